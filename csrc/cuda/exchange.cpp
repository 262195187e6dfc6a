// What kernels that exchange their data by themselves have in common on the host.

#include "cuda/launch.hpp"

namespace flux::cuda {

ExchangeArgs exchange_args(Problem const& problem, ExchangeForm form, WorkspaceView const& view,
                           SignalWait const& wait) {
  bool const gathers = form == ExchangeForm::kGather;
  ExchangeArgs args{};
  args.rank = problem.rank;
  args.world = problem.world;
  args.form = form;
  args.own_rows = static_cast<int>(form == ExchangeForm::kScatter ? problem.rows : total_rows(problem));
  for (int r = 0; r < problem.world; ++r) {
    args.words[r] = reinterpret_cast<ExchangeWords*>(view.exchange(r));
    args.slots[r] = reinterpret_cast<uint32_t*>(
        view.base[r] + (gathers ? view.layout.gather_offset() : WorkspaceLayout::slots_offset()));
  }
  args.slots_bytes = view.layout.exchange_bytes;
  args.wait = wait;
  return args;
}

ExchangeArgs exchange_args(Problem const& problem, ExchangeForm form, Workspace& workspace, CallInfo const& info,
                           cudaStream_t stream) {
  return exchange_args(problem, form, workspace.view(), workspace.begin_exchange(problem, info, stream));
}

}  // namespace flux::cuda
