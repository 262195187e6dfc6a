#pragma once
// Which strategy runs a call. The choice may depend on nothing but what the ranks of the group have agreed on: ranks
// that choose for themselves deadlock.

#include <string>
#include <string_view>

namespace flux {

enum class Strategy : int { kLocal = 0, kSequential = 1, kFused = 2 };

inline char const* strategy_name(Strategy s) {
  return s == Strategy::kLocal ? "local" : s == Strategy::kSequential ? "sequential" : "fused";
}

// What a caller may ask for; "local" is never asked for, it is what a call without communication comes to.
// "fused:CONFIG" names the configuration too.
inline constexpr char const* kAllowedStrategies = "'auto', 'sequential', 'fused'";
inline constexpr std::string_view kFusedWithConfig = "fused:";
inline bool is_fused(std::string_view asked) {
  bool const with_config =
      asked.size() > kFusedWithConfig.size() && asked.substr(0, kFusedWithConfig.size()) == kFusedWithConfig;
  return asked == "fused" || with_config;
}
inline bool is_allowed_strategy(std::string_view asked) {
  return asked == "auto" || asked == "sequential" || is_fused(asked);
}
inline std::string_view asked_config(std::string_view asked) {
  return is_fused(asked) && asked != "fused" ? asked.substr(kFusedWithConfig.size()) : "";
}

struct Choice {
  Strategy strategy;
  std::string reason;
  bool refused = false;    // what was asked for can't run; `reason` says why
  bool fell_back = false;  // "auto" would rather have run another strategy
};

// Each reason is empty unless it holds: the call needs no communication; the backend can't run it fused; it can, but
// the plain sequence is faster.
inline Choice choose_strategy(std::string_view asked, std::string const& why_local, std::string const& why_not_fused,
                              std::string const& why_fused_is_slower) {
  if (!why_local.empty()) return {Strategy::kLocal, why_local};
  if (asked == "sequential") return {Strategy::kSequential, "asked for"};
  if (is_fused(asked)) {
    if (!why_not_fused.empty()) return {Strategy::kFused, why_not_fused, /*refused=*/true};
    return {Strategy::kFused, "asked for"};
  }
  if (!why_not_fused.empty()) {
    return {Strategy::kSequential, "fused can't run: " + why_not_fused, /*refused=*/false, /*fell_back=*/true};
  }
  if (!why_fused_is_slower.empty()) return {Strategy::kSequential, "faster than fused: " + why_fused_is_slower};
  return {Strategy::kFused, "the model's choice"};
}

}  // namespace flux
