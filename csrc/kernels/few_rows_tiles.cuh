#pragma once
// What a kernel for few rows is made of: its configuration, its arguments, and where tiles and their words lie.

#include <algorithm>

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "kernels/exchange.cuh"
#include "kernels/few_rows_split.cuh"
#include "kernels/num_sms.hpp"

namespace flux {

constexpr int kExchangeWarps = 3;

template <class Element_, int TileN_, int TileM_, int SplitK_ = 1>
struct FewRowsConfig {
  using Element = Element_;
  static constexpr int TileN = TileN_, TileM = TileM_, SplitK = SplitK_;
  static constexpr int kParts = TileN / 64;  // units of a CTA, one of each math warpgroup
  static constexpr int kTileK = TileN * TileM >= 128 * 64 ? 64 : 128;
  static constexpr int kMathThreads = kParts * 128;
  static constexpr int kThreads = kMathThreads + 128;
  static constexpr int kSliceM = TileM / SplitK;  // rows of x of a unit
  static constexpr int kWords = kSliceM / 4;      // of a thread: pairs of sums
  static constexpr int kWeightBytes = TileN * kTileK * 2, kXBytes = TileM * kTileK * 2;
  static constexpr int kStageBytes = kWeightBytes + kXBytes;
  static constexpr int kSplitBytes = split_bytes(TileN * TileM, SplitK);
  static constexpr int kStages = (215 * 1024 - kSplitBytes) / kStageBytes;
  // Of a thread: 3 warpgroups have not enough for all alike.
  static constexpr bool kUnevenRegisters = kParts > 1;
  static constexpr int kMathRegisters = 208, kOtherRegisters = 88;
  static_assert(kSliceM % 16 == 0);

  using Mma = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, float,
                                 cute::Shape<cute::Int<TileN>, cute::Int<TileM>, cute::Int<kTileK>>>(),
      cute::Layout<cute::Shape<cute::Int<kParts>, cute::_1, cute::_1>>{}));
  using SmemAtom = cute::GMMA::Layout_K_SW128_Atom<Element>;
  using WeightLayout =
      decltype(cute::tile_to_shape(SmemAtom{}, cute::Shape<cute::Int<TileN>, cute::Int<kTileK>, cute::Int<kStages>>{}));
  using XLayout =
      decltype(cute::tile_to_shape(SmemAtom{}, cute::Shape<cute::Int<TileM>, cute::Int<kTileK>, cute::Int<kStages>>{}));
  using Transfer = Exchange<Element, kWords, 128, exchange_share(kWords / 4)>;
  static_assert(Transfer::kVectorWords == 4, "a vector is a block of 16 x 16 of a warp");

  // Where a warp turns a vector's columns, which lie in different lanes, into vectors of neighbouring columns of y.
  struct Turned {
    uint4 half[2][16 + 4];  // columns 0..7 and 8..15 of a row of x each; so far apart, the halves lie in other banks
  };

  struct Storage {
    alignas(1024) cute::ArrayEngine<Element, cute::cosize_v<WeightLayout>> weight;
    alignas(1024) cute::ArrayEngine<Element, cute::cosize_v<XLayout>> x;
    alignas(16) uint8_t parts[std::max(kSplitBytes, 16)];  // of the tile, by the other CTAs: few_rows_split.cuh
    uint64_t full[kStages];
    uint64_t empty[kStages];
    SplitBarriers split;
    Turned turned[kMathThreads / 32 + kExchangeWarps];
    uint32_t sent;    // tiles, by each warp of the math warpgroups
    uint32_t slices;  // kGather: that have arrived
  };
};

template <class Cfg, class TmaWeight, class TmaX>
struct FewRowsParams {
  TmaWeight tma_weight;
  TmaX tma_x[2];       // kGather: of the area of each parity
  TmaX tma_last_x[2];  // the same, of as many rows as the last tile has
  int last_x_bytes;    // that it brings
  int m, n, k;
  typename Cfg::Element const* bias;  // [n] or null
  typename Cfg::Element* y;
  void const* shard;  // kGather: this rank's rows of x
  void* gathered;     // kGather: for the rows of all ranks, or null
  ExchangeArgs exchange;

