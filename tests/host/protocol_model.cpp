// Builds the machine of a scenario: the rules of protocol_model.hpp, step by step.

#include "protocol_model.hpp"

#include <algorithm>
#include <utility>

#include "schedule/chunk_order.hpp"
#include "schedule/tile_order.hpp"
#include "schedule/workspace_layout.hpp"

namespace flux::model {
namespace {

int constexpr kMaxRanks = 4;
int constexpr kMaxModelPieces = 4;

class Builder {
 public:
  explicit Builder(Scenario const& scenario) : s_(scenario), world_(scenario.world) {
    for (Call const& call : s_.calls) max_pieces_ = std::max(max_pieces_, call.pieces);
    for (Call const& call : s_.calls) max_tiles_ = std::max(max_tiles_, call.tiles);
    if (world_ < 2 || world_ > kMaxRanks || max_pieces_ > kMaxModelPieces || world_ * max_pieces_ > 8 ||
        (world_ - 1) * max_tiles_ > 8) {
      throw std::length_error("the scenario is too large for the model");
    }
    for (int r = 0; r < world_; ++r) {
      for (char const* name : {" gemm", " push"}) {
        machine_.actors.push_back({rank(r) + name, {}});
        machine_.add("steps of" + rank(r) + name);
      }
    }
    add_memory();
  }

  Machine build() {
    int tag = 0, eager = 0, replayed = 0;
    for (Call const& call : s_.calls) {
      if (call.pieces == 0 && s_.change != Change::kEmptyCallCounts) continue;
      ++tag;
      int const epoch = call.replayed ? ++replayed : ++eager;
      // Change kWrongReplayRegion and an eager call after a replayed one are mistakes that the explorer has to find.
      int region = call.replayed ? (eager + (s_.change == Change::kWrongReplayRegion ? 0 : 1)) & 1
                                 : static_cast<int>(parity_of(epoch));
      if (s_.change == Change::kOneRegion) region = 0;
      for (int r = 0; r < world_; ++r) add_call(call, r, tag, epoch, region);
    }
    return machine_;
  }

 private:
  struct Context {
    Call call;
    int rank, tag, epoch, region;
    SignalSet set;
    Pieces pieces;
    std::string text;  // how each step of the call begins
  };

  static std::string rank(int r) { return "rank " + std::to_string(r); }
  Var pc_gemm(int r) const { return static_cast<Var>(2 * r); }
  Var pc_push(int r) const { return static_cast<Var>(2 * r + 1); }
  std::vector<Step>& gemm(int r) { return machine_.actors[2 * r].steps; }
  std::vector<Step>& push(int r) { return machine_.actors[2 * r + 1].steps; }
  bool residency() const { return s_.change == Change::kWaitKernelNeedsSm || s_.change == Change::kWaitBeforeGemm; }

  SignalSet set_of(Call const& call, int epoch) const {
    if (call.replayed) return SignalSet::kReplay;
    return s_.change == Change::kOneSignalSet ? SignalSet::kEven : signal_set_of(static_cast<Epoch>(epoch));
  }

  Buffer add_buffer(std::string const& name) { return {machine_.add(name), machine_.add("cells of " + name)}; }

  void add_memory() {
    bool any_ag = false, any_rs = false, any_replayed = false, used[kNumSignalSets] = {};
    int eager = 0;
    for (Call const& call : s_.calls) {
      any_ag |= call.op == Op::kAgGemm;
      any_rs |= call.op == Op::kGemmRs;
      any_replayed |= call.replayed;
      if (call.pieces == 0 && s_.change != Change::kEmptyCallCounts) continue;
      used[static_cast<int>(set_of(call, call.replayed ? 0 : ++eager))] = true;
    }
    char const* const sets[kNumSignalSets] = {"even", "odd", "replay"};
    for (int r = 0; r < world_; ++r) {
      std::string const of = " of " + rank(r);
      for (int p = 0; p < 2; ++p) regions_[r][p] = add_buffer("call in region " + std::to_string(p) + of);
      if (any_ag) x_[r] = add_buffer("call in x" + of);
      if (any_ag) machine_.initial[x_[r].call] = machine_.initial[x_[r].cells] = 1;
      if (any_rs) send_[r] = add_buffer("call in the send buffer" + of);
      if (any_replayed) epoch_[r] = machine_.add("epoch word" + of);
      if (residency()) resident_[r] = machine_.add("GEMM on the SMs" + of);
      for (int q = 0; q < world_; ++q) {
        if (q == r) continue;
        std::string const from = "[" + rank(q) + "]";
        if (any_replayed) completed_[r][q] = machine_.add("completed" + from + of);
        for (int p = 0; p < max_pieces_; ++p) {
          std::string const piece = from + "[piece " + std::to_string(p) + "]";
          for (int k = 0; k < kNumSignalSets; ++k) {
            if (used[k]) arrived_[k][r][q][p] = machine_.add("arrived[" + std::string(sets[k]) + "]" + piece + of);
          }
          if (!any_rs) continue;
          tiles_done_[r][q][p] = machine_.add("tiles_done" + piece + of);
          machine_.at_the_end.push_back({tiles_done_[r][q][p], 0});
        }
      }
    }
  }

