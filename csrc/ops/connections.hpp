#pragma once
// Whether all streams of the process share one queue of the GPU.

#include <cstdlib>
#include <string_view>

namespace flux {

inline bool has_one_connection() {
  static bool const has_one = [] {
    char const* const connections = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
    return connections != nullptr && std::string_view(connections) == "1";
  }();
  return has_one;
}

}  // namespace flux
