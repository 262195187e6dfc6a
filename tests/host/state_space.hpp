#pragma once
// A small explicit-state model checker for machines made of guarded steps.
//
// A machine is a set of byte variables and a set of actors. Each actor runs a straight line of steps. A step is enabled
// when all its guards hold; it then applies its effects, atomically, and the actor moves on. Actors interleave freely:
// explore() visits every reachable state, breadth first, and stops at the first state in which
//
//   - a read does not find what it expects, or a signal word would not grow, or is late          (violation)
//   - no actor can move although some have not finished, or a word has a wrong value at the end  (deadlock, bad end)
//
// Every step raises the sum of the program counters by one. So the states at depth d are the states whose counters sum
// to d, no state is met at two depths, and only the states of one depth have to be kept to recognise a repeated one.
// The first violation found lies at the least depth: its trace is a shortest one.

#include <chrono>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace flux::model {

using Var = uint8_t;

// What lies in a piece of memory that many writers share: the call that wrote it last, and which cells it has written.
// A store by another call empties the buffer: any cell of one call may overlap any cell of another (shapes and ops
// differ from call to call), so the model allows nothing of an older call to survive.
struct Buffer {
  Var call, cells;
};

struct Guard {
  enum Kind : uint8_t { kAtLeast, kAtMost } kind;
  Var var;
  uint8_t value;
};

struct Effect {
  enum Kind : uint8_t {
    kSet,        // a = value
    kIncrement,  // a += 1
    kRaise,      // a = value, which must be greater than a
    kRaiseFrom,  // a = b, which must be greater than a
    kStore,      // buffer (a, b): cells `bits` now hold data of call `value`
    kEquals,     // a must be value
    kReached,    // a must be at least value
    kExpect,     // buffer (a, b): cells `bits` must hold data of call `value`
  } kind;
  Var a, b;
  uint8_t value, bits;
};

inline Guard at_least(Var var, size_t value) { return {Guard::kAtLeast, var, static_cast<uint8_t>(value)}; }
inline Guard at_most(Var var, size_t value) { return {Guard::kAtMost, var, static_cast<uint8_t>(value)}; }
inline Effect set(Var var, int value) { return {Effect::kSet, var, 0, static_cast<uint8_t>(value), 0}; }
inline Effect raise_to(Var var, int value) { return {Effect::kRaise, var, 0, static_cast<uint8_t>(value), 0}; }
inline Effect on(Effect::Kind kind, Buffer b, int call, int bits) {
  return {kind, b.call, b.cells, static_cast<uint8_t>(call), static_cast<uint8_t>(bits)};
}

struct Step {
  std::string text;
  std::vector<Guard> guards;
  std::vector<Effect> effects;
};

struct Actor {
  std::string name;
  std::vector<Step> steps;
};

struct Machine {
  std::vector<Actor> actors;  // variable i is the program counter of actor i
  std::vector<uint8_t> initial;
  std::vector<std::string> names;                   // of the variables
  std::vector<std::pair<Var, uint8_t>> at_the_end;  // values that must hold once all actors have finished

  Var add(std::string name, uint8_t value = 0) {
    if (names.size() >= 255) throw std::length_error("the model has more than 255 variables");
    names.push_back(std::move(name));
    initial.push_back(value);
    return static_cast<Var>(names.size() - 1);
  }
};

struct Result {
  uint64_t states = 0, transitions = 0, widest = 0, depth = 0;
  double seconds = 0;
  std::string failure;             // empty: every interleaving ends well
  std::vector<std::string> trace;  // steps that lead to the failure
};

class Explorer {
 public:
  explicit Explorer(Machine const& machine)
      : machine_(machine), words_((machine.initial.size() + 7) / 8), size_(machine.initial.size()) {}

  Result explore() {
    auto const start = std::chrono::steady_clock::now();
    std::vector<uint64_t> level(words_, 0), next;
    std::memcpy(level.data(), machine_.initial.data(), size_);
    std::vector<uint64_t> scratch(words_);
    while (!level.empty() && result_.failure.empty()) {
      size_t const count = level.size() / words_;
      result_.states += count;
      if (count > result_.widest) result_.widest = count;
      next.clear();
      from_.emplace_back();
      table_.assign(size_t{1} << 12, 0);
      for (size_t i = 0; i < count && result_.failure.empty(); ++i) {
        expand(&level[i * words_], static_cast<uint32_t>(i), scratch, next);
      }
      level.swap(next);
      if (!level.empty()) ++result_.depth;
    }
    result_.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return result_;
  }

 private:
  struct Origin {
    uint32_t parent;  // index in the level before
    uint8_t actor;
  };

  void expand(uint64_t const* state, uint32_t index, std::vector<uint64_t>& scratch, std::vector<uint64_t>& next) {
    auto const* vars = reinterpret_cast<uint8_t const*>(state);
    bool moved = false, finished = true;
    for (size_t a = 0; a < machine_.actors.size(); ++a) {
      auto const& steps = machine_.actors[a].steps;
      if (vars[a] == steps.size()) continue;
      finished = false;
      Step const& step = steps[vars[a]];
      if (!enabled(step, vars)) continue;
      moved = true;
      ++result_.transitions;
      std::memcpy(scratch.data(), state, words_ * 8);
      auto* after = reinterpret_cast<uint8_t*>(scratch.data());
      for (Effect const& effect : step.effects) {
        std::string const wrong = apply(effect, after);
        if (!wrong.empty()) return fail(wrong, index, static_cast<int>(a));
      }
      ++after[a];
      if (insert(scratch.data(), next)) from_.back().push_back({index, static_cast<uint8_t>(a)});
    }
    if (finished) {
      for (auto const& [var, value] : machine_.at_the_end) {
        if (vars[var] != value) return fail("bad end: " + describe(var, vars[var], value), index, -1);
      }
    } else if (!moved) {
      fail("deadlock" + stuck(vars), index, -1);
    }
  }

