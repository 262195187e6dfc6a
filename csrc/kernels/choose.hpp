#pragma once
// Which kernel and knobs run a problem, as a pure function of the problem: all ranks decide alike.

#include <string>

#include "kernels/kernels.hpp"
#include "ops/problem.hpp"

namespace flux {

// Pieces of a chunk of `bytes`: each big enough for the copy engine to run at full speed (about 4 MB).
inline int choose_pieces(int64_t bytes, int most) {
  int64_t const full_speed = int64_t{4} << 20;
  int64_t const pieces = bytes / full_speed;
  return pieces < 1 ? 1 : pieces > most ? most : static_cast<int>(pieces);
}

inline int kernel_index(std::string const& name) {
  for (int i = 0; i < kNumKernels; ++i) {
    if (name == kKernels[i].config.name) return i;
  }
  return -1;
}

// Reads "c128x256_2x1/n2/p2" (LaunchChoice::name). Returns false if the text is none.
inline bool parse_choice(std::string const& text, LaunchChoice* choice) {
  size_t const first = text.find('/');
  size_t const second = text.find("/p", first == std::string::npos ? first : first + 1);
  if (first == std::string::npos || second == std::string::npos) return false;
  choice->kernel = kernel_index(text.substr(0, first));
  char const raster = text[first + 1];
  choice->along_n = raster == 'n';
  choice->swizzle = std::atoi(text.substr(first + 2, second - first - 2).c_str());
  choice->pieces = std::atoi(text.substr(second + 2).c_str());
  return choice->kernel >= 0 && (raster == 'n' || raster == 'm') && choice->swizzle >= 1 && choice->pieces >= 1 &&
         choice->pieces <= kMaxPieces;
}

// Rows of a chunk, rounded up to whole clusters of a kernel.
inline int64_t padded_rows(int64_t rows, TileShape shape) {
  return round_up(rows, int64_t{shape.tile_m} * shape.cluster_m);
}

// Measured on H100s at TP = 2 and 4 (benchmarks/bench.py --explore).
inline LaunchChoice choose_launch(Problem const& problem) {
  bool const ag = problem.op == Op::kAgGemm;
  int const tall = kernel_index("c256x128_2x1");
  int const wide = kernel_index("c128x256_2x1");
  int64_t const least = padded_rows(problem.rows, kKernels[wide].config.shape);
  LaunchChoice choice;
  if (problem.rows <= 128) {  // one row of tiles a chunk: small tiles share it out better
    choice = {kernel_index("p128x128_2x1"), 2, true, 1};
  } else if (ag && padded_rows(problem.rows, kKernels[tall].config.shape) <= least + least / 16) {
    choice = {tall, 1, false, 1};
  } else {
    choice = {wide, ag ? 4 : 1, false, 1};
  }
  // The own shard of ag_gemm hides the arrival of the next; a partial of gemm_rs should leave before its chunk is done.
  if (!ag) choice.pieces = choose_pieces(problem.rows * problem.n * 2, 2);
  return choice;
}

}  // namespace flux
