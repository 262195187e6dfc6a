#pragma once
// The exchange area, through which the kernels for few rows send their tiles, and an all-reduce after a library GEMM
// what it adds up. A unit is what one group of threads holds of the product: 64 columns of y of a tile. Every rank has
// slots for partials, each of [vector][thread]: the vectors of one thread's words. A vector of all threads together is
// a block of 16 rows of y.
//
//   one-shot   each rank stores its partial of every unit into its slot at every peer, and adds up what it receives
//   two-shot   a unit is cut into shares of a few vectors, which the ranks own in turn: each rank stores its partial of
//              a share into its slot at the owner; the owner adds up, and stores the sum into its slot at every peer
//   scatter    each rank stores of its partial, at every peer, the vectors with rows that the peer owns
//
//   one-shot   [unit][source rank]
//   two-shot   [share / world][source rank] of the shares that this rank owns, then the sums [share]
//   scatter    [64 columns of y][source rank][16 rows], all 16 rows of which this rank owns some
//
// A word that is kEmptyWord has not arrived: two 16-bit floats of that pattern are NaNs that no conversion from fp32
// produces. So the data is its own signal. A reader empties the slots it has read.
//
//   gather     each rank stores its rows of x at every peer, in slices along K, and each of them in parts; a word for
//              each part tells the peer that it has arrived
//
// There are areas of two parities, and the words that count the calls of such kernels.

#include <algorithm>

#include "schedule/chunk_order.hpp"
#include "schedule/workspace_layout.hpp"

