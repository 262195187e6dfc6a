#pragma once
// Builds the machine of a scenario: its memory, and the begin and the end of a call. protocol_model.cpp has the ops.

#include <algorithm>
#include <optional>
#include <utility>

#include "protocol_model.hpp"
#include "schedule/ar_schedule.hpp"
#include "schedule/chunk_order.hpp"
#include "schedule/tile_order.hpp"
#include "schedule/workspace_layout.hpp"

namespace flux::model {

int constexpr kMaxRanks = 4;
int constexpr kMaxModelPieces = 4;
int constexpr kMaxLanes = 2;

class Builder {
 public:
  explicit Builder(Scenario const& scenario) : s_(scenario), world_(scenario.world) {
    bool fits = s_.lanes >= 1 && s_.lanes <= kMaxLanes;
    for (Call const& call : s_.calls) {
      bool const two_shot = call.op == Op::kGemmArTwoShot;
      max_pieces_ = std::max(max_pieces_, two_shot ? 2 * call.pieces : call.pieces);
      max_tiles_ = std::max(max_tiles_, call.tiles);
      fits = fits && (!two_shot || (2 * world_ - 1) * call.pieces <= 8);
    }
    if (!fits || world_ < 2 || world_ > kMaxRanks || max_pieces_ > kMaxModelPieces || world_ * max_pieces_ > 8 ||
        (world_ - 1) * max_tiles_ > 8) {
      throw std::length_error("the scenario is too large for the model");
    }
    for (int r = 0; r < world_; ++r) {
      char const* const names[] = {" gemm", " push", " push 2"};
      for (int a = 0; a <= s_.lanes; ++a) {
        machine_.actors.push_back({rank(r) + names[a], {}});
        machine_.add("steps of " + rank(r) + names[a]);
      }
    }
    add_memory();
  }

  Machine build() {
    int tag = 0, eager = 0, counted = 0, last_use[2] = {};
    for (Call const& call : s_.calls) {
      if (call.pieces == 0 && s_.change != Change::kEmptyCallCounts) continue;
      ++tag;
      // An eager call after a device-counted one is a mistake that the explorer has to find.
      int const epoch = call.device_counted ? ++counted : ++eager;
      int region = call.device_counted ? call.region : static_cast<int>(parity_of(epoch));
      if (s_.change == Change::kOneRegion) region = 0;
      int const last = last_use[region];
      if (call.device_counted && s_.change != Change::kLastUseNotUpdated) last_use[region] = epoch;
      for (int r = 0; r < world_; ++r) add_call(call, r, tag, epoch, region, last);
    }
    return machine_;
  }

 private:
  struct Context {
    Call call;
    int rank, tag, epoch, region, last;
    SignalSet set;
    Pieces pieces;
    std::string text;  // how each step of the call begins
  };

  static std::string rank(int r) { return "rank " + std::to_string(r); }
  Var pc_gemm(int r) const { return static_cast<Var>((1 + s_.lanes) * r); }
  Var pc_push(int r, int lane = 0) const { return static_cast<Var>(pc_gemm(r) + 1 + lane); }
  std::vector<Step>& gemm(int r) { return machine_.actors[pc_gemm(r)].steps; }
  std::vector<Step>& push(int r, int lane = 0) { return machine_.actors[pc_push(r, lane)].steps; }
  bool residency() const { return s_.change == Change::kWaitKernelNeedsSm; }

  SignalSet set_of(Call const& call, int epoch) const {
    if (call.device_counted) {
      bool const odd = call.region == 1 && s_.change != Change::kOneReplaySignalSet;
      return odd ? SignalSet::kReplayOdd : SignalSet::kReplayEven;
    }
    return s_.change == Change::kOneSignalSet ? SignalSet::kEven
                                              : signal_set_of(parity_of(static_cast<Epoch>(epoch)), /*replay=*/false);
  }

  Buffer add_buffer(std::string const& name) { return {machine_.add(name), machine_.add("cells of " + name)}; }

