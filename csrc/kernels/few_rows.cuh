#pragma once
// The ops for few rows of x, each in one kernel: what is computed is at few_rows_launch.hpp.
//
// With few rows the time is that of reading the weights, and then that of filling shared memory: a tile is TileN rows
// of the weight, the left operand of the MMA, by TileM rows of x. Where there are too few such tiles, SplitK CTAs, a
// cluster, share one: each multiplies a part of K, and they exchange what they have, each for a slice of the tile's x.
//
//   load       one warp, by TMA: the weight past the L2's care (it is used once), x with it; and the first of the
//              weight into the L2, while the kernel before this one ends
//   math       a warpgroup for each 64 rows of the weight. When a tile is done, it sends the rounded partial straight
//              into the peers' exchange area; after its last tile it waits for the sums and writes y
//   exchange   three warps: do the same for the tiles before the last one, while the next is computed (ag_gemm: two
//              push this rank's rows of x to the peers, one watches what comes in)
//
// A warp of the first CTA tells the peers which call this is, and the load warps wait for their words of it: that tells
// unlike calls apart.
//
// The sum has the same bits on all ranks.

#include <algorithm>

#include "cutlass/arch/barrier.h"
#include "cutlass/arch/reg_reconfig.h"
#include "cutlass/device_kernel.h"
#include "cutlass/pipeline/sm90_pipeline.hpp"
#include "kernels/few_rows_load.cuh"
#include "kernels/few_rows_push.cuh"
#include "kernels/few_rows_tiles.cuh"
#include "kernels/occupancy.hpp"

namespace flux {

static_assert(kExchangeWarps == kPushWarps + 1, "of an ag_gemm: those that push, and one that watches");

// Of an ag_gemm, whose call must be known.
template <class Cfg, class Params>
__device__ PushedRows pushed_rows(Params const& p, ExchangeCall const& call) {
  return PushedRows(p.exchange, call, p.shard_rows(), p.k, p.num_tiles() * Cfg::SplitK);
}

// The product of one tile, or the cluster's part of it.
template <class Cfg, class Accumulators>
__device__ void few_rows_multiply(typename Cfg::Storage& storage, int k_tiles,
                                  cutlass::PipelineState<Cfg::kStages>& state, int thread, Accumulators& acc) {
  using namespace cute;
  typename Cfg::Mma mma;
  auto const slice = mma.get_thread_slice(thread);
  Tensor const s_weight = make_tensor(make_smem_ptr(storage.weight.begin()), typename Cfg::WeightLayout{});
  Tensor const s_x = make_tensor(make_smem_ptr(storage.x.begin()), typename Cfg::XLayout{});
  Tensor const a = slice.make_fragment_A(slice.partition_A(s_weight));
  Tensor const b = slice.make_fragment_B(slice.partition_B(s_x));
  auto const release = [&](int stage) {
    if (thread % 32 == 0) cutlass::arch::ClusterBarrier::arrive(&storage.empty[stage]);
  };
  mma.accumulate_ = GMMA::ScaleOut::Zero;
  int last_stage = -1;
  for (int k = FewRowsTiles<Cfg>::slice(); k < k_tiles; k += Cfg::SplitK, ++state) {
    int const stage = state.index();
    cutlass::arch::ClusterTransactionBarrier::wait(&storage.full[stage], state.phase());
    warpgroup_fence_operand(acc);
    warpgroup_arrive();
    CUTE_UNROLL
    for (int block = 0; block < size<2>(a); ++block) {
      gemm(mma, a(_, _, block, stage), b(_, _, block, stage), acc);
      mma.accumulate_ = GMMA::ScaleOut::One;
    }
    warpgroup_commit_batch();
    warpgroup_fence_operand(acc);
    if (last_stage >= 0) {
      warpgroup_wait<1>();
      release(last_stage);
    }
    last_stage = stage;
  }
  warpgroup_wait<0>();
  warpgroup_fence_operand(acc);
  release(last_stage);
}

// Writes vectors of a warp's lanes, of one unit, into this rank's rows of y: of each 16 rows by 16 columns, 32 bytes of
// a row by two lanes.
template <class Cfg>
class FewRowsWriter {
 public:
  // `turned` is the warp's own.
  template <class Params>
  __device__ FewRowsWriter(Params const& p, FewRowsPlace<Cfg> const& place, typename Cfg::Turned& turned) {
    int const lane = threadIdx.x % 32, n = place.n0 + 8 * (lane % 2);
    to_ = cute::cast_smem_ptr_to_uint(&turned.half[lane / 8 % 2][lane / 16 * 8 + lane % 8]);
    from_ = &turned.half[lane % 2][lane / 2];
    m_ = place.m0 + lane / 2 - p.first_row(p.exchange.rank);
    num_rows_ = p.exchange.own_rows;
    n_ = p.n;
    y_ = p.y + n;
    columns_ = p.n - n;
  }

