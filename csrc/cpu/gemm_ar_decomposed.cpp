// y[rows, n] = all_reduce(x[rows, k] . w[n, k]^T) + bias, as one ATen GEMM and an all-reduce after it
//
// One-shot: each rank copies its partial to all peers, and adds up all of them. Two-shot: it copies to each peer the
// rows that the peer owns; each owner adds up its rows, and copies the sums to all peers. The partials are added up in
// rank order, rounded to the dtype before, as those of a plain all-reduce are: all ranks get the same bits.
//
//   region   | partials [source rank][row of the reader][n] | sums [row of y][n] |

#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <cstring>

#include "cpu/chunk_gemm.hpp"
#include "cpu/staging.hpp"
#include "ops/backend.hpp"
#include "ops/data_type.hpp"
#include "ops/decomposed.hpp"

namespace flux::cpu {
namespace {

enum Piece : int { kPartials = 0, kSums = 1 };

}  // namespace

void gemm_ar_decomposed(Problem const& p, Operands const& o, WorkspaceView const& workspace, CallInfo const& info) {
  at::AutoDispatchBelowADInplaceOrView const no_autograd;
  bool const two_shot = decomposition_of(p).schedule == ChunkSchedule::kTwoShot;
  Exchange const exchange(p, workspace, info);
  exchange.announce();
  ChunkGemm const gemm(p, o);
  at::Tensor const partial = gemm.product(view_matrix(p.dtype, o.x, p.rows, p.k, p.k), 0).to(row_of(p.dtype).scalar);

  int64_t const row_bytes = p.n * element_size(p.dtype);
  int64_t const rows_at_most = two_shot ? ceil_div(p.rows, p.world) : p.rows;  // of an owner
  auto const begin = [&](int owner) { return two_shot ? std::min(owner * rows_at_most, p.rows) : 0; };
  auto const rows_of = [&](int owner) { return std::min(rows_at_most, p.rows - begin(owner)); };
  auto const partial_at = [&](int rank, int source) {
    return exchange.region(rank) + source * rows_at_most * row_bytes;
  };
  auto const to_peers = [&](Piece piece, auto const& copy) {
    for (int step = 0; step < p.world - 1; ++step) {
      int const peer = ag_push_peer(p.rank, p.world, step);
      copy(peer);
      exchange.signal(peer, piece);
    }
  };

  to_peers(kPartials, [&](int peer) {
    auto const* const from = static_cast<std::byte const*>(partial.const_data_ptr()) + begin(peer) * row_bytes;
    std::memcpy(partial_at(peer, p.rank), from, rows_of(peer) * row_bytes);
  });
  int64_t const own = begin(p.rank), own_rows = rows_of(p.rank);
  auto const part = [&](int source) {
    if (source == p.rank) return partial.narrow(0, own, own_rows).to(accumulation_type(p.dtype));
    exchange.wait(source, kPartials, p.world, "step");
    return view_matrix(p.dtype, partial_at(p.rank, source), own_rows, p.n, p.n).to(accumulation_type(p.dtype));
  };
  gemm.write(add_in_rank_order(p.world, part), own);
  if (!two_shot) return;

  auto const sums_at = [&](int rank, int owner) { return partial_at(rank, p.world) + begin(owner) * row_bytes; };
  auto const y_at = [&](int owner) { return static_cast<std::byte*>(o.y) + begin(owner) * row_bytes; };
  to_peers(kSums, [&](int peer) { std::memcpy(sums_at(peer, p.rank), y_at(p.rank), own_rows * row_bytes); });
  for (int step = 0; step < p.world - 1; ++step) {
    int const owner = ag_push_peer(p.rank, p.world, step);
    exchange.wait(owner, kSums, p.world, "step");
    std::memcpy(y_at(owner), sums_at(p.rank, owner), rows_of(owner) * row_bytes);
  }
}

}  // namespace flux::cpu
