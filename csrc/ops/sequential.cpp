// The sequential strategy: the plain collective and the plain product, one after the other. The same as
// flux_ops/reference.py, which is what tests and benchmarks compare with; here for the host's time.

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/linear.h>

#include "ops/dispatch.hpp"

namespace flux {
namespace {

// A backend that orders its work on the caller's stream by itself, as NCCL does, returns none.
void finish(c10::intrusive_ptr<c10d::Work> const& work) {
  if (work) work->wait();
}

template <class Options>
Options synchronous() {  // on the GPU: on the caller's stream
  Options options;
  options.asyncOp = false;
  return options;
}

// The collectives on whole tensors under the names of torch 2.13 and later, where the ones of before are deprecated.
template <class Group>
void all_gather(Group& group, at::Tensor& gathered, at::Tensor& shard) {
  auto const options = synchronous<c10d::AllgatherOptions>();
  if constexpr (requires { group.all_gather_single(gathered, shard, options); }) {
    finish(group.all_gather_single(gathered, shard, options));
  } else {
    finish(group._allgather_base(gathered, shard, options));
  }
}

template <class Group>
void reduce_scatter_sum(Group& group, at::Tensor& result, at::Tensor& partial) {
  auto const options = synchronous<c10d::ReduceScatterOptions>();
  if constexpr (requires { group.reduce_scatter_single(result, partial, options); }) {
    finish(group.reduce_scatter_single(result, partial, options));
  } else {
    finish(group._reduce_scatter_base(result, partial, options));
  }
}

template <class Group>
void all_to_all(Group& group, at::Tensor& received, at::Tensor& sent) {
  auto const options = synchronous<c10d::AllToAllOptions>();
  std::vector<int64_t> even;
  if constexpr (requires { group.all_to_all_single(received, sent, even, even, options); }) {
    finish(group.all_to_all_single(received, sent, even, even, options));
  } else {
    finish(group.alltoall_base(received, sent, even, even, options));
  }
}

// The parts of all ranks, stacked along dimension 0, added in rank order in fp32 (fp64 for fp64) and rounded once.
at::Tensor sum_in_rank_order(at::Tensor const& parts, int world) {
  auto const wide = parts.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  at::Tensor total;
  for (at::Tensor const& part : parts.to(wide).chunk(world)) total = total.defined() ? total + part : part;
  return total.to(parts.scalar_type());
}

// The rows of this rank, summed over the ranks. NCCL adds in the dtype of the tensor, in an order of its own. On the
// CPU the sum is the same on every run.
at::Tensor reduce_scatter(at::Tensor partial, c10d::ProcessGroup& group) {
  partial = partial.contiguous();
  if (partial.is_cuda()) {
    std::vector<int64_t> shape = partial.sizes().vec();
    shape.front() /= group.getSize();
    at::Tensor result = at::empty(shape, partial.options());
    reduce_scatter_sum(group, result, partial);
    return result;
  }
  at::Tensor parts = at::empty_like(partial);
  all_to_all(group, parts, partial);
  return sum_in_rank_order(parts, group.getSize());
}

// The same for all rows; `partial` may become the result. On the CPU all ranks get the same bits.
at::Tensor all_reduce(at::Tensor partial, c10d::ProcessGroup& group) {
  partial = partial.contiguous();
  if (partial.is_cuda()) {
    std::vector<at::Tensor> tensors{partial};
    finish(group.allreduce(tensors, synchronous<c10d::AllreduceOptions>()));
    return partial;
  }
  std::vector<int64_t> shape = partial.sizes().vec();
  shape.front() *= group.getSize();
  at::Tensor parts = at::empty(shape, partial.options());
  all_gather(group, parts, partial);
  return sum_in_rank_order(parts, group.getSize());
}

}  // namespace

Results run_sequential_ag_gemm(Call const& call, Arguments const& args) {
  auto const group = resolve_group(call.site.op, args.group_name);
  at::Tensor gathered = at::empty(gathered_shape(args, call.problem()), args.x.options());
  at::Tensor shard = args.x.contiguous();
  all_gather(*group, gathered, shard);
  return {at::linear(gathered, args.weight, args.bias).contiguous(), gathered};
}

at::Tensor run_sequential_reduction(Call const& call, Arguments const& args) {
  auto const group = resolve_group(call.site.op, args.group_name);
  at::Tensor const partial = at::linear(args.x, args.weight);
  at::Tensor const y = args.op == Op::kGemmRs ? reduce_scatter(partial, *group) : all_reduce(partial, *group);
  return args.has_bias() ? y + *args.bias : y;
}

}  // namespace flux