  // ---- helpers for guards and effects

  static Guard at_least(Var var, size_t value) { return {Guard::kAtLeast, var, static_cast<uint8_t>(value)}; }
  static Guard at_most(Var var, size_t value) { return {Guard::kAtMost, var, static_cast<uint8_t>(value)}; }
  static Effect set(Var var, int value) { return {Effect::kSet, var, 0, static_cast<uint8_t>(value), 0}; }
  static Effect on(Effect::Kind kind, Buffer b, int tag, int bits) {
    return {kind, b.call, b.cells, static_cast<uint8_t>(tag), static_cast<uint8_t>(bits)};
  }
  Effect raise(Context const& c, Var word) const {
    if (c.call.replayed) return {Effect::kRaiseFrom, word, epoch_[c.rank], 0, 0};
    return {Effect::kRaise, word, 0, static_cast<uint8_t>(c.epoch), 0};
  }

  void add_step(std::vector<Step>& steps, Context const& c, std::string const& text, std::vector<Guard> guards,
                std::vector<Effect> effects) {
    bool const split = s_.split_waits && !guards.empty() && !effects.empty();
    if (split) steps.push_back({c.text + "waits to " + text, std::move(guards), {}});
    steps.push_back({c.text + text, split ? std::vector<Guard>{} : std::move(guards), std::move(effects)});
    if (steps.size() > 255) throw std::length_error("an actor of the model has more than 255 steps");
  }

  // ---- one call of one rank

  void add_call(Call const& call, int r, int tag, int epoch, int region) {
    Context c{call, r, tag, epoch, region, set_of(call, epoch), make_pieces(call.tiles, std::max(call.pieces, 1), 1),
              {}};
    char const* const names[] = {" (ag_gemm", " (gemm_rs", " (direct gemm_rs"};
    c.text = "call " + std::to_string(tag) + names[static_cast<int>(call.op)] +
             (call.replayed ? ", replay " : ", epoch ") + std::to_string(epoch) + "): ";
    if (c.pieces.count() != std::max(call.pieces, 1)) throw std::length_error("a piece without tiles");

    std::vector<Guard> fork;  // of the first step of `push`
    if (call.replayed)
      add_step(gemm(r), c, "begin: raise the epoch word", {}, {{Effect::kIncrement, epoch_[r], 0, 0, 0}});
    std::vector<Guard> const completed = completed_by_all(c);
    bool const before_gemm = s_.change == Change::kWaitBeforeGemm || call.op == Op::kGemmRsDirect;
    if (before_gemm && !completed.empty()) {
      add_step(gemm(r), c, "wait until all peers have completed the call before", completed, {});
    } else if (s_.change != Change::kWaitPerPeer) {
      fork = completed;
    }
    if (s_.change != Change::kPushTooEarly) fork.push_back(at_least(pc_gemm(r), gemm(r).size()));
    if (residency()) add_step(gemm(r), c, "start the GEMM", {}, {set(resident_[r], 1)});
    if (s_.change == Change::kWaitKernelNeedsSm && call.replayed) {
      add_step(push(r), c, "start the wait kernel", {fork.back(), at_most(resident_[r], 0)}, {});
    }

    if (call.pieces > 0) {
      if (call.op == Op::kAgGemm) {
        push_shard(c, fork);
        gemm_of_shards(c);
      } else if (call.op == Op::kGemmRsDirect) {
        send_partials_directly(c);
        gemm_of_own_chunk(c);
      } else {
        gemm_of_partials(c);
        push_partials(c, fork);
        gemm_of_own_chunk(c);
      }
    }
    finish(c);
  }

  // Rule 10, as guards.
  std::vector<Guard> completed_by_all(Context const& c) const {
    std::vector<Guard> guards;
    if (!c.call.replayed || s_.change == Change::kNoCompletedWait || c.epoch == 1) return guards;
    for (int q = 0; q < world_; ++q) {
      if (q != c.rank) guards.push_back(at_least(completed_[c.rank][q], c.epoch - 1));
    }
    return guards;
  }

