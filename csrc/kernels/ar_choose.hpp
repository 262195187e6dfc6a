#pragma once
// How gemm_ar runs a problem: pure functions of it, so all ranks decide alike.
//
//   few rows    a kernel of ar_kernels.hpp; the exchange is one-shot or two-shot (schedule/exchange_layout.hpp)
//   many rows   a kernel of gemm_rs on sections of the rows (schedule/ar_schedule.hpp)

#include <algorithm>
#include <string>
#include <vector>

#include "kernels/ar_kernels.hpp"
#include "kernels/candidates.hpp"
#include "schedule/ar_schedule.hpp"

namespace flux {

struct ArChoice {
  int few_rows = -1;  // index into kArKernels, or
  LaunchChoice many_rows{};
  bool two_shot = false;  // of few rows

  bool is_few_rows() const { return few_rows >= 0; }
  std::string name() const {
    if (is_few_rows()) return std::string(kArKernels[few_rows].name) + (two_shot ? "/two-shot" : "/one-shot");
    return many_rows.name() + "/s" + std::to_string(many_rows.sections);
  }
};

// Reads what ArChoice::name writes. Returns false if the text is none.
inline bool parse_ar_choice(std::string const& text, ArChoice* choice) {
  for (int kernel = 0; kernel < kNumArKernels; ++kernel) {
    for (bool const two_shot : {false, true}) {
      *choice = ArChoice{kernel, {}, two_shot};
      if (choice->name() == text) return true;
    }
  }
  *choice = ArChoice{};
  size_t const sections = text.rfind("/s");
  if (sections == std::string::npos || !parse_choice(text.substr(0, sections), &choice->many_rows)) return false;
  choice->many_rows.sections = parse_count(text.substr(sections + 2));
  return choice->many_rows.sections >= 1 && choice->name() == text;
}

constexpr int kMostArSections = 4;

// With fewer, the chunks of the ranks are mostly padding.
inline int64_t least_many_rows(int world) { return int64_t{128} * world; }

// The problem of the gemm_rs kernel that computes one section after the other; rounded up where M is no multiple.
inline Problem section_problem(Problem const& problem, int sections) {
  Problem chunk = problem;
  chunk.op = Op::kGemmRs;
  chunk.rows = ceil_div(problem.rows, int64_t{sections} * problem.world);
  return chunk;
}

// Why a choice can't run the problem, as the end of a sentence; empty if it can.
inline std::string why_not_ar(Problem const& problem, ArChoice const& choice) {
  if (choice.is_few_rows()) {
    ArKernelRow const& kernel = kArKernels[choice.few_rows];
    if (problem.weight_transposed) return "the kernels for few rows take no transposed weight";
    if (kernel.slot_bytes(problem.rows, problem.n, problem.world) > kExchangeBytes) {
      return "partials of " + std::to_string(problem.rows) + " x " + std::to_string(problem.n) + " of " +
             std::to_string(problem.world) + " ranks don't fit into the exchange area of " +
             std::to_string(kExchangeBytes >> 20) + " MiB";
    }
    return {};
  }
  LaunchChoice const& many = choice.many_rows;
  // Without M itself: `auto` warns of a reason once.
  if (problem.rows < least_many_rows(problem.world)) {
    return "the kernels for many rows take M from " + std::to_string(least_many_rows(problem.world)) + " on";
  }
  if (problem.rows % (int64_t{many.sections} * problem.world) != 0) {
    return "the kernels for many rows take an M that is a multiple of TP x sections = " +
           std::to_string(many.sections * problem.world);
  }
  if (many.sections > kMostArSections || many.sections * (many.pieces + 1) > kMaxPieces) {
    return std::to_string(many.sections) + " sections of " + std::to_string(many.pieces) + " pieces are more than " +
           std::to_string(kMostArSections) + ", or need more than " + std::to_string(kMaxPieces) + " signals";
  }
  return {};
}

// Bytes of the send buffer and of a region for many rows, whatever the kernel and the sections. They grow with M.
inline int64_t ar_send_bytes_at_most(Problem const& problem) {
  int64_t most = 0;
  if (problem.rows < least_many_rows(problem.world)) return most;
  for (int sections = 1; sections <= kMostArSections; ++sections) {
    most = std::max(most, sections * largest_rs_region_bytes(section_problem(problem, sections)));
  }
  return most;
}
inline int64_t ar_region_bytes_at_most(Problem const& problem) {
  int64_t const send = ar_send_bytes_at_most(problem);
  return send == 0 ? 0 : round_up(send, kRegionAlign) + problem.rows * problem.n * element_size(problem.dtype);
}

inline ArChoice many_rows_choice(Problem const& problem, int sections) {
  ArChoice choice;
  choice.many_rows = choose_launch(section_problem(problem, sections));
  choice.many_rows.pieces = 1;
  choice.many_rows.sections = sections;
  return choice;
}

// What is worth a measurement, the model's choice first: few rows as measured on H100s and H200s.
inline std::vector<ArChoice> ar_candidates(Problem const& problem) {
  std::vector<ArChoice> candidates;
  auto const add = [&](ArChoice const& choice) {
    auto const same = [&](ArChoice const& other) { return other.name() == choice.name(); };
    if (why_not_ar(problem, choice).empty() && std::none_of(candidates.begin(), candidates.end(), same)) {
      candidates.push_back(choice);
    }
  };
  constexpr int64_t kFewRowsAtMost = 512;
  if (problem.rows <= kFewRowsAtMost) {
    // The least tile that holds all rows, or the largest there is; the one before it, which is first where the weight
    // has too few rows to fill the chip with whole ones; and the one after.
    int enough = 0;
    while (enough < kNumArKernels - 1 && kArKernels[enough].tile_m < problem.rows) ++enough;
    bool const halves = kArKernels[enough].num_tiles(1, problem.n) < 96;
    bool const two_shot_first = problem.world > 2 && problem.rows > 32;
    for (int const kernel : {halves ? enough - 1 : enough, halves ? enough : enough - 1, enough + 1}) {
      if (kernel < 0 || kernel >= kNumArKernels) continue;
      add({kernel, {}, two_shot_first});
      if (problem.world > 2) add({kernel, {}, !two_shot_first});
    }
  }
  for (int const sections : {2, 4, 1}) {
    if (problem.rows % (int64_t{sections} * problem.world) != 0) continue;
    for (LaunchChoice launch : launch_candidates(section_problem(problem, sections))) {
      ArChoice choice = many_rows_choice(problem, sections);
      if (launch.kernel != choice.many_rows.kernel && launch.swizzle != 1) continue;
      launch.sections = sections;
      choice.many_rows = launch;
      add(choice);
    }
  }
  return candidates;
}

// The configuration that the problem names, or the first candidate; false if there is none.
inline bool find_ar_choice(Problem const& problem, ArChoice* choice) {
  if (!problem.config.empty()) return parse_ar_choice(problem.config, choice);
  std::vector<ArChoice> const candidates = ar_candidates(problem);
  if (!candidates.empty()) *choice = candidates.front();
  return !candidates.empty();
}

// Why the plain sequence is faster than the first candidate, or empty. With more rows than a tile has, the kernels for
// few rows read the weights more than once.
inline std::string why_ar_is_slower(Problem const& problem) {
  std::vector<ArChoice> const candidates = ar_candidates(problem);
  if (candidates.empty()) return {};
  if (candidates.front().is_few_rows()) {
    int const most = kArKernels[kNumArKernels - 1].tile_m;
    if (problem.rows <= most) return {};
    return "M is " + std::to_string(problem.rows) + "; the kernels for few rows pay up to " + std::to_string(most);
  }
  return why_fused_is_slower(section_problem(problem, candidates.front().many_rows.sections));
}

}  // namespace flux
