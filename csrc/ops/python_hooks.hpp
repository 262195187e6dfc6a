#pragma once

#include <pybind11/pybind11.h>

namespace flux {

// Lets the methods of a Python object (flux_ops/hooks.py) serve as the hooks of the ops.
void set_python_hooks(pybind11::object object);

}  // namespace flux