  // The end of a call. After its last step the buffer of x belongs to the next call.
  void finish(Context const& c) {
    int const r = c.rank;
    std::vector<Effect> last;
    bool any_ag = false;
    for (Call const& call : s_.calls) any_ag |= call.op == Op::kAgGemm;
    if (any_ag) last.push_back(on(Effect::kStore, x_[r], c.tag + 1, 1));
    if (residency()) add_step(gemm(r), c, "leave the SMs", {}, {set(resident_[r], 0)});
    std::vector<Guard> join;
    if (s_.change != Change::kNoJoin) join.push_back(at_least(pc_push(r), push(r).size()));
    std::vector<Step> reports;
    for (int s = 0; c.call.replayed && s < world_ - 1; ++s) {
      int const q = ag_push_peer(r, world_, s);
      reports.push_back({c.text + "report completion to " + rank(q), {}, {raise(c, completed_[q][r])}});
    }
    auto& steps = gemm(r);
    if (s_.change == Change::kCompletedBeforeJoin) {
      steps.insert(steps.end() - 1, reports.begin(), reports.end());  // before the last tile
      reports.clear();
    }
    add_step(steps, c, "join", join, reports.empty() ? last : std::vector<Effect>{});
    if (reports.empty()) return;
    reports.back().effects.insert(reports.back().effects.end(), last.begin(), last.end());
    steps.insert(steps.end(), reports.begin(), reports.end());
    if (s_.change == Change::kReadAfterCompleted && c.call.op == Op::kAgGemm) gemm_of_shards(c);
  }

  // ---- ag_gemm

  void push_shard(Context const& c, std::vector<Guard> guards) {
    for (int s = 0; s < world_ - 1; ++s) {
      int const peer = ag_push_peer(c.rank, world_, s);
      if (s_.change == Change::kWaitPerPeer && c.call.replayed) {
        guards.push_back(at_least(completed_[c.rank][peer], c.epoch - 1));
      }
      for (int p = 0; p < c.call.pieces; ++p) {
        std::vector<Effect> effects;
        if (s_.change != Change::kPushTooEarly) effects.push_back(on(Effect::kExpect, x_[c.rank], c.tag, 1));
        send_piece(c, peer, p, c.rank * max_pieces_ + p, std::move(guards), std::move(effects));
        guards.clear();
      }
    }
  }

  void gemm_of_shards(Context const& c) {
    for (int s = 0; s < world_; ++s) {
      int const source = ag_chunk(c.rank, world_, s);
      if (source == c.rank) continue;  // read from x: nothing that a peer could touch
      for (int t = 0; t < c.call.tiles; ++t) read_cell(c, source, t, source * max_pieces_ + c.pieces.piece_of(t));
    }
  }

  // ---- gemm_rs

  int send_bit(Context const& c, int dest, int tile) const {
    return 1 << (rs_slot(c.rank, world_, dest) * max_tiles_ + tile);
  }

  void gemm_of_partials(Context const& c) {
    for (int s = 0; s < world_ - 1; ++s) {
      int const dest = rs_chunk(c.rank, world_, s);
      for (int t = 0; t < c.call.tiles; ++t) {
        std::string const tile = "tile " + std::to_string(t) + " for " + rank(dest);
        Effect const store = on(Effect::kStore, send_[c.rank], c.tag, send_bit(c, dest, t));
        Effect const count{Effect::kIncrement, tiles_done_[c.rank][dest][c.pieces.piece_of(t)], 0, 0, 0};
        bool const wrong = s_.change == Change::kCountFirst;
        if (wrong) add_step(gemm(c.rank), c, "count " + tile, {}, {count});
        add_step(gemm(c.rank), c, "write " + tile + " to the send buffer", {}, {store});
        if (!wrong) add_step(gemm(c.rank), c, "count " + tile, {}, {count});
      }
    }
  }

  void push_partials(Context const& c, std::vector<Guard> guards) {
    for (int s = 0; s < world_ - 1; ++s) {
      int const dest = rs_chunk(c.rank, world_, s);
      if (s_.change == Change::kWaitPerPeer && c.call.replayed) {
        guards.push_back(at_least(completed_[c.rank][dest], c.epoch - 1));
      }
      for (int p = 0; p < c.call.pieces; ++p) {
        Var const count = tiles_done_[c.rank][dest][p];
        if (s_.change == Change::kWaitKernelNeedsSm && c.call.replayed) {
          add_step(push(c.rank), c, "start the kernel that waits for a count", {at_most(resident_[c.rank], 0)}, {});
        }
        guards.push_back(at_least(count, c.pieces.size(p) - (s_.change == Change::kTooFewTiles ? 1 : 0)));
        int bits = 0;
        for (int t = c.pieces.begin(p); t < c.pieces.begin(p) + c.pieces.size(p); ++t) bits |= send_bit(c, dest, t);
        send_piece(c, dest, p, rs_slot(dest, world_, c.rank) * max_pieces_ + p, std::move(guards),
                   {on(Effect::kExpect, send_[c.rank], c.tag, bits)});
        guards.clear();
        if (s_.change == Change::kNoReset) continue;
        std::string const piece = "piece " + std::to_string(p) + " for " + rank(dest);
        add_step(push(c.rank), c, "reset the count of " + piece, {}, {set(count, 0)});
      }
    }
  }

