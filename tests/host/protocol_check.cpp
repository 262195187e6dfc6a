// Explores all interleavings of one scenario of the protocol.
//
//   protocol_check --world 3 --calls ag,rs,ag [--modes ABC] [--pieces 2 | 2,1,2] [--tiles 2 | 2,1,2]
//                  [--lanes 2] [--change signal_first] [--split-waits]
//
// Calls: ag_gemm, gemm_rs staged, gemm_rs direct, gemm_ar two-shot, gemm_ar one-shot (ag, rs, rd, at, ao). Modes: A
// eager; device-counted in region 0 (B) or region 1 (C). Exit status 0: verified; 1: a failure, printed with a shortest
// trace; 2: bad arguments.

#include <cstdio>
#include <exception>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "protocol_model.hpp"
#include "state_space.hpp"

namespace {

using flux::model::Call;
using flux::model::Change;
using flux::model::Op;
using flux::model::Scenario;

std::map<std::string, Op> const kOps = {{"ag", Op::kAgGemm},        {"al", Op::kAgGemmInLine},
                                        {"rs", Op::kGemmRs},        {"rd", Op::kGemmRsDirect},
                                        {"at", Op::kGemmArTwoShot}, {"ao", Op::kGemmArOneShot}};

std::map<std::string, Change> const kChanges = {
    {"none", Change::kNone},
    {"one_region", Change::kOneRegion},
    {"push_too_early", Change::kPushTooEarly},
    {"no_join", Change::kNoJoin},
    {"join_one_lane", Change::kJoinOneLane},
    {"signal_first", Change::kSignalFirst},
    {"one_signal_set", Change::kOneSignalSet},
    {"empty_call_counts", Change::kEmptyCallCounts},
    {"count_first", Change::kCountFirst},
    {"send_from_region", Change::kSendFromRegion},
    {"no_finished_wait", Change::kNoFinishedWait},
    {"too_few_tiles", Change::kTooFewTiles},
    {"no_reset", Change::kNoReset},
    {"one_replay_signal_set", Change::kOneReplaySignalSet},
    {"begun_before_last_tile", Change::kBegunBeforeLastTile},
    {"begin_before_join", Change::kBeginBeforeJoin},
    {"read_after_begun", Change::kReadAfterBegun},
    {"last_use_not_updated", Change::kLastUseNotUpdated},
    {"last_use_updated_first", Change::kLastUseUpdatedFirst},
    {"no_begun_wait", Change::kNoBegunWait},
    {"no_first_wait", Change::kNoFirstWait},
    {"wait_for_last", Change::kWaitForLast},
    {"wait_before_announcing", Change::kWaitBeforeAnnouncing},
    {"peers_in_turn", Change::kPeersInTurn},
    {"wait_kernel_needs_sm", Change::kWaitKernelNeedsSm},
    {"one_lane_waits", Change::kOneLaneWaits},
    {"wait_on_side_stream", Change::kWaitOnSideStream},
    {"wait_per_peer", Change::kWaitPerPeer},
    {"one_last_use", Change::kOneLastUse},
    {"check_for_wait", Change::kCheckForWait},
};

std::vector<std::string> split(std::string const& text) {
  std::vector<std::string> parts;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, ',');) parts.push_back(part);
  return parts;
}

// The value for call `i` of an option that has one value for all calls or one for each.
int value_for(std::vector<std::string> const& values, size_t i, size_t num_calls) {
  if (values.size() != 1 && values.size() != num_calls) {
    throw std::invalid_argument("give one value for all calls or one for each");
  }
  return std::stoi(values[values.size() == 1 ? 0 : i]);
}

Scenario parse(int argc, char** argv) {
  std::map<std::string, std::string> options = {{"--world", "2"},  {"--calls", ""},  {"--modes", ""},
                                                {"--pieces", "1"}, {"--tiles", "1"}, {"--change", "none"},
                                                {"--lanes", "1"}};
  Scenario scenario;
  for (int i = 1; i < argc; ++i) {
    std::string const name = argv[i];
    if (name == "--split-waits") {
      scenario.split_waits = true;
    } else if (options.count(name) && i + 1 < argc) {
      options[name] = argv[++i];
    } else {
      throw std::invalid_argument("unknown option or no value: " + name);
    }
  }
  scenario.world = std::stoi(options["--world"]);
  scenario.lanes = std::stoi(options["--lanes"]);
  scenario.change = kChanges.at(options["--change"]);
  auto const calls = split(options["--calls"]), pieces = split(options["--pieces"]), tiles = split(options["--tiles"]);
  std::string const modes = options["--modes"].empty() ? std::string(calls.size(), 'A') : options["--modes"];
  if (calls.empty() || modes.size() != calls.size()) throw std::invalid_argument("--calls and --modes do not agree");
  for (size_t i = 0; i < calls.size(); ++i) {
    if (modes[i] < 'A' || modes[i] > 'C') throw std::invalid_argument("a mode is A, B or C");
    Call call;
    call.op = kOps.at(calls[i]);
    call.device_counted = modes[i] != 'A';
    call.region = modes[i] == 'C' ? 1 : 0;
    call.pieces = value_for(pieces, i, calls.size());
    call.tiles = value_for(tiles, i, calls.size());
    scenario.calls.push_back(call);
  }
  return scenario;
}

}  // namespace

int main(int argc, char** argv) try {
  auto const machine = flux::model::build_machine(parse(argc, argv));
  auto const result = flux::model::Explorer(machine).explore();
  std::printf("%s: %llu states, %llu transitions, depth %llu, widest level %llu, %.2f s\n",
              result.failure.empty() ? "verified" : "FAILED", static_cast<unsigned long long>(result.states),
              static_cast<unsigned long long>(result.transitions), static_cast<unsigned long long>(result.depth),
              static_cast<unsigned long long>(result.widest), result.seconds);
  if (result.failure.empty()) return 0;
  std::printf("%s\n", result.failure.c_str());
  for (size_t i = 0; i < result.trace.size(); ++i) std::printf("%4zu  %s\n", i + 1, result.trace[i].c_str());
  return 1;
} catch (std::exception const& error) {
  std::fprintf(stderr, "protocol_check: %s\n", error.what());
  return 2;
}
