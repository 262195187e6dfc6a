#pragma once
// The product that one call computes, in plain values: what is left of the tensors once the arguments are checked.

#include <cstdint>
#include <string>

#include "ops/choose.hpp"
#include "schedule/chunk_order.hpp"
#include "schedule/workspace_layout.hpp"

namespace flux {

enum class Op : int { kAgGemm = 0, kGemmRs = 1, kGemmAr = 2 };
enum class DataType : int { kFloat32 = 0, kFloat64 = 1, kBFloat16 = 2, kFloat16 = 3 };

inline char const* op_name(Op op) {
  switch (op) {
    case Op::kAgGemm:
      return "ag_gemm";
    case Op::kGemmRs:
      return "gemm_rs";
    case Op::kGemmAr:
      return "gemm_ar";
  }
  return "";
}
inline int64_t element_size(DataType t) { return t == DataType::kFloat64 ? 8 : t == DataType::kFloat32 ? 4 : 2; }

//   ag_gemm   y[world * rows, n] = all_gather(x[rows, k]) . w[n, k]^T + bias[n]
//   gemm_rs   y[rows, n]         = reduce_scatter(x[world * rows, k] . w[n, k]^T) + bias[n]
//   gemm_ar   y[rows, n]         = all_reduce(x[rows, k] . w[n, k]^T) + bias[n]
// The ranks of a group agree on every field but `rank`.
struct Problem {
  Op op;
  int rank;
  int world;
  int64_t rows;  // of a shard of x or y: M / world; gemm_ar, which shards neither: M
  int64_t n;     // columns of this rank's product
  int64_t k;     // length of this rank's contraction
  DataType dtype;
  bool weight_transposed;   // false: weight is [n, k] with unit stride along k; true: with unit stride along n
  std::string config = {};  // name of a configuration of the strategy; empty: the backend chooses
};

// Rows M of the whole product, and the rows of a problem whose product has M, rounded up where it shards them.
inline int64_t total_rows(Problem const& p) { return p.op == Op::kGemmAr ? p.rows : p.world * p.rows; }
inline int64_t rows_of(Op op, int world, int64_t m) { return op == Op::kGemmAr ? m : ceil_div(m, world); }

// Device or host addresses of one call. x and y are contiguous; all are aligned to 16 bytes.
struct Operands {
  void const* x;
  void const* weight;
  int64_t weight_stride;  // elements between rows of [n, k], or of [k, n] where the weight is transposed
  void const* bias;       // [n], or null
  void* y;
  void* gathered;  // [world * rows, k] that ag_gemm fills on request, or null
};

// The number of a call that exchanges data through the workspace, and what its ranks must have in common besides.
struct CallInfo {
  Epoch epoch;      // counts such calls on this workspace, this one included
  uint64_t digest;  // digest_of
  double timeout_seconds;
};

// Tells calls apart that have one epoch but are not one call. `call_idx` counts all calls on the group, also those that
// were refused or ran otherwise: a rank that alone has refused a call is out of step from there on. It is added last,
// so that nearby calls of one problem differ for sure, in the lowest bits too.
inline uint64_t digest_of(Problem const& problem, Strategy strategy, bool has_bias, int64_t call_idx) {
  uint64_t digest = 14695981039346656037ull;
  auto const mix = [&digest](uint64_t value) {
    digest = (digest ^ value) * 1099511628211ull;
    digest ^= digest >> 31;
  };
  for (int64_t const value :
       {int64_t{static_cast<int>(problem.op)}, int64_t{static_cast<int>(strategy)}, int64_t{problem.world},
        problem.rows, problem.n, problem.k, int64_t{static_cast<int>(problem.dtype)}, int64_t{has_bias}}) {
    mix(static_cast<uint64_t>(value));
  }
  for (char const c : problem.config) mix(static_cast<unsigned char>(c));
  return digest + static_cast<uint64_t>(call_idx);
}

// The symmetric memory of a group: base address of each rank's block, as mapped in this process.
struct WorkspaceView {
  std::string group_name;
  int rank;
  int world;
  WorkspaceLayout layout;
  std::byte* base[kMaxWorld];

  ControlWords& control(int r) const { return *reinterpret_cast<ControlWords*>(base[r]); }
  std::byte* exchange(int r) const { return base[r] + layout.exchange_offset(); }
  std::byte* region(int r, int parity) const { return base[r] + layout.region_offset(parity); }

  // CUDA cuts the regions into one slot for each peer, the same for all calls but those that put shards in line
  // (cuda/ag_gemm_decomposed.cpp). In the region of `r`, `source` alone writes in its slot. So what this rank sends in
  // a call needs no memory besides: what goes to `owner` leaves from owner's slot of the region that the call does not
  // use. `owner` writes there in its next call, and to end this one it needs all that is sent to it.
  int64_t slot_bytes() const { return layout.peer_slot_bytes(world); }
  std::byte* slot(int r, int source, int parity) const {
    return region(r, parity) + peer_slot(r, world, source) * slot_bytes();
  }
  std::byte* send_region(int parity) const { return region(rank, 1 - parity); }
  std::byte* to_send(int owner, int parity) const { return slot(rank, owner, 1 - parity); }
};

}  // namespace flux
