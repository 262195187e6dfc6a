// Every operator schema and the Python module, one screen.

#include <pybind11/pybind11.h>
#include <torch/library.h>

#include "ops/module.hpp"
#include "ops/ops.hpp"

TORCH_LIBRARY(flux, m) {
  // y[M, N] = all_gather(x[M/TP, K]) . weight[N, K]^T + bias; the second result is the gathered x, or empty.
  m.def(
      "ag_gemm(Tensor x, Tensor weight, Tensor? bias, str group_name, bool return_gathered, str strategy)"
      " -> (Tensor, Tensor)");

  // y[M/TP, N] = reduce_scatter(x[M, K] . weight[N, K]^T) + bias
  m.def("gemm_rs(Tensor x, Tensor weight, Tensor? bias, str group_name, str strategy) -> Tensor");

  // y[M, N] = all_reduce(x[M, K] . weight[N, K]^T) + bias
  m.def("gemm_ar(Tensor x, Tensor weight, Tensor? bias, str group_name, str strategy) -> Tensor");
}

TORCH_LIBRARY_IMPL(flux, CPU, m) {
  m.impl("ag_gemm", flux::ag_gemm);
  m.impl("gemm_rs", flux::gemm_rs);
  m.impl("gemm_ar", flux::gemm_ar);
}

TORCH_LIBRARY_IMPL(flux, CUDA, m) {
  m.impl("ag_gemm", flux::ag_gemm);
  m.impl("gemm_rs", flux::gemm_rs);
  m.impl("gemm_ar", flux::gemm_ar);
}

TORCH_LIBRARY_IMPL(flux, Meta, m) {
  m.impl("ag_gemm", flux::ag_gemm_meta);
  m.impl("gemm_rs", flux::gemm_rs_meta);
  m.impl("gemm_ar", flux::gemm_ar_meta);
}

TORCH_LIBRARY_IMPL(flux, Autograd, m) {
  m.impl("ag_gemm", flux::ag_gemm_autograd);
  m.impl("gemm_rs", flux::gemm_rs_autograd);
  m.impl("gemm_ar", flux::gemm_ar_autograd);
}

TORCH_LIBRARY_IMPL(flux, AutocastCPU, m) {
  m.impl("ag_gemm", flux::ag_gemm_autocast);
  m.impl("gemm_rs", flux::gemm_rs_autocast);
  m.impl("gemm_ar", flux::gemm_ar_autocast);
}

TORCH_LIBRARY_IMPL(flux, AutocastCUDA, m) {
  m.impl("ag_gemm", flux::ag_gemm_autocast);
  m.impl("gemm_rs", flux::gemm_rs_autocast);
  m.impl("gemm_ar", flux::gemm_ar_autocast);
}

// What flux_ops/*.py uses of the core besides the operators: see ops/module.cpp.
PYBIND11_MODULE(_C, m) { flux::add_module_functions(m); }
