#include "ops/module.hpp"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/headeronly/version.h>

#include "cpu/config.hpp"
#include "cpu/trace.hpp"
#if defined(FLUX_WITH_CUDA)
#include "cuda/alone.hpp"
#endif
#include "kernels/predict.hpp"
#include "ops/data_type.hpp"
#include "ops/decomposed.hpp"
#include "ops/dispatch.hpp"
#include "ops/python_hooks.hpp"

namespace py = pybind11;

namespace flux {
namespace {

#if !defined(FLUX_TORCH_VERSION)
#define FLUX_TORCH_VERSION TORCH_VERSION
#endif
// Found in the file by flux_ops/extension.py before it loads it.
__attribute__((used)) char const kTorchVersionMark[] = "flux_ops built for torch " FLUX_TORCH_VERSION ";";

#if defined(FLUX_WITH_CUDA)
constexpr bool kHasCudaKernels = true;
constexpr char const* kNoCudaReason = "";
#else
constexpr bool kHasCudaKernels = false;
#if defined(FLUX_NO_CUDA_REASON)
constexpr char const* kNoCudaReason = FLUX_NO_CUDA_REASON;
#else
constexpr char const* kNoCudaReason = "flux_ops was built without them";
#endif
#endif

c10::Device make_device(std::string const& type, int index) {
  return {type == "cuda" ? c10::DeviceType::CUDA : c10::DeviceType::CPU, static_cast<c10::DeviceIndex>(index)};
}

// WorkspaceNeeds, as Python keeps them.
using NeedsTuple = std::tuple<int64_t, int64_t>;
WorkspaceNeeds make_needs(NeedsTuple const& needs) { return {std::get<0>(needs), std::get<1>(needs)}; }

Op make_op(std::string const& op) {
  for (Op const one : {Op::kAgGemm, Op::kGemmRs, Op::kGemmAr}) {
    if (op == op_name(one)) return one;
  }
  TORCH_CHECK_VALUE(false, "op is '", op, "'; allowed are 'ag_gemm', 'gemm_rs' and 'gemm_ar'.");
}

DataType make_dtype(std::string const& name) {
  auto const* row = find_data_type([&](DataTypeRow const& r) { return name == r.name; });
  TORCH_CHECK_NOT_IMPLEMENTED(row != nullptr, "dtype is ", name, "; supported are ", kDataTypeNames, ".");
  return row->type;
}

// As rank 0 of `world` has it; m are the rows of the whole product.
Problem make_problem(std::string const& op, int world, int64_t m, int64_t n, int64_t k, std::string const& dtype,
                     bool transposed) {
  return {make_op(op), 0, world, rows_of(make_op(op), world, m), n, k, make_dtype(dtype), transposed};
}

class Step {
 public:
  Step(std::string const& group_name, std::string what) : what_(std::move(what)) {
    state_ = group_state(what_.c_str(), group_name);
  }
  py::tuple enter() {
    Turn turn = take_turn(*state_, what_.c_str());
    check_not_broken(*state_, what_.c_str());
    turn_ = std::move(turn);
    state_->may_differ = true;
    return py::make_tuple(state_->name, state_->id, state_->calls++, what_);
  }
  void leave(bool has_failed) {
    if (turn_) state_->may_differ = has_failed;
    turn_.reset();
  }

