#include "cuda/workspace.hpp"

#include <c10/util/Exception.h>

#include <utility>

#include "comm/stream_ops.hpp"
#include "cuda/fault_watch.hpp"
#include "ops/backend.hpp"

namespace flux::cuda {

void check(cudaError_t error, char const* action) {
  if (error != cudaSuccess) cudaGetLastError();  // or the next launch of anyone would raise it again
  TORCH_CHECK(error == cudaSuccess, "flux_ops: ", action, " failed: ", cudaGetErrorString(error));
}

Workspace::Workspace(WorkspaceView const& view) : view_(view) {
  int least = 0, greatest = 0;
  check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "reading the stream priorities");
  for (Lane& lane : lanes_) {
    check(cudaStreamCreateWithPriority(&lane.stream, cudaStreamNonBlocking, greatest), "creating a copy stream");
    check(cudaEventCreateWithFlags(&lane.reached, cudaEventDisableTiming), "creating an event");
  }
  for (cudaEvent_t* const event : {&fork_, &may_push_}) {
    check(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "creating an event");
  }
  check(cudaHostAlloc(&fault_, sizeof(FaultRecord), cudaHostAllocPortable), "allocating the fault record");
  *fault_ = FaultRecord{};
  watch_faults(this);
}

Workspace::~Workspace() {  // errors are ignored: the context may be lost already
  unwatch_faults(this);
  cudaFreeHost(fault_);
  cudaEventDestroy(fork_);
  cudaEventDestroy(may_push_);
  for (Lane const& lane : lanes_) {
    cudaEventDestroy(lane.reached);
    cudaStreamDestroy(lane.stream);
  }
}

std::string Workspace::fault_message() const {
  FaultRecord const volatile& fault = *fault_;
  if (fault.written == 0) return {};
  Epoch const expected = fault.expected, seen = fault.seen;
  std::string text = c10::str("flux_ops.", op_name(static_cast<Op>(fault.op)), ": rank ", int{fault.rank},
                              " of group '", view_.group_name, "' ");
  bool const plain = fault.piece == kCallsBegun;
  bool const ends = plain || fault.piece == kCallsFinished;
  Epoch const expected_epoch = plain ? expected : signal_epoch(expected),
              seen_epoch = plain ? seen : signal_epoch(seen);
  if (!plain && seen_epoch == expected_epoch) {
    text += c10::str("is out of step: in call ", expected_epoch, " of the workspace peer ", int{fault.peer},
                     " makes another call");
  } else {
    std::string const work =
        fault.tile_m >= 0   ? c10::str("tile (", int{fault.tile_m}, ", ", int{fault.tile_n}, ")")
        : fault.tile_n >= 0 ? c10::str("step ", int{fault.tile_n})  // decomposed: of its GEMMs; gemm_ar: of the end
                            : std::string("the product");           // ag_gemm, few rows or gather: all of it at once
    text += c10::str("timed out: it waited ", timeout_seconds_, " s for peer ", int{fault.peer},
                     ends ? std::string(" to finish the calls before that one")
                          : c10::str(": ", work, " needs piece ", int{fault.piece}, " of its data"),
                     ", expected epoch ", expected_epoch, ", seen ", seen_epoch,
                     ". The peer is late, dead, or makes other calls than this one; flux_ops.set_timeout(seconds) "
                     "allows more time");
  }
  return text + ". The CUDA context of this process is lost: restart the processes of the group.";
}

void Workspace::check_fault() const {
  if (std::string const fault = fault_message(); !fault.empty()) C10_THROW_ERROR(DistBackendError, fault);
}

SignalWait Workspace::make_wait(Problem const& problem, CallInfo const& info) {
  timeout_seconds_ = info.timeout_seconds;
  SignalWait wait{};
  wait.signal = make_signal(info.epoch, info.digest);
  wait.timeout_ns = static_cast<uint64_t>(info.timeout_seconds * 1e9);
  wait.fault = fault_;
  wait.fault_claim = &view_.control(problem.rank).local.fault_claim;
  wait.op = static_cast<int32_t>(problem.op);
  wait.rank = problem.rank;
  return wait;
}

void Workspace::note_capture(cudaStream_t stream) {
  if (replayed_) return;
  cudaStreamCaptureStatus status;
  check(cudaStreamIsCapturing(stream, &status), "reading the capture state");
  replayed_ = status == cudaStreamCaptureStatusActive;
}

SignalWait Workspace::begin_exchange(Problem const& problem, CallInfo const& info, cudaStream_t stream) {
  note_capture(stream);
  return make_wait(problem, info);
}

