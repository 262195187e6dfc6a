// Tests of the workspace layout: control words, regions, shards and tiles. Part of schedule_test.

#include <algorithm>
#include <cstddef>
#include <map>
#include <random>
#include <set>
#include <type_traits>
#include <vector>

#include "ops/problem.hpp"
#include "schedule/tile_order.hpp"
#include "schedule/workspace_layout.hpp"
#include "schedule_test.hpp"

namespace flux::test {
namespace {

// ---- control words

void signal_words_are_distinct() {
  static_assert(std::is_trivially_copyable<ControlWords>::value && std::is_standard_layout<ControlWords>::value,
                "control words are mapped into every process and written by copy engines");
  ControlWords words;
  std::map<size_t, size_t> spans;  // offset -> size
  auto const add = [&](void const* word, size_t size) {
    size_t const offset = static_cast<size_t>(static_cast<char const*>(word) - reinterpret_cast<char const*>(&words));
    CHECK(offset % size == 0, "a word of %zu bytes at offset %zu", size, offset);
    CHECK(spans.emplace(offset, size).second, "two words at offset %zu", offset);
  };
  for (auto const& set : words.signals.arrived) {
    for (auto const& source : set) {
      for (auto const& word : source) add(&word, sizeof word);
    }
  }
  for (auto const& set : words.signals.finished) {
    for (auto const& word : set) add(&word, sizeof word);
  }
  for (auto const& word : words.signals.begun) add(&word, sizeof word);
  for (auto const& parity : words.signals.calls) {
    for (auto const& word : parity) {
      add(&word.epoch, sizeof word.epoch);
      add(&word.digest, sizeof word.digest);
    }
  }
  for (auto const& destination : words.local.tiles_done) {
    for (auto const& word : destination) add(&word, sizeof word);
  }
  add(&words.local.fault_claim, sizeof words.local.fault_claim);
  for (auto const* word : {&words.local.epoch, &words.local.before, &words.local.signal}) add(word, sizeof *word);
  for (auto const& word : words.local.last_use) add(&word, sizeof word);
  for (auto const* word : {&words.local.may_push, &words.local.blocks_ended}) add(word, sizeof *word);
  size_t end = 0;
  for (auto const& [offset, size] : spans) {
    CHECK(offset >= end, "words overlap at offset %zu", offset);
    end = offset + size;
  }
  CHECK(static_cast<int64_t>(end) <= WorkspaceLayout::exchange_offset(), "words end at %zu", end);
  CHECK(spans.size() == size_t{kNumSignalSets + 1} * kMaxWorld * kMaxPieces + (kNumSignalSets + 5) * kMaxWorld + 8,
        "%zu words", spans.size());
  CHECK(static_cast<int>(SignalSet::kReplayOdd) == kNumSignalSets - 1, "%d sets", kNumSignalSets);
}

void signals_hold_epoch_and_digest() {
  for (Epoch e : {Epoch{1}, Epoch{2}, Epoch{1} << 43}) {
    for (uint64_t digest : {uint64_t{0}, uint64_t{1}, ~uint64_t{0}}) {
      CHECK(signal_epoch(make_signal(e, digest)) == e, "epoch %llu", static_cast<unsigned long long>(e));
      CHECK(make_signal(e, digest) >= make_signal(e, 0), "a digest must not make a signal look older");
      CHECK(make_signal(e, digest) < make_signal(e + 1, 0), "a digest must not make a signal look newer");
    }
    CHECK(make_signal(e, 5) != make_signal(e, 6), "digests are told apart");
  }
}

void parity_alternates() {
  for (Epoch e : {Epoch{1}, Epoch{2}, Epoch{1} << 40, ~Epoch{0} - 1}) {
    CHECK(parity_of(e) >= 0 && parity_of(e) <= 1 && parity_of(e) != parity_of(e + 1), "epoch %llu",
          static_cast<unsigned long long>(e));
  }
  SignalSet const sets[] = {signal_set_of(0, false), signal_set_of(1, false), signal_set_of(0, true),
                            signal_set_of(1, true)};
  for (int i = 0; i < kNumSignalSets; ++i) {
    for (int j = 0; j < i; ++j) CHECK(sets[i] != sets[j], "sets %d and %d are one", i, j);
  }
}

// ---- workspace

struct Shape {
  int world;
  int64_t rows, n, k, element_size;
  TileShape tiles;
};

// Small shapes and shapes with M * N and M * K far above 2^31.
std::vector<Shape> shapes() {
  std::vector<Shape> all;
  std::mt19937_64 random(1);
  auto const pick = [&](int64_t low, int64_t high) {
    return low + static_cast<int64_t>(random() % static_cast<uint64_t>(high - low + 1));
  };
  TileShape const tiles[] = {{128, 128, 2, 1}, {128, 256, 2, 1}, {256, 128, 1, 1}, {64, 64, 1, 2}};
  for (int world = 1; world <= 8; ++world) {
    for (int i = 0; i < 40; ++i) {
      int64_t const top = i % 2 ? 500 : 150000;
      all.push_back({world, pick(1, top), pick(1, top), pick(1, top), int64_t{1} << pick(1, 3), tiles[i % 4]});
    }
    all.push_back({world, 262144, 131072, 65536, 8, tiles[0]});
    all.push_back({world, 65537, 65537, 65537, 2, tiles[1]});
  }
  return all;
}

struct Span {
  Wide begin, end;
};

// Inside [0, total), and no two overlap.
void check_disjoint(std::vector<Span> spans, Wide total, char const* what) {
  std::sort(spans.begin(), spans.end(), [](Span const& a, Span const& b) { return a.begin < b.begin; });
  Wide end = 0;
  for (Span const& span : spans) {
    CHECK(span.begin >= end && span.end >= span.begin, "%s: [%lld, %lld) after %lld", what,
          static_cast<long long>(span.begin), static_cast<long long>(span.end), static_cast<long long>(end));
    end = span.end;
  }
  CHECK(end <= total, "%s: ends at %lld of %lld", what, static_cast<long long>(end), static_cast<long long>(total));
}

void workspace_parts_are_disjoint_and_aligned() {
  for (Shape const& s : shapes()) {
    int64_t const tile_bytes = rs_tile_bytes(s.tiles.tile_m, s.tiles.tile_n, s.element_size);
    int64_t const num_tiles = make_tile_order(s.rows, s.n, s.tiles, 1, true).num_tiles();
    int64_t const ag = ag_region_bytes(s.world, s.rows, s.k, s.element_size);
    int64_t const rs = rs_region_bytes(s.world, num_tiles, tile_bytes);
    for (int64_t region : {ag, rs, std::max(ag, rs), int64_t{0}, int64_t{1}}) {
      WorkspaceLayout const layout = make_workspace_layout({region, rs});
      CHECK(layout.region_bytes >= region && layout.region_bytes - region < kRegionAlign, "world %d", s.world);
      for (int64_t offset :
           {layout.slots_offset(), layout.gather_offset(), layout.region_offset(0), layout.region_offset(1)}) {
        CHECK(offset % kRegionAlign == 0, "offset %lld", static_cast<long long>(offset));
      }
      CHECK(layout.covers({region, rs}) && layout.exchange_bytes >= kExchangeBytes, "world %d", s.world);
      check_disjoint({{0, sizeof(ControlWords)},
                      {layout.exchange_offset(), Wide{layout.exchange_offset()} + kExchangeHeadBytes},
                      {layout.slots_offset(), Wide{layout.slots_offset()} + 2 * Wide{layout.exchange_bytes}},
                      {layout.gather_offset(), Wide{layout.gather_offset()} + 2 * kGatherBytes},
                      {layout.region_offset(0), Wide{layout.region_offset(0)} + region},
                      {layout.region_offset(1), Wide{layout.region_offset(1)} + region}},
                     layout.total_bytes(), "parts of the workspace");
    }
  }
}

// As each rank computes them, for the memory of every rank: one slot for each peer in each region, all in the region.
void slots_of_peers_are_disjoint() {
  std::byte memory[1];  // addresses are computed, not used
  for (int world = 2; world <= kMaxWorld; ++world) {
    for (int64_t bytes : {int64_t{1}, kRegionAlign, kRegionAlign + 1, int64_t{1} << 33}) {
      int64_t const region_bytes = region_of_slots(world, bytes);
      CHECK(region_bytes >= (world - 1) * bytes && region_bytes < (world - 1) * (bytes + kRegionAlign), "world %d",
            world);
      for (int64_t const more : {int64_t{0}, kRegionAlign, (world - 1) * int64_t{4096}, int64_t{3} << 20}) {
        WorkspaceLayout const layout = make_workspace_layout({region_bytes + more, 0});
        for (int rank = 0; rank < world; ++rank) {
          WorkspaceView view{"", rank, world, layout, {}};
          for (int r = 0; r < world; ++r) view.base[r] = memory;
          CHECK(view.slot_bytes() >= bytes && view.slot_bytes() % kRegionAlign == 0, "world %d", world);
          std::vector<Span> spans;
          for (int parity = 0; parity < 2; ++parity) {
            for (int peer = 0; peer < world; ++peer) {
              if (peer == rank) continue;
              Wide const begin = view.slot(rank, peer, parity) - memory;
              CHECK(begin >= layout.region_offset(parity) &&
                        begin + view.slot_bytes() <= layout.region_offset(parity) + layout.region_bytes,
                    "slot of %d at %d of %d lies outside of its region", peer, rank, world);
              CHECK(view.to_send(peer, 1 - parity) == view.slot(rank, peer, parity), "what goes to %d", peer);
              spans.push_back({begin, begin + view.slot_bytes()});
            }
          }
          check_disjoint(spans, layout.total_bytes(), "slots");
        }
      }
    }
  }
}

// A batched GEMM takes the slots of the peers on either side of a rank by one stride.
void neighbours_have_neighbouring_slots() {
  for (int world = 3; world <= kMaxWorld; ++world) {
    for (int rank = 0; rank < world; ++rank) {
      for (int peer = 1; peer < world; ++peer) {
        if (peer == rank || peer - 1 == rank) continue;
        CHECK(peer_slot(rank, world, peer) == peer_slot(rank, world, peer - 1) + 1, "rank %d of %d, peer %d", rank,
              world, peer);
      }
    }
  }
}

void ag_shards_are_disjoint_and_exact() {
  for (Shape const& s : shapes()) {
    Wide const shard = Wide{s.rows} * s.k * s.element_size;
    CHECK(ag_shard_bytes(s.rows, s.k, s.element_size) == shard, "%lld rows", static_cast<long long>(s.rows));
    CHECK(ag_region_bytes(s.world, s.rows, s.k, s.element_size) == shard * s.world, "world %d", s.world);
    std::vector<Span> spans;
    for (int source = 0; source < s.world; ++source) {
      int64_t const offset = ag_shard_offset(source, s.rows, s.k, s.element_size);
      CHECK(offset == shard * source, "shard of %d at %lld", source, static_cast<long long>(offset));
      spans.push_back({offset, offset + shard});
    }
    check_disjoint(spans, ag_region_bytes(s.world, s.rows, s.k, s.element_size), "shards");
  }
}

void rs_tiles_are_disjoint_and_exact() {
  for (Shape const& s : shapes()) {
    Wide const tile = Wide{s.tiles.tile_m} * s.tiles.tile_n * s.element_size;
    int64_t const tile_bytes = rs_tile_bytes(s.tiles.tile_m, s.tiles.tile_n, s.element_size);
    CHECK(tile_bytes == tile, "tile of %lld bytes", static_cast<long long>(tile_bytes));
    int64_t const step_m = int64_t{s.tiles.tile_m} * s.tiles.cluster_m,
                  step_n = int64_t{s.tiles.tile_n} * s.tiles.cluster_n;
    TileOrder const order = make_tile_order(s.rows, s.n, s.tiles, 4, false);
    Wide const tiles =
        Wide{(s.rows + step_m - 1) / step_m} * ((s.n + step_n - 1) / step_n) * s.tiles.cluster_m * s.tiles.cluster_n;
    CHECK(order.num_tiles() == tiles, "%d tiles", order.num_tiles());
    CHECK(rs_slot_bytes(order.num_tiles(), tile_bytes) == tiles * tile, "slot of %d tiles", order.num_tiles());
    int64_t const region = rs_region_bytes(s.world, order.num_tiles(), tile_bytes);
    CHECK(region == tiles * tile * (s.world - 1), "world %d", s.world);
    std::vector<Span> spans;
    int const stride = std::max(1, order.num_tiles() / 97);
    for (int slot = 0; slot < s.world - 1; ++slot) {
      for (int i = 0; i < order.num_tiles() + stride - 1; i += stride) {
        int const position = std::min(i, order.num_tiles() - 1);  // the last tile always, and all of a small grid
        int64_t const offset = rs_tile_offset(slot, rs_slot_bytes(order.num_tiles(), tile_bytes), position, tile_bytes);
        CHECK(offset == (slot * tiles + position) * tile, "slot %d, position %d: %lld", slot, position,
              static_cast<long long>(offset));
        spans.push_back({offset, offset + tile});
      }
    }
    check_disjoint(spans, region, "tiles");
  }
}

}  // namespace

std::vector<Test> workspace_tests() {
  return {
      TEST(signal_words_are_distinct),        TEST(parity_alternates),
      TEST(signals_hold_epoch_and_digest),    TEST(workspace_parts_are_disjoint_and_aligned),
      TEST(ag_shards_are_disjoint_and_exact), TEST(rs_tiles_are_disjoint_and_exact),
      TEST(slots_of_peers_are_disjoint),      TEST(neighbours_have_neighbouring_slots),
  };
}

}  // namespace flux::test
