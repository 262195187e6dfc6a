// One call of gemm_ar for many rows, on all ranks: it comes to an end, and each count and each signal is used once.
//
//   GEMM          G clusters; cluster c computes items c, c + G, c + 2G ... of ar_item. An item of the own chunk first
//                 waits for its piece from each peer. Each item counts its tiles.
//   side streams  push by push (csrc/cuda/gemm_ar.cpp), two lanes in turn: waits for the tiles of a piece, resets their
//                 count, and raises the signal of the piece. Ahead of results the lanes meet. Whoever executes them may
//                 have but one queue: here they are one after the other, as enqueued, or lane by lane between two
//                 meetings
//   collecting    after the GEMM, once the lanes have come to their last push: waits for all results of all peers
//
// A wait that is over stays over until the waiting side goes on. So whether the call ends does not depend on which side
// moves first, and one order of moves stands for all.

#include <algorithm>
#include <string>
#include <vector>

#include "schedule/ar_results.hpp"
#include "schedule/ar_schedule.hpp"
#include "schedule/chunk_order.hpp"
#include "schedule/tile_order.hpp"
#include "schedule/workspace_layout.hpp"
#include "schedule_test.hpp"

namespace flux::test {
namespace {

// Of a piece: a partial, to the owner of its chunk, or the results of the own chunk, to all peers.
struct Push {
  int owner, number;
  int lane = 0;
  bool is_met = false;  // the lanes meet before it
};

enum class Results { kAsInGemmAr, kBehindTheirPartials, kBeforeTheirPartials };
enum class Lanes { kOneQueue, kFirstFirst, kSecondFirst, kByRank, kSecondFirstUnmet, kHeldSignals, kHeldSignalsUnmet };
bool in_order(Lanes lanes) { return lanes == Lanes::kOneQueue || lanes >= Lanes::kHeldSignals; }
bool meets(Lanes lanes) { return lanes != Lanes::kSecondFirstUnmet && lanes != Lanes::kHeldSignalsUnmet; }

// The pushes from `begin` on, lane by lane.
void part_lanes(std::vector<Push>& pushes, size_t begin, Lanes lanes, int rank) {
  for (size_t i = begin; i < pushes.size(); ++i) pushes[i].lane = i % 2;
  if (in_order(lanes)) return;
  std::vector<Push> of_lane[2];
  for (size_t i = begin; i < pushes.size(); ++i) of_lane[i % 2].push_back(pushes[i]);
  bool const swapped = lanes == Lanes::kByRank ? rank % 2 == 1 : lanes != Lanes::kFirstFirst;
  pushes.resize(begin);
  for (int i = 0; i < 2; ++i) {
    std::vector<Push> const& lane = of_lane[swapped ? 1 - i : i];
    pushes.insert(pushes.end(), lane.begin(), lane.end());
  }
}

// Of the side streams of r.rank.
std::vector<Push> pushes_of(ArResults const& r, Results results, Lanes lanes) {
  std::vector<Push> pushes;
  size_t met = 0;  // how many there were when the lanes met
  int const count = r.pieces.count();
  int next = 0;
  auto const add_results = [&](int end) {
    for (; next < end; ++next) pushes.push_back({r.rank, next});
  };
  for (int section = 0; section < r.sections; ++section) {
    if (results == Results::kBeforeTheirPartials) add_results((section + 1) * count);
    for (int i = 0; i < r.world * count; ++i) {
      auto const [step, piece] = rs_piece(i, r.world, r.pieces, r.pieces);
      int const owner = rs_chunk(r.rank, r.world, step);
      if (owner != r.rank) pushes.push_back({owner, section * count + piece});
    }
    int const end = results == Results::kAsInGemmAr ? r.sent_after_partials_of(section) : (section + 1) * count;
    bool const meet = end > next && meets(lanes);
    if (meet) {
      part_lanes(pushes, met, lanes, r.rank);
      met = pushes.size();
    }
    add_results(end);
    if (meet) pushes[met].is_met = true;
  }
  part_lanes(pushes, met, lanes, r.rank);
  return pushes;
}

enum class Signal { kNotRaised, kRaised, kSeen };

struct Rank {
  ArResults results;
  std::vector<int32_t> next;  // item of each cluster
  int32_t items_left;
  std::vector<Push> pushes;
  size_t pushed = 0;
  bool holds_signals = false;
  std::vector<Push> held;  // partials whose signals go out with what their lane does next
  bool has_ended = false;
  int32_t tiles_done[kMaxWorld][kMaxPieces] = {};  // [owner][number of the piece]
  Signal arrived[kMaxWorld][kMaxPieces] = {};      // [source][signal]
};

class Call {
 public:
  Call(ArResults const& results, int num_clusters, Results order, Lanes lanes = Lanes::kOneQueue) {
    for (int rank = 0; rank < results.world; ++rank) {
      Rank r;
      r.results = results;
      r.results.rank = rank;
      r.items_left = results.order.num_clusters() * results.world * results.sections;
      for (int c = 0; c < num_clusters; ++c) r.next.push_back(c);
      r.pushes = pushes_of(r.results, order, lanes);
      r.holds_signals = lanes >= Lanes::kHeldSignals;
      ranks_.push_back(r);
    }
  }