  CUTLASS_HOST_DEVICE int m_tiles() const { return static_cast<int>(ceil_div(m, int{Cfg::TileM})); }
  CUTLASS_HOST_DEVICE int n_tiles() const { return static_cast<int>(ceil_div(n, int{Cfg::TileN})); }
  CUTLASS_HOST_DEVICE int k_tiles() const {  // at least one for each CTA: beyond K are zeros
    int const tiles = static_cast<int>(ceil_div(k, int{Cfg::kTileK}));
    return tiles < Cfg::SplitK ? Cfg::SplitK : tiles;
  }
  CUTLASS_HOST_DEVICE int num_tiles() const { return m_tiles() * n_tiles(); }
  CUTLASS_HOST_DEVICE bool is_last_m(int m_tile) const { return m_tile == m_tiles() - 1; }
  CUTLASS_HOST_DEVICE int num_units() const { return num_tiles() * Cfg::kParts * Cfg::SplitK; }
  CUTLASS_DEVICE int shard_rows() const { return m / exchange.world; }  // kGather: of x, that a rank has
  // The first of the rows of y that a rank owns.
  CUTLASS_DEVICE int first_row(int rank) const {
    return exchange.form == ExchangeForm::kScatter ? exchange.own_rows * rank : 0;
  }
};

// The CTA's tiles, one after the other. All CTAs of a cluster have the same. Tiles of the same rows of the weight are
// neighbours, so they read them together. After as many as run at once on an H100, they change places: else the tiles
// that M does not fill, which take less time, would always be those of the same CTAs.
template <class Cfg>
struct FewRowsTiles {
  int tile, count, m_tiles;

  template <class Params>
  __device__ explicit FewRowsTiles(Params const& p)
      : tile(blockIdx.x / Cfg::SplitK), count(p.num_tiles()), m_tiles(p.m_tiles()) {}

  static __device__ int slice() { return blockIdx.x % Cfg::SplitK; }
  __device__ bool is_valid() const { return tile < count; }
  __device__ bool is_last() const { return tile + int(gridDim.x / Cfg::SplitK) >= count; }
  __device__ void next() { tile += gridDim.x / Cfg::SplitK; }
  __device__ int n() const { return tile / m_tiles; }
  __device__ int m() const {
    int const groups_at_once = max(kNumSms / Cfg::SplitK / m_tiles, 1);
    return (tile + n() / groups_at_once) % m_tiles;
  }
  __device__ ExchangeUnit unit(int part) const {
    return {(tile * Cfg::kParts + part) * Cfg::SplitK + slice(), n() * Cfg::kParts + part,
            (m() * Cfg::TileM + slice() * Cfg::kSliceM) / 16};
  }
};

// Where the words of a thread lie in the product. The accumulators of a warp are blocks of 8 rows of the weight by 8
// rows of x: a word holds two neighbouring rows of x for one row of the weight, until the block is transposed.
template <class Cfg>
struct FewRowsPlace {
  int n0, m0;       // of the unit, and of the warp in it
  int row, column;  // lane / 4, lane % 4: of the thread in a block of 8 x 8

  __device__ FewRowsPlace(FewRowsTiles<Cfg> const& tile, int part, int thread)
      : n0(tile.n() * Cfg::TileN + part * 64 + thread / 32 * 16),
        m0(tile.m() * Cfg::TileM + tile.slice() * Cfg::kSliceM) {
    row = thread % 32 / 4;
    column = thread % 4;
  }

  __device__ int block_n(int word) const { return n0 + word % 2 * 8; }

  // Bit v: vector v of the thread's words has rows of x from `begin` on, before `end`.
  __device__ uint32_t mask(int begin, int end) const {
    return vector_mask(m0 + 2 * column, Cfg::Transfer::kVectors, begin, end);
  }
};

}  // namespace flux
