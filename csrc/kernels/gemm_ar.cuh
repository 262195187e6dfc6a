#pragma once
// gemm_ar for few rows, in one kernel: y[m, n] = sum over ranks of x_r[m, k_r] . w_r[n, k_r]^T, + bias.
//
// With few rows the time is that of reading the weights, so a tile is TileN rows of the weight, the left operand of the
// MMA, by TileM rows of x.
//
//   loads    one warp, by TMA: the weight past the L2's care (it is used once), x with it
//   math     a warpgroup for each 64 rows of the weight
//   sends    the same threads, when their tile is done: rounded partials straight into the peers' exchange area
//   waits    the same threads, for the peers' partials of the tile before (or of the last one), in rank order; the
//            warp that loads, for each peer's word of this call: it tells unlike calls apart
//
// The sum has the same bits on all ranks. Its state is in device memory, so a replayed CUDA graph needs no more.
// Consecutive calls use the two halves of the exchange area in turn: to finish a call a rank needs data that each peer
// sends after it has finished the call before, so when a rank begins a call, all peers are done with the last call but
// one. That call's readers have emptied the slots.

#include <algorithm>

#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/cutlass.h"
#include "cutlass/device_kernel.h"
#include "cutlass/pipeline/sm90_pipeline.hpp"
#include "kernels/ar_exchange.cuh"
#include "kernels/occupancy.hpp"

namespace flux {

template <class Element_, int TileN_, int TileM_>
struct ArConfig {
  using Element = Element_;
  static constexpr int TileN = TileN_, TileM = TileM_;
  static constexpr int kTileK = TileN * TileM >= 128 * 64 ? 64 : 128;
  static constexpr int kMathThreads = TileN / 64 * 128;
  static constexpr int kThreads = kMathThreads + 32;
  static constexpr int kWords = TileM / 4;  // of a thread: pairs of accumulators
  static constexpr int kStageBytes = (TileN + TileM) * kTileK * 2;
  static constexpr int kStages = 215 * 1024 / kStageBytes;

  using Mma = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, float,
                                 cute::Shape<cute::Int<TileN>, cute::Int<TileM>, cute::Int<kTileK>>>(),
      cute::Layout<cute::Shape<cute::Int<TileN / 64>, cute::_1, cute::_1>>{}));
  using SmemAtom = cute::GMMA::Layout_K_SW128_Atom<Element>;
  using WeightLayout =
      decltype(cute::tile_to_shape(SmemAtom{}, cute::Shape<cute::Int<TileN>, cute::Int<kTileK>, cute::Int<kStages>>{}));
  using XLayout =
      decltype(cute::tile_to_shape(SmemAtom{}, cute::Shape<cute::Int<TileM>, cute::Int<kTileK>, cute::Int<kStages>>{}));
  using Transfer = Exchange<Element, kWords, kMathThreads>;

  struct Storage {
    alignas(1024) cute::ArrayEngine<Element, cute::cosize_v<WeightLayout>> weight;
    alignas(1024) cute::ArrayEngine<Element, cute::cosize_v<XLayout>> x;
    uint64_t full[kStages];
    uint64_t empty[kStages];
  };
};

template <class Cfg, class TmaWeight, class TmaX>
struct ArParams {
  TmaWeight tma_weight;
  TmaX tma_x;
  int m, n, k;
  typename Cfg::Element const* bias;  // [n] or null
  typename Cfg::Element* y;           // [m, n]
  ExchangeArgs exchange;
  ExchangeWords* words[kMaxWorld];
  uint64_t digest;

  CUTLASS_HOST_DEVICE int m_tiles() const { return static_cast<int>(ceil_div(m, int{Cfg::TileM})); }
  CUTLASS_HOST_DEVICE int k_tiles() const { return static_cast<int>(ceil_div(k, int{Cfg::kTileK})); }
  CUTLASS_HOST_DEVICE int num_tiles() const { return m_tiles() * static_cast<int>(ceil_div(n, int{Cfg::TileN})); }
};

