#pragma once
// The bytes of a workspace. Every rank of a group allocates the same layout, so an offset computed here names the
// same thing in the memory of each peer:
//
//   | control words | exchange words |   slots 0, 1   | gathered rows 0, 1 |  regions 0, 1  |
//       fixed size       fixed size      exchange_bytes      fixed size         region_bytes
//
// 0, 1: one for each parity of a call's number, of so many bytes each.
//
// A region holds, during one call, what the peers push: shards of the gathered operand (ag_gemm), staged partials
// (gemm_rs), or these and the reduced rows (gemm_ar). On CUDA it is cut into one slot for each peer, for all calls but
// those that put shards in line: WorkspaceView::slot. The other slots and the gathered rows are the exchange area of
// exchange_layout.hpp. The control words lie at offsets that depend on no shape, so one shape's signal can never be
// another shape's data.

#include "schedule/host_device.hpp"

namespace flux {

constexpr int kMaxWorld = 16;           // ranks of one host
constexpr int kMaxPieces = 16;          // pieces of a chunk, each with a signal of its own
constexpr int64_t kRegionAlign = 1024;  // base of a region; tensor maps need 128

using Epoch = uint64_t;  // one per call of any op on a group, counted from 1; it never wraps

// Each region has a set of signals, so a word keeps its value until its reader has finished the call. Calls whose epoch
// the device counts (graph replay) have sets of their own.
enum class SignalSet : int { kEven = 0, kOdd = 1, kReplayEven = 2, kReplayOdd = 3 };
constexpr int kNumSignalSets = 4;

// The value of a signal of the CUDA backend: the epoch, and below it a digest of what the writer computes in that
// call. A reader that finds its epoch with another digest knows that the peer makes another call.
constexpr int kDigestBits = 20;
FLUX_HD Epoch make_signal(Epoch epoch, uint64_t digest) {
  return epoch << kDigestBits | (digest & ((uint64_t{1} << kDigestBits) - 1));
}
FLUX_HD Epoch signal_epoch(Epoch signal) { return signal >> kDigestBits; }

struct CallWord {
  Epoch epoch;
  uint64_t digest;
};

// Words that peers write, as epochs (`calls`: and digests) or, `arrived` and `finished` on CUDA, as make_signal values.
// Each only grows: a reader waits until it is large enough, and nothing is ever reset.
struct SignalWords {
  Epoch arrived[kNumSignalSets][kMaxWorld][kMaxPieces];  // [set][source rank][piece]
  Epoch finished[kNumSignalSets][kMaxWorld];             // [set][source rank]: it has finished the calls before
  Epoch begun[kMaxWorld];                                // last call that the peer has begun (graph replay)
  CallWord calls[2][kMaxWorld];                          // [parity][source rank], CPU: what the peer computes
};

// Words that only this rank touches.
struct LocalWords {
  uint32_t tiles_done[kMaxWorld][kMaxPieces];  // gemm_rs, gemm_ar: finished tiles by owner and piece
  uint32_t fault_claim;                        // set by the first thread that meets a fault
  // Where the device counts the calls (graph replay):
  Epoch epoch;            // calls so far
  Epoch before;           // calls before the one under way, if that is counted as it begins
  Epoch signal;           // value of the signals of the call under way
  Epoch last_use[2];      // last call that used the region of this parity
  uint32_t may_push;      // 1 once peers may be written to
  uint32_t blocks_ended;  // of the kernel that ends the call
};

struct ControlWords {
  SignalWords signals;
  LocalWords local;
};

FLUX_HD int parity_of(Epoch epoch) { return static_cast<int>(epoch & 1); }
FLUX_HD SignalSet signal_set_of(int parity, bool replay) {
  if (replay) return parity == 0 ? SignalSet::kReplayEven : SignalSet::kReplayOdd;
  return parity == 0 ? SignalSet::kEven : SignalSet::kOdd;
}

constexpr int64_t kExchangeHeadBytes = 160 << 10;      // words of the exchange
constexpr int64_t kExchangeBytes = int64_t{16} << 20;  // slots of one parity, at least
constexpr int64_t kGatherBytes = int64_t{8} << 20;     // gathered rows of x of one parity

// What a problem needs of a workspace.
struct WorkspaceNeeds {
  int64_t region_bytes = 0;
  int64_t exchange_bytes = 0;  // slots of one parity
};

struct WorkspaceLayout {
  int64_t region_bytes;
  int64_t exchange_bytes;

