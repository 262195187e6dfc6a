#pragma once
// What a backend offers to the ops: csrc/cpu and csrc/cuda implement the same few functions.

#include <memory>
#include <string>
#include <vector>

#include "ops/problem.hpp"

namespace flux::cpu {

// Why the fused strategy can't run this problem, as the end of a sentence; empty if it can.
std::string why_not_fused(Problem const& problem);
// The configuration that it will run, by name.
std::string config_name(Problem const& problem);
// The configurations that are worth measuring, by name, best guess first.
std::vector<std::string> candidates(Problem const& problem);
// What the names of configurations are made of, as one line.
std::string config_names();
// Enough for every configuration, so that fewer rows never need more, whatever is tuned for them.
WorkspaceNeeds workspace_needs(Problem const& problem);

// Runs one call. Throws c10::DistBackendError when a peer does not arrive in time, or makes another call.
void ag_gemm(Problem const& problem, Operands const& operands, WorkspaceView const& workspace, CallInfo const& info);
void gemm_rs(Problem const& problem, Operands const& operands, WorkspaceView const& workspace, CallInfo const& info);
void gemm_ar(Problem const& problem, Operands const& operands, WorkspaceView const& workspace, CallInfo const& info);

// The same for the decomposed strategy. Its configurations are those of ops/decomposed.hpp.
WorkspaceNeeds decomposed_needs(Problem const& problem);
void ag_gemm_decomposed(Problem const& problem, Operands const& operands, WorkspaceView const& workspace,
                        CallInfo const& info);
void gemm_rs_decomposed(Problem const& problem, Operands const& operands, WorkspaceView const& workspace,
                        CallInfo const& info);
void gemm_ar_decomposed(Problem const& problem, Operands const& operands, WorkspaceView const& workspace,
                        CallInfo const& info);

}  // namespace flux::cpu

#if defined(FLUX_WITH_CUDA)
namespace flux::cuda {

// What can run, and what pays, is said in kernels/predict.hpp.
std::string config_name(Problem const& problem);
std::vector<std::string> candidates(Problem const& problem);
std::string config_names();
WorkspaceNeeds workspace_needs(Problem const& problem);

// Kernel, knobs, tiles and pieces of a problem that is run fused.
struct LaunchPlan;
std::shared_ptr<LaunchPlan const> make_launch_plan(Problem const& problem);

// Streams, events and the fault record that go with one block of symmetric memory of the current device.
class Workspace;
std::shared_ptr<Workspace> make_workspace(WorkspaceView const& view);

// Throws, as c10::DistBackendError, the fault that an earlier call has met on the GPU: a peer that did not arrive
// within the timeout, or made another call. It does not touch the CUDA context, which is lost by then.
void check_fault(Workspace const& workspace);

// Whether a CUDA graph holds addresses of this workspace.
bool is_captured(Workspace const& workspace);
// True while the current stream records a CUDA graph.
bool is_capturing();

// How many SMs of each GPU the kernels leave to others.
void set_spare_sms(int count);

// Enqueue one call on the current stream. A fault of an earlier call is thrown before anything is launched.
void ag_gemm(Problem const& problem, LaunchPlan const& plan, Operands const& operands, Workspace& workspace,
             CallInfo const& info);
void gemm_rs(Problem const& problem, LaunchPlan const& plan, Operands const& operands, Workspace& workspace,
             CallInfo const& info);
void gemm_ar(Problem const& problem, LaunchPlan const& plan, Operands const& operands, Workspace& workspace,
             CallInfo const& info);

WorkspaceNeeds decomposed_needs(Problem const& problem);
void ag_gemm_decomposed(Problem const& problem, Operands const& operands, Workspace& workspace, CallInfo const& info);
void gemm_rs_decomposed(Problem const& problem, Operands const& operands, Workspace& workspace, CallInfo const& info);
void gemm_ar_decomposed(Problem const& problem, Operands const& operands, Workspace& workspace, CallInfo const& info);

}  // namespace flux::cuda
#endif