template <class Cfg, class Params>
__device__ void ar_load(Params const& p, typename Cfg::Storage& storage) {
  using namespace cute;
  using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
  using EmptyBarrier = cutlass::arch::ClusterBarrier;
  Tensor const weight = p.tma_weight.get_tma_tensor(make_shape(p.n, p.k));
  Tensor const x = p.tma_x.get_tma_tensor(make_shape(p.m, p.k));
  Tensor const s_weight = make_tensor(make_smem_ptr(storage.weight.begin()), typename Cfg::WeightLayout{});
  Tensor const s_x = make_tensor(make_smem_ptr(storage.x.begin()), typename Cfg::XLayout{});
  cutlass::PipelineState<Cfg::kStages> state(0, 1, 0);  // all stages are empty
  for (int tile = blockIdx.x; tile < p.num_tiles(); tile += gridDim.x) {
    auto const g_weight =
        local_tile(weight, Shape<Int<Cfg::TileN>, Int<Cfg::kTileK>>{}, make_coord(tile / p.m_tiles(), _));
    auto const g_x = local_tile(x, Shape<Int<Cfg::TileM>, Int<Cfg::kTileK>>{}, make_coord(tile % p.m_tiles(), _));
    auto const [from_weight, to_weight] =
        tma_partition(p.tma_weight, Int<0>{}, Layout<_1>{}, group_modes<0, 2>(s_weight), group_modes<0, 2>(g_weight));
    auto const [from_x, to_x] =
        tma_partition(p.tma_x, Int<0>{}, Layout<_1>{}, group_modes<0, 2>(s_x), group_modes<0, 2>(g_x));
    for (int k = 0; k < p.k_tiles(); ++k, ++state) {
      int const stage = state.index();
      EmptyBarrier::wait(&storage.empty[stage], state.phase());
      FullBarrier::arrive_and_expect_tx(&storage.full[stage], Cfg::kStageBytes);
      copy(p.tma_weight.with(storage.full[stage], 0, TMA::CacheHintSm90::EVICT_FIRST), from_weight(_, k),
           to_weight(_, stage));
      copy(p.tma_x.with(storage.full[stage], 0, TMA::CacheHintSm90::EVICT_LAST), from_x(_, k), to_x(_, stage));
    }
  }
}

// The product of one tile. K is not 0.
template <class Cfg, class Accumulators>
__device__ void ar_multiply(typename Cfg::Storage& storage, int k_tiles, cutlass::PipelineState<Cfg::kStages>& state,
                            int thread, Accumulators& acc) {
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
  int last_stage = 0;
  for (int k = 0; k < k_tiles; ++k, ++state) {
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
    if (k > 0) {
      warpgroup_wait<1>();
      release(last_stage);
    }
    last_stage = stage;
  }
  warpgroup_wait<0>();
  warpgroup_fence_operand(acc);
  release(last_stage);
}

// Where the words of a thread lie in y. The accumulators of a warp are blocks of 8 rows of the weight by 8 rows of x:
// a word holds two neighbouring rows of x for one row of the weight, until the block is transposed.
template <class Cfg>
struct ArPlace {
  int n0, m0;       // of the tile, and of the warp in it
  int row, column;  // of the thread's quad: warp's rows of the weight; lane / 4, lane % 4

  template <class Params>
  __device__ ArPlace(Params const& p, int tile, int thread)
      : n0(tile / p.m_tiles() * Cfg::TileN + thread / 32 * 16), m0(tile % p.m_tiles() * Cfg::TileM) {
    row = thread % 32 / 4;
    column = thread % 4;
  }

  __device__ int block_m(int word) const { return m0 + word / 2 * 8; }
  __device__ int block_n(int word) const { return n0 + word % 2 * 8; }

