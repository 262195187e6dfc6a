#pragma once

#include <pybind11/pybind11.h>

namespace flux {

// The functions of flux_ops._C.
void add_module_functions(pybind11::module_& m);

}  // namespace flux
