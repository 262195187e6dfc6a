#pragma once
// The two-shot form of gemm_ar: who reduces which rows of y, and the order in which a rank computes.
//
// The M rows are cut into sections, and a section into one chunk for each rank, its owner. Every rank computes its
// partial of every chunk; the owner adds the partials up and sends the reduced rows to all ranks. A chunk has
// chunk_rows rows, a multiple of a granule (the rows of a tile), so that no tile holds rows of two owners; where M
// ends, a chunk is short, and those behind it are empty. All chunks are signalled alike, the empty ones too: so in each
// call a rank waits for every signal of every peer, which is what lets two regions do (see csrc/cpu/protocol.hpp).
//
//   world = 3, 2 sections                 |  0.0  |  1.0  |  2.0  |  0.1  |  1.1  |  2.1  |    rows ->, owner.section
//   rank 1 computes                       P0: 2.0 0.0   P1: 2.1 0.1   O0: 1.0   O1: 1.1
//   4 sections, any rank                  P0  P1  O0  P2  O1  P3  O2  O3
//
// P: a section's chunks of the peers, next rank first, one after the other (chunk_order.hpp); O: the own chunk. Where
// chunks travel in pieces, those of P are interleaved (rs_item), and O is sent on piece by piece, too. O of a section
// comes after P of the next one: by then the peers' partials have had the time of a section's products to come. While
// a section is reduced and sent around, the next ones are computed. No order of waits is a circle: O of section s waits
// for P of section s on other ranks, before which they wait for nothing but O of earlier sections.
//
// The one-shot form has no chunks: every rank sends all of its partial to all ranks and adds up all rows itself.

#include "schedule/chunk_order.hpp"
#include "schedule/tile_order.hpp"
#include "schedule/workspace_layout.hpp"

namespace flux {

struct ArChunk {
  int section, owner;
};
// Chunks are numbered as they lie in y.
FLUX_HD int ar_chunk_index(ArChunk chunk, int world) { return chunk.section * world + chunk.owner; }
FLUX_HD ArChunk ar_chunk_of(int index, int world) { return {index / world, index % world}; }

// What `rank` computes in `step`, and the step of its own chunk of a section; sections * world steps. With one section
// it is the order of a gemm_rs of one piece.
FLUX_HD ArChunk ar_chunk(int rank, int world, int sections, int step) {
  if (step < world - 1) return {0, rs_chunk(rank, world, step)};
  int const turn = (step - (world - 1)) / world;  // P of section turn + 1, then O of section `turn`
  int const in_turn = (step - (world - 1)) % world;
  bool const own = in_turn == world - 1 || turn == sections - 1;
  return own ? ArChunk{turn, rank} : ArChunk{turn + 1, rs_chunk(rank, world, in_turn)};
}
FLUX_HD int ar_own_step(int world, int sections, int section) {
  return section == sections - 1 ? sections * world - 1 : (section + 2) * world - 2;
}

// The same item by item, as a kernel goes through them: P interleaves the parts of its chunks as gemm_rs does.
struct ArItem {
  ArChunk chunk;
  int32_t item;
};
FLUX_HD ArItem ar_item(int32_t index, int rank, int world, int sections, Pieces const& parts) {
  auto const of_peers = [&](int section, int32_t in_turn) {
    RsItem const work = rs_item(in_turn, world, parts);
    return ArItem{{section, rs_chunk(rank, world, work.step)}, work.item};
  };
  int32_t const of_p = (world - 1) * parts.items;
  if (index < of_p) return of_peers(0, index);
  int32_t const turn = (index - of_p) / (of_p + parts.items), in_turn = index - of_p - turn * (of_p + parts.items);
  if (turn == sections - 1) return {{turn, rank}, in_turn};
  return in_turn < of_p ? of_peers(turn + 1, in_turn) : ArItem{{turn, rank}, in_turn - of_p};
}

constexpr int kMaxSections = kMaxPieces / 2;  // of two signals each
constexpr int64_t kOneShotMostRows = 512;     // beyond, its TP x M x N of traffic and memory can't pay

struct ArSchedule {
  int64_t rows;  // M
  int64_t chunk_rows;
  int32_t world;
  int32_t sections;

  FLUX_HD int num_chunks() const { return sections * world; }
  FLUX_HD int index(ArChunk chunk) const { return ar_chunk_index(chunk, world); }
  FLUX_HD int64_t begin(ArChunk chunk) const {
    int64_t const row = index(chunk) * chunk_rows;
    return row < rows ? row : rows;
  }
  FLUX_HD int64_t size(ArChunk chunk) const {
    int64_t const left = rows - begin(chunk);
    return left < chunk_rows ? left : chunk_rows;
  }

  // What `rank` computes in `step`, step in [0, num_chunks()).
  FLUX_HD ArChunk chunk_at(int rank, int step) const { return ar_chunk(rank, world, sections, step); }

  // Signals of a rank to a peer: its partial of the peer's chunk has come, and the reduced rows of its own chunk.
  FLUX_HD int partial_piece(int section) const { return section; }
  FLUX_HD int result_piece(int section) const { return sections + section; }
};

// At most `wanted` sections: as many as the granule leaves. rows > 0.
FLUX_HD ArSchedule make_ar_schedule(int64_t rows, int world, int32_t wanted, int64_t granule) {
  int64_t const chunk_rows = round_up(ceil_div(rows, int64_t{wanted} * world), granule);
  return {rows, chunk_rows, world, static_cast<int32_t>(ceil_div(rows, world * chunk_rows))};
}

// At least sections * chunk_rows of any schedule whose granule divides this one; more rows never give less.
FLUX_HD int64_t ar_rows_per_owner_at_most(int64_t rows, int world, int64_t granule) {
  return ceil_div(rows, world) + round_up(ceil_div(rows, 2 * world), granule);
}

}  // namespace flux
