#pragma once
// Partials on their way to the ranks that add them up, tile by tile, in the regions of the workspace.

#include <ATen/core/Tensor.h>

#include <atomic>
#include <vector>

#include "cpu/protocol.hpp"
#include "cpu/tile_gemm.hpp"

namespace flux::cpu {

// Slots of `num_tiles` tiles, in the dtype of the problem.
class Staging {
 public:
  Staging(Problem const& problem, Exchange const& exchange, TileShape shape, int64_t num_tiles)
      : problem_(problem), exchange_(exchange), shape_(shape), num_tiles_(num_tiles) {}

  int64_t tile_bytes() const { return rs_tile_bytes(shape_.tile_m, shape_.tile_n, element_size(problem_.dtype)); }

  // The tile at `position` of a slot in the region of `rank`.
  at::Tensor tile(int rank, int slot, int64_t position, TileRange const& range) const {
    int64_t const offset = rs_tile_offset(slot, rs_slot_bytes(num_tiles_, tile_bytes()), position, tile_bytes());
    std::byte* const data = exchange_.region(rank) + offset;
    return view_matrix(problem_.dtype, data, range.rows, range.cols, shape_.tile_n);
  }

 private:
  Problem const& problem_;
  Exchange const& exchange_;
  TileShape shape_;
  int64_t num_tiles_;
};

// Counts that several workers bring down to 0.
class Countdown {
 public:
  explicit Countdown(int counts) : left_(counts) {}
  void set(int index, int32_t count) { left_[index] = count; }
  // True for the one that finishes the last.
  bool finish_one(int index) { return left_[index].fetch_sub(1, std::memory_order_acq_rel) == 1; }

 private:
  std::vector<std::atomic<int32_t>> left_;
};

// part(0) + part(1) + ...: the parts of all ranks in rank order, which no timing changes.
template <class Part>
at::Tensor add_in_rank_order(int world, Part const& part) {
  at::Tensor total = part(0).clone();
  for (int source = 1; source < world; ++source) total.add_(part(source));
  return total;
}

}  // namespace flux::cpu
