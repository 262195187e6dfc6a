#pragma once
// A kernel whose wait times out stops with a fault record, and the next CUDA call of the process fails with a bare
// launch failure. A thread of this process watches the records meanwhile and says on stderr what really happened.

namespace flux::cuda {

class Workspace;

void watch_faults(Workspace const* workspace);
void unwatch_faults(Workspace const* workspace);

}  // namespace flux::cuda
