#pragma once
// The protocol of ag_gemm, gemm_rs and gemm_ar as a machine for state_space.hpp: who may write what, when, and who
// waits for it.
//
// Each rank has two actors. `gemm` is the main stream: it computes the tiles. `push` is the side stream: it copies to
// the peers. Where there are two side streams, there is one for each: 12. Each rank has two regions (parity 0 and 1)
// that peers write, signal words that peers write, and tile counters of its own. All calls of a group, of any op and
// any shape, share them. A region has a slot for each peer, and only that peer writes there.
//
// EAGER CALLS
//
//  1. All ranks make the same calls in the same order. Call e = 1, 2, ... uses region e & 1 on every rank.
//  2. Fork and join. `push` begins call e after `gemm` has finished call e-1 on this rank. `gemm` finishes call e after
//     `push` has finished it. Everything that reads a region or an operand is part of its call.
//  3. `push` writes the data of a piece, then the signal of the piece: arrived[e & 1][source][piece] = e.
//  4. A signal word has one writer and only grows. A reader waits for word >= e; then it reads the region. What it has
//     read is e: the sets of signals alternate as the regions do, so the next value comes after the reader is finished.
//     That is how a reader can tell by a digest in the word that its peer makes another call.
//  5. Every call waits, on every rank, for every piece of each peer, and there is at least one. A call without pieces
//     takes no number: it would wait for nobody and let its rank run ahead, which breaks the proof below.
//  6. ag_gemm: `push` sends x, piece by piece, next rank first. `gemm` takes its own shard from x, and the others from
//     the region, in the order in which they arrive.
//     The uniform schedules of the decomposed strategy want the shards in line, across the slots. So from three ranks
//     on, all tell each other first that they have finished the calls before, and wait for that: kNoFinishedWait.
//  7. gemm_rs: `gemm` writes each tile of a peer's chunk to the slot of this peer in the region that the call does not
//     use, then counts it in tiles_done[peer][piece].
//     `push` waits until the count is the number of tiles of the piece, copies the piece, raises its signal and sets
//     the count back to 0. The own chunk comes last: each tile reads the partials of every peer. (Two lanes: 12.)
//     The direct form (CPU backend) has no `push`: `gemm` writes the tiles of a piece to their owner, then the signal.
//     The decomposed strategy makes the same calls: a tile is a library GEMM, the count is an event of the stream,
//     which needs no reset, and the own chunk's one tile is the reduction. Its ag_gemm is 6 with any order of the
//     pieces.
//     gemm_ar (csrc/schedule/ar_schedule.hpp), two-shot: `gemm` writes each partial to its owner, then the signal;
//     where it comes to an own chunk it reads the partials of every peer, writes the result to all peers, then the
//     signal. `push` reads the results of the peers (it is the copy into y). A section has two pieces, one of either
//     kind. One-shot: `gemm` writes each piece to all ranks, its own copy too, then the signals; then it reads all of
//     them. On CUDA, for many rows, `push` sends the partials as in gemm_rs, and the results behind them; a later
//     kernel reads those of the peers: ar_order_test.cpp has the order.
//
// DEVICE-COUNTED CALLS (a CUDA graph has its addresses baked in, and is replayed in any order and any number of times)
//
//  8. From the first capture on, all calls are device-counted: numbered e = 1, 2, ... afresh by a word on the device.
//     The host gives each call a region when it captures or makes it. So any sequence of regions can be executed, for
//     instance 0,1,0,0,1,1, but all ranks execute the same one. Each region has signal words of its own for them.
//  9. `gemm` begins a call: it raises the word to e and writes begun[rank] = e to every peer. This says that the rank
//     has finished all calls before e, eager ones included. Peers are told nothing at the end of a call. (A fused GEMM
//     raises its own word only then, and takes e to be one more: nobody else reads it.)
// 10. Then, with last = last_use[region] (0 before the first use), it sets last_use[region] = e and waits until
//     begun[q] > last for every peer q. It waits for nobody before it has told everybody.
// 11. Only then the call forks, computes and writes to peers. A fused GEMM on CUDA does 9 and 10 itself, beside its
//     first tiles, and `push` waits for that: kWaitOnSideStream.
//
// TWO LANES (side streams for the pieces of staged gemm_rs on CUDA; `push` of ag_gemm stays on the first)
//
// 12. The pieces of a call go to the lanes in turn, the first to the second lane. Each piece waits for its own count.
//     Fork and join (2) hold for both lanes. With kWaitOnSideStream the lane of the first piece waits for its tiles and
//     for the peers (10), and the other lane waits until it has done so. It can't wait for the peers itself: the word
//     by which the GEMM tells of them is set back by the first lane that sees it.
//     Nothing else orders the lanes. Each piece has a count, a signal and cells of its own, so pieces of one call don't
//     meet; and fork and join order the calls on two lanes as they do on one. The claims below hold as they stand.
//
// WHY TWO REGIONS ARE ENOUGH (eager)
//
//   Claim: when rank r pushes in call e to a peer q, then q has finished call e-2, the last one that used this region.
//   r pushes in call e only after it has finished call e-1 (2). To finish it, r has seen a signal that q raised in its
//   call e-1 (5, 4). q's `push` began its call e-1 after q had finished call e-2 (2). Finished, q has read all that it
//   reads of call e-2 (2), and all that was sent to it has landed, as it has waited for every piece. So a region holds
//   data of one call at a time, and nothing in flight can fall into a later call.
//   What r sends to q in call e (7) lies in q's slot of r's region of call e+1. What used the slot before is call e-1,
//   which r has finished; all that q sent in it has landed. q writes there in call e+1, after it has finished call e,
//   for which it has waited for every piece of r (5): all of them have left. In another slot r may still have something
//   for another peer, so q must not write there (kSendFromRegion: regions without slots), or not before r has finished
//   call e (6, shards in line). (Calls e-1 and e+1 are those that use the other region: kernels for few rows take a
//   number and use none, but wait for data from every peer, too.) One region is not enough: the same chain says nothing
//   about q's call e-1, which q may still be reading.
//
// WHY ANY SEQUENCE OF REGIONS IS SAFE (device-counted)
//
//   Claim: when rank r pushes in call e to a peer q, then q has finished the last call that used this region.
//   That call is `last` on all ranks, as all execute the same sequence. r pushes after it has seen begun[q] > last (10,
//   11), and q writes a number above `last` only after it has finished `last` (9). If last = 0, what used the region
//   last is an eager call, or nothing; begun[q] >= 1 says that q has finished all eager calls.
//   What is sent as above: until q begins the next call that uses this region, it has finished call e.
//   From there on as above: a region holds data of one call at a time. A signal word does too, since the sets go with
//   the regions: r raises it to e when q, its reader, is finished with `last`. One set for both regions is not enough:
//   r may begin call e in the other region while q still waits for the word of call e-1.
//   An eager call after a device-counted one would be wrong: no chain ties it to the regions that those use.
//
// WHAT THE WAIT COSTS
//
//   If last <= e-2, nothing: to finish call e-1, r has seen data of that call from every peer (5), which q sent after
//   it had written begun[q] = e-1 > last (9). The word is there already; kCheckForWait checks it. Only where a region
//   is used twice in a row, and in call 1, does r wait for the peers to begin this very call.
//
// WHY NOBODY WAITS FOREVER
//
//   Take the least call e that some rank has not finished. All ranks have finished the one before, so all begin this
//   one, and tell all peers before they wait (10): begun reaches e > last everywhere. Then no `push` of ag_gemm waits
//   for anything else. The chunks of peers in gemm_rs wait for nothing, so every count is reached and every piece is
//   sent; then every own tile has what it waits for. This needs the streams to run side by side: see
//   Change::kWaitKernelNeedsSm. The wait of rule 10 is one of a warp of the GEMM's first block, after it has told all
//   peers, or of a kernel before the GEMM on its stream.
//
// HOW IT IS MODELLED
//
//   A wait and the action that follows are one guarded step. Nothing is lost: the words that are waited for never
//   fall (a count does, but only its own waiter resets it), so "wait, then act later" has the same effect as "wait and
//   act" at the later time. With split_waits they are two steps all the same, and copies read and write separately.
//   For the same reason all peers are told in one step, as `begun` only grows: told one by one (split_waits), they
//   could do no more than wait for longer.
//   The wait that the other lane waits for (12) is always a step of its own: that lane need not wait for the copy, too.
//   A rank has a second lane, the actor `push 2`, only where a scenario asks for it: a third actor costs states.
//   last_use has one reader and writer, the begin of a call on its own rank, in program order; all ranks execute the
//   same sequence. So its values are known when the machine is built, and it is no part of the state.
//   Reads and writes of a piece are atomic: a read that overlaps a write it should not meet also has an interleaving in
//   which the whole write comes first, and that one is caught. Signals and counts are numbers that the real words hold,
//   slots are modelled by the call that wrote them last (state_space.hpp): cells of two calls always overlap. Where no
//   call is a staged gemm_rs, a region is one slot for all: more than CUDA needs, and what the CPU backend has.

