#pragma once
// Slots of the exchange area, through which a kernel of gemm_ar for few rows sends its tiles. Every rank has for each
// unit, a tile of the product, one slot per source:
//
//   exchange area of one parity   [unit][source rank][vector][thread]     vectors of one thread's words
//
//   one-shot   each rank stores its partial of every unit into its slot at every peer, and adds up what it receives
//   two-shot   each rank stores its partial into its slot at the unit's owner; the owner adds up, and stores the sum
//              into the owner's slot at every peer
//
// Before the areas of both parities stand the words that count the calls of such kernels.
//
// A word that is kEmptyWord has not arrived: two 16-bit floats of that pattern are NaNs that no conversion from fp32
// produces. So the data is its own signal. A reader empties the slots it has read.

#include "schedule/workspace_layout.hpp"

namespace flux {

constexpr uint32_t kEmptyWord = 0xffffffffu;

struct ExchangeWords {
  Epoch begun[2][kMaxWorld];  // [parity of the call][peer], written by peers: make_signal of the call they have begun
  Epoch calls;                // finished by this rank
  uint32_t finished;          // CTAs of the call under way
};
static_assert(sizeof(ExchangeWords) <= kExchangeHeadBytes);

// Rank that adds up a unit of a two-shot exchange.
FLUX_HD int exchange_owner(int32_t unit, int world) { return static_cast<int>(unit % world); }

// Offset of a slot, in words; `unit_words` is the size of a slot.
FLUX_HD int64_t exchange_slot(int64_t unit, int world, int source, int32_t unit_words) {
  return (unit * world + source) * unit_words;
}
FLUX_HD int64_t exchange_bytes(int64_t num_units, int world, int32_t unit_words) {
  return exchange_slot(num_units, world, 0, unit_words) * 4;
}

}  // namespace flux