namespace flux {

constexpr uint32_t kEmptyWord = 0xffffffffu;
constexpr int kMaxPushers = 64;  // parts of x, each stored by one thread block
constexpr int kMaxSlices = 8;    // along K

enum class ExchangeForm : int { kOneShot = 0, kTwoShot = 1, kScatter = 2, kGather = 3 };

struct ExchangeWords {
  Epoch begun[2][kMaxWorld];  // [parity of the call][peer], written by peers: make_signal of the call they have begun
  Epoch pushed[2][kMaxWorld][kMaxSlices][kMaxPushers];  // gather: the same when a part of a slice has arrived
  Epoch calls;                                          // finished by this rank
  uint32_t finished;                                    // CTAs of the call under way
};
static_assert(sizeof(ExchangeWords) <= kExchangeHeadBytes);

// Vectors of a share of a unit of so many: up to four shares, so that several ranks add up a part of it at once.
constexpr int exchange_share(int vectors) { return vectors % 4 == 0 ? vectors / 4 : (vectors + 2) / 3; }

// Rank that adds up a share of a two-shot exchange. Shares are counted through all units. Those of one number of slot
// are each another rank's, and change places from one number to the next: else a rank could have the same share of
// every unit, say that which M leaves empty.
FLUX_HD int exchange_owner(int32_t share, int world) {
  uint32_t const n = static_cast<uint32_t>(share), w = static_cast<uint32_t>(world);
  return static_cast<int>((n + n / w) % w);
}

// Shares from this one on that have its number of slot.
FLUX_HD int shares_left_in_slot(int32_t share, int world) { return world - share % world; }
// exchange_owner of the share after one that `owner` owns, without a division; keeps shares_left_in_slot up to date.
FLUX_HD int next_owner(int owner, int* left, int world) {
  owner = wrap_rank(owner + 1, world);
  if (--*left == 0) {
    owner = wrap_rank(owner + 1, world);
    *left = world;
  }
  return owner;
}

// Of the shares of a number of slot, counted from the first one, that which a rank owns; `rank` may be `world`, too.
FLUX_HD int share_in_slot(int slot, int rank, int world) { return (rank + world - slot % world) % world; }

// Number of the slot of a partial of a unit (two-shot: a share), and of the sum of a share, but for scatter.
FLUX_HD int64_t exchange_slot(ExchangeForm form, int32_t number, int world, int source) {
  uint32_t const n = static_cast<uint32_t>(number), w = static_cast<uint32_t>(world);
  return int64_t{form == ExchangeForm::kTwoShot ? n / w : n} * world + source;
}
FLUX_HD int64_t exchange_sum_slot(int64_t share, int64_t num_shares, int world) {
  return round_up(num_shares, int64_t{world}) + share;
}
FLUX_HD int64_t exchange_slots(ExchangeForm form, int64_t count, int world) {
  return form == ExchangeForm::kTwoShot ? exchange_sum_slot(count, count, world) : count * world;
}

// Two-shot, of units of `vectors`, `share` of them a share: the number of the share in which a vector of a unit lies,
// and the place, among all vectors in the slots, of its partial at the share's owner and of its sum at all others.
FLUX_HD int32_t share_of_vector(int32_t unit, int vector, int vectors, int share) {
  return unit * (vectors / share) + vector / share;
}
FLUX_HD int64_t share_place(int32_t unit, int vector, int vectors, int share, int world, int source) {
  int32_t const number = share_of_vector(unit, vector, vectors, share);
  return exchange_slot(ExchangeForm::kTwoShot, number, world, source) * share + vector % share;
}
FLUX_HD int64_t sum_place(int32_t unit, int vector, int vectors, int share, int64_t num_units, int world) {
  return exchange_sum_slot(share_of_vector(unit, 0, vectors, share), num_units * (vectors / share), world) * share +
         vector;
}

// Bit v: vector v of a thread has rows from `begin` on, before `end`. The thread has two rows of each block of 8, of
// the first one those from `first` on, and a vector those of two blocks.
FLUX_HD uint32_t vector_mask(int first, int num_vectors, int begin, int end) {
  int const num_blocks = 2 * num_vectors;
  auto const blocks_before = [&](int m) { return std::min(std::max(m - first + 7, 0) / 8, num_blocks); };
  int const from = blocks_before(begin - 1), to = blocks_before(end);
  return from < to ? (1u << (to + 1) / 2) - (1u << from / 2) : 0;
}

// At most so many blocks of 16 rows hold some of the `rows` that a rank owns.
FLUX_HD int scatter_vectors(int rows) { return (rows + 30) / 16; }
// The place, at their owner, of the partial of the block `vector`, counted through all rows of y.
FLUX_HD int64_t scatter_place(int columns, int source, int world, int vector, int owner, int rows) {
  return (int64_t{columns} * world + source) * scatter_vectors(rows) + vector - owner * rows / 16;
}

// An all-reduce after a library GEMM: a unit is so many bytes of y, one after the other, as vectors of 16 bytes, a few
// for each thread of a block. It is one share.
constexpr int kAllReduceThreads = 256;
constexpr int kAllReduceVectors = 4;
constexpr int64_t kAllReduceUnitBytes = int64_t{kAllReduceThreads} * kAllReduceVectors * 16;

FLUX_HD int64_t all_reduce_units(int64_t bytes) { return ceil_div(bytes, kAllReduceUnitBytes); }
// Units that a block takes together: two-shot: one of each owner.
FLUX_HD int all_reduce_group_units(ExchangeForm form, int world) { return form == ExchangeForm::kTwoShot ? world : 1; }
FLUX_HD int64_t all_reduce_groups(ExchangeForm form, int64_t bytes, int world) {
  return ceil_div(all_reduce_units(bytes), int64_t{all_reduce_group_units(form, world)});
}

// Slots of one parity for `bytes` of y.
FLUX_HD int64_t all_reduce_slot_bytes(ExchangeForm form, int64_t bytes, int world) {
  return exchange_slots(form, all_reduce_units(bytes), world) * kAllReduceUnitBytes;
}

// Columns of a slice of a shard of `rows` rows: slices as large as that a signal costs little. A tile of K lies in one.
FLUX_HD int gather_slice_k(int rows, int k) {
  constexpr int64_t kLeastBytes = 256 << 10, kGranule = 128;
  int64_t const bytes = int64_t{2} * rows * k;
  int64_t const slices = bytes < 2 * kLeastBytes            ? 1
                         : bytes > kMaxSlices * kLeastBytes ? int64_t{kMaxSlices}
                                                            : bytes / kLeastBytes;
  return static_cast<int>(round_up(ceil_div(k, slices), kGranule));
}

}  // namespace flux