  static bool enabled(Step const& step, uint8_t const* vars) {
    for (Guard const& g : step.guards) {
      if (!holds(g, vars)) return false;
    }
    return true;
  }

  static bool holds(Guard const& g, uint8_t const* vars) {
    return g.kind == Guard::kAtLeast ? vars[g.var] >= g.value : vars[g.var] <= g.value;
  }

  // Applies one effect; returns what is wrong with it, or nothing.
  std::string apply(Effect const& e, uint8_t* vars) const {
    switch (e.kind) {
      case Effect::kSet:
        vars[e.a] = e.value;
        return {};
      case Effect::kIncrement:
        ++vars[e.a];
        return {};
      case Effect::kRaise:
      case Effect::kRaiseFrom: {
        uint8_t const value = e.kind == Effect::kRaise ? e.value : vars[e.b];
        if (value <= vars[e.a]) return "signal does not grow: " + describe(e.a, vars[e.a], value);
        vars[e.a] = value;
        return {};
      }
      case Effect::kStore:
        if (vars[e.a] != e.value) vars[e.b] = 0;
        vars[e.a] = e.value;
        vars[e.b] |= e.bits;
        return {};
      case Effect::kEquals:
        if (vars[e.a] == e.value) return {};
        return "signal of another call: " + describe(e.a, vars[e.a], e.value);
      case Effect::kReached:
        if (vars[e.a] >= e.value) return {};
        return "word is late: " + describe(e.a, vars[e.a], e.value);
      case Effect::kExpect:
        break;
    }
    if (vars[e.a] == e.value && (vars[e.b] & e.bits) == e.bits) return {};
    if (vars[e.a] == e.value)
      return "missing data: " + machine_.names[e.a] + " is right, but not all cells are written";
    return (vars[e.a] > e.value ? "overwritten data: " : "stale data: ") + describe(e.a, vars[e.a], e.value);
  }

  std::string describe(Var var, int seen, int expected) const {
    return machine_.names[var] + " is " + std::to_string(seen) + ", expected " + std::to_string(expected);
  }

  // Where each actor stands, and for which words it waits.
  std::string stuck(uint8_t const* vars) const {
    std::string text;
    for (size_t a = 0; a < machine_.actors.size(); ++a) {
      Actor const& actor = machine_.actors[a];
      if (vars[a] == actor.steps.size()) continue;
      Step const& step = actor.steps[vars[a]];
      text += "\n      " + actor.name + " stands before: " + step.text;
      for (Guard const& g : step.guards) {
        if (!holds(g, vars)) text += "; " + describe(g.var, vars[g.var], g.value);
      }
    }
    return text;
  }

  // `last` is the actor whose next step fails, or -1 where the state itself is the failure.
  void fail(std::string const& failure, uint32_t index, int last) {
    result_.failure = failure;
    std::vector<uint8_t> path;
    for (size_t d = result_.depth; d > 0; --d) {
      Origin const& origin = from_[d - 1][index];
      path.push_back(origin.actor);
      index = origin.parent;
    }
    std::vector<size_t> counters(machine_.actors.size(), 0);
    auto const take = [&](int a) {
      Actor const& actor = machine_.actors[a];
      result_.trace.push_back(actor.name + ": " + actor.steps[counters[a]++].text);
    };
    for (auto a = path.rbegin(); a != path.rend(); ++a) take(*a);
    if (last >= 0) take(last);
  }

  static uint64_t mix(uint64_t h) {
    h ^= h >> 32;
    h *= 0xd6e8feb86659fd93u;
    return h ^ (h >> 29);
  }

  // Appends the state to `next` unless it is there. The table holds positions in `next`, counted from 1.
  bool insert(uint64_t const* state, std::vector<uint64_t>& next) {
    if (next.size() / words_ * 2 >= table_.size()) grow(next);
    uint32_t* entry = find(state, next);
    if (*entry != 0) return false;
    next.insert(next.end(), state, state + words_);
    *entry = static_cast<uint32_t>(next.size() / words_);
    return true;
  }

  uint32_t* find(uint64_t const* state, std::vector<uint64_t> const& next) {
    uint64_t hash = 0;
    for (size_t w = 0; w < words_; ++w) hash = mix(hash + state[w] * 0x9e3779b97f4a7c15u);
    size_t const mask = table_.size() - 1;
    for (size_t at = hash & mask;; at = (at + 1) & mask) {
      if (table_[at] == 0) return &table_[at];
      if (std::memcmp(&next[(table_[at] - 1) * words_], state, words_ * 8) == 0) return &table_[at];
    }
  }

  void grow(std::vector<uint64_t> const& next) {
    table_.assign(table_.size() * 4, 0);
    for (size_t i = 0; i < next.size() / words_; ++i) *find(&next[i * words_], next) = static_cast<uint32_t>(i + 1);
  }

  Machine const& machine_;
  size_t const words_;
  size_t const size_;
  std::vector<uint32_t> table_;
  std::vector<std::vector<Origin>> from_;  // [depth]: how each state of the next depth was reached
  Result result_;
};

}  // namespace flux::model