  // Bit v: vector v of the thread's words has rows of x that exist.
  template <class Transfer>
  __device__ uint32_t mask(int m) const {
    uint32_t bits = 0;
    CUTE_UNROLL
    for (int v = 0; v < Transfer::kVectors; ++v) {
      if (block_m(v * Transfer::kVectorWords) + 2 * column < m) bits |= 1u << v;
    }
    return bits;
  }
};

template <class Cfg, class Params>
__device__ void ar_write(Params const& p, ArPlace<Cfg> const& place, uint32_t word, int i) {
  uint32_t transposed;  // two neighbouring columns of y for one row
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(word));
  int const m = place.block_m(i) + place.row, n = place.block_n(i) + 2 * place.column;
  if (m < p.m && n < p.n) *reinterpret_cast<uint32_t*>(p.y + int64_t{m} * p.n + n) = transposed;
}

// Waits for the sum of a tile, or for what it is made of, and writes it.
template <class Cfg, class Params>
__device__ void ar_finish(Params const& p, typename Cfg::Transfer const& transfer, int tile, int thread) {
  using Transfer = typename Cfg::Transfer;
  ArPlace<Cfg> const place(p, tile, thread);
  uint32_t const mask = place.template mask<Transfer>(p.m);
  typename Transfer::Vector words[Transfer::kVectors];
  auto const word = [&](int i) -> uint32_t& {
    return words[i / Transfer::kVectorWords].word[i % Transfer::kVectorWords];
  };
  float bias[2] = {};  // of the two rows of the weight that the thread has
  CUTE_UNROLL
  for (int i = 0; i < 2; ++i) {
    int const n = place.block_n(i) + place.row;
    if (p.bias != nullptr && n < p.n) bias[i] = float(p.bias[n]);
  }
  if (!p.exchange.two_shot || exchange_owner(tile, p.exchange.world) == p.exchange.rank) {
    auto const sums = transfer.reduce(tile, mask);
    CUTE_UNROLL
    for (int i = 0; i < Cfg::kWords; ++i) {
      word(i) = Transfer::pack(sums.value[2 * i] + bias[i % 2], sums.value[2 * i + 1] + bias[i % 2]);
    }
    if (p.exchange.two_shot) transfer.send_sum(tile, words, mask);
  } else {
    transfer.receive_sum(tile, words, mask);
  }
  __syncwarp();
  CUTE_UNROLL
  for (int i = 0; i < Cfg::kWords; ++i) ar_write(p, place, word(i), i);
}

template <class Cfg, class Params>
__device__ void ar_compute(Params const& p, typename Cfg::Storage& storage, typename Cfg::Transfer const& transfer,
                           int thread) {
  using namespace cute;
  using Transfer = typename Cfg::Transfer;
  int tile_before = -1;
  cutlass::PipelineState<Cfg::kStages> state;
  for (int tile = blockIdx.x; tile < p.num_tiles(); tile += gridDim.x) {
    typename Transfer::Vector partial[Transfer::kVectors];
    {
      Tensor acc = partition_fragment_C(typename Cfg::Mma{}, Shape<Int<Cfg::TileN>, Int<Cfg::TileM>>{});
      ar_multiply<Cfg>(storage, p.k_tiles(), state, thread, acc);
      CUTE_UNROLL
      for (int i = 0; i < Cfg::kWords; ++i) {
        partial[i / Transfer::kVectorWords].word[i % Transfer::kVectorWords] =
            Transfer::pack(acc(2 * i), acc(2 * i + 1));
      }
    }
    ArPlace<Cfg> const place(p, tile, thread);
    transfer.send_partial(tile, partial, place.template mask<Transfer>(p.m));
    if (tile_before >= 0) ar_finish<Cfg>(p, transfer, tile_before, thread);
    tile_before = tile;
  }
  if (tile_before >= 0) ar_finish<Cfg>(p, transfer, tile_before, thread);
}

