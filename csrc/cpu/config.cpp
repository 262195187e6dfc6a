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

// How the ranks share the reduction: gemm_ar has two ways, the other ops one.
enum class Form { kChunks, kOneShot, kTwoShot };

// What a configuration's name says.
struct Knobs {
  Form form;
  int32_t tile_m, tile_n;
  int32_t parts;  // at most: pieces of a chunk or of y; two-shot: sections
  bool same_order = false;

  std::string name() const {
    std::string const prefix = form == Form::kChunks ? "" : form == Form::kOneShot ? "one-shot/" : "two-shot/";
    return prefix + "t" + std::to_string(tile_m) + "x" + std::to_string(tile_n) +
           (form == Form::kTwoShot ? "/s" : "/p") + std::to_string(parts) + (same_order ? kSameOrder : "");
  }
};

// Reads what Knobs::name writes, for this op. False if it is no configuration.
bool parse_knobs(Op op, std::string const& text, Knobs* knobs) {
  auto const reads = [&](Form form, char const* format, int most) {
    Knobs k{form, 0, 0, 0};
    if (std::sscanf(text.c_str(), format, &k.tile_m, &k.tile_n, &k.parts) != 3) return false;
    k.same_order = form == Form::kChunks && text.find(kSameOrder) != std::string::npos;
    auto const is_extent = [](int32_t extent) {
      return std::find(std::begin(kTileExtents), std::end(kTileExtents), extent) != std::end(kTileExtents);
    };
    *knobs = k;
    return is_extent(k.tile_m) && is_extent(k.tile_n) && k.parts >= 1 && k.parts <= most && text == k.name();
  };
  if (op != Op::kGemmAr) return reads(Form::kChunks, "t%dx%d/p%d", kMaxPieces);
  return reads(Form::kOneShot, "one-shot/t%dx%d/p%d", kMaxPieces) ||
         reads(Form::kTwoShot, "two-shot/t%dx%d/s%d", kMaxSections);
}

// Large enough that ATen's GEMM runs well, small enough that a chunk has several tiles to overlap.
int32_t tile_extent(int64_t extent) {
  if (extent >= 4096) return 512;
  if (extent >= 1024) return 256;
  return extent >= 256 ? 128 : 64;
}

// For few rows what counts is how often the ranks wait for each other: once in one-shot, twice in two-shot. Two
// sections where each rank has two tiles of rows to fill them.
Knobs default_knobs(Problem const& p) {
  constexpr int64_t kFewRows = 64;
  if (p.op != Op::kGemmAr) return {Form::kChunks, tile_extent(p.rows), tile_extent(p.n), /*parts=*/4};
  if (p.rows <= kFewRows) return {Form::kOneShot, tile_extent(p.rows), tile_extent(p.n), /*parts=*/4};
  int64_t const rows = ceil_div(p.rows, p.world);
  int32_t const tile_m = tile_extent(rows);
  return {Form::kTwoShot, tile_m, tile_extent(p.n), /*parts=*/rows >= 2 * tile_m ? 2 : 1};
}

Knobs knobs_of(Problem const& p) {
  Knobs knobs = default_knobs(p);
  if (!p.config.empty()) {
    TORCH_CHECK_VALUE(parse_knobs(p.op, p.config, &knobs), "'", p.config, "' is no configuration.");
  }
  return knobs;
}

// Along N first: the tiles of the rows that arrive first come first.
TileOrder order_of(int64_t rows, int64_t cols, TileShape tile) {
  return make_tile_order(rows, cols, tile, /*swizzle=*/1, /*along_n=*/true);
}

constexpr TileShape tile_shape(int32_t tile_m, int32_t tile_n) {
  return {tile_m, tile_n, /*cluster_m=*/1, /*cluster_n=*/1};
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
  c.tile = tile_shape(knobs.tile_m, knobs.tile_n);
  c.order = order_of(p.rows, p.n, c.tile);
  bool const by_rows = p.op == Op::kAgGemm;
  c.order_rank = knobs.same_order ? 0 : p.rank;
  c.pieces = make_pieces(by_rows ? p.rows : c.order.num_tiles(), knobs.parts, by_rows ? c.tile.tile_m : 1);
  c.parts = interleaved_parts(c.pieces, knobs.same_order);
  return c;
}

