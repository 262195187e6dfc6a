#pragma once
// The protocol of ag_gemm and gemm_rs as a machine for state_space.hpp: who may write what, when, and who waits for it.
//
// Each rank has two actors. `gemm` is the main stream: it computes the tiles. `push` is the side stream: it copies to
// the peers. Each rank has two regions (parity 0 and 1) that peers write, one send buffer of its own, signal words that
// peers write, and tile counters of its own. All calls of a group, of either op and any shape, share them.
//
// EAGER CALLS
//
//  1. All ranks make the same calls in the same order. Call e = 1, 2, ... uses region e & 1 on every rank.
//  2. Fork and join. `push` begins call e after `gemm` has finished call e-1 on this rank. `gemm` finishes call e after
//     `push` has finished it. Everything that reads a region or an operand is part of its call.
//  3. `push` writes the data of a piece, then the signal of the piece: arrived[e & 1][source][piece] = e.
//  4. A signal word has one writer and only grows. A reader waits for word >= e; then it reads the region. What it
//  finds
//     is e: the two sets of signals alternate as the regions do, so the next value comes after the reader is finished.
//     That is how a reader can tell by a digest in the word that its peer makes another call.
//  5. Every call waits, on every rank, for every piece of each peer, and there is at least one. What has no pieces
//  takes
//     no number: a call that waits for nobody would let its rank run ahead, and breaks the proof below.
//  6. ag_gemm: `push` sends x, piece by piece, next rank first. `gemm` takes its own shard from x, and the others from
//     the region, in the order in which they arrive.
//  7. gemm_rs: `gemm` writes each tile of a peer's chunk to the send buffer, then counts it in tiles_done[peer][piece].
//     `push` waits until the count is the number of tiles of the piece, copies the piece, raises its signal and sets
//     the count back to 0. The own chunk comes last: each tile reads the partials of every peer.
//     The direct form (CPU backend) has no `push`: `gemm` writes the tiles of a piece to their owner, then the signal.
//     The decomposed strategy makes the same calls: a tile is a library GEMM, the count is an event of the stream,
//     which needs no reset, and the own chunk's one tile is the reduction. Its ag_gemm is 6 with any order of the
//     pieces.
//
// REPLAYED CALLS (a CUDA graph has its addresses baked in, so the host cannot alternate regions)
//
//  8. From the first capture on, all calls are replayed calls, numbered e = 1, 2, ... afresh by a word on the device
//     that the first step of a call raises. Their signals are words of their own.
//  9. All of them use region b = (E + 1) & 1, where E is the number of the last eager call (0: there was none).
// 10. Before it writes to any peer in call e, a rank waits until completed[q] >= e-1 for every peer q.
// 11. After the join, `gemm` writes completed[rank] = e to every peer; then the call is finished.
//
// WHY TWO REGIONS ARE ENOUGH (eager)
//
//   Claim: when rank r pushes in call e to a peer q, then q has finished call e-2, the last one that used this region.
//   r pushes in call e only after it has finished call e-1 (2). To finish it, r has seen a signal that q raised in its
//   call e-1 (5, 4). q's `push` began its call e-1 after q had finished call e-2 (2). Finished, q has read all that it
//   reads of call e-2 (2), and all that was sent to it has landed, as it has waited for every piece. So a region holds
//   data of one call at a time, and nothing in flight can fall into a later call.
//   One region is not enough: the same chain says nothing about q's call e-1, which q may still be reading.
//
// WHY ONE REGION IS ENOUGH WITH `completed` (replayed)
//
//   In call e > 1, rule 10 says directly that q has finished its call e-1, the last one that used region b. In call 1
//   there is nothing to wait for: r has finished eager call E, so by the chain above q has finished call E-1, and
//   region b = (E - 1) & 1 is the one which q is no longer reading. Region E & 1 would be wrong.
//   An eager call after a replayed one would be wrong too: no chain ties it to the region that replays use.
//
// WHY NOBODY WAITS FOREVER
//
//   Take the least call that some rank has not finished. All ranks have finished the one before, so all have begun
//   this one, `completed` has reached e-1 everywhere, and no `push` of ag_gemm waits for anything else. The chunks of
//   peers in gemm_rs wait for nothing, so every count is reached and every piece is sent; then every own tile has what
//   it waits for. This needs the streams to run side by side: see Change::kWaitKernelNeedsSm.
//
// HOW IT IS MODELLED
//
//   A wait and the action that follows are one guarded step. Nothing is lost: the words that are waited for never
//   fall (a count does, but only its own waiter resets it), so "wait, then act later" has the same effect as "wait and
//   act" at the later time. With split_waits they are two steps all the same, and copies read and write separately.
//   Reads and writes of a piece are atomic: a read that overlaps a write it should not meet also has an interleaving in
//   which the whole write comes first, and that one is caught. Signals and counts are numbers that the real words hold,
//   buffers are modelled by the call that wrote them last (state_space.hpp): cells of two calls always overlap.

#include <string>
#include <vector>

#include "state_space.hpp"

namespace flux::model {

enum class Op { kAgGemm, kGemmRs, kGemmRsDirect };

struct Call {
  Op op = Op::kAgGemm;
  bool replayed = false;
  int pieces = 1;  // of a chunk; 0: an empty call
  int tiles = 1;   // of a chunk; piece p holds the tiles that make_pieces gives it
};

// A departure from the rules. All but the last two break them.
enum class Change {
  kNone,
  kOneRegion,            // 1: all eager calls use region 0
  kPushTooEarly,         // 2: `push` does not wait for the call before (no harm in gemm_rs: the counts hold it back)
  kNoJoin,               // 2: `gemm` does not wait for `push`
  kSignalFirst,          // 3: the signal, then the data
  kOneSignalSet,         // 4: eager calls do not alternate between sets of signals
  kEmptyCallCounts,      // 5: an empty call takes a number
  kCountFirst,           // 7: a tile is counted, then written
  kTooFewTiles,          // 7: `push` waits for one tile less than the piece has
  kNoReset,              // 7: counts are not set back
  kWrongReplayRegion,    // 9: b = E & 1
  kNoCompletedWait,      // 10: left out
  kCompletedBeforeJoin,  // 11: `completed` is written before the last tile has read its data
  kReadAfterCompleted,   // 2, 11: the gathered operand is copied out of the region after `completed` is written
  kWaitKernelNeedsSm,    // 7, 10: the waits of `push` are kernels, which cannot start while the GEMM fills the GPU
  kWaitBeforeGemm,       // 10 by a kernel on the main stream, before fork and GEMM: sound
  kWaitPerPeer,          // 10: before it writes to peer q, `push` waits for completed[q] only: sound, thanks to 5
};

struct Scenario {
  int world = 2;
  std::vector<Call> calls;
  Change change = Change::kNone;
  bool split_waits = false;
};

// The machine that runs the scenario on all ranks. Throws std::length_error where it does not fit the model.
Machine build_machine(Scenario const& scenario);

}  // namespace flux::model
