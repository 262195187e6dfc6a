#pragma once
// The record that a bounded wait leaves when a peer does not arrive in time. It lies in pinned host memory, so the
// host can read it after the kernel has trapped and the CUDA context is lost.

#include <cstdint>

#include "schedule/workspace_layout.hpp"

namespace flux {

struct FaultRecord {
  uint32_t written;  // 1 once the rest is complete
  int32_t op;        // flux::Op
  int32_t rank;
  int32_t peer;
  int32_t piece;
  int32_t tile_m, tile_n;
  Epoch expected;
  Epoch seen;
};

// What a kernel needs to wait for the signals of one call.
struct SignalWait {
  Epoch epoch;              // of this call
  Epoch const* epoch_word;  // if not null, the epoch is read from here (graph replay)
  uint64_t timeout_ns;
  FaultRecord* fault;     // pinned host memory
  uint32_t* fault_claim;  // device word: the first thread that times out writes the record
  int32_t op;
  int32_t rank;
};

}  // namespace flux
