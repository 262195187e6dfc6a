// The hooks of the ops as calls of Python methods. Ops run without the interpreter lock: each hook takes it.

#include "ops/python_hooks.hpp"

#include <pybind11/stl.h>

#include "ops/data_type.hpp"
#include "ops/hooks.hpp"

namespace py = pybind11;

namespace flux {
namespace {

py::tuple site_tuple(CallSite const& site) {
  return py::make_tuple(site.group_name, site.state_id, site.call_idx, std::string(site.op));
}

py::tuple device_tuple(c10::Device device) {
  return py::make_tuple(c10::DeviceTypeName(device.type(), /*lower_case=*/true), int{device.index()});
}

Tuned make_tuned(py::object const& pair) {
  auto const [choice, origin] = pair.cast<std::pair<std::string, std::string>>();
  return {choice, origin};
}

}  // namespace

void set_python_hooks(py::object object) {
  auto* const target = new py::object(std::move(object));  // lives as long as the process
  Hooks& h = hooks();
  h.tuned = [target](Problem const& p, c10::Device device) {
    py::gil_scoped_acquire const gil;
    return make_tuned(target->attr("tuned")(op_name(p.op), total_rows(p), p.n, p.k, row_of(p.dtype).name,
                                            p.weight_transposed, p.world, device_tuple(device)));
  };
  h.agree = [target](CallSite const& site, std::string const& text, Tuned const& proposal) {
    py::gil_scoped_acquire const gil;
    return make_tuned(target->attr("agree")(site_tuple(site), text, std::make_pair(proposal.choice, proposal.origin)));
  };
  h.refuse = [target](CallSite const& site, std::string const& message) {
    py::gil_scoped_acquire const gil;
    target->attr("refuse")(site_tuple(site), message);
  };
  h.why_not_connected = [target](CallSite const& site, c10::Device device) {
    py::gil_scoped_acquire const gil;
    return target->attr("why_not_connected")(site_tuple(site), device_tuple(device)).cast<std::string>();
  };
  h.grow = [target](CallSite const& site, c10::Device device, WorkspaceNeeds needs) {
    py::gil_scoped_acquire const gil;
    target->attr("grow")(site_tuple(site), device_tuple(device),
                         py::make_tuple(needs.region_bytes, needs.exchange_bytes));
  };
  h.explain_timeout = [target](CallSite const& site) {
    py::gil_scoped_acquire const gil;
    return target->attr("explain_timeout")(site_tuple(site)).cast<std::string>();
  };
  h.warn_once = [target](std::string const& message) {
    py::gil_scoped_acquire const gil;
    target->attr("warn_once")(message);
  };
  // Handlers run on the main thread alone, and others must not wait for the lock of an interpreter that ends.
  auto const main_thread = py::module_::import("threading").attr("main_thread")().attr("ident").cast<unsigned long>();
  h.check_signals = [main_thread] {
    if (PyThread_get_thread_ident() != main_thread) return;
    py::gil_scoped_acquire const gil;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  };
  h.traced = [target](std::string const& group_name, int64_t world) {
    py::gil_scoped_acquire const gil;
    target->attr("traced")(group_name, world);
  };
  h.dropped = [target](uint64_t state_id) {
    py::gil_scoped_acquire const gil;
    target->attr("dropped")(state_id);
  };
}

}  // namespace flux
