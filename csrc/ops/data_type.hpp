#pragma once
// The dtypes of the operators: ours, ATen's and Python's names of them, once.

#include <c10/core/ScalarType.h>

#include "ops/problem.hpp"

namespace flux {

struct DataTypeRow {
  DataType type;
  c10::ScalarType scalar;
  char const* name;  // without "torch."
};
inline constexpr DataTypeRow kDataTypes[] = {
    {DataType::kFloat32, c10::ScalarType::Float, "float32"},
    {DataType::kFloat64, c10::ScalarType::Double, "float64"},
    {DataType::kBFloat16, c10::ScalarType::BFloat16, "bfloat16"},
    {DataType::kFloat16, c10::ScalarType::Half, "float16"},
};
inline constexpr char const* kDataTypeNames = "float32, float64, bfloat16 and float16";

// The row for which `is` holds, or null.
template <class Predicate>
DataTypeRow const* find_data_type(Predicate is) {
  for (DataTypeRow const& row : kDataTypes) {
    if (is(row)) return &row;
  }
  return nullptr;
}

inline DataTypeRow const& row_of(DataType type) {
  return *find_data_type([type](DataTypeRow const& row) { return row.type == type; });
}

}  // namespace flux