ArConfig make_ar_config(Problem const& p) {
  Knobs const knobs = knobs_of(p);
  ArConfig c{};
  c.one_shot = knobs.form == Form::kOneShot;
  c.tile = tile_shape(knobs.tile_m, knobs.tile_n);
  if (c.one_shot) {
    c.order = order_of(p.rows, p.n, c.tile);
    c.pieces = make_pieces(c.order.num_tiles(), knobs.parts, 1);
  } else {
    c.schedule = make_ar_schedule(p.rows, p.world, knobs.parts, c.tile.tile_m);
    c.order = order_of(c.schedule.chunk_rows, p.n, c.tile);
  }
  return c;
}

void set_num_threads(int num_threads) { requested_threads = num_threads; }

int num_threads(int world) {
  int const requested = requested_threads;
  return requested > 0 ? requested : std::max(1, std::min(4, available_cores() / world));
}

std::string why_not_fused(Problem const& p) {
  Knobs knobs = default_knobs(p);
  if (!p.config.empty() && !parse_knobs(p.op, p.config, &knobs)) {
    return "there is no configuration '" + p.config + "' (one is '" + default_knobs(p).name() + "')";
  }
  if (knobs.form == Form::kOneShot && p.rows > kOneShotMostRows) {
    return "one-shot takes at most " + std::to_string(kOneShotMostRows) + " rows, and M is " + std::to_string(p.rows);
  }
  int64_t const limit = std::numeric_limits<int32_t>::max();
  if (p.rows >= limit || p.n >= limit || ceil_div(p.rows, 64) * ceil_div(p.n, 64) >= limit / p.world) {
    return std::to_string(p.world) + " chunks of " + std::to_string(p.rows) + " x " + std::to_string(p.n) +
           " have 2^31 rows, columns or tiles, or more";
  }
  return {};
}

std::string config_name(Problem const& p) { return knobs_of(p).name(); }

std::vector<std::string> candidates(Problem const& p) {
  std::vector<std::string> names{knobs_of(p).name()};
  auto const add = [&names](std::initializer_list<char const*> more) {
    for (char const* name : more) {
      if (names.front() != name) names.emplace_back(name);
    }
  };
  if (p.op != Op::kGemmAr) {
    add({"t64x64/p8", "t128x128/p4", "t256x256/p2", "t256x256/p1"});
    return names;
  }
  if (p.rows <= kOneShotMostRows) add({"one-shot/t64x64/p4", "one-shot/t128x128/p1"});
  add({"two-shot/t64x64/s4", "two-shot/t64x64/s1", "two-shot/t128x128/s2", "two-shot/t256x256/s2"});
  return names;
}

std::string config_names() {
  std::string names;
  for (int32_t const extent : kTileExtents) names += (names.empty() ? "t" : " t") + std::to_string(extent);
  return names;
}

WorkspaceNeeds workspace_needs(Problem const& p) {
  int64_t const size = element_size(p.dtype);
  if (p.op == Op::kAgGemm) return {ag_region_bytes(p.world, p.rows, p.k, size), 0};
  int64_t const tile_bytes = rs_tile_bytes(kLargestExtent, kLargestExtent, size);
  auto const tiles_at_most = [&](int64_t rows) {
    return int64_t{order_of(rows, p.n, tile_shape(kLargestExtent, kLargestExtent)).num_tiles()};
  };
  if (p.op == Op::kGemmRs) return {rs_region_bytes(p.world, tiles_at_most(p.rows), tile_bytes), 0};
  int64_t const rows = ar_rows_per_owner_at_most(p.rows, p.world, kLargestExtent);
  int64_t const two_shot = ar_two_shot_bytes(p.world, tiles_at_most(rows), tile_bytes, p.rows, p.n, size);
  int64_t const few = tiles_at_most(std::min(p.rows, kOneShotMostRows));
  int64_t const one_shot = ar_one_shot_bytes(p.world, few, tile_bytes);
  return {std::max({two_shot, one_shot, decomposed_needs(p).region_bytes}), 0};
}

WorkspaceNeeds decomposed_needs(Problem const& p) {
  int64_t const size = element_size(p.dtype);
  if (p.op == Op::kAgGemm) return {ag_region_bytes(p.world, p.rows, p.k, size), 0};
  if (p.op == Op::kGemmRs) return {rs_chunks_bytes(p), 0};
  int64_t const one_shot_rows = p.world * p.rows, two_shot_rows = round_up(p.rows, int64_t{p.world}) + p.rows;
  return {std::max(one_shot_rows, two_shot_rows) * p.n * size, 0};
}

}  // namespace flux::cpu