  // For all lanes of the warp.
  __device__ void write(int v, typename Cfg::Transfer::Vector const& vector) const {
    __syncwarp();  // the one before has been read
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to_),
                 "r"(vector.word[0]), "r"(vector.word[1]), "r"(vector.word[2]), "r"(vector.word[3])
                 : "memory");
    __syncwarp();
    uint4 const columns = *from_;
    int const m = m_ + 16 * v;
    if (m < 0 || m >= num_rows_) return;
    if (columns_ > 0) *reinterpret_cast<uint4*>(y_ + int64_t{m} * n_) = columns;  // why_no_kernel: N is a multiple of 8
  }

 private:
  uint32_t to_;
  uint4 const* from_;
  typename Cfg::Element* y_;
  int m_, num_rows_, n_, columns_;
};

// The bias of the two rows of the weight that a thread has.
template <class Cfg, class Params>
__device__ float2 few_rows_bias(Params const& p, FewRowsPlace<Cfg> const& place) {
  auto const at = [&](int n) { return p.bias != nullptr && n < p.n ? float(p.bias[n]) : 0.0f; };
  return {at(place.block_n(0) + place.row), at(place.block_n(1) + place.row)};
}

// Where a math warp keeps its partial of the last tile: over operands that its warpgroup alone reads, and has read,
// which lie in blocks of 64 rows by 64 columns of the weight; or over the others' parts that its thread has added.
template <class Cfg>
class FewRowsKept {
 public:
  using Vector = typename Cfg::Transfer::Vector;
  __device__ FewRowsKept(typename Cfg::Storage& storage, int thread)
      : first_(kByThread ? storage.parts + thread * 16
                         : reinterpret_cast<uint8_t*>(storage.weight.begin()) + thread / 128 * kBlockBytes +
                               thread % 128 * 16) {}
  __device__ Vector& at(int v) const {
    int const offset =
        kByThread ? v * Cfg::kMathThreads * 16 : v / kPerBlock * Cfg::kParts * kBlockBytes + v % kPerBlock * 128 * 16;
    return *reinterpret_cast<Vector*>(first_ + offset);
  }

 private:
  static constexpr bool kByThread = Cfg::SplitK > 1;
  static constexpr int kBlockBytes = 64 * 64 * 2, kPerBlock = kBlockBytes / (128 * 16);
  static_assert(Cfg::Transfer::kVectors * Cfg::kMathThreads * 16 <=
                (kByThread ? Cfg::kSplitBytes : Cfg::kStages * Cfg::kWeightBytes));
  uint8_t* first_;
};

// Adds up what this rank owns of a unit, waits for the sums of the rest, and writes them; Group vectors at a time, or
// in the two-shot form Share at a time of those that it adds up. `own(v)`: this rank's partial, if `has_own`.
template <class Cfg, int Group, int Share, class Params, class Own>
__device__ __forceinline__ void few_rows_finish(Params const& p, typename Cfg::Transfer const& transfer,
                                                FewRowsTiles<Cfg> const& tile, int part, int thread, bool has_own,
                                                Own const& own, typename Cfg::Turned& turned) {
  using Transfer = typename Cfg::Transfer;
  using Vector = typename Transfer::Vector;
  static_assert(Transfer::kVectors % Group == 0 && Transfer::kShare % Share == 0, "groups are whole");
  ExchangeArgs const& exchange = p.exchange;
  bool const two_shot = exchange.form == ExchangeForm::kTwoShot;
  int const first = p.first_row(exchange.rank);
  ExchangeUnit const unit = tile.unit(part);
  FewRowsPlace<Cfg> const place(tile, part, thread);
  uint32_t const mask = place.mask(first, first + p.exchange.own_rows);
  uint32_t const owned = two_shot ? transfer.owned(unit) : ~0u;
  float2 const row_bias = few_rows_bias<Cfg>(p, place);
  auto const bias = [row_bias](int word) {
    float const b = word % 2 == 0 ? row_bias.x : row_bias.y;
    return float2{b, b};
  };
  FewRowsWriter<Cfg> const writer(p, place, turned);
  auto const add_up = [&](auto count) {
    constexpr int kCount = decltype(count)::value;
    CUTE_NO_UNROLL
    for (int v = 0; v < Transfer::kVectors; v += kCount) {
      if (!__any_sync(~0u, (mask & owned) >> v & ((1u << kCount) - 1))) continue;
      Vector sums[kCount];
      transfer.template reduce<kCount>(unit, v, mask, bias, has_own, own, sums);
      if (two_shot) transfer.template send_sum<kCount>(unit, v, sums, mask);
      CUTE_UNROLL
      for (int i = 0; i < kCount; ++i) writer.write(v + i, sums[i]);
    }
  };
  if constexpr (Group != Share) {
    if (!two_shot) return add_up(cute::Int<Group>{});
  }
  add_up(cute::Int<Share>{});
  if (!two_shot) return;
  uint32_t const rest = mask & ~owned;
  CUTE_NO_UNROLL
  for (int group = 0; group < Transfer::kVectors; group += Group) {
    if (!__any_sync(~0u, rest >> group & ((1u << Group) - 1))) continue;
    Vector sums[1][Group];
    transfer.template receive_sum<Group>(unit, group, sums, rest);
    CUTE_UNROLL
    for (int i = 0; i < Group; ++i) {
      if (~owned >> (group + i) & 1) writer.write(group + i, sums[0][i]);
    }
  }
}

