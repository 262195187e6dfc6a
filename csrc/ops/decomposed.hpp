#pragma once
// The configurations of the decomposed strategy, by name ("hetero-unfused-1d/c2"), and the choice among them: pure
// functions of the problem, so all ranks decide alike.

#include <limits>
#include <string>
#include <vector>

#include "ops/problem.hpp"
#include "schedule/chunk_schedule.hpp"

namespace flux {

struct ScheduleRow {
  ChunkSchedule schedule;
  Op op;
  char const* text;
  int least;  // chunks worth a try: with fewer nothing overlaps, with more the pieces are small
  int most;

  bool has_chunks() const { return most > 1; }
  std::string name(int chunks) const { return has_chunks() ? std::string(text) + "/c" + std::to_string(chunks) : text; }
};
inline constexpr ScheduleRow kSchedules[] = {
    {ChunkSchedule::kUniformFused1d, Op::kAgGemm, "uniform-fused-1d", 2, 4},
    {ChunkSchedule::kHeteroFused1d, Op::kAgGemm, "hetero-fused-1d", 1, 4},
    {ChunkSchedule::kHeteroUnfused1d, Op::kAgGemm, "hetero-unfused-1d", 1, 4},
    {ChunkSchedule::kUniformFused2d, Op::kAgGemm, "uniform-fused-2d", 2, 4},
    {ChunkSchedule::kGather, Op::kAgGemm, "gather", 1, 1},
    {ChunkSchedule::kRowChunks, Op::kGemmRs, "chunks", 1, 4},
    {ChunkSchedule::kOneShot, Op::kGemmAr, "one-shot", 1, 1},
    {ChunkSchedule::kTwoShot, Op::kGemmAr, "two-shot", 1, 1},
};

struct Decomposition {
  ChunkSchedule schedule;
  int chunks;  // of a shard (ag_gemm) or of the rows for one owner (gemm_rs), at most; else 1