#include <string>
#include <vector>

#include "state_space.hpp"

namespace flux::model {

enum class Op { kAgGemm, kAgGemmInLine, kGemmRs, kGemmRsDirect, kGemmArTwoShot, kGemmArOneShot };

struct Call {
  Op op = Op::kAgGemm;
  bool device_counted = false;
  int region = 0;  // of a device-counted call
  int pieces = 1;  // of a chunk, or sections of a two-shot gemm_ar; 0: an empty call
  int tiles = 1;   // of a chunk; piece p holds the tiles that make_pieces gives it
};

// A departure from the rules. Those from kWaitOnSideStream on are sound.
enum class Change {
  kNone,
  kOneRegion,             // 1: all eager calls use region 0
  kPushTooEarly,          // 2: `push` does not wait for the call before (no harm in gemm_rs: the counts hold it back)
  kNoJoin,                // 2: `gemm` does not wait for `push`
  kJoinOneLane,           // 12: `gemm` does not wait for the second lane
  kSignalFirst,           // 3: the signal, then the data
  kOneSignalSet,          // 4: eager calls do not alternate between sets of signals
  kEmptyCallCounts,       // 5: an empty call takes a number
  kCountFirst,            // 7: a tile is counted, then written
  kNoFinishedWait,        // 6: shards in line are sent at once
  kSendFromRegion,        // 7: regions have no slots
  kTooFewTiles,           // 7: `push` waits for one tile less than the piece has
  kNoReset,               // 7: counts are not set back
  kOneReplaySignalSet,    // 8: one set for both regions
  kBegunBeforeLastTile,   // 9: peers are told before the last tile of the call before has read its data
  kBeginBeforeJoin,       // 9: a call begins before the `push` of the call before is finished
  kReadAfterBegun,        // 9: the gathered operand of the call before is copied out of the region afterwards
  kLastUseNotUpdated,     // 10: last_use stays 0
  kLastUseUpdatedFirst,   // 10: last is read after the update, so it is e
  kNoBegunWait,           // 10: left out
  kNoFirstWait,           // 10: left out where last is 0
  kWaitForLast,           // 10: until begun[q] >= last
  kWaitBeforeAnnouncing,  // 10: first waits, then tells the peers
  kPeersInTurn,        // 10: tells a peer and waits for it, then the next peer (from 3 ranks on, they wait in a ring)
  kWaitKernelNeedsSm,  // 7, 11: the waits of `push` are kernels, which cannot start while the GEMM fills the GPU
  kOneLaneWaits,       // 12: kWaitOnSideStream, but the other lane does not wait for the first piece's
  kWaitOnSideStream,   // 11: `push` waits, by the copy engine, and the GEMM starts at once
  kWaitPerPeer,        // 11: the wait for begun[q] stands before the first write to q
  kOneLastUse,         // 10: one word for both regions: every call waits for the peers to begin it
  kCheckForWait,       // 10: where last <= e-2, the word must be there without a wait
};

struct Scenario {
  int world = 2;
  std::vector<Call> calls;
  Change change = Change::kNone;
  bool split_waits = false;
  int lanes = 1;  // 2: staged gemm_rs has two
};

// The machine that runs the scenario on all ranks. Throws std::length_error where it does not fit the model.
Machine build_machine(Scenario const& scenario);

}  // namespace flux::model