template <class Cfg, class Params>
__device__ void few_rows_compute(Params const& p, typename Cfg::Storage& storage,
                                 typename Cfg::Transfer const& transfer, int thread) {
  using namespace cute;
  using Transfer = typename Cfg::Transfer;
  bool const gathers = p.exchange.form == ExchangeForm::kGather;
  FewRowsKept<Cfg> const kept(storage, thread);
  cutlass::PipelineState<Cfg::kStages> state;
  int turn = 0;
  for (FewRowsTiles<Cfg> tile(p); tile.is_valid(); tile.next(), ++turn) {
    int const part = thread / 128;
    FewRowsPlace<Cfg> const place(tile, part, thread % 128);
    Tensor acc = partition_fragment_C(typename Cfg::Mma{}, Shape<Int<Cfg::TileN>, Int<Cfg::TileM>>{});
    few_rows_multiply<Cfg>(storage, p.k_tiles(), state, thread, acc);
    if constexpr (Cfg::SplitK > 1) {
      add_slices<Cfg::SplitK, Cfg::kParts>(storage.split, storage.parts, tile.slice(), turn, tile.is_last(), thread,
                                           acc);
    }
    float2 const bias = gathers ? few_rows_bias<Cfg>(p, place) : float2{};
    typename Transfer::Vector words[Transfer::kVectors];
    CUTE_UNROLL
    for (int i = 0; i < Cfg::kWords; ++i) {
      float const b = i % 2 == 0 ? bias.x : bias.y;
      words[i / Transfer::kVectorWords].word[i % Transfer::kVectorWords] =
          Transfer::pack(acc(2 * i) + b, acc(2 * i + 1) + b);
    }
    if (gathers) {
      FewRowsWriter<Cfg> const writer(p, place, storage.turned[thread / 32]);
      CUTE_UNROLL
      for (int v = 0; v < Transfer::kVectors; ++v) writer.write(v, words[v]);
    } else {
      transfer.send_partial(tile.unit(part), words, !tile.is_last(), [&](int rank) {
        int const first = p.first_row(rank);
        return place.mask(first, first + p.exchange.own_rows);
      });
      if (tile.is_last()) {
        __syncwarp();
        if constexpr (Cfg::SplitK == 1) cutlass::arch::NamedBarrier::sync(128, part);  // all its warps have multiplied
        CUTE_UNROLL
        for (int v = 0; v < Transfer::kVectors; ++v) kept.at(v) = words[v];
      }
    }
    __syncwarp();
    if (thread % 32 == 0) atomicAdd_block(&storage.sent, 1u);
  }
  // The next kernel may be brought in while this one waits for the peers. No sooner: it holds SMs while it waits for
  // this one, and another stream's kernel that a peer waits for may need them.
  asm volatile("griddepcontrol.launch_dependents;");
  if (gathers) return;
  FewRowsTiles<Cfg> last(p);
  while (!last.is_last()) last.next();
  constexpr int kGroup = Transfer::kVectors == 6 ? 3 : std::min(Transfer::kVectors, 4);
  few_rows_finish<Cfg, kGroup, Transfer::kShare>(
      p, transfer, last, thread / 128, thread % 128, true, [&](int v) { return kept.at(v); },
      storage.turned[thread / 32]);
}