  void send_partials_directly(Context const& c) {
    for (int s = 0; s < world_ - 1; ++s) {
      int const dest = rs_chunk(c.rank, world_, s);
      for (int t = 0; t < c.call.tiles; ++t) {
        int const cell = rs_slot(dest, world_, c.rank) * max_tiles_ + t, piece = c.pieces.piece_of(t);
        bool const last = t + 1 == c.pieces.begin(piece) + c.pieces.size(piece);
        std::vector<Step> steps = {{c.text + "write tile " + std::to_string(t) + " to region " +
                                        std::to_string(c.region) + " of " + rank(dest),
                                    {},
                                    {on(Effect::kStore, regions_[dest][c.region], c.tag, 1 << cell)}}};
        if (last) steps.push_back(signal_step(c, dest, piece));
        if (s_.change == Change::kSignalFirst) std::reverse(steps.begin(), steps.end());
        gemm(c.rank).insert(gemm(c.rank).end(), steps.begin(), steps.end());
      }
    }
  }

  void gemm_of_own_chunk(Context const& c) {
    for (int t = 0; t < c.call.tiles; ++t) {
      for (int source = 0; source < world_; ++source) {
        if (source == c.rank) continue;
        int const slot = rs_slot(c.rank, world_, source);
        bool const direct = c.call.op == Op::kGemmRsDirect;  // a cell is a tile; else it is a piece
        read_cell(c, source, t, direct ? slot * max_tiles_ + t : slot * max_pieces_ + c.pieces.piece_of(t));
      }
    }
  }

  // ---- both

  // Copies a piece to cell `cell` of the peer's region, then raises its signal. `effects` check what is copied.
  void send_piece(Context const& c, int peer, int piece, int cell, std::vector<Guard> guards,
                  std::vector<Effect> effects) {
    auto& steps = push(c.rank);
    std::string const what = "piece " + std::to_string(piece) + " ";
    Step const signal = signal_step(c, peer, piece);
    if (s_.change == Change::kSignalFirst) {
      steps.push_back(signal);
      steps.back().guards = std::move(guards);
      guards.clear();
    }
    if (s_.split_waits) {
      add_step(steps, c, "read " + what + "for " + rank(peer), std::move(guards), std::move(effects));
      guards.clear();
      effects.clear();
    }
    effects.push_back(on(Effect::kStore, regions_[peer][c.region], c.tag, 1 << cell));
    add_step(steps, c, "copy " + what + "to region " + std::to_string(c.region) + " of " + rank(peer),
             std::move(guards), std::move(effects));
    if (s_.change != Change::kSignalFirst) steps.push_back(signal);
  }

  Step signal_step(Context const& c, int peer, int piece) {
    return {c.text + "signal piece " + std::to_string(piece) + " to " + rank(peer),
            {},
            {raise(c, arrived_[static_cast<int>(c.set)][peer][c.rank][piece])}};
  }

  // Tile `tile` waits for its piece of `source` and reads it from cell `cell` of the region.
  void read_cell(Context const& c, int source, int tile, int cell) {
    int const piece = c.pieces.piece_of(tile);
    add_step(gemm(c.rank), c,
             "read piece " + std::to_string(piece) + " of " + rank(source) + " from region " +
                 std::to_string(c.region) + ", for tile " + std::to_string(tile),
             {at_least(arrived_[static_cast<int>(c.set)][c.rank][source][piece], c.epoch)},
             {on(Effect::kExpect, regions_[c.rank][c.region], c.tag, 1 << cell),
              {Effect::kEquals, arrived_[static_cast<int>(c.set)][c.rank][source][piece], 0,
               static_cast<uint8_t>(c.epoch), 0}});
  }

  Scenario const& s_;
  int const world_;
  int max_pieces_ = 1, max_tiles_ = 1;
  Machine machine_;
  Buffer regions_[kMaxRanks][2] = {}, x_[kMaxRanks] = {}, send_[kMaxRanks] = {};
  Var arrived_[kNumSignalSets][kMaxRanks][kMaxRanks][kMaxModelPieces] = {};  // [set][owner][source][piece]
  Var completed_[kMaxRanks][kMaxRanks] = {};                                 // [owner][source]
  Var tiles_done_[kMaxRanks][kMaxRanks][kMaxModelPieces] = {};               // [owner][destination][piece]
  Var epoch_[kMaxRanks] = {}, resident_[kMaxRanks] = {};
};

}  // namespace

Machine build_machine(Scenario const& scenario) { return Builder(scenario).build(); }

}  // namespace flux::model