  // Moves all ranks until nothing moves any more; whether all have come to their end.
  bool ends() {
    for (int moves = 1; moves > 0;) {
      moves = 0;
      for (Rank& r : ranks_) moves += compute(r) + push(r) + collect(r);
    }
    return std::all_of(ranks_.begin(), ranks_.end(), [](Rank const& r) { return r.has_ended; });
  }

  void check_that_all_is_used_once() const {
    for (Rank const& r : ranks_) {
      for (int other = 0; other < kMaxWorld; ++other) {
        for (int i = 0; i < kMaxPieces; ++i) {
          CHECK(r.tiles_done[other][i] == 0, "rank %d: %d tiles of %d.%d", r.results.rank, r.tiles_done[other][i],
                other, i);
          bool const of_peer = other < r.results.world && other != r.results.rank;
          Signal const expected = of_peer && i < 2 * r.results.num_pieces() ? Signal::kSeen : Signal::kNotRaised;
          CHECK(r.arrived[other][i] == expected, "rank %d: signal %d of %d", r.results.rank, i, other);
        }
      }
    }
  }

 private:
  // Each returns how many moves it has made.
  int compute(Rank& r) {
    int moves = 0;
    int32_t const items = r.results.order.num_clusters() * r.results.world * r.results.sections;
    for (int32_t& item : r.next) {
      for (; item < items && compute_item(r, item); item += int32_t(r.next.size())) ++moves;
    }
    r.items_left -= moves;
    return moves;
  }

  int push(Rank& r) {
    size_t const before = r.pushed;
    for (; r.pushed < r.pushes.size(); ++r.pushed) {
      Push const& next = r.pushes[r.pushed];
      send_held(r, [&next](Push const& one) { return next.is_met || one.lane == next.lane; });
      if (!send(r, next)) break;
    }
    return int(r.pushed - before);
  }

  int collect(Rank& r) {
    if (r.has_ended || r.items_left > 0 || r.pushed < r.pushes.size()) return 0;
    for (int number = 0; number < r.results.num_pieces(); ++number) {
      if (!have_arrived(r, r.results.signal(number))) return 0;
    }
    r.has_ended = true;
    return 1;
  }

  bool compute_item(Rank& r, int32_t index) {
    ArResults const& a = r.results;
    TileOrder const& order = a.order;
    Pieces const& pieces = a.pieces;
    Pieces const parts{pieces.items / order.cluster_size(), pieces.per_piece / order.cluster_size()};
    auto const [chunk, item] = ar_item(index, a.rank, a.world, a.sections, parts);
    Tile const c = order.cluster_at(item);
    int const piece = pieces.piece_of(order.position_of({c.m * order.cluster_m, c.n * order.cluster_n}));
    int const number = chunk.section * pieces.count() + piece;
    if (chunk.owner == a.rank && !have_arrived(r, number)) return false;
    for (int i = 0; i < order.cluster_size(); ++i) {
      Tile const tile{c.m * order.cluster_m + i % order.cluster_m, c.n * order.cluster_n + i / order.cluster_m};
      CHECK(pieces.piece_of(order.position_of(tile)) == piece, "a cluster of piece %d has a tile of another", piece);
      CHECK(++r.tiles_done[chunk.owner][number] <= pieces.size(piece), "too many tiles of piece %d", number);
    }
    return true;
  }

  bool send(Rank& r, Push push) {  // if all tiles of the piece are counted
    ArResults const& a = r.results;
    int32_t& done = r.tiles_done[push.owner][push.number];
    if (done < a.pieces.size(push.number % a.pieces.count())) return false;
    done = 0;
    if (r.holds_signals && push.owner != a.rank) {
      r.held.push_back(push);
    } else {
      signal(r, push);
    }
    return true;
  }

  template <class Is>
  void send_held(Rank& r, Is const& is) {
    auto const kept = std::stable_partition(r.held.begin(), r.held.end(), [&](Push const& one) { return !is(one); });
    for (auto one = kept; one != r.held.end(); ++one) signal(r, *one);
    r.held.erase(kept, r.held.end());
  }

