#pragma once
// What the ops of the decomposed strategy share on the CPU: ATen GEMMs on blocks, and a thread that plays the copy
// engine.

#include <ATen/core/Tensor.h>

#include <functional>

#include "cpu/protocol.hpp"
#include "ops/problem.hpp"

namespace flux::cpu {

// The weight in the accumulation type, converted once a call, as [k, n].
class ChunkGemm {
 public:
  ChunkGemm(Problem const& problem, Operands const& operands);

  // x[rows, ks] . w[:, k : k + ks]^T in the accumulation type.
  at::Tensor product(at::Tensor const& x, int64_t k) const;
  // y[row : row + rows] = round(total + bias)
  void write(at::Tensor const& total, int64_t row) const;

 private:
  Problem const& problem_;
  Operands const& operands_;
  at::Tensor weight_;
};

// Runs `products` on the calling thread, whose GEMMs use ATen's threads, and `pushes` beside it, as a copy engine
// would. When one of them fails the waits of both end, and the first error is thrown.
void run_beside(std::function<void()> const& products, std::function<void()> const& pushes, Exchange const& exchange);

}  // namespace flux::cpu
