#pragma once
// What the last call of this process did with its chunks (gemm_rs: with each of their pieces; gemm_ar, one-shot: with
// the pieces of y), in the order in which it finished them.

#include <chrono>
#include <mutex>
#include <vector>

#include "ops/problem.hpp"

namespace flux::cpu {

struct ChunkTrace {
  int chunk, piece;
  double arrived_us;  // since the call began: when its data had all been seen
  double done_us;     // when its last tile was finished
};

class Tracer {
 public:
  explicit Tracer(int num_chunks, int num_pieces = 1) : num_pieces_(num_pieces), parts_(num_chunks * num_pieces) {}

  void arrived(int chunk, int piece = 0);
  void done(int chunk, int piece = 0);
  // Makes this the trace of the last call.
  void publish();

 private:
  double now_us() const;

  std::mutex mutex_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  int num_pieces_;
  std::vector<ChunkTrace> parts_;
  std::vector<ChunkTrace> finished_;
};

std::vector<ChunkTrace> last_trace();

}  // namespace flux::cpu