template <class Cfg, class Params>
__global__ void __launch_bounds__(Cfg::kThreads, 1) gemm_ar_kernel(CUTLASS_GRID_CONSTANT Params const p) {
  extern __shared__ char shared_memory[];
  auto& storage =
      *reinterpret_cast<typename Cfg::Storage*>((reinterpret_cast<uintptr_t>(shared_memory) + 1023) & ~uintptr_t{1023});
  int const thread = threadIdx.x;
  bool const loads = thread >= Cfg::kMathThreads;
  if (thread == 0) {
    for (int stage = 0; stage < Cfg::kStages; ++stage) {
      cutlass::arch::ClusterTransactionBarrier::init(&storage.full[stage], 1);
      cutlass::arch::ClusterBarrier::init(&storage.empty[stage], Cfg::kMathThreads / 32);
    }
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");

  ExchangeWords& local = *p.words[p.exchange.rank];
  Epoch const call = load_relaxed_sys(&local.calls) + 1;
  int const parity = parity_of(call);
  Epoch const signal = make_signal(call, p.digest);
  if (loads) {
    int const lane = thread % 32;
    bool const is_peer = lane < p.exchange.world && lane != p.exchange.rank;
    if (blockIdx.x == 0 && is_peer) store_release_sys(&p.words[lane]->begun[parity][p.exchange.rank], signal);
    if (cute::elect_one_sync()) ar_load<Cfg>(p, storage);
    __syncwarp();
    if (is_peer) {
      SignalWait wait = p.exchange.wait;
      wait.signal = signal;
      wait_signal(wait, &local.begun[parity][lane], lane, 0, 0, 0);
    }
  } else {
    typename Cfg::Transfer const transfer(p.exchange, parity, signal, thread);
    ar_compute<Cfg>(p, storage, transfer, thread);
  }
  __syncthreads();
  if (thread == 0 && atomicAdd(&local.finished, 1u) == gridDim.x - 1) {
    local.finished = 0;
    local.calls = call;
  }
}

template <class Cfg>
cudaError_t launch_gemm_ar(GemmArArgs const& args, cudaStream_t stream) {
  using namespace cute;
  using Element = typename Cfg::Element;
  int const m = static_cast<int>(args.m), n = static_cast<int>(args.n), k = static_cast<int>(args.k);
  auto const tma = [k](void const* data, int rows, int64_t stride, auto const& smem, auto tile_rows) {
    Tensor const matrix =
        make_tensor(make_gmem_ptr(static_cast<Element const*>(data)), make_shape(rows, k), make_stride(stride, _1{}));
    return make_tma_copy(SM90_TMA_LOAD{}, matrix, smem(_, _, 0), make_shape(tile_rows, Int<Cfg::kTileK>{}), _1{});
  };
  auto const tma_weight = tma(args.weight, n, args.weight_stride, typename Cfg::WeightLayout{}, Int<Cfg::TileN>{});
  auto const tma_x = tma(args.x, m, args.k, typename Cfg::XLayout{}, Int<Cfg::TileM>{});
  ArParams<Cfg, decltype(tma_weight), decltype(tma_x)> params{
      tma_weight,    tma_x, m,          n, k, static_cast<Element const*>(args.bias), static_cast<Element*>(args.y),
      args.exchange, {},    args.digest};
  std::copy(std::begin(args.words), std::end(args.words), params.words);

  auto* const kernel = gemm_ar_kernel<Cfg, decltype(params)>;
  constexpr int kSmemBytes = sizeof(typename Cfg::Storage) + 1024;
  int device = 0, ctas = 0;
  cudaError_t const error =
      max_active_clusters(reinterpret_cast<void const*>(kernel), dim3(1), Cfg::kThreads, kSmemBytes, &device, &ctas);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = {static_cast<unsigned>(std::min(ctas, params.num_tiles())), 1, 1};
  config.blockDim = {Cfg::kThreads, 1, 1};
  config.dynamicSmemBytes = kSmemBytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, params);
}

}  // namespace flux
