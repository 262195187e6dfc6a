// What a rank does in a call, by op: the rules of protocol_model.hpp, step by step.

#include "protocol_builder.hpp"

namespace flux::model {

// ---- ag_gemm

// All ranks tell each other, over `push`, that they have finished the calls before; `gemm` waits for that, and `push`
// goes on when it has.
void Builder::wait_until_all_have_finished(Context const& c, std::vector<Guard>& fork) {
  if (world_ == 2 || s_.change == Change::kNoFinishedWait) return;
  int const set = static_cast<int>(c.set);
  std::vector<Guard> all;
  for (int peer : peers(c)) {
    add_step(push(c.rank), c, "tell " + rank(peer) + " that the calls before are finished", std::exchange(fork, {}),
             {raise(c, finished_[set][peer][c.rank])});
    all.push_back(at_least(finished_[set][c.rank][peer], c.epoch));
  }
  std::vector<Effect> exact;
  for (Guard const& g : all) exact.push_back({Effect::kEquals, g.var, 0, static_cast<uint8_t>(c.epoch), 0});
  add_step(gemm(c.rank), c, "wait until all peers have finished the calls before", all, exact);
  fork = {at_least(pc_gemm(c.rank), gemm(c.rank).size())};
}

void Builder::push_shard(Context const& c, std::vector<Guard> guards) {
  for (int peer : peers(c)) {
    add_wait_per_peer(c, peer, guards);
    for (int p = 0; p < c.call.pieces; ++p) {
      std::vector<Effect> effects;
      if (s_.change != Change::kPushTooEarly) effects.push_back(on(Effect::kExpect, x_[c.rank], c.tag, 1));
      send_piece(push(c.rank), c, peer, p, c.rank * max_pieces_ + p, std::move(guards), std::move(effects));
      guards.clear();
    }
  }
}

void Builder::gemm_of_shards(Context const& c) {
  bool const in_line = c.call.op == Op::kAgGemmInLine;
  std::vector<Effect> store, expect;  // of the own shard in line
  for (Buffer const& slot : slots(c, c.rank, c.rank)) {
    store.push_back(on(Effect::kStore, slot, c.tag, 1 << (c.rank * max_pieces_)));
    expect.push_back(on(Effect::kExpect, slot, c.tag, 1 << (c.rank * max_pieces_)));
  }
  if (in_line) add_step(gemm(c.rank), c, "copy the own shard", {}, store);
  for (int s = 0; s < world_; ++s) {
    int const source = ag_chunk(c.rank, world_, s);
    if (source == c.rank) {  // else read from x: nothing that a peer could touch
      if (in_line) add_step(gemm(c.rank), c, "read the own shard", {}, expect);
      continue;
    }
    for (int t = 0; t < c.call.tiles; ++t) read_cell(c, source, t, source * max_pieces_ + c.pieces.piece_of(t));
  }
}

// ---- gemm_rs

int Builder::send_bit(Context const& c, int dest, int tile) const {
  return 1 << (peer_slot(c.rank, world_, dest) * max_tiles_ + tile);
}

void Builder::gemm_of_partials(Context const& c) {
  for (int i = 0; i < (world_ - 1) * c.call.tiles; ++i) {
    RsItem const work = rs_item(i, world_, c.pieces);
    int const dest = rs_chunk(c.rank, world_, work.step), t = work.item;
    std::string const tile = "tile " + std::to_string(t) + " for " + rank(dest);
    Effect const store = on(Effect::kStore, to_send(c, dest), c.tag, send_bit(c, dest, t));
    Effect const count{Effect::kIncrement, tiles_done_[c.rank][dest][c.pieces.piece_of(t)], 0, 0, 0};
    bool const wrong = s_.change == Change::kCountFirst;
    if (wrong) add_step(gemm(c.rank), c, "count " + tile, {}, {count});
    add_step(gemm(c.rank), c, "write " + tile + " to the other region", {}, {store});
    if (!wrong) add_step(gemm(c.rank), c, "count " + tile, {}, {count});
  }
}

void Builder::push_partials(Context const& c, std::vector<Guard> const& fork) {
  std::vector<Guard> guards[kMaxLanes] = {fork, fork};  // of the next step of each lane
  bool may_push = s_.lanes == 1 || !c.call.device_counted || !push_waits(c);
  int lane = 0;
  for (int i = 0; i < world_ * c.call.pieces; ++i) {
    auto const [step, p] = rs_piece(i, world_, c.pieces, c.pieces);
    int const dest = rs_chunk(c.rank, world_, step);
    if (dest == c.rank) continue;
    lane = s_.lanes - 1 - lane;
    auto& steps = push(c.rank, lane);
    if (p < s_.lanes) add_wait_per_peer(c, dest, guards[lane]);
    Var const count = tiles_done_[c.rank][dest][p];
    if (residency() && c.call.device_counted) {
      add_step(steps, c, "start the kernel that waits for a count", {at_most(resident_[c.rank], 0)}, {});
    }
    guards[lane].push_back(at_least(count, c.pieces.size(p) - (s_.change == Change::kTooFewTiles ? 1 : 0)));
    if (!std::exchange(may_push, true)) {
      add_step(steps, c, "wait for the first tiles and the peers", std::exchange(guards[lane], {}), {});
      guards[1 - lane] = {fork.back()};
      if (s_.change != Change::kOneLaneWaits) guards[1 - lane].push_back(at_least(pc_push(c.rank, lane), steps.size()));
    }
    int bits = 0;
    for (int t = c.pieces.begin(p); t < c.pieces.begin(p) + c.pieces.size(p); ++t) bits |= send_bit(c, dest, t);
    send_piece(steps, c, dest, p, peer_slot(dest, world_, c.rank) * max_pieces_ + p, std::exchange(guards[lane], {}),
               {on(Effect::kExpect, to_send(c, dest), c.tag, bits)});
    if (s_.change == Change::kNoReset) continue;
    std::string const piece = "piece " + std::to_string(p) + " for " + rank(dest);
    add_step(steps, c, "reset the count of " + piece, {}, {set(count, 0)});
  }
}

void Builder::send_partials_directly(Context const& c) {
  for (int i = 0; i < (world_ - 1) * c.call.tiles; ++i) {
    RsItem const work = rs_item(i, world_, c.pieces);
    int const dest = rs_chunk(c.rank, world_, work.step), t = work.item;
    int const cell = peer_slot(dest, world_, c.rank) * max_tiles_ + t, piece = c.pieces.piece_of(t);
    bool const last = t + 1 == c.pieces.begin(piece) + c.pieces.size(piece);
    std::vector<Guard> guards;
    if (t == 0) add_wait_per_peer(c, dest, guards);
    write_directly(c, dest, "tile " + std::to_string(t), cell, last ? piece : -1, std::move(guards));
  }
}

void Builder::gemm_of_own_chunk(Context const& c) {
  for (int t = 0; t < c.call.tiles; ++t) {
    for (int source = 0; source < world_; ++source) {
      if (source == c.rank) continue;
      int const slot = peer_slot(c.rank, world_, source);
      bool const direct = c.call.op == Op::kGemmRsDirect;  // a cell is a tile; else it is a piece
      read_cell(c, source, t, direct ? slot * max_tiles_ + t : slot * max_pieces_ + c.pieces.piece_of(t));
    }
  }
}

// ---- gemm_ar. A chunk is one tile, that is one cell.

// Cells of a region: the partials of the own chunks, by slot of the source, then the results, by owner.
int Builder::partial_cell(Context const& c, int owner, int source, int section) const {
  return peer_slot(owner, world_, source) * c.call.pieces + section;
}
int Builder::result_cell(Context const& c, int owner, int section) const {
  return (world_ - 1 + owner) * c.call.pieces + section;
}

void Builder::reduce_own_chunks(Context const& c) {
  ArSchedule const schedule = make_ar_schedule(int64_t{world_} * c.call.pieces, world_, c.call.pieces, 1);
  for (int step = 0; step < schedule.num_chunks(); ++step) {
    auto const [section, owner] = schedule.chunk_at(c.rank, step);
    std::string const of = " of section " + std::to_string(section);
    if (owner != c.rank) {
      std::vector<Guard> guards;
      if (section == 0) add_wait_per_peer(c, owner, guards);
      write_directly(c, owner, "the partial" + of, partial_cell(c, owner, c.rank, section),
                     schedule.partial_piece(section), std::move(guards));
      continue;
    }
    for (int source : peers(c)) {
      read_piece(gemm(c.rank), c, source, schedule.partial_piece(section), partial_cell(c, c.rank, source, section),
                 "for the own chunk" + of, {});
    }
    for (int peer : peers(c)) {
      write_directly(c, peer, "the result" + of, result_cell(c, c.rank, section), schedule.result_piece(section), {});
    }
  }
}

void Builder::receive_results(Context const& c, std::vector<Guard> guards) {
  ArSchedule const schedule = make_ar_schedule(int64_t{world_} * c.call.pieces, world_, c.call.pieces, 1);
  for (int section = 0; section < schedule.sections; ++section) {
    for (int owner : peers(c)) {
      read_piece(push(c.rank), c, owner, schedule.result_piece(section), result_cell(c, owner, section),
                 "for the result of section " + std::to_string(section), std::move(guards));
      guards.clear();
    }
  }
}

// Every rank has a copy of all partials, its own among them.
void Builder::send_partials_to_all(Context const& c) {
  for (int p = 0; p < c.call.pieces; ++p) {
    int const cell = c.rank * max_pieces_ + p;
    for (int peer : peers(c)) {
      std::vector<Guard> guards;
      if (p == 0) add_wait_per_peer(c, peer, guards);
      write_directly(c, peer, "piece " + std::to_string(p), cell, p, std::move(guards));
    }
    write_directly(c, c.rank, "piece " + std::to_string(p), cell, -1, {});
  }
}

void Builder::reduce_everything(Context const& c) {
  for (int p = 0; p < c.call.pieces; ++p) {
    for (int source : peers(c)) {
      read_piece(gemm(c.rank), c, source, p, source * max_pieces_ + p, "for its sum", {});
    }
    add_step(gemm(c.rank), c, "read the own piece " + std::to_string(p), {},
             {on(Effect::kExpect, slots(c, c.rank, c.rank)[0], c.tag, 1 << (c.rank * max_pieces_ + p))});
  }
}

// ---- all

// `gemm` writes a cell of the region of `dest`, then raises the signal of `piece`, if it has one.
void Builder::write_directly(Context const& c, int dest, std::string const& what, int cell, int piece,
                             std::vector<Guard> guards) {
  std::vector<Step> steps = {{c.text + "write " + what + " to region " + std::to_string(c.region) + " of " + rank(dest),
                              std::move(guards),
                              {on(Effect::kStore, slots(c, dest, c.rank)[0], c.tag, 1 << cell)}}};
  if (piece >= 0) steps.push_back(signal_step(c, dest, piece));
  if (s_.change == Change::kSignalFirst) std::reverse(steps.begin(), steps.end());
  gemm(c.rank).insert(gemm(c.rank).end(), steps.begin(), steps.end());
}

// Copies a piece to cell `cell` of the peer's region, then raises its signal. `effects` check what is copied.
void Builder::send_piece(std::vector<Step>& steps, Context const& c, int peer, int piece, int cell,
                         std::vector<Guard> guards, std::vector<Effect> effects) {
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
  for (Buffer const& slot : slots(c, peer, c.rank)) effects.push_back(on(Effect::kStore, slot, c.tag, 1 << cell));
  add_step(steps, c, "copy " + what + "to region " + std::to_string(c.region) + " of " + rank(peer), std::move(guards),
           std::move(effects));
  if (s_.change != Change::kSignalFirst) steps.push_back(signal);
}

Step Builder::signal_step(Context const& c, int peer, int piece) {
  return {c.text + "signal piece " + std::to_string(piece) + " to " + rank(peer),
          {},
          {raise(c, arrived_[static_cast<int>(c.set)][peer][c.rank][piece])}};
}

// Tile `tile` waits for its piece of `source` and reads it from cell `cell` of the region.
void Builder::read_cell(Context const& c, int source, int tile, int cell) {
  read_piece(gemm(c.rank), c, source, c.pieces.piece_of(tile), cell, "for tile " + std::to_string(tile), {});
}

void Builder::read_piece(std::vector<Step>& steps, Context const& c, int source, int piece, int cell,
                         std::string const& purpose, std::vector<Guard> guards) {
  if (&steps == &gemm(c.rank)) last_read_[c.rank] = static_cast<int>(steps.size());
  Var const word = arrived_[static_cast<int>(c.set)][c.rank][source][piece];
  guards.push_back(at_least(word, c.epoch));
  std::vector<Effect> effects;
  for (Buffer const& slot : slots(c, c.rank, source)) effects.push_back(on(Effect::kExpect, slot, c.tag, 1 << cell));
  effects.push_back({Effect::kEquals, word, 0, static_cast<uint8_t>(c.epoch), 0});
  add_step(steps, c,
           "read piece " + std::to_string(piece) + " of " + rank(source) + " from region " + std::to_string(c.region) +
               ", " + purpose,
           std::move(guards), std::move(effects));
}

Machine build_machine(Scenario const& scenario) { return Builder(scenario).build(); }

}  // namespace flux::model
