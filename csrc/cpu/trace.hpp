#pragma once
// What the last call of this process did with its chunks (gemm_rs: with their pieces, chunk * pieces + piece; gemm_ar,
// one-shot: with the pieces of y), in the order in which it finished them.

#include <chrono>
#include <mutex>
#include <vector>

#include "ops/problem.hpp"

namespace flux::cpu {

struct ChunkTrace {
  int chunk;
  double waited_us;   // the longest wait of one of its tiles for a peer
  double arrived_us;  // since the call began: when its data had all been seen
  double done_us;     // when its last tile was finished
};

class Tracer {
 public:
  explicit Tracer(int num_chunks) : chunks_(num_chunks) {}

  void waited(int chunk, double microseconds);
  void done(int chunk);
  // Makes this the trace of the last call.
  void publish();

 private:
  double now_us() const;

  std::mutex mutex_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  std::vector<ChunkTrace> chunks_;
  std::vector<ChunkTrace> finished_;
};

std::vector<ChunkTrace> last_trace();

}  // namespace flux::cpu
