#pragma once
// The record that a wait leaves when a peer does not arrive in time, or makes another call. It lies in pinned host
// memory, so the host can read it after the kernel has trapped and the CUDA context is lost.

#include <cstdint>

#include "schedule/workspace_layout.hpp"

namespace flux {

// What a record has in the place of a piece, where the wait was for the end of a peer's earlier calls:
constexpr int kCallsBegun = -1;     // of replayed calls: the word is a plain epoch
constexpr int kCallsFinished = -2;  // of all others

struct FaultRecord {
  uint32_t written;  // 1 once the rest is complete
  int32_t op;        // flux::Op
  int32_t rank;
  int32_t peer;
  int32_t piece;  // or one of the above
  int32_t tile_m, tile_n;
  Epoch expected;  // values of the word (make_signal, or plain epochs for `begun`)
  Epoch seen;
};

// What a kernel needs to wait for the signals of one call.
struct SignalWait {
  Epoch signal;             // value of this call's signals; their digest alone where the device counts the calls:
  Epoch const* epoch_word;  // then this word, else null, holds the number of calls before this one
  uint64_t timeout_ns;
  FaultRecord* fault;     // pinned host memory
  uint32_t* fault_claim;  // device word: the first thread that meets a fault writes the record
  int32_t op;
  int32_t rank;
};

}  // namespace flux