Call::Call(Workspace& workspace, Problem const& problem, CallInfo const& info, cudaStream_t stream, BegunBy begun_by)
    : workspace_(workspace), stream_(stream), parity_(parity_of(info.epoch)) {
  wait_ = workspace.make_wait(problem, info);
  workspace.note_capture(stream);
  signals_ = signal_set_of(parity_, workspace.replayed_);
  if (!workspace.replayed_) return;
  LocalWords& local = workspace.view_.control(problem.rank).local;
  bool const by_gemm = begun_by == BegunBy::kGemm;
  wait_.signal = make_signal(0, info.digest);
  wait_.epoch_word = by_gemm ? &local.epoch : &local.before;
  replayed_.local = &local;
  replayed_.world = problem.world;
  replayed_.parity = parity_;
  for (int r = 0; r < problem.world; ++r) replayed_.begun.at[r] = workspace.view_.control(r).signals.begun;
  may_push_ = !by_gemm;
  if (!by_gemm) check(stream_begin_call(stream, replayed_, wait_), "starting a call");
}

Epoch* Call::arrived(int r, int source) const {
  return workspace_.view_.control(r).signals.arrived[static_cast<int>(signals_)][source];
}

Epoch* Call::finished(int r, int source) const {
  return &workspace_.view_.control(r).signals.finished[static_cast<int>(signals_)][source];
}

void Call::fork() {
  check(cudaEventRecord(workspace_.fork_, stream_), "recording an event");
  for (int i = 0; i < 2; ++i) {
    send_held_signal(i);
    if (in_use_[i]) wait_for(workspace_.fork_, lane(i));
  }
}

void Call::wait_for(cudaEvent_t event, cudaStream_t stream) {
  check(cudaStreamWaitEvent(stream, event, 0), "waiting for an event");
}

cudaEvent_t Call::reached(int i) {
  check(cudaEventRecord(workspace_.lanes_[i].reached, lane(i)), "recording an event");
  return workspace_.lanes_[i].reached;
}

cudaStream_t Call::lane(int i) {
  if (!std::exchange(in_use_[i], true)) {
    wait_for(workspace_.fork_, workspace_.lanes_[i].stream);
    if (waited_to_push_) wait_for(workspace_.may_push_, workspace_.lanes_[i].stream);
  }
  return workspace_.lanes_[i].stream;
}

void Call::take_tiles(uint32_t* counter, int32_t count) {
  lane_ = 1 - lane_;
  Epoch* const word = std::exchange(held_signal_[lane_], nullptr);
  check(stream_take(lane(lane_), counter, static_cast<uint32_t>(count), word, wait_.signal), "waiting for tiles");
}

void Call::meet() {
  for (int i = 0; i < 2; ++i) send_held_signal(i);
  wait_for(reached(0), lane(1));
  wait_for(reached(1), lane(0));
}

void Call::signal(Epoch* word) {
  send_held_signal(lane_);
  wait_until_may_push();
  send_signal(word, lane_);
}

void Call::push(void* to, void const* from, int64_t bytes, Epoch* signal) {
  copy(to, from, bytes);
  send_signal(signal, lane_);
}

void Call::push_tiles(uint32_t* counter, int32_t count, void* to, void const* from, int64_t bytes, Epoch* signal) {
  take_tiles(counter, count);
  copy(to, from, bytes);
  if (is_replayed()) {
    send_signal(signal, lane_);
  } else {
    held_signal_[lane_] = signal;
  }
}

void Call::push_rows(void* to, void const* from, int64_t pitch, int64_t width, int64_t rows, Epoch* signal) {
  send_held_signal(lane_);
  wait_until_may_push();
  check(cudaMemcpy2DAsync(to, pitch, from, pitch, width, rows, cudaMemcpyDeviceToDevice, lane(lane_)),
        "a push to a peer");
  send_signal(signal, lane_);
}

void Call::copy(void* to, void const* from, int64_t bytes) {
  send_held_signal(lane_);
  wait_until_may_push();
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, lane(lane_)), "a push to a peer");
}

void Call::wait_until_may_push() {
  if (std::exchange(may_push_, true)) return;
  check(stream_take(lane(lane_), &replayed_.local->may_push, 1), "waiting for the start of a call");
  check(cudaEventRecord(workspace_.may_push_, lane(lane_)), "recording an event");
  waited_to_push_ = true;
  if (in_use_[1 - lane_]) wait_for(workspace_.may_push_, lane(1 - lane_));
}

void Call::send_signal(Epoch* signal, int i) {
  if (is_replayed()) {
    check(cudaMemcpyAsync(signal, &replayed_.local->signal, sizeof(Epoch), cudaMemcpyDeviceToDevice, lane(i)),
          "a signal to a peer");
  } else {
    check(stream_write(lane(i), signal, wait_.signal), "a signal to a peer");
  }
}

void Call::send_held_signal(int i) {
  if (held_signal_[i] != nullptr) send_signal(std::exchange(held_signal_[i], nullptr), i);
}

void Call::join() {
  for (int i = 0; i < 2; ++i) {
    send_held_signal(i);
    if (in_use_[i]) wait_for(reached(i), stream_);
  }
}

}  // namespace flux::cuda
