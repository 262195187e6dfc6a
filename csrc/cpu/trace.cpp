#include "cpu/trace.hpp"

namespace flux::cpu {
namespace {

std::mutex last_mutex;
std::vector<ChunkTrace>& last() {
  static auto* trace = new std::vector<ChunkTrace>;
  return *trace;
}

}  // namespace

double Tracer::now_us() const {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start_).count();
}

void Tracer::arrived(int chunk, int piece) {
  std::lock_guard<std::mutex> const lock(mutex_);
  parts_[chunk * num_pieces_ + piece].arrived_us = now_us();
}

void Tracer::done(int chunk, int piece) {
  std::lock_guard<std::mutex> const lock(mutex_);
  ChunkTrace& part = parts_[chunk * num_pieces_ + piece];
  part.chunk = chunk;
  part.piece = piece;
  part.done_us = now_us();
  finished_.push_back(part);
}

void Tracer::publish() {
  std::lock_guard<std::mutex> const lock(last_mutex);
  last() = std::move(finished_);
}

std::vector<ChunkTrace> last_trace() {
  std::lock_guard<std::mutex> const lock(last_mutex);
  return last();
}

}  // namespace flux::cpu