  std::string name() const {
    for (ScheduleRow const& row : kSchedules) {
      if (row.schedule == schedule) return row.name(chunks);
    }
    return {};
  }
};

// What name() writes for this op, read back. Returns false if the text is none.
inline bool parse_decomposition(Op op, std::string const& text, Decomposition* decomposition) {
  for (ScheduleRow const& row : kSchedules) {
    if (row.op != op || text.rfind(row.text, 0) != 0) continue;
    for (int chunks = 1; chunks <= (row.has_chunks() ? kMaxPieces : 1); ++chunks) {
      *decomposition = {row.schedule, chunks};
      if (row.name(chunks) == text) return true;
    }
  }
  return false;
}

// FiCCO's heuristic (section V-C). Cutting hurts least along the longer of M and K. Among the schedules along M, the
// more a product has to do, op-to-byte ratio times memory traffic, the finer it may be cut, and the more it suffers
// from what runs beside it. That figure is the number of operations; it is compared with what the GPU does at its peak
// in a unit of time. The unit is ours: the products of the paper take some hundred times as long as those here.
inline ChunkSchedule choose_schedule(Problem const& problem) {
  constexpr double kUnitSeconds = 100e-6;
  double const peak_ops_per_second = element_size(problem.dtype) == 2 ? 989e12 : 67e12;  // H100 SXM, dense
  int64_t const m = problem.world * problem.rows;
  if (m <= problem.k) return ChunkSchedule::kUniformFused2d;
  double const ops = 2.0 * static_cast<double>(m) * static_cast<double>(problem.n) * static_cast<double>(problem.k);
  double const units = ops / (peak_ops_per_second * kUnitSeconds);
  if (units < 1) return ChunkSchedule::kUniformFused1d;
  return units > 5 ? ChunkSchedule::kHeteroUnfused1d : ChunkSchedule::kHeteroFused1d;
}

// In a two-shot all-reduce each byte goes to fewer ranks, but twice, which takes a microsecond or two longer: a
// one-shot one may send so many bytes more in that time.
inline ChunkSchedule choose_all_reduce(Problem const& problem) {
  constexpr double kBytesMeanwhile = 512 << 10;
  double const bytes = double(problem.rows) * double(problem.n) * double(element_size(problem.dtype));
  double const more = bytes / problem.world * (problem.world - 1) * (problem.world - 2);
  return more <= kBytesMeanwhile ? ChunkSchedule::kOneShot : ChunkSchedule::kTwoShot;
}

// The paper cuts a shard into as many chunks as there are ranks: no more, and none too small for a copy engine to run
// at full speed. Along K there are two: each more reads and writes the sums once more. A GEMM of
// gemm_rs keeps the copy engine busy while the next one runs: two of them do.
inline Decomposition choose_decomposition(Problem const& problem) {
  constexpr int64_t kFullSpeedBytes = int64_t{4} << 20;
  auto const clamp = [](int64_t v, int least, int most) {
    return static_cast<int>(v < least ? least : v > most ? most : v);
  };
  int64_t const size = element_size(problem.dtype);
  if (problem.op == Op::kGemmAr) return {choose_all_reduce(problem), 1};
  if (problem.op == Op::kGemmRs) {
    return {ChunkSchedule::kRowChunks, clamp(problem.rows * problem.n * size / kFullSpeedBytes, 1, 2)};
  }
  ChunkSchedule const schedule = choose_schedule(problem);
  if (is_along_k(schedule)) return {schedule, 2};
  int const most = problem.world > kMaxPieces ? kMaxPieces : problem.world;
  return {schedule, clamp(problem.rows * problem.k * size / kFullSpeedBytes, 2, most < 2 ? 2 : most)};
}

inline Problem with_config(Problem problem, std::string const& config) {
  problem.config = config;
  return problem;
}

// What the problem names, or the default.
inline Decomposition decomposition_of(Problem const& problem) {
  Decomposition named{};
  if (parse_decomposition(problem.op, problem.config, &named)) return named;
  return choose_decomposition(problem);
}

inline AgSchedule ag_schedule_of(Problem const& problem) {
  Decomposition const d = decomposition_of(problem);
  return make_ag_schedule(d.schedule, problem.rank, problem.world, problem.rows, problem.k, d.chunks);
}

// Whether GEMMs along K add up in y itself. Sums of 16 bits would be rounded once a GEMM: they add up in fp32.
inline bool sums_in_result(DataType dtype, int num_sums) { return element_size(dtype) != 2 || num_sums <= 1; }

// Why the strategy can't run this problem on any backend, as the end of a sentence; empty if it can.
inline std::string why_not_decomposed(Problem const& problem) {
  Decomposition named{};
  if (!problem.config.empty() && !parse_decomposition(problem.op, problem.config, &named)) {
    return "there is no configuration '" + problem.config + "' (one is '" + choose_decomposition(problem).name() + "')";
  }
  constexpr int64_t kLimit = std::numeric_limits<int32_t>::max();  // of extents (cuBLAS), of a row's bytes (2-D copies)
  if (problem.rows > kLimit / problem.world || problem.n > kLimit || problem.k > kLimit / element_size(problem.dtype)) {
    return "a chunk of " + std::to_string(problem.rows) + " x " + std::to_string(problem.n) + " x " +
           std::to_string(problem.k) + " has an extent past 2^31";
  }
  return {};
}

// The configurations that are worth a measurement, by name.
inline std::vector<std::string> decomposed_candidates(Op op) {
  std::vector<std::string> names;
  for (ScheduleRow const& row : kSchedules) {
    for (int chunks = row.least; row.op == op && chunks <= row.most; chunks *= 2) {
      names.push_back(row.name(chunks));
    }
  }
  return names;
}

// The partials of gemm_rs on their way, in a region of the CPU backend.
inline int64_t rs_chunks_bytes(Problem const& problem) {
  return (problem.world - 1) * rs_chunk_bytes(problem.rows, problem.n, element_size(problem.dtype));
}

}  // namespace flux
