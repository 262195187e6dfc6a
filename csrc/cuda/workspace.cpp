#include "cuda/workspace.hpp"

#include <c10/util/Exception.h>

#include <cstdlib>

#include "comm/stream_ops.hpp"
#include "cuda/fault_watch.hpp"
#include "ops/backend.hpp"

namespace flux::cuda {

void check(cudaError_t error, char const* action) {
  TORCH_CHECK(error == cudaSuccess, "flux_ops: ", action, " failed: ", cudaGetErrorString(error));
}

bool launches_block() {
  static bool const block = [] {
    char const* value = std::getenv("CUDA_LAUNCH_BLOCKING");
    return value != nullptr && std::atoi(value) != 0;
  }();
  return block;
}

Workspace::Workspace(WorkspaceView const& view) : view_(view) {
  check(cudaGetDevice(&device_), "reading the current device");
  int least = 0, greatest = 0;
  check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "reading the stream priorities");
  check(cudaStreamCreateWithPriority(&side_stream_, cudaStreamNonBlocking, greatest), "creating the copy stream");
  check(cudaEventCreateWithFlags(&fork_, cudaEventDisableTiming), "creating an event");
  check(cudaEventCreateWithFlags(&join_, cudaEventDisableTiming), "creating an event");
  check(cudaHostAlloc(&fault_, sizeof(FaultRecord), cudaHostAllocPortable), "allocating the fault record");
  *fault_ = FaultRecord{};
  watch_faults(this);
}

Workspace::~Workspace() {  // errors are ignored: the context may be lost already
  unwatch_faults(this);
  cudaFreeHost(fault_);
  cudaEventDestroy(join_);
  cudaEventDestroy(fork_);
  cudaStreamDestroy(side_stream_);
}

std::string Workspace::fault_message() const {
  FaultRecord const volatile& fault = *fault_;
  if (fault.written == 0) return {};
  std::string const what = fault.piece < 0 ? "to finish its call before"
                                           : c10::str("for piece ", int{fault.piece}, " of its chunk, read by tile (",
                                                      int{fault.tile_m}, ", ", int{fault.tile_n}, ")");
  return c10::str("flux_ops.", op_name(static_cast<Op>(fault.op)), " timed out: group '", view_.group_name, "', rank ",
                  int{fault.rank}, " waited ", timeout_seconds_, " s for peer ", int{fault.peer}, " ", what,
                  "; expected epoch ", Epoch{fault.expected}, ", seen epoch ", Epoch{fault.seen},
                  ". The peer is dead, late, or made another call. The CUDA context of this process is lost: restart "
                  "the processes of the group. If the peer was only slow, raise the timeout (flux_ops.set_timeout).");
}

Call::Call(Workspace& workspace, Problem const& problem, cudaStream_t stream, Epoch epoch, double timeout_seconds)
    : workspace_(workspace), problem_(problem), stream_(stream), epoch_(epoch), parity_(parity_of(epoch)) {
  if (std::string const fault = workspace.fault_message(); !fault.empty()) C10_THROW_ERROR(DistBackendError, fault);
  workspace.timeout_seconds_ = timeout_seconds;
  ControlWords& control = workspace.view_.control(problem.rank);
  wait_.epoch = epoch;
  wait_.epoch_word = nullptr;
  wait_.timeout_ns = static_cast<uint64_t>(timeout_seconds * 1e9);
  wait_.fault = workspace.fault_;
  wait_.fault_claim = &control.local.fault_claim;
  wait_.op = static_cast<int32_t>(problem.op);
  wait_.rank = problem.rank;

  if (!workspace.replayed_) {
    cudaStreamCaptureStatus status;
    check(cudaStreamIsCapturing(stream, &status), "reading the capture state");
    if (status == cudaStreamCaptureStatusActive) {
      workspace.replayed_ = true;
      workspace.replay_parity_ = parity_;
    }
  }
  if (workspace.replayed_) {
    parity_ = workspace.replay_parity_;
    wait_.epoch_word = &control.local.epoch;
    check(stream_begin_call(stream, &control.local.epoch, control.signals.completed, problem.world, wait_),
          "starting a call");
  }
}

SignalKind Call::signal_kind() const {
  bool const ag = problem_.op == Op::kAgGemm;
  if (workspace_.replayed_) return ag ? SignalKind::kAgGemmReplay : SignalKind::kGemmRsReplay;
  return ag ? SignalKind::kAgGemm : SignalKind::kGemmRs;
}

Epoch* Call::arrived(int r, int source) const {
  return workspace_.view_.control(r).signals.arrived[static_cast<int>(signal_kind())][source];
}

void Call::fork() {
  check(cudaEventRecord(workspace_.fork_, stream_), "recording an event");
  check(cudaStreamWaitEvent(workspace_.side_stream_, workspace_.fork_, 0), "starting the copy stream");
}

void Call::push(void* to, void const* from, int64_t bytes, Epoch* signal) {
  cudaStream_t const stream = workspace_.side_stream_;
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream), "a push to a peer");
  if (workspace_.replayed_) {
    check(cudaMemcpyAsync(signal, wait_.epoch_word, sizeof(Epoch), cudaMemcpyDeviceToDevice, stream),
          "a signal to a peer");
  } else {
    check(stream_write(stream, signal, epoch_), "a signal to a peer");
  }
}

void Call::join() {
  check(cudaEventRecord(workspace_.join_, workspace_.side_stream_), "recording an event");
  check(cudaStreamWaitEvent(stream_, workspace_.join_, 0), "joining the copy stream");
}

void Call::finish() {
  if (workspace_.replayed_) {
    PeerWords completed{};
    for (int r = 0; r < problem_.world; ++r) completed.at[r] = workspace_.view_.control(r).signals.completed;
    check(stream_end_call(stream_, completed, problem_.rank, problem_.world, wait_.epoch_word), "ending a call");
  }
}

}  // namespace flux::cuda
