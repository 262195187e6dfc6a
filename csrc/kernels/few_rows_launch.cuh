#pragma once
// Starts a kernel for few rows.

#include "kernels/few_rows.cuh"

namespace flux {

// visit(Int<rows>) with the least number of rows, of those that a load of a part of a tile's x can have, that holds so
// many; nothing if it takes the whole tile.
template <int TileM, int Rows = 16, class Visit>
void with_load_rows(int rows, Visit const& visit) {
  if constexpr (Rows < TileM) {
    if (rows > Rows) return with_load_rows<TileM, Rows + 16>(rows, visit);
    visit(cute::Int<Rows>{});
  }
}

template <class Cfg>
cudaError_t launch_few_rows(FewRowsArgs const& args, cudaStream_t stream) {
  using namespace cute;
  using Element = typename Cfg::Element;
  int const m = static_cast<int>(args.m), n = static_cast<int>(args.n), k = static_cast<int>(args.k);
  bool const gathers = args.exchange.form == ExchangeForm::kGather;

  auto const tma = [k](void const* data, int rows, int64_t stride, auto const& smem, auto tile) {
    Tensor const matrix =
        make_tensor(make_gmem_ptr(static_cast<Element const*>(data)), make_shape(rows, k), make_stride(stride, _1{}));
    return make_tma_copy(SM90_TMA_LOAD{}, matrix, smem(_, _, 0), tile, _1{});
  };
  auto const tma_x = [&](int parity, auto tile) {
    auto const* const area = reinterpret_cast<std::byte const*>(args.exchange.slots[args.exchange.rank]);
    auto const layout = tile_to_shape(typename Cfg::SmemAtom{}, append(tile, _1{}));
    return tma(gathers ? area + parity * kGatherBytes : args.x, m, args.k, layout, tile);
  };
  auto const tma_weight =
      tma(args.weight, n, args.weight_stride, typename Cfg::WeightLayout{}, Shape<Int<Cfg::TileN>, Int<Cfg::kTileK>>{});
  Shape<Int<Cfg::TileM>, Int<Cfg::kTileK>> const whole{};
  auto const first_x = tma_x(0, whole), second_x = gathers ? tma_x(1, whole) : first_x;
  // Rows beyond M cost a load as much as others, and more: the last tile of rows is loaded by a smaller box. What is
  // left in shared memory beyond it goes into sums that nobody uses.
  auto last_x = first_x, second_last_x = second_x;
  int last_x_bytes = Cfg::kXBytes;
  if (m % Cfg::TileM != 0) {
    with_load_rows<Cfg::TileM>(m % Cfg::TileM, [&](auto rows) {
      auto const box = make_shape(rows, size<1>(typename Cfg::SmemAtom{}));  // a load of more of K is several
      last_x.tma_desc_ = tma_x(0, box).tma_desc_;
      second_last_x.tma_desc_ = gathers ? tma_x(1, box).tma_desc_ : last_x.tma_desc_;
      last_x_bytes = rows * Cfg::kTileK * int(sizeof(Element));
    });
  }
  FewRowsParams<Cfg, decltype(tma_weight), std::remove_const_t<decltype(first_x)>> const params{
      tma_weight,
      {first_x, second_x},
      {last_x, second_last_x},
      last_x_bytes,
      m,
      n,
      k,
      static_cast<Element const*>(args.bias),
      static_cast<Element*>(args.y),
      args.x,
      args.gathered,
      args.exchange};

  auto* const kernel = few_rows_kernel<Cfg, std::remove_const_t<decltype(params)>>;
  constexpr int kSmemBytes = sizeof(typename Cfg::Storage) + 1024;
  int device = 0, clusters = 0;
  cudaError_t const error = max_active_clusters(reinterpret_cast<void const*>(kernel), dim3(Cfg::SplitK), Cfg::kThreads,
                                                kSmemBytes, stream, &device, &clusters);
  if (error != cudaSuccess) return error;
  int const tiles = params.num_tiles();
  dim3 const grid(std::min(clusters, tiles) * Cfg::SplitK);
  return launch_clusters(kernel, params, grid, dim3(Cfg::SplitK), Cfg::kThreads, kSmemBytes, /*overlaps=*/true, stream);
}

}  // namespace flux
