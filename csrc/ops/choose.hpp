#pragma once
// Which strategy runs a call. The choice may depend on nothing but what the ranks of the group have agreed on: ranks
// that choose for themselves deadlock.

#include <string>
#include <string_view>

namespace flux {

enum class Strategy : int { kLocal = 0, kSequential = 1, kFused = 2, kDecomposed = 3 };

inline char const* strategy_name(Strategy s) {
  switch (s) {
    case Strategy::kLocal:
      return "local";
    case Strategy::kSequential:
      return "sequential";
    case Strategy::kFused:
      return "fused";
    case Strategy::kDecomposed:
      return "decomposed";
  }
  return "";
}

// Whether the ranks exchange data through the workspace.
inline bool needs_workspace(Strategy s) { return s == Strategy::kFused || s == Strategy::kDecomposed; }

// What a caller may ask for; "local" is never asked for, it is what a call without communication comes to.
// "fused:CONFIG" and "decomposed:CONFIG" name the configuration too.
inline constexpr char const* kAllowedStrategies = "'auto', 'sequential', 'fused', 'decomposed'";
inline bool asks_for(std::string_view asked, std::string_view name) {
  bool const with_config = asked.size() > name.size() + 1 && asked[name.size()] == ':';
  return asked == name || (with_config && asked.substr(0, name.size()) == name);
}
inline bool is_fused(std::string_view asked) { return asks_for(asked, "fused"); }
inline bool is_decomposed(std::string_view asked) { return asks_for(asked, "decomposed"); }
inline bool is_allowed_strategy(std::string_view asked) {
  return asked == "auto" || asked == "sequential" || is_fused(asked) || is_decomposed(asked);
}
// Of what is asked for by name; not of "auto".
inline Strategy asked_strategy(std::string_view asked) {
  return is_fused(asked) ? Strategy::kFused : is_decomposed(asked) ? Strategy::kDecomposed : Strategy::kSequential;
}
inline std::string_view asked_config(std::string_view asked) {
  size_t const colon = asked.find(':');
  return colon == std::string_view::npos ? "" : asked.substr(colon + 1);
}

// Who has chosen, in short: what dispatch_counts() tells apart.
enum class ChosenBy : int { kCaller = 0, kTuner = 1, kModel = 2, kFallback = 3, kNoCommunication = 4 };

inline char const* chosen_by_name(ChosenBy by) {
  constexpr char const* kNames[] = {"asked for", "tuned", "model", "fell back", "no communication"};
  return kNames[static_cast<int>(by)];
}

struct Choice {
  Strategy strategy;
  std::string reason;
  bool refused = false;    // what was asked for can't run; `reason` says why
  bool fell_back = false;  // "auto" runs the plain sequence as nothing else can run
};

// Each reason is empty unless it holds: the call needs no communication; the backend can't run it fused (or decomposed,
// where that is asked for); it can, but `otherwise` is faster, which "auto" then runs.
inline Choice choose_strategy(std::string_view asked, std::string const& why_local, std::string const& why_not,
                              std::string const& why_fused_is_slower, Strategy otherwise) {
  if (!why_local.empty()) return {Strategy::kLocal, why_local};
  if (asked == "sequential") return {Strategy::kSequential, "asked for"};
  if (is_fused(asked) || is_decomposed(asked)) {
    if (!why_not.empty()) return {asked_strategy(asked), why_not, /*refused=*/true};
    return {asked_strategy(asked), "asked for"};
  }
  if (!why_not.empty()) {
    return {otherwise, "fused can't run: " + why_not, /*refused=*/false, otherwise == Strategy::kSequential};
  }
  if (!why_fused_is_slower.empty()) return {otherwise, "faster than fused: " + why_fused_is_slower};
  return {Strategy::kFused, "the model's choice"};
}

}  // namespace flux