// The exchange warps, but for ag_gemm: each stands in for the math warps of its number, and of every third from there.
template <class Cfg, class Params>
__device__ void few_rows_exchange(Params const& p, typename Cfg::Storage& storage, ExchangeCall const& call, int warp) {
  uint32_t sent = 0;
  for (FewRowsTiles<Cfg> tile(p); tile.is_valid() && !tile.is_last(); tile.next()) {
    sent += Cfg::kMathThreads / 32;
    while (*const_cast<uint32_t volatile*>(&storage.sent) < sent) __nanosleep(500);  // only not to poll in vain
    CUTE_NO_UNROLL
    for (int w = warp; w < Cfg::kMathThreads / 32; w += kExchangeWarps) {
      int const thread = w * 32 + threadIdx.x % 32;
      typename Cfg::Transfer const transfer(p.exchange, p.num_units(), call, thread % 128);
      few_rows_finish<Cfg, 1, 1>(
          p, transfer, tile, thread / 128, thread % 128, false, [](int) { return typename Cfg::Transfer::Vector{}; },
          storage.turned[Cfg::kMathThreads / 32 + warp]);
    }
  }
}

template <class Cfg, class Params>
__global__ void __launch_bounds__(Cfg::kThreads, 1) few_rows_kernel(CUTLASS_GRID_CONSTANT Params const p) {
  extern __shared__ char shared_memory[];
  // Rounded up without a cast of the pointer: the compiler has to know that it is shared memory.
  auto& storage =
      *reinterpret_cast<typename Cfg::Storage*>(shared_memory + (-cute::cast_smem_ptr_to_uint(shared_memory) & 1023));
  int const thread = threadIdx.x;
  if (thread == 0) {
    for (int stage = 0; stage < Cfg::kStages; ++stage) {
      cutlass::arch::ClusterTransactionBarrier::init(&storage.full[stage], 1);
      cutlass::arch::ClusterBarrier::init(&storage.empty[stage], Cfg::kMathThreads / 32);
    }
    storage.split.init(Cfg::SplitK, Cfg::kMathThreads / 32);
    storage.sent = storage.slices = 0;
    cutlass::arch::fence_barrier_init();
  }
  if constexpr (Cfg::SplitK > 1) cute::cluster_sync();
  __syncthreads();

  if (thread < Cfg::kMathThreads) {
    if constexpr (Cfg::kUnevenRegisters) cutlass::arch::warpgroup_reg_alloc<Cfg::kMathRegisters>();
    wait_for_last_kernel();
    few_rows_compute<Cfg>(p, storage, {p.exchange, p.num_units(), ExchangeCall(p.exchange), thread % 128}, thread);
  } else {
    if constexpr (Cfg::kUnevenRegisters) cutlass::arch::warpgroup_reg_dealloc<Cfg::kOtherRegisters>();
    int const warp = (thread - Cfg::kMathThreads) / 32, lane = thread % 32;
    if (warp == kExchangeWarps) {
      if (cute::elect_one_sync()) few_rows_prefetch<Cfg>(p, storage);
      if (p.exchange.form == ExchangeForm::kGather) {
        wait_for_last_kernel();
        if (cute::elect_one_sync()) few_rows_load</*Gathers=*/true, Cfg>(p, storage);
      } else if (cute::elect_one_sync()) {
        few_rows_load</*Gathers=*/false, Cfg>(p, storage);
      }
      __syncwarp();
      wait_for_last_kernel();  // those lanes that were not elected
      ExchangeCall(p.exchange).compare(lane);
    } else {
      wait_for_last_kernel();
      ExchangeCall const call(p.exchange);
      if (blockIdx.x == 0 && warp == kWatchWarp) call.announce(lane);
      if (p.exchange.form != ExchangeForm::kGather) {
        few_rows_exchange<Cfg>(p, storage, call, warp);
      } else if (warp == kWatchWarp) {
        pushed_rows<Cfg>(p, call).watch(&storage.slices);
      } else {
        auto const pushed = pushed_rows<Cfg>(p, call);
        pushed.push(p.shard, thread - Cfg::kMathThreads);
        if (p.gathered != nullptr) pushed.copy_to(p.gathered, thread - Cfg::kMathThreads);
      }
    }
  }
  __syncthreads();
  if (thread == 0) ExchangeCall(p.exchange).end();
}

}  // namespace flux
