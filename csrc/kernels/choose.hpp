#pragma once
// Which kernel and knobs run a problem, as a pure function of the problem: all ranks decide alike.

#include <algorithm>
#include <string>

#include "kernels/kernels.hpp"
#include "kernels/num_sms.hpp"
#include "ops/problem.hpp"

namespace flux {

constexpr int64_t kFullSpeedBytes = int64_t{4} << 20;  // of a push, about

// Pieces of a chunk of `bytes`: each big enough for the copy engine to run at full speed.
inline int choose_pieces(int64_t bytes, int most, int64_t least = kFullSpeedBytes) {
  int64_t const pieces = bytes / least;
  return pieces < 1 ? 1 : pieces > most ? most : static_cast<int>(pieces);
}

inline int kernel_index(std::string const& name) {
  for (int i = 0; i < kNumKernels; ++i) {
    if (name == kKernels[i].config.name) return i;
  }
  return -1;
}

// A number of at most four digits, at least 1; 0 if the text is none.
inline int parse_count(std::string const& text) {
  bool const digits = text.find_first_not_of("0123456789") == std::string::npos;
  return digits && !text.empty() && text.size() <= 4 ? std::stoi(text) : 0;
}

// Cuts the ending off the text, and says whether it was there.
inline bool take_ending(std::string* text, std::string const& ending) {
  bool const ends =
      text->size() >= ending.size() && text->compare(text->size() - ending.size(), ending.size(), ending) == 0;
  if (ends) text->resize(text->size() - ending.size());
  return ends;
}

// Reads "c128x256_2x1/n2/p2" (LaunchChoice::name). Returns false if the text is none.
inline bool parse_choice(std::string text, LaunchChoice* choice) {
  choice->same_order = take_ending(&text, kSameOrder);
  size_t const first = text.find('/');
  size_t const second = text.find("/p", first == std::string::npos ? first : first + 1);
  if (first == std::string::npos || second == std::string::npos) return false;
  choice->kernel = kernel_index(text.substr(0, first));
  char const raster = text[first + 1];
  choice->along_n = raster == 'n';
  choice->swizzle = second > first + 2 ? parse_count(text.substr(first + 2, second - first - 2)) : 0;
  choice->pieces = parse_count(text.substr(second + 2));
  return choice->kernel >= 0 && (raster == 'n' || raster == 'm') && choice->swizzle >= 1 && choice->pieces >= 1 &&
         choice->pieces <= kMaxPieces;
}

inline int64_t num_tiles(Problem const& problem, TileShape shape) {
  return int64_t{problem.world} * make_tile_order(problem.rows, problem.n, shape, 1, false).num_tiles();
}

// Microseconds of the product by the kernel's model. Close enough to choose by, no more.
inline double estimated_us(Problem const& problem, KernelRow const& kernel) {
  TileShape const shape = kernel.config.shape;
  double const mmac = double(shape.tile_m) * shape.tile_n * double(problem.k) / 1e6;
  int64_t const waves = ceil_div(num_tiles(problem, shape), kNumSms);
  return waves * std::max(mmac * kernel.model.us_per_mmac + kernel.model.us_per_wave, 1.0);
}

// The kernel by the model; its knobs as measured on H100s and H200s at TP = 2 and 4 (flux_ops bench --explore).
inline LaunchChoice choose_launch(Problem const& problem) {
  bool const ag = problem.op == Op::kAgGemm;
  int best = 0;
  for (int kernel = 1; kernel < kNumKernels; ++kernel) {
    if (estimated_us(problem, kKernels[kernel]) < estimated_us(problem, kKernels[best])) best = kernel;
  }
  TileShape const shape = kKernels[best].config.shape;
  LaunchChoice choice{best, /*swizzle=*/1, /*along_n=*/false, /*pieces=*/1};
  if (shape.tile_n == 192 && ag) choice = {best, 4, true, 1};
  if (shape.tile_m == 128 && shape.tile_n == 128) choice = {best, 2, true, 1};
  if (shape.tile_n == 256 && ag) choice = {best, 4, false, 1};
  // The own shard of ag_gemm hides the arrival of the next; a partial of gemm_rs should leave before its chunk is done.
  if (!ag) choice.pieces = choose_pieces(problem.rows * problem.n * 2, 2);
  return choice;
}

// Why the plain sequence is faster than the fused kernels, or empty. Measured as above: with fewer rows a rank the
// tiles are mostly padding, and with fewer tiles most SMs have nothing to do.
inline std::string why_too_few_tiles(Problem const& problem) {
  constexpr int64_t kLeastRows = 256, kLeastTiles = 192;
  if (problem.rows < kLeastRows) {
    return "a chunk has " + std::to_string(problem.rows) + " rows; fused pays from " + std::to_string(kLeastRows) +
           " on";
  }
  int64_t const tiles = num_tiles(problem, {128, 128, 1, 1});
  if (tiles < kLeastTiles) {
    return "the product has " + std::to_string(tiles) + " tiles of 128 x 128; fused pays from " +
           std::to_string(kLeastTiles) + " on";
  }
  return {};
}

}  // namespace flux