  void add_memory() {
    bool any_rs = false, any_in_line = false, any_counted = false, used[kNumSignalSets] = {};
    int eager = 0;
    for (Call const& call : s_.calls) {
      any_ag_ |= is_ag(call.op);
      any_rs |= call.op == Op::kGemmRs;
      any_in_line |= call.op == Op::kAgGemmInLine;
      any_counted |= call.device_counted;
      if (call.pieces == 0 && s_.change != Change::kEmptyCallCounts) continue;
      used[static_cast<int>(set_of(call, call.device_counted ? 0 : ++eager))] = true;
    }
    bool const has_slots = any_rs && s_.change != Change::kSendFromRegion;
    num_slots_ = has_slots ? world_ : 1;
    char const* const sets[kNumSignalSets] = {"even", "odd", "replay even", "replay odd"};
    for (int r = 0; r < world_; ++r) {
      std::string const of = " of " + rank(r);
      for (int p = 0; p < 2; ++p) {
        std::string const region = "region " + std::to_string(p) + of;
        for (int slot = 0; slot < num_slots_; ++slot) {
          std::string const in = has_slots ? "slot " + std::to_string(slot) + " of " : "";
          slots_[r][p][slot] = add_buffer("call in " + in + region);
        }
      }
      if (any_ag_) x_[r] = add_buffer("call in x" + of);
      if (any_ag_) machine_.initial[x_[r].call] = machine_.initial[x_[r].cells] = 1;
      if (any_counted) epoch_[r] = machine_.add("epoch word" + of);
      if (residency()) resident_[r] = machine_.add("GEMM on the SMs" + of);
      for (int q = 0; q < world_; ++q) {
        if (q == r) continue;
        std::string const from = "[" + rank(q) + "]";
        if (any_counted) begun_[r][q] = machine_.add("begun" + from + of);
        for (int k = 0; any_in_line && k < kNumSignalSets; ++k) {
          if (used[k]) finished_[k][r][q] = machine_.add("finished[" + std::string(sets[k]) + "]" + from + of);
        }
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

  Effect raise(Context const& c, Var word) const {
    return c.call.device_counted ? Effect{Effect::kRaiseFrom, word, epoch_[c.rank], 0, 0} : raise_to(word, c.epoch);
  }

  void add_step(std::vector<Step>& steps, Context const& c, std::string const& text, std::vector<Guard> guards,
                std::vector<Effect> effects) {
    bool const split = s_.split_waits && !guards.empty() && !effects.empty();
    if (split) steps.push_back({c.text + "waits to " + text, std::move(guards), {}});
    steps.push_back({c.text + text, split ? std::vector<Guard>{} : std::move(guards), std::move(effects)});
    if (steps.size() > 255) throw std::length_error("an actor of the model has more than 255 steps");
  }

  // ---- one call of one rank

  void add_call(Call const& call, int r, int tag, int epoch, int region, int last) {
    Pieces const pieces = make_pieces(call.tiles, std::max(call.pieces, 1), 1);
    Context c{call, r, tag, epoch, region, last, set_of(call, epoch), pieces, {}};
    char const* const names[] = {" (ag_gemm",        " (ag_gemm in line",  " (gemm_rs",
                                 " (direct gemm_rs", " (two-shot gemm_ar", " (one-shot gemm_ar"};
    c.text = "call " + std::to_string(tag) + names[static_cast<int>(call.op)] +
             (call.device_counted ? ", device epoch " : ", epoch ") + std::to_string(epoch) + "): ";
    if (c.pieces.count() != std::max(call.pieces, 1)) throw std::length_error("a piece without tiles");

    if (call.device_counted) begin(c);
    std::vector<Guard> fork =
        begun_by(c, push_waits(c) ? peers(c) : std::vector<int>{});  // of the first step of `push`, of either lane
    if (s_.change != Change::kPushTooEarly) fork.push_back(at_least(pc_gemm(r), gemm(r).size()));
    if (residency()) add_step(gemm(r), c, "start the GEMM", {}, {set(resident_[r], 1)});
    if (residency() && call.device_counted) {
      add_step(push(r), c, "start the wait kernel", {fork.back(), at_most(resident_[r], 0)}, {});
    }

    if (call.pieces > 0) {
      if (is_ag(call.op)) {
        if (call.op == Op::kAgGemmInLine) wait_until_all_have_finished(c, fork);
        push_shard(c, fork);
        gemm_of_shards(c);
      } else if (call.op == Op::kGemmRsDirect) {
        send_partials_directly(c);
        gemm_of_own_chunk(c);
      } else if (call.op == Op::kGemmArTwoShot) {
        reduce_own_chunks(c);
        receive_results(c, fork);
      } else if (call.op == Op::kGemmArOneShot) {
        send_partials_to_all(c);
        reduce_everything(c);
      } else {
        gemm_of_partials(c);
        push_partials(c, fork);
        gemm_of_own_chunk(c);
      }
    }
    finish(c);
  }

  std::vector<int> peers(Context const& c) const {
    std::vector<int> all;
    for (int s = 0; s < world_ - 1; ++s) all.push_back(ag_push_peer(c.rank, world_, s));
    return all;
  }

  // The wait of rule 10 for the peers, as guards.
  std::vector<Guard> begun_by(Context const& c, std::vector<int> const& peers) const {
    int value = c.last + 1;  // 0: no wait
    if (s_.change == Change::kWaitForLast) value = c.last;
    if (s_.change == Change::kOneLastUse) value = c.epoch;
    if (s_.change == Change::kLastUseUpdatedFirst) value = c.epoch + 1;
    if (s_.change == Change::kNoBegunWait || (s_.change == Change::kNoFirstWait && c.last == 0)) value = 0;
    std::vector<Guard> guards;
    if (!c.call.device_counted || value == 0) return guards;
    for (int q : peers) guards.push_back(at_least(begun_[c.rank][q], value));
    return guards;
  }

  // Rules 9 and 10.
  void begin(Context const& c) {
    auto& steps = gemm(c.rank);
    bool const early = s_.change == Change::kBegunBeforeLastTile;
    std::vector<Step> tell = {{c.text + "begin", {}, {{Effect::kIncrement, epoch_[c.rank], 0, 0, 0}}}};
    for (int q : peers(c)) {
      Var const word = begun_[q][c.rank];
      Effect const begun = early ? raise_to(word, c.epoch) : raise(c, word);
      if (s_.split_waits || early || s_.change == Change::kPeersInTurn) {
        tell.push_back({c.text + "tell " + rank(q), {}, {begun}});
      } else {
        tell.back().effects.push_back(begun);
      }
      if (s_.change == Change::kPeersInTurn) tell.push_back({c.text + "wait for " + rank(q), begun_by(c, {q}), {}});
    }
    if (s_.change == Change::kWaitBeforeAnnouncing) wait_for_peers(c);
    if (early && c.tag > 1) {  // but not the count: the pushes of the call before still need it
      steps.insert(steps.begin() + last_read_[c.rank], tell.begin() + 1, tell.end());
      tell.resize(1);
    }
    auto const at = s_.change == Change::kBeginBeforeJoin && c.tag > 1 ? steps.begin() + join_[c.rank] : steps.end();
    steps.insert(at, tell.begin(), tell.end());
    auto const& before = previous_[c.rank];
    if (s_.change == Change::kReadAfterBegun && before && is_ag(before->call.op)) gemm_of_shards(*before);
    bool const elsewhere = s_.change == Change::kWaitPerPeer || s_.change == Change::kPeersInTurn ||
                           s_.change == Change::kWaitBeforeAnnouncing || push_waits(c);
    if (!elsewhere) wait_for_peers(c);
  }

  // `gemm` writes to the peers itself.
  static bool is_direct(Op op) { return !is_ag(op) && op != Op::kGemmRs; }
  static bool is_ag(Op op) { return op == Op::kAgGemm || op == Op::kAgGemmInLine; }

  bool push_waits(Context const& c) const {
    bool const asked_for = s_.change == Change::kWaitOnSideStream || s_.change == Change::kOneLaneWaits;
    return !is_direct(c.call.op) && (asked_for || residency());
  }

  void wait_for_peers(Context const& c) {
    std::vector<Guard> guards = begun_by(c, peers(c));
    std::vector<Effect> checks;
    if (s_.change == Change::kCheckForWait && c.epoch > 1 && c.last <= c.epoch - 2) {
      for (Guard const& g : guards) checks.push_back({Effect::kReached, g.var, 0, g.value, 0});
      guards.clear();
    }
    add_step(gemm(c.rank), c, "wait until all peers have finished the last call in this region", guards, checks);
  }

  // The end of a call. After its last step the buffer of x belongs to the next call.
  void finish(Context const& c) {
    int const r = c.rank;
    std::vector<Effect> last;
    if (any_ag_) last.push_back(on(Effect::kStore, x_[r], c.tag + 1, 1));
    if (residency()) add_step(gemm(r), c, "leave the SMs", {}, {set(resident_[r], 0)});
    std::vector<Guard> join;
    int const joined = s_.change == Change::kNoJoin ? 0 : s_.change == Change::kJoinOneLane ? 1 : s_.lanes;
    for (int lane = 0; lane < joined; ++lane) join.push_back(at_least(pc_push(r, lane), push(r, lane).size()));
    join_[r] = static_cast<int>(gemm(r).size());
    add_step(gemm(r), c, "join", join, last);
    previous_[r] = c;
  }

  void add_wait_per_peer(Context const& c, int peer, std::vector<Guard>& guards) const {
    if (s_.change != Change::kWaitPerPeer) return;
    for (Guard const& g : begun_by(c, {peer})) guards.push_back(g);
  }

  // ---- the ops

  // What `writer` touches in the region of `owner`: its slot, or the slots of all peers.
  std::vector<Buffer> slots(Context const& c, int owner, int writer) const {
    auto const& all = slots_[owner][c.region];
    if (num_slots_ == 1) return {all[0]};
    if (c.call.op == Op::kAgGemmInLine) return {all, all + world_ - 1};
    return {all[writer == owner ? world_ - 1 : peer_slot(owner, world_, writer)]};
  }
  Buffer to_send(Context const& c, int dest) const {
    return slots_[c.rank][1 - c.region][num_slots_ == 1 ? 0 : peer_slot(c.rank, world_, dest)];
  }
  void wait_until_all_have_finished(Context const& c, std::vector<Guard>& fork);
  void push_shard(Context const& c, std::vector<Guard> guards);
  void gemm_of_shards(Context const& c);
  int send_bit(Context const& c, int dest, int tile) const;
  void gemm_of_partials(Context const& c);
  void push_partials(Context const& c, std::vector<Guard> const& fork);
  void send_partials_directly(Context const& c);
  void gemm_of_own_chunk(Context const& c);
  int partial_cell(Context const& c, int owner, int source, int section) const;
  int result_cell(Context const& c, int owner, int section) const;
  void reduce_own_chunks(Context const& c);
  void receive_results(Context const& c, std::vector<Guard> guards);
  void send_partials_to_all(Context const& c);
  void reduce_everything(Context const& c);
  void write_directly(Context const& c, int dest, std::string const& what, int cell, int piece,
                      std::vector<Guard> guards);
  void send_piece(std::vector<Step>& steps, Context const& c, int peer, int piece, int cell, std::vector<Guard> guards,
                  std::vector<Effect> effects);
  Step signal_step(Context const& c, int peer, int piece);
  void read_cell(Context const& c, int source, int tile, int cell);
  void read_piece(std::vector<Step>& steps, Context const& c, int source, int piece, int cell,
                  std::string const& purpose, std::vector<Guard> guards);

  Scenario const& s_;
  int const world_;
  int max_pieces_ = 1, max_tiles_ = 1;
  bool any_ag_ = false;
  Machine machine_;
  int num_slots_ = 1;                           // of a region; the last is the own rank's
  Buffer slots_[kMaxRanks][2][kMaxRanks] = {};  // [owner][region][slot]
  Buffer x_[kMaxRanks] = {};
  Var arrived_[kNumSignalSets][kMaxRanks][kMaxRanks][kMaxModelPieces] = {};  // [set][owner][source][piece]
  Var finished_[kNumSignalSets][kMaxRanks][kMaxRanks] = {};                  // [set][owner][source]
  Var begun_[kMaxRanks][kMaxRanks] = {};                                     // [owner][source]
  Var tiles_done_[kMaxRanks][kMaxRanks][kMaxModelPieces] = {};               // [owner][destination][piece]
  Var epoch_[kMaxRanks] = {}, resident_[kMaxRanks] = {};
  std::optional<Context> previous_[kMaxRanks];            // the call before
  int last_read_[kMaxRanks] = {}, join_[kMaxRanks] = {};  // steps of `gemm` in it
};

}  // namespace flux::model