  void signal(Rank& r, Push push) {
    ArResults const& a = r.results;
    bool const is_result = push.owner == a.rank;
    int const signal = is_result ? a.signal(push.number) : push.number;
    CHECK(0 <= signal && signal < kMaxPieces, "signal %d", signal);
    for (Rank& to : ranks_) {
      if (is_result ? &to == &r : to.results.rank != push.owner) continue;
      Signal& word = to.arrived[a.rank][signal];
      CHECK(word == Signal::kNotRaised, "signal %d of rank %d to %d comes twice", signal, a.rank, to.results.rank);
      word = Signal::kRaised;
    }
  }

  static bool have_arrived(Rank& r, int signal) {  // from all peers
    for (int source = 0; source < r.results.world; ++source) {
      if (source == r.results.rank) continue;
      if (r.arrived[source][signal] == Signal::kNotRaised) return false;
      r.arrived[source][signal] = Signal::kSeen;
    }
    return true;
  }

  std::vector<Rank> ranks_;
};

template <class Visit>  // visit(results, num_clusters)
void for_calls(Visit visit) {
  struct Chunk {
    int64_t rows, columns;
    TileShape tile;
  };
  for (Chunk const& chunk : {Chunk{208, 128, {8, 8, 2, 1}}, Chunk{53, 50, {8, 8, 2, 1}}, Chunk{53, 50, {16, 8, 1, 2}},
                             Chunk{7, 40, {8, 16, 2, 1}}, Chunk{70, 9, {8, 8, 1, 2}}}) {
    for (int const swizzle : {1, 2, 4}) {
      for (bool const along_n : {false, true}) {
        TileOrder const order = make_tile_order(chunk.rows, chunk.columns, chunk.tile, swizzle, along_n);
        for (int sections = 1; sections <= 4; ++sections) {
          for (int wanted = 1; 2 * sections * wanted <= kMaxPieces; ++wanted) {
            Pieces const pieces = make_pieces(order.num_tiles(), wanted, order.tiles_of_block());
            for (int const world : {2, 3, 4, 8}) {
              ArResults const results{0, world, sections, 0, 0, order, pieces, 0, 0};  // no bytes are sent
              for (int const num_clusters : {1, 7, 66}) visit(results, num_clusters);
            }
          }
        }
      }
    }
  }
}

std::string text_of(ArResults const& r, int num_clusters) {
  return std::to_string(r.world) + " ranks, " + std::to_string(r.sections) + " sections of " +
         std::to_string(r.pieces.count()) + " pieces, " + std::to_string(r.pieces.items) + " tiles, swizzle " +
         std::to_string(r.order.swizzle) + (r.order.along_n ? " along N, " : " along M, ") +
         std::to_string(num_clusters) + " clusters";
}

void check_that_calls_end(Results order, Lanes lanes = Lanes::kOneQueue) {
  for_calls([order, lanes](ArResults const& results, int num_clusters) {
    Call call(results, num_clusters, order, lanes);
    CHECK(call.ends(), "%s", text_of(results, num_clusters).c_str());
    call.check_that_all_is_used_once();
  });
}

void ar_calls_end_and_use_all_once() { check_that_calls_end(Results::kAsInGemmAr); }

void ar_results_may_go_before_the_next_partials() { check_that_calls_end(Results::kBehindTheirPartials); }

void ar_lanes_may_share_a_queue() {
  for (Lanes const lanes : {Lanes::kFirstFirst, Lanes::kSecondFirst, Lanes::kByRank, Lanes::kHeldSignals}) {
    check_that_calls_end(Results::kAsInGemmAr, lanes);
  }
}

void ar_lanes_that_do_not_meet_are_found() {
  for (Lanes const lanes : {Lanes::kSecondFirstUnmet, Lanes::kHeldSignalsUnmet}) {
    bool found = false;
    for_calls([lanes, &found](ArResults const& results, int num_clusters) {
      Call call(results, num_clusters, Results::kAsInGemmAr, lanes);
      found = !call.ends() || found;
    });
    CHECK(found, "all calls end");
  }
}

void ar_results_before_their_partials_are_found() {
  for_calls([](ArResults const& results, int num_clusters) {
    CHECK(!Call(results, num_clusters, Results::kBeforeTheirPartials).ends(), "%s",
          text_of(results, num_clusters).c_str());
  });
}

}  // namespace

std::vector<Test> ar_order_tests() {
  return {
      TEST(ar_calls_end_and_use_all_once),
      TEST(ar_results_may_go_before_the_next_partials),
      TEST(ar_lanes_may_share_a_queue),
      TEST(ar_lanes_that_do_not_meet_are_found),
      TEST(ar_results_before_their_partials_are_found),
  };
}

}  // namespace flux::test
