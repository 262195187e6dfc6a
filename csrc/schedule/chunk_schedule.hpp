#pragma once
// The schedules of the decomposed strategy: which library GEMM comes when, what it waits for, and what is pushed when.
// A shard [rows, k] of ag_gemm is cut into chunks, one level finer than the ranks cut the operand; a chunk is a piece
// with a signal of its own. Method: FiCCO (papers/ficco.txt), section V, which names the schedules by three choices:
//
//   uniform: every step computes on chunks of all ranks, the own one among them       hetero: the own shard first
//   fused: one GEMM a step, over what has come from all peers        unfused: one GEMM for each peer and chunk
//   1d: chunks are blocks of rows       2d: chunks are blocks of columns (along K), whose products are added up in y
//
//   world = 4, rank 1, two chunks (a, b) of each shard       GEMMs, [..] one each
//     uniform-fused-1d    [0a 1a 2a 3a] [0b 1b 2b 3b]
//     uniform-fused-2d    the same, each over all rows and half of K
//     hetero-fused-1d     [1a 1b] [0a] [2a 3a] [0b] [2b 3b]
//     hetero-unfused-1d   [1a 1b] [0a] [3a] [2a] [0b] [3b] [2b]
//     gather              [0 1 2 3]: not of the paper; on GPUs SMs move the chunks, for few rows
//
// A GEMM over several sources is a batched one with a fixed stride from rank to rank, of the operand and of y: nothing
// is gathered or scattered besides. A gap at the own rank cuts it in two; each part waits for its own sources only.
// Without a gap, that is in a uniform schedule, the shards lie side by side, and the own one is copied there.
//
// Every rank pushes chunk a to each peer, next rank first, then chunk b: what is needed first is sent first. A push
// waits for nothing, or, in a uniform schedule of more than two ranks, for signals that themselves wait for nothing: no
// order of the GEMMs can make ranks wait in a circle.

#include <vector>

#include "schedule/chunk_order.hpp"
#include "schedule/tile_order.hpp"

namespace flux {

enum class ChunkSchedule : int {
  kUniformFused1d,
  kHeteroFused1d,
  kHeteroUnfused1d,
  kUniformFused2d,
  kGather,     // ag_gemm: uniform, fused, of one chunk that a kernel moves
  kRowChunks,  // gemm_rs
  kOneShot,    // gemm_ar: the forms of the all-reduce after the GEMM
  kTwoShot,
};

constexpr bool is_uniform(ChunkSchedule s) {
  return s == ChunkSchedule::kUniformFused1d || s == ChunkSchedule::kUniformFused2d || s == ChunkSchedule::kGather;
}
constexpr bool is_along_k(ChunkSchedule s) { return s == ChunkSchedule::kUniformFused2d; }

// `extent` rows or columns cut into at most `wanted` chunks. Large chunks are whole tiles, and their first columns lie
// at aligned addresses.
inline Pieces make_chunks(int64_t extent, int32_t wanted) {
  constexpr int32_t kTile = 128;
  return make_pieces(extent, wanted, extent >= int64_t{2} * kTile * wanted ? kTile : 1);
}

// Part of a shard: rows [row, row + rows), columns [k, k + ks).
struct Block {
  int64_t row, rows;
  int64_t k, ks;
};

// One GEMM of ag_gemm, for each source s in [first_source, first_source + num_sources):
//   y[s][row : row + rows] (+)= shard_s[row : row + rows, k : k + ks] . w[:, k : k + ks]^T
struct AgProduct {
  int first_source, num_sources;
  int piece;  // that it needs of each source but the own rank; -1: of none
  Block block;
};

struct AgPush {
  int peer;
  int piece;
};

struct AgSchedule {
  ChunkSchedule kind;
  int rank, world;
  int64_t rows, k;  // of a shard
  Pieces pieces;    // of the rows, or of the columns

  Block block(int piece) const {
    if (is_along_k(kind)) return {0, rows, pieces.begin(piece), pieces.size(piece)};
    return {pieces.begin(piece), pieces.size(piece), 0, k};
  }

  // In the order in which they are enqueued.
  std::vector<AgPush> pushes() const {
    std::vector<AgPush> list;
    for (int piece = 0; piece < pieces.count(); ++piece) {
      for (int step = 0; step < world - 1; ++step) list.push_back({ag_push_peer(rank, world, step), piece});
    }
    return list;
  }

  std::vector<AgProduct> products() const {
    std::vector<AgProduct> list;
    if (!is_uniform(kind)) list.push_back({rank, 1, -1, {0, rows, 0, k}});
    for (int piece = 0; piece < pieces.count(); ++piece) {
      if (is_uniform(kind)) {
        list.push_back({0, world, piece, block(piece)});
      } else if (kind == ChunkSchedule::kHeteroFused1d) {
        if (rank > 0) list.push_back({0, rank, piece, block(piece)});
        if (rank < world - 1) list.push_back({rank + 1, world - 1 - rank, piece, block(piece)});
      } else {
        for (int step = 1; step < world; ++step) list.push_back({ag_chunk(rank, world, step), 1, piece, block(piece)});
      }
    }
    return list;
  }
};

inline AgSchedule make_ag_schedule(ChunkSchedule kind, int rank, int world, int64_t rows, int64_t k, int32_t chunks) {
  return {kind, rank, world, rows, k, make_chunks(is_along_k(kind) ? k : rows, chunks)};
}

// One GEMM of gemm_rs: the partial of rows [row, row + rows) of the chunk of `owner`. It is pushed as `piece` of this
// rank once it is computed; the own chunk (piece -1) comes last, in one.
struct RsProduct {
  int owner;
  int piece;
  int64_t row, rows;
};

inline std::vector<RsProduct> rs_products(int rank, int world, int64_t rows, Pieces const& pieces) {
  std::vector<RsProduct> list;
  for (int step = 0; step < world - 1; ++step) {
    for (int piece = 0; piece < pieces.count(); ++piece) {
      list.push_back({rs_chunk(rank, world, step), piece, pieces.begin(piece), pieces.size(piece)});
    }
  }
  list.push_back({rank, -1, 0, rows});
  return list;
}

// gemm_rs: [slot of the source][row][n]. Slots begin at addresses that 16-byte loads take.
inline int64_t rs_chunk_bytes(int64_t rows, int64_t n, int64_t element_size) {
  return round_up(rows * n * element_size, 16);
}
inline int64_t rs_chunk_offset(int slot, int64_t row, int64_t rows, int64_t n, int64_t element_size) {
  return slot * rs_chunk_bytes(rows, n, element_size) + row * n * element_size;
}

}  // namespace flux
