#include "cpu/config.hpp"

#include <c10/util/Exception.h>

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <iterator>
#include <limits>

#include "cpu/protocol.hpp"
#include "ops/backend.hpp"
#include "ops/decomposed.hpp"
#include "schedule/chunk_order.hpp"

namespace flux::cpu {
namespace {

constexpr int32_t kTileExtents[] = {64, 128, 256, 512};
constexpr int32_t kLargestExtent = 512;

// What a configuration's name says.
struct Knobs {
  int32_t tile_m, tile_n;
  int32_t pieces;  // of a chunk, at most
  bool same_order = false;

  std::string name() const {
    return "t" + std::to_string(tile_m) + "x" + std::to_string(tile_n) + "/p" + std::to_string(pieces) +
           (same_order ? kSameOrder : "");
  }
};

// Reads "t128x256/p4". False if it is no configuration.
bool parse_knobs(std::string const& text, Knobs* knobs) {
  if (std::sscanf(text.c_str(), "t%dx%d/p%d", &knobs->tile_m, &knobs->tile_n, &knobs->pieces) != 3) return false;
  knobs->same_order = text.find(kSameOrder) != std::string::npos;
  auto const is_extent = [](int32_t extent) {
    return std::find(std::begin(kTileExtents), std::end(kTileExtents), extent) != std::end(kTileExtents);
  };
  return is_extent(knobs->tile_m) && is_extent(knobs->tile_n) && knobs->pieces >= 1 && knobs->pieces <= kMaxPieces &&
         text == knobs->name();
}

// Large enough that ATen's GEMM runs well, small enough that a chunk has several tiles to overlap.
int32_t tile_extent(int64_t extent) {
  if (extent >= 4096) return 512;
  if (extent >= 1024) return 256;
  return extent >= 256 ? 128 : 64;
}

Knobs knobs_of(Problem const& p) {
  Knobs knobs{tile_extent(p.rows), tile_extent(p.n), /*pieces=*/4};
  if (!p.config.empty()) {
    TORCH_CHECK_VALUE(parse_knobs(p.config, &knobs), "'", p.config, "' is no configuration.");
  }
  return knobs;
}

std::atomic<int> requested_threads{0};

int available_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
}

}  // namespace

Config make_config(Problem const& p) {
  Knobs const knobs = knobs_of(p);
  Config c;
  c.tile = {knobs.tile_m, knobs.tile_n, /*cluster_m=*/1, /*cluster_n=*/1};
  // Along N first: the tiles of the rows that arrive first come first.
  c.order = make_tile_order(p.rows, p.n, c.tile, /*swizzle=*/1, /*along_n=*/true);
  bool const by_rows = p.op == Op::kAgGemm;
  c.order_rank = knobs.same_order ? 0 : p.rank;
  c.pieces = make_pieces(by_rows ? p.rows : c.order.num_tiles(), knobs.pieces, by_rows ? c.tile.tile_m : 1);
  return c;
}

void set_num_threads(int num_threads) { requested_threads = num_threads; }

int num_threads(int world) {
  int const requested = requested_threads;
  return requested > 0 ? requested : std::max(1, std::min(4, available_cores() / world));
}

std::string why_not_fused(Problem const& p) {
  Knobs knobs;
  if (!p.config.empty() && !parse_knobs(p.config, &knobs)) {
    return "there is no configuration '" + p.config + "' (one is 't128x128/p4')";
  }
  int64_t const limit = std::numeric_limits<int32_t>::max();
  if (p.rows >= limit || p.n >= limit || ceil_div(p.rows, 64) * ceil_div(p.n, 64) >= limit) {
    return "a chunk of " + std::to_string(p.rows) + " x " + std::to_string(p.n) + " has more than 2^31 rows or tiles";
  }
  return {};
}

std::string why_fused_is_slower(Problem const&) { return {}; }

std::string config_name(Problem const& p) { return knobs_of(p).name(); }

std::vector<std::string> candidates(Problem const& p) {
  std::vector<std::string> names{knobs_of(p).name()};
  for (char const* name : {"t64x64/p8", "t128x128/p4", "t256x256/p2", "t256x256/p1"}) {
    if (names.front() != name) names.emplace_back(name);
  }
  return names;
}

std::string config_names() {
  std::string names;
  for (int32_t const extent : kTileExtents) names += (names.empty() ? "t" : " t") + std::to_string(extent);
  return names;
}

WorkspaceNeeds workspace_needs(Problem const& p) {
  int64_t const size = element_size(p.dtype), send_bytes = sizeof(CallWords);
  if (p.op == Op::kAgGemm) return {ag_region_bytes(p.world, p.rows, p.k, size), send_bytes};
  TileShape const largest{kLargestExtent, kLargestExtent, /*cluster_m=*/1, /*cluster_n=*/1};
  int64_t const tiles = make_tile_order(p.rows, p.n, largest, /*swizzle=*/1, /*along_n=*/true).num_tiles();
  return {rs_region_bytes(p.world, tiles, rs_tile_bytes(kLargestExtent, kLargestExtent, size)), send_bytes};
}

std::string why_not_decomposed(Problem const& problem) { return flux::why_not_decomposed(problem); }

WorkspaceNeeds decomposed_needs(Problem const& p) {
  int64_t const send_bytes = sizeof(CallWords);
  if (p.op == Op::kAgGemm) return {ag_region_bytes(p.world, p.rows, p.k, element_size(p.dtype)), send_bytes};
  return {rs_chunks_bytes(p), send_bytes};
}

}  // namespace flux::cpu