  bool covers(WorkspaceNeeds const& needs) const {
    return region_bytes >= needs.region_bytes && exchange_bytes >= needs.exchange_bytes;
  }
  FLUX_HD static int64_t exchange_offset() { return round_up(sizeof(ControlWords), kRegionAlign); }
  FLUX_HD static int64_t slots_offset() { return exchange_offset() + kExchangeHeadBytes; }
  FLUX_HD int64_t gather_offset() const { return slots_offset() + 2 * exchange_bytes; }
  FLUX_HD int64_t region_offset(int parity) const { return gather_offset() + 2 * kGatherBytes + parity * region_bytes; }
  FLUX_HD int64_t total_bytes() const { return region_offset(2); }
  // Of each slot of a region, where it has one for each peer.
  FLUX_HD int64_t peer_slot_bytes(int world) const { return region_bytes / (world - 1) / kRegionAlign * kRegionAlign; }
};

// Of a region whose slots have so many bytes, or more.
FLUX_HD int64_t region_of_slots(int world, int64_t slot_bytes) {
  return (world - 1) * round_up(slot_bytes, kRegionAlign);
}

inline WorkspaceLayout make_workspace_layout(WorkspaceNeeds const& needs) {
  int64_t const exchange_bytes = needs.exchange_bytes > kExchangeBytes ? needs.exchange_bytes : kExchangeBytes;
  return {round_up(needs.region_bytes, kRegionAlign), round_up(exchange_bytes, kRegionAlign)};
}

// ---- ag_gemm: a shard is [row][k]. In a region of the CPU backend, and where CUDA computes on all shards at once, it
// is shard[source rank].

FLUX_HD int64_t ag_shard_bytes(int64_t rows_per_rank, int64_t k, int64_t element_size) {
  return rows_per_rank * k * element_size;
}
FLUX_HD int64_t ag_region_bytes(int world, int64_t rows_per_rank, int64_t k, int64_t element_size) {
  return world * ag_shard_bytes(rows_per_rank, k, element_size);
}
FLUX_HD int64_t ag_shard_offset(int source, int64_t rows_per_rank, int64_t k, int64_t element_size) {
  return source * ag_shard_bytes(rows_per_rank, k, element_size);
}

// ---- gemm_rs: [slot of the source][tile position][element]. Slots are those of the region, or, on CPUs, as many bytes
// apart as they hold. Tiles are whole: the padding of a ragged edge travels too, so both ends index alike.

FLUX_HD constexpr int64_t rs_tile_bytes(int64_t tile_m, int64_t tile_n, int64_t element_size) {
  return tile_m * tile_n * element_size;
}
FLUX_HD int64_t rs_slot_bytes(int64_t num_tiles, int64_t tile_bytes) { return num_tiles * tile_bytes; }
FLUX_HD int64_t rs_region_bytes(int world, int64_t num_tiles, int64_t tile_bytes) {
  return (world - 1) * rs_slot_bytes(num_tiles, tile_bytes);
}
FLUX_HD int64_t rs_tile_offset(int slot, int64_t slot_bytes, int64_t position, int64_t tile_bytes) {
  return slot * slot_bytes + position * tile_bytes;
}

// ---- gemm_ar, two-shot: | partials of the own chunks, as of a gemm_rs | reduced rows |
// `num_tiles` are those of the own chunks of all sections; the position of a tile counts through them.

// On CUDA, in the slot of a peer: its partials | its reduced rows [row among those it owns][n].
FLUX_HD int64_t ar_slot_results_offset(int64_t num_tiles, int64_t tile_bytes) {
  return round_up(rs_slot_bytes(num_tiles, tile_bytes), kRegionAlign);
}

// On CPUs, in a region: the partials of all peers | reduced rows [row of y][n].
FLUX_HD int64_t ar_results_offset(int world, int64_t num_tiles, int64_t tile_bytes) {
  return round_up(rs_region_bytes(world, num_tiles, tile_bytes), kRegionAlign);
}
FLUX_HD int64_t ar_result_offset(int world, int64_t num_tiles, int64_t tile_bytes, int64_t row, int64_t n,
                                 int64_t element_size) {
  return ar_results_offset(world, num_tiles, tile_bytes) + row * n * element_size;
}
FLUX_HD int64_t ar_two_shot_bytes(int world, int64_t num_tiles, int64_t tile_bytes, int64_t rows, int64_t n,
                                  int64_t element_size) {
  return ar_result_offset(world, num_tiles, tile_bytes, rows, n, element_size);
}

// ---- gemm_ar, one-shot (CPU): [source rank][tile position][element], the own rank's too: rs_tile_offset(source, ...)

FLUX_HD int64_t ar_one_shot_bytes(int world, int64_t num_tiles, int64_t tile_bytes) {
  return world * rs_slot_bytes(num_tiles, tile_bytes);
}

}  // namespace flux