 private:
  std::string what_;
  std::shared_ptr<GroupState> state_;
  Turn turn_;
};

py::object last_dispatch_dict() {
  auto const plan = last_dispatch();
  if (!plan) return py::none();
  Problem const& p = plan->problem;
  py::dict d;
  d["op"] = op_name(p.op);
  d["strategy"] = strategy_name(plan->choice.strategy);
  d["config"] = plan->config;
  d["reason"] = plan->choice.reason;
  d["m"] = total_rows(p);
  d["n"] = p.n;
  d["k"] = p.k;
  d["dtype"] = row_of(p.dtype).name;
  d["world"] = p.world;
  return d;
}

}  // namespace

void add_module_functions(py::module_& m) {
  m.attr("torch_version") = FLUX_TORCH_VERSION;
  m.attr("has_cuda_kernels") = kHasCudaKernels;
  m.attr("no_cuda_reason") = kNoCudaReason;

  m.def("set_hooks", &set_python_hooks, "Lets the methods of an object answer what the ops ask of Python.");
  m.def("set_timeout", [](double seconds) { settings().timeout_seconds = seconds; });
  m.def("set_check_ranks", [](bool check) { settings().check_ranks = check; });
  m.def("set_cpu_threads", &cpu::set_num_threads, "Worker threads of one CPU call; 0 asks for the default.");

#if defined(FLUX_WITH_CUDA)
  m.def("set_spare_sms", &cuda::set_spare_sms, "How many SMs of each GPU the kernels leave to others.");
#endif

  py::class_<Step>(m, "Step", "A collective step outside an op: it counts as a call. `with` it as its call site.")
      .def(py::init<std::string const&, std::string>())
      .def("__enter__", &Step::enter)
      .def("__exit__", [](Step& step, py::object const& error, py::args const&) { step.leave(!error.is_none()); });

  m.def("mark_broken", [](std::string const& group_name, std::string const& why) {
    group_state("mark_broken", group_name)->broken = why;
  });
  m.def("drop_group", &drop_group);
  m.def("attach_workspace", [](std::string const& group_name, std::string const& device_type, int device_index,
                               std::vector<uintptr_t> const& bases, NeedsTuple const& needs) {
    attach_workspace(group_name, make_device(device_type, device_index), bases, make_needs(needs));
  });
  m.def("workspace_captured", [](std::string const& group_name, std::string const& device_type) {
    return group_state("workspace_captured", group_name)->on(make_device(device_type, 0).type()).is_captured();
  });
  m.def("workspace_total_bytes",
        [](NeedsTuple const& needs) { return make_workspace_layout(make_needs(needs)).total_bytes(); });
  // (begin, end) of what holds 0xFF bytes while no call is under way.
  m.def("workspace_slots", [](NeedsTuple const& needs) {
    int64_t const begin = WorkspaceLayout::slots_offset();
    return py::make_tuple(begin, begin + 2 * make_workspace_layout(make_needs(needs)).exchange_bytes);
  });
  m.def("workspace_region_offset", [](NeedsTuple const& needs, int parity) {
    return make_workspace_layout(make_needs(needs)).region_offset(parity);
  });
  // (region bytes, bytes of a parity's slots) that a product of m rows needs.
  m.def("workspace_needs", [](std::string const& op, std::string const& device_type, int world, int64_t m, int64_t n,
                              int64_t k, std::string const& dtype) {
    Problem const problem = make_problem(op, world, m, n, k, dtype, /*transposed=*/false);
    // The decomposed strategy needs no more than the fused one.
    WorkspaceNeeds const needs = workspace_needs(problem, Strategy::kFused, make_device(device_type, 0).type());
    return NeedsTuple{needs.region_bytes, needs.exchange_bytes};
  });
  // Whether any strategy but the plain sequence takes such products, of few rows at least.
  m.def("may_overlap", [](std::string const& op, std::string const& device_type, int world, int64_t n, int64_t k,
                          std::string const& dtype) {
    Problem const problem = make_problem(op, world, /*m=*/world, n, k, dtype, /*transposed=*/false);
    return candidates(problem, make_device(device_type, 0).type()).size() > 1;
  });
  m.def(
      "decomposed_candidates", [](std::string const& op) { return decomposed_candidates(make_op(op)); },
      "Configurations of the decomposed strategy that are worth a measurement: \"decomposed:\" + name runs one.");

#if defined(FLUX_WITH_CUDA)
  // The fused kernel of `config` on one GPU, without communication, as the last of `world` ranks would run it.
  m.def("alone_scratch",
        [](std::string const& op, at::Tensor const& x, at::Tensor const& weight, int world, std::string const& config) {
          return cuda::alone_scratch(cuda::alone_problem(make_op(op), x, weight, world, config), x.device());
        });
  m.def("run_alone", [](std::string const& op, at::Tensor const& x, at::Tensor const& weight, int world,
                        std::string const& config, at::Tensor const& scratch) {
    return cuda::run_alone(cuda::alone_problem(make_op(op), x, weight, world, config), x, weight, scratch);
  });
#endif

  // For the tuner; the problem is given as to workspace_needs.
  m.def("candidates", [](std::string const& op, std::string const& device_type, int world, int64_t m, int64_t n,
                         int64_t k, std::string const& dtype, bool transposed) {
    return candidates(make_problem(op, world, m, n, k, dtype, transposed), make_device(device_type, 0).type());
  });
  m.def("model_choice", [](std::string const& op, std::string const& device_type, int world, int64_t m, int64_t n,
                           int64_t k, std::string const& dtype, bool transposed) {
    return model_choice(make_problem(op, world, m, n, k, dtype, transposed), make_device(device_type, 0).type());
  });
  // Whether a choice that was measured with `measured_m` rows may stand for a product of m.
  m.def("suits", [](std::string const& op, std::string const& device_type, int world, int64_t m, int64_t n, int64_t k,
                    std::string const& dtype, bool transposed, std::string const& choice, int64_t measured_m) {
    return suits(make_problem(op, world, m, n, k, dtype, transposed), choice, measured_m,
                 make_device(device_type, 0).type());
  });
  // What GPUs would run, asked of the kernels' model alone: (strategy as asked for, microseconds of the product or
  // None, bytes that a rank sends).
  m.def("predict", [](std::string const& op, int world, int64_t rows, int64_t n, int64_t k, std::string const& dtype) {
    TORCH_CHECK_VALUE(world >= 2 && world <= kMaxWorld, "world is ", world, "; it must be 2 to ", kMaxWorld, ".");
    Prediction const p = predict(make_problem(op, world, rows, n, k, dtype, /*transposed=*/false));
    return py::make_tuple(p.choice, p.product_us > 0 ? py::object(py::float_(p.product_us)) : py::none(), p.sent_bytes);
  });
  m.def("config_names",
        [](std::string const& device_type) { return config_names(make_device(device_type, 0).type()); });
  m.def("forget_plans", &forget_plans);
  m.def("may_run_beside_collective",
        [](at::Tensor const& x, std::string const& group_name, std::string const& strategy) {
          return may_run_beside_collective(x.device(), group_name, strategy);
        });

  m.def("last_dispatch", &last_dispatch_dict);
  // {(op, strategy, who has chosen it): calls}
  m.def("dispatch_counts", [](bool reset) {
    py::dict d;
    for (auto const& [key, count] : dispatch_counts(reset)) {
      auto const [op, strategy, by] = key;
      d[py::make_tuple(op_name(op), strategy_name(strategy), chosen_by_name(by))] = count;
    }
    return d;
  });
  m.def(
      "last_trace",
      [] {
        py::list parts;
        for (cpu::ChunkTrace const& c : cpu::last_trace()) {
          parts.append(py::make_tuple(c.chunk, c.piece, c.arrived_us, c.done_us));
        }
        return parts;
      },
      "CPU: (chunk, piece, microseconds until its data had arrived, until it was computed) of the last fused call, in "
      "the order in which they were.");
  // For tests of the pure choice: (strategy, reason, refused, fell_back).
  m.def("choose_strategy", [](std::string const& asked, std::string const& why_local, std::string const& why_not,
                              std::string const& why_slower, bool or_decomposed) {
    Strategy const otherwise = or_decomposed ? Strategy::kDecomposed : Strategy::kSequential;
    Choice const c = choose_strategy(asked, why_local, why_not, why_slower, otherwise);
    return py::make_tuple(strategy_name(c.strategy), c.reason, c.refused, c.fell_back);
  });
}

}  // namespace flux
