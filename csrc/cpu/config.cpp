#include "cpu/config.hpp"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <limits>

#include "cpu/protocol.hpp"
#include "ops/backend.hpp"
#include "ops/decomposed.hpp"

namespace flux::cpu {
namespace {

// Large enough that ATen's GEMM runs well, small enough that a chunk has several tiles to overlap.
int32_t tile_extent(int64_t extent) {
  if (extent >= 4096) return 512;
  if (extent >= 1024) return 256;
  return extent >= 256 ? 128 : 64;
}

std::atomic<int> requested_threads{0};

int available_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
}

}  // namespace

Config make_config(Problem const& p) {
  Config c;
  c.tile = {tile_extent(p.rows), tile_extent(p.n), /*cluster_m=*/1, /*cluster_n=*/1};
  // Along N first: the tiles of the rows that arrive first come first.
  c.order = make_tile_order(p.rows, p.n, c.tile, /*swizzle=*/1, /*along_n=*/true);
  bool const by_rows = p.op == Op::kAgGemm;
  c.pieces = make_pieces(by_rows ? p.rows : c.order.num_tiles(), kWantedPieces, by_rows ? c.tile.tile_m : 1);
  return c;
}

void set_num_threads(int num_threads) { requested_threads = num_threads; }

int num_threads(int world) {
  int const requested = requested_threads;
  return requested > 0 ? requested : std::max(1, std::min(4, available_cores() / world));
}

std::string why_not_fused(Problem const& p) {
  if (!p.config.empty()) return "the CPU backend has no configurations to name";
  int64_t const limit = std::numeric_limits<int32_t>::max();
  if (p.rows >= limit || p.n >= limit || ceil_div(p.rows, 64) * ceil_div(p.n, 64) >= limit) {
    return "a chunk of " + std::to_string(p.rows) + " x " + std::to_string(p.n) + " has more than 2^31 rows or tiles";
  }
  return {};
}

std::string why_fused_is_slower(Problem const&) { return {}; }

std::string config_name(Problem const& p) {
  Config const c = make_config(p);
  return "tiles " + std::to_string(c.tile.tile_m) + "x" + std::to_string(c.tile.tile_n) + ", " +
         std::to_string(c.pieces.count()) + " pieces per chunk";
}

WorkspaceNeeds workspace_needs(Problem const& p) {
  int64_t const send_bytes = sizeof(CallWords);
  if (p.op == Op::kAgGemm) return {ag_region_bytes(p.world, p.rows, p.k, element_size(p.dtype)), send_bytes};
  Config const c = make_config(p);
  int64_t const tile_bytes = rs_tile_bytes(c.tile.tile_m, c.tile.tile_n, element_size(p.dtype));
  return {rs_region_bytes(p.world, c.order.num_tiles(), tile_bytes), send_bytes};
}

std::string why_not_decomposed(Problem const& problem) { return flux::why_not_decomposed(problem); }

WorkspaceNeeds decomposed_needs(Problem const& p) {
  int64_t const send_bytes = sizeof(CallWords);
  if (p.op == Op::kAgGemm) return {ag_region_bytes(p.world, p.rows, p.k, element_size(p.dtype)), send_bytes};
  return {rs_chunks_bytes(p), send_bytes};
}

}  // namespace flux::cpu
