#pragma once
// How the fused strategy runs a problem: pure functions of it, so all ranks decide alike.
//
//   few rows    a kernel of few_rows_kernels.hpp; for gemm_ar the exchange is one-shot or two-shot
//   many rows   a kernel of kernels.hpp; for gemm_ar one of gemm_rs, on sections of the rows (schedule/ar_schedule.hpp)

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "kernels/candidates.hpp"
#include "kernels/exchange_choose.hpp"
#include "kernels/few_rows_choose.hpp"
#include "schedule/ar_schedule.hpp"

namespace flux {

struct FusedChoice {
  int few_rows = -1;  // index into kFewRowsKernels, or
  LaunchChoice many_rows{};
  ExchangeForm form{};  // of few rows

  bool is_few_rows() const { return few_rows >= 0; }
  std::string name(Op op) const {
    std::string const ar_form = form == ExchangeForm::kTwoShot ? "/two-shot" : "/one-shot";
    std::string const sections = "/s" + std::to_string(many_rows.sections);
    std::string const name = is_few_rows() ? kFewRowsKernels[few_rows].name : many_rows.name();
    return op != Op::kGemmAr ? name : name + (is_few_rows() ? ar_form : sections);
  }
};

inline std::vector<ExchangeForm> exchange_forms(Op op) {
  switch (op) {
    case Op::kAgGemm:
      return {ExchangeForm::kGather};
    case Op::kGemmRs:
      return {ExchangeForm::kScatter};
    case Op::kGemmAr:
      break;
  }
  return {ExchangeForm::kOneShot, ExchangeForm::kTwoShot};
}

// Reads what FusedChoice::name writes. Returns false if the text is none.
inline bool parse_fused_choice(Op op, std::string const& text, FusedChoice* choice) {
  for (int kernel = 0; kernel < kNumFewRowsKernels; ++kernel) {
    for (ExchangeForm const form : exchange_forms(op)) {
      *choice = FusedChoice{kernel, {}, form};
      if (choice->name(op) == text) return true;
    }
  }
  *choice = FusedChoice{};
  if (op != Op::kGemmAr) return parse_choice(text, &choice->many_rows);
  size_t const sections = text.rfind("/s");
  if (sections == std::string::npos || !parse_choice(text.substr(0, sections), &choice->many_rows)) return false;
  choice->many_rows.sections = parse_count(text.substr(sections + 2));
  return choice->many_rows.sections >= 1 && choice->name(op) == text;
}

constexpr int kMostArSections = 4;

// Of a kernel: the rows of its clusters, to which those of a chunk are padded.
inline int64_t padded_to(int kernel) {
  TileShape const shape = kKernels[kernel].config.shape;
  return int64_t{shape.tile_m} * shape.cluster_m;
}
// What pads a chunk of gemm_ar takes memory: not more than a third of its rows, or, where there is one section, than
// the kernels with the smallest tiles need, but never more than its rows.
inline bool has_least_padding(int sections, int kernel) {
  int64_t least = padded_to(0);
  for (int i = 1; i < kNumKernels; ++i) least = std::min(least, padded_to(i));
  return sections == 1 && padded_to(kernel) == least;
}
inline bool is_filled(int64_t rows, int sections, int kernel) {
  int64_t const padded = round_up(rows, padded_to(kernel));
  return has_least_padding(sections, kernel) ? 2 * rows >= padded : 4 * rows >= 3 * padded;
}
// The most rows that such chunks of up to so many rows are padded to.
inline int64_t padded_at_most(int64_t rows, int sections, int kernel) {
  int64_t const tile = padded_to(kernel);
  if (has_least_padding(sections, kernel)) return 2 * rows >= tile ? round_up(rows, tile) : 0;
  return 4 * rows / (3 * tile) * tile;
}

// The problem of the gemm_rs kernel that computes one section after the other; rounded up where M is no multiple.
inline Problem section_problem(Problem const& problem, int sections) {
  Problem chunk = problem;
  chunk.op = Op::kGemmRs;
  chunk.rows = ceil_div(problem.rows, int64_t{sections} * problem.world);
  return chunk;
}

// The same for the model: one kernel computes the chunks of all sections.
inline Problem chunks_problem(Problem const& problem, int sections) {
  Problem chunks = section_problem(problem, sections);
  chunks.world *= sections;
  return chunks;
}

// Of a section: a chunk of partials and one of results have a signal for each piece.
inline int most_ar_pieces(int sections) { return kMaxPieces / (2 * sections); }

// How a choice cuts a chunk (gemm_ar: of a section): its tiles, and its pieces, of rows (ag_gemm) or of tile positions.
// Those of gemm_ar are blocks of y: see schedule/ar_results.hpp.
struct ChunkCut {
  TileOrder order;
  Pieces pieces;
};
inline ChunkCut cut_chunk(Problem const& problem, LaunchChoice const& launch) {
  bool const ar = problem.op == Op::kGemmAr;
  int64_t const rows = ar ? section_problem(problem, launch.sections).rows : problem.rows;
  TileShape const shape = kKernels[launch.kernel].config.shape;
  TileOrder const order = make_tile_order(rows, problem.n, shape, launch.swizzle, launch.along_n);
  if (problem.op == Op::kAgGemm) return {order, make_pieces(rows, launch.pieces, 1)};
  int32_t const granule = ar ? order.tiles_of_block() : order.cluster_size();
  return {order, make_pieces(order.num_tiles(), launch.pieces, std::max(granule, 1))};  // an empty chunk has no block
}

inline int64_t section_chunk_bytes(Problem const& problem, int sections) {
  return section_problem(problem, sections).rows * problem.n * element_size(problem.dtype);
}

// Of a piece of gemm_ar. With more than two ranks pushes of several come to one at a time, which takes them longer, and
// there are more of them.
inline int64_t ar_piece_bytes(int world) { return world == 2 ? kFullSpeedBytes : 2 * kFullSpeedBytes; }

// The two-shot form may have more than the least slots: they are twice as large as y, whatever the number of ranks.
inline bool slots_may_grow(Problem const& problem, ExchangeForm form) {
  return form == ExchangeForm::kTwoShot && total_rows(problem) <= few_rows_at_most(problem.op);
}

// Why a choice can't run the problem, as the end of a sentence; empty if it can.
inline std::string why_not_few_rows(Problem const& problem, FusedChoice const& choice) {
  if (problem.weight_transposed) return "the kernels for few rows take no transposed weight";
  FewRowsRow const& kernel = kFewRowsKernels[choice.few_rows];
  int64_t const m = total_rows(problem);
  auto const too_large = [](std::string const& what, int64_t limit) {
    return what + " don't fit into the exchange area of " + std::to_string(limit >> 20) + " MiB";
  };
  if (problem.op == Op::kAgGemm) {
    if (gathered_rows_fit(problem)) return {};
    return too_large(std::to_string(m) + " rows of " + std::to_string(problem.k), kGatherBytes);
  }
  if (slots_may_grow(problem, choice.form)) return {};
  if (choice.form == ExchangeForm::kTwoShot) {
    return "the two-shot form of the kernels for few rows takes an M up to " +
           std::to_string(few_rows_at_most(problem.op));
  }
  if (kernel.slot_bytes(choice.form, m, problem.n, problem.world) <= kExchangeBytes) return {};
  return too_large("partials of " + std::to_string(m) + " x " + std::to_string(problem.n) + " of " +
                       std::to_string(problem.world) + " ranks",
                   kExchangeBytes);
}

inline std::string why_not_fused_choice(Problem const& problem, FusedChoice const& choice) {
  if (choice.is_few_rows()) return why_not_few_rows(problem, choice);
  if (problem.op != Op::kGemmAr) return {};
  LaunchChoice const& many = choice.many_rows;
  // Without M itself: `auto` warns of a reason once.
  if (problem.rows % (int64_t{many.sections} * problem.world) != 0) {
    return "the kernels for many rows take an M that is a multiple of TP x sections = " +
           std::to_string(many.sections * problem.world);
  }
  if (!is_filled(section_problem(problem, many.sections).rows, many.sections, many.kernel)) {
    return "too much of the tiles of this kernel for many rows is empty";
  }
  if (many.same_order) return "the ranks of a gemm_ar don't take their chunks in one order";
  if (many.sections > kMostArSections || many.pieces > most_ar_pieces(many.sections)) {
    return "gemm_ar takes up to " + std::to_string(kMostArSections) + " sections, and up to " +
           std::to_string(kMaxPieces / 2) + " pieces in all of them";
  }
  return {};
}

// Bytes of a peer's slot for many rows, whatever the kernel and the sections that run. They grow with M.
inline int64_t ar_slot_bytes_at_most(Problem const& problem) {
  int64_t partials = 0;
  for (int sections = 1; sections <= kMostArSections; ++sections) {
    for (int kernel = 0; kernel < kNumKernels; ++kernel) {
      Problem chunk = section_problem(problem, sections);
      chunk.rows = padded_at_most(chunk.rows, sections, kernel);
      partials = std::max(partials, sections * rs_slot_bytes_of(chunk, kKernels[kernel].config.shape));
    }
  }
  if (partials == 0) return 0;
  int64_t const rows_of_owner = ceil_div(problem.rows, problem.world);
  return round_up(partials, kRegionAlign) + rows_of_owner * problem.n * element_size(problem.dtype);
}

inline FusedChoice many_rows_choice(Problem const& problem, int sections) {
  FusedChoice choice;
  choice.many_rows = choose_launch(chunks_problem(problem, sections));
  choice.many_rows.pieces =
      choose_pieces(section_chunk_bytes(problem, sections), most_ar_pieces(sections), ar_piece_bytes(problem.world));
  choice.many_rows.sections = sections;
  return choice;
}

constexpr int64_t kFewRowsFirst = 256;  // up to so many they are faster than those for many rows
constexpr double kFullTiles = 0.8;      // the least row_fill where the padding of tiles costs as much as rows do

// The share of the rows of a choice's tiles that are rows of the product; those of a chunk for many rows.
inline double row_fill(Problem const& problem, FusedChoice const& choice) {
  auto const fill = [](int64_t rows, int64_t tile) { return double(rows) / double(round_up(rows, tile)); };
  if (choice.is_few_rows()) return fill(total_rows(problem), kFewRowsKernels[choice.few_rows].tile_m);
  bool const ar = problem.op == Op::kGemmAr;
  int64_t const rows = ar ? section_problem(problem, choice.many_rows.sections).rows : problem.rows;
  return fill(rows, padded_to(choice.many_rows.kernel));
}

// The least time of a product for many rows with more than two ranks, or what runs beside fused is faster: SMs send
// faster than the copy engines of several ranks, which the product has to outweigh. In microseconds by the kernel's
// model; measured at TP = 4 (bench --study rows --lists models). What runs beside an ag_gemm is a gather by one kernel,
// where x is small enough, or NCCL's.
inline double least_us(Problem const& problem) {
  if (problem.op == Op::kAgGemm) return why_no_all_gather(problem).empty() ? 27.0 : 11.0;
  return problem.op == Op::kGemmRs ? 21.0 : 95.0;
}

// Why what runs beside fused is faster than a choice for many rows, or empty.
inline std::string why_many_rows_are_slower(Problem const& problem, FusedChoice const& choice) {
  bool const ar = problem.op == Op::kGemmAr;
  Problem const chunks = ar ? chunks_problem(problem, choice.many_rows.sections) : problem;
  if (std::string const slower = why_too_few_tiles(chunks); !slower.empty()) return slower;
  std::string const m = "M is " + std::to_string(total_rows(problem));
  double const least_fill = ar ? 0.9 : kFullTiles;  // a gemm_ar gains less; measured at TP = 2 (bench --study rows)
  if (row_fill(problem, choice) < least_fill) return m + ", which leaves too much of the tiles of a rank's rows empty";
  KernelRow const& kernel = kKernels[choice.many_rows.kernel];
  if (ar && num_tiles(chunks, kernel.config.shape) < 2 * kNumSms) {  // measured at TP = 2 and 4
    return m + ", whose tiles are computed nearly all at once: too few travel meanwhile";
  }
  double const us = estimated_us(ar ? chunks_problem(problem, 1) : problem, kernel);
  if (problem.world > 2 && us < least_us(problem)) {
    return "the product takes " + std::to_string(std::lround(us)) +
           " us by the model; with more than two ranks fused pays from " +
           std::to_string(std::lround(least_us(problem))) + " us on";
  }
  return {};
}

// As many as leave chunks of a piece or more, and full tiles: the first's results travel early. With two ranks not more
// than two, as each section reads the weight anew, which takes longer than the fewer results that are left for the end.
inline int choose_sections(Problem const& problem) {
  for (int sections = problem.world == 2 ? 2 : kMostArSections; sections > 1; --sections) {
    FusedChoice const choice = many_rows_choice(problem, sections);
    bool const runs = why_not_fused_choice(problem, choice).empty();
    if (!runs || section_chunk_bytes(problem, sections) < ar_piece_bytes(problem.world)) continue;
    if (why_many_rows_are_slower(problem, choice).empty()) return sections;
  }
  return 1;
}

// Why what runs beside fused, or for a gemm_ar the kernels for many rows, are faster than a kernel for few rows, or
// empty (of the other ops, see few_rows_come_first); measured at TP = 2 (bench --study rows), `at_once` at TP = 4.
inline std::string why_few_rows_are_slower(Problem const& problem, int kernel) {
  int64_t const m = total_rows(problem);
  std::string const m_is = "M is " + std::to_string(m);
  FewRowsRow const& row = kFewRowsKernels[kernel];
  constexpr int64_t kUseMatters = 128;  // from here on, of a gemm_ar, whose exchange takes as long after a library GEMM
  if (m <= kFewRowsFirst) {
    bool const may_be_slower = problem.op == Op::kGemmAr && problem.world == 2 && m > kUseMatters;
    if (!may_be_slower || few_rows_use(problem, row) > 0.65) return {};
    return m_is + ", which leaves SMs without a tile of the kernels for few rows";
  }
  // If all tiles run at once, a gemm_rs takes as long as one of them. With more than two ranks all ops gain then, as
  // the exchange beside a library GEMM takes longer.
  bool const at_once = row.runs_at_once(m, problem.n);
  if (problem.world > 2 && at_once) return {};
  bool const reduces_at_once = problem.op == Op::kGemmRs && at_once, few = m <= kFewRows;
  if (!few && problem.world > 2) {
    return m_is + ": with more than two ranks the exchange of a tile takes longer than the product of the next one";
  }
  double const least_use = reduces_at_once ? 0.7 : few ? 0.8 : 0.85;
  double const least_fill = reduces_at_once || few ? 0.8 : 0.9;
  double const fill = row_fill(problem, {kernel, {}, {}});
  if (few_rows_use(problem, row) > least_use && fill >= least_fill) return {};
  return m_is + ", which leaves too much of the tiles of the kernels for few rows empty";
}

// Whether an ag_gemm or a gemm_rs runs a kernel for few rows rather than one for many; measured as above.
inline bool few_rows_come_first(Problem const& problem, int kernel) {
  int64_t const m = total_rows(problem);
  if (m <= kFewRowsFirst || (m <= kFewRows && !why_too_few_tiles(problem).empty())) return true;
  if (!why_few_rows_are_slower(problem, kernel).empty()) return false;
  bool const at_once = m > kFewRows && kFewRowsKernels[kernel].runs_at_once(m, problem.n);
  return at_once || !why_many_rows_are_slower(problem, {-1, choose_launch(problem), {}}).empty();
}

// What is worth a measurement, the model's choice first.
inline std::vector<FusedChoice> fused_candidates(Problem const& problem) {
  std::vector<FusedChoice> candidates;
  auto const add = [&](FusedChoice const& choice) {
    auto const same = [&](FusedChoice const& other) { return other.name(problem.op) == choice.name(problem.op); };
    if (why_not_fused_choice(problem, choice).empty() && std::none_of(candidates.begin(), candidates.end(), same)) {
      candidates.push_back(choice);
    }
  };
  std::vector<int> const few = few_rows_order(problem);
  auto const add_few_rows = [&] {
    bool const two_shot_first = problem.rows > (problem.world > 2 ? 32 : 256);
    for (int const kernel : few) {
      std::vector<ExchangeForm> forms = exchange_forms(problem.op);
      if (two_shot_first) std::reverse(forms.begin(), forms.end());
      for (ExchangeForm const form : forms) add({kernel, {}, form});
    }
  };
  bool const interleaved = problem.op != Op::kAgGemm && problem.world > 2;
  if (problem.op != Op::kGemmAr) {
    bool const few_first = !few.empty() && few_rows_come_first(problem, few.front());
    if (few_first) add_few_rows();
    for (LaunchChoice const& launch : launch_candidates(problem, interleaved)) add({-1, launch, {}});
    if (!few_first) add_few_rows();
    return candidates;
  }
  bool const few_first =
      !few.empty() && (total_rows(problem) <= kFewRows || why_few_rows_are_slower(problem, few.front()).empty());
  if (few_first) add_few_rows();
  for (int const sections : {choose_sections(problem), 1, 2, kMostArSections}) {
    if (problem.rows % (int64_t{sections} * problem.world) != 0) continue;
    int const most_pieces = most_ar_pieces(sections);
    FusedChoice const model = many_rows_choice(problem, sections);
    add(model);
    for (LaunchChoice launch : launch_candidates(chunks_problem(problem, sections), interleaved, most_pieces)) {
      // Of the other kernels, those walks with which launch_candidates varies the pieces.
      bool const is_walk_of_pieces = launch.swizzle == 1 || (interleaved && launch.along_n && launch.swizzle == 4);
      if (launch.kernel != model.many_rows.kernel && !is_walk_of_pieces) continue;
      launch.sections = sections;
      launch.pieces = std::min(launch.pieces, most_pieces);
      // With fewer blocks than pieces it is the choice of fewer pieces.
      if (cut_chunk(problem, launch).pieces.count() == launch.pieces) add({-1, launch, {}});
    }
  }
  if (!few_first) add_few_rows();
  return candidates;
}

// The configuration that the problem names, or the first candidate; false if there is none.
inline bool find_fused_choice(Problem const& problem, FusedChoice* choice) {
  if (!problem.config.empty()) return parse_fused_choice(problem.op, problem.config, choice);
  std::vector<FusedChoice> const candidates = fused_candidates(problem);
  if (!candidates.empty()) *choice = candidates.front();
  return !candidates.empty();
}

// Why a gather of x by one kernel and a library GEMM are faster than all kernels of an ag_gemm, or empty: those for few
// rows fill their tiles badly and those for many rows not at all. With more than two ranks the product is shorter, and
// a gather that overlaps it gains more, unless the product is that short that most of the gather is left. Measured at
// TP = 2 and 4 (bench --study rows).
inline std::string why_gather_is_faster(Problem const& problem) {
  constexpr int64_t kOverlaps = 64;  // up to so many rows the weight takes longer to stream than they take to gather
  constexpr int64_t kOneTile = 128;  // of up to so many rows a kernel for few rows gathers while the weight streams
  constexpr int64_t kShortGather = int64_t{1} << 20;  // bytes, which come within the latency of any gather
  constexpr double kShortProduct = 8e9;               // operations; about 10 us
  int64_t const m = total_rows(problem);
  if (problem.op != Op::kAgGemm || m <= kOverlaps || m > kFewRows || !why_no_all_gather(problem).empty()) return {};
  if (problem.world > 2) {
    bool const gather_is_long = m > kOneTile && m * problem.k * element_size(problem.dtype) > kShortGather;
    if (!gather_is_long || 2.0 * double(m) * double(problem.n) * double(problem.k) > kShortProduct) return {};
    return "M is " + std::to_string(m) + ", and the product too short for the gather to hide behind it";
  }
  return "M is " + std::to_string(m) + ": from " + std::to_string(kOverlaps + 1) + " to " + std::to_string(kFewRows) +
         " rows are gathered first, as a library GEMM gains more than that takes";
}

// Why what runs beside fused is faster than the first candidate, or empty.
inline std::string why_fused_does_not_pay(Problem const& problem) {
  if (std::string const faster = why_gather_is_faster(problem); !faster.empty()) return faster;
  std::vector<FusedChoice> const candidates = fused_candidates(problem);
  if (candidates.empty()) return {};
  FusedChoice const& first = candidates.front();
  return first.is_few_rows() ? why_few_rows_are_slower(problem, first.few_rows)
                             : why_many_rows_are_slower(problem, first);
}

// Whether what was measured with `measured_m` rows in all may stand for the problem: not where other kernels run, and a
// configuration only if it can run; of `fused`, if it fills its tiles about as well; of `decomposed` not copies by the
// copy engine where fewer rows are gathered by a kernel.
inline bool suits(Problem const& problem, Strategy strategy, std::string const& config, int64_t measured_m) {
  int64_t const m = total_rows(problem);
  if (m == measured_m) return true;
  for (int64_t const most : {kFewRows, few_rows_at_most(problem.op)}) {
    if ((m <= most) != (measured_m <= most)) return false;
  }
  if (strategy == Strategy::kDecomposed) {
    bool const copies = problem.op == Op::kAgGemm && config != beside_fused(problem).config;
    return why_not_decomposed_on_cuda(with_config(problem, config)).empty() &&
           !(copies && !why_gather_is_faster(problem).empty());
  }
  FusedChoice choice;
  if (strategy != Strategy::kFused || !parse_fused_choice(problem.op, config, &choice)) return true;
  if (!why_not_fused_choice(problem, choice).empty()) return false;
  Problem measured = problem;
  measured.rows = problem.op == Op::kGemmAr ? measured_m : measured_m / problem.world;
  bool const as_full = row_fill(problem, choice) >= 0.9 * row_fill(measured, choice);
  if (!choice.is_few_rows()) return as_full;
  int64_t const tile_m = kFewRowsKernels[choice.few_rows].tile_m;
  return as_full && ceil_div(m, tile_m) == ceil_div(measured_m, tile_m);
}

}  // namespace flux
