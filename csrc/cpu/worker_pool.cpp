#include "cpu/worker_pool.hpp"

#include <ATen/Parallel.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "cpu/protocol.hpp"
#include "ops/hooks.hpp"

// Of the OpenMP runtime and the MKL that torch brings. Both settings are of the calling thread alone.
extern "C" void omp_set_num_threads(int);
extern "C" __attribute__((weak)) int MKL_Set_Num_Threads_Local(int);

namespace flux::cpu {
namespace {

constexpr std::chrono::milliseconds kBetweenSignals{50};  // of Python, for whose handlers a wait is interrupted

// A tile is the unit of parallel work: inside it ATen must not start threads.
void make_this_thread_serial() {
  at::internal::lazy_init_num_threads();
  omp_set_num_threads(1);
  if (MKL_Set_Num_Threads_Local != nullptr) MKL_Set_Num_Threads_Local(1);
}

class Pool {
 public:
  explicit Pool(int size) : size_(size) {}
  // Once. A pool that could not start all its threads is left to those that it has.
  void start() {
    for (int i = 0; i < size_; ++i) std::thread([this] { loop(); }).detach();
  }
  int size() const { return size_; }

  void begin(std::function<void()> const& work, std::function<void()> const& on_error) {
    std::lock_guard<std::mutex> const lock(mutex_);
    work_ = &work;
    on_error_ = &on_error;
    running_ = size_;
    error_ = nullptr;
    ++job_;
    wake_.notify_all();
  }

  // Whether the work ends within that time.
  bool ends_within(std::chrono::milliseconds time) {
    std::unique_lock<std::mutex> lock(mutex_);
    return done_.wait_for(lock, time, [this] { return running_ == 0; });
  }

  std::exception_ptr end() {
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return running_ == 0; });
    return error_;
  }

 private:
  void loop() {
    make_this_thread_serial();
    uint64_t seen = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      wake_.wait(lock, [&] { return job_ != seen; });
      seen = job_;
      lock.unlock();
      run_one();
      lock.lock();
      if (--running_ == 0) done_.notify_all();
    }
  }

  void run_one() {
    try {
      (*work_)();
    } catch (Cancelled const&) {
    } catch (...) {
      {
        std::lock_guard<std::mutex> const lock(mutex_);
        if (!error_) error_ = std::current_exception();
      }
      (*on_error_)();
    }
  }

  int const size_;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::function<void()> const* work_ = nullptr;
  std::function<void()> const* on_error_ = nullptr;
  std::exception_ptr error_;
  uint64_t job_ = 0;
  int running_ = 0;
};

// Pools that no call uses. They live as long as the process; a forked child has no threads and starts anew.
struct IdlePools {
  std::mutex mutex;
  std::vector<Pool*> pools;
  pid_t owner = getpid();
};

IdlePools& idle_pools() {
  static auto* idle = new IdlePools;
  if (idle->owner != getpid()) idle = new IdlePools;
  return *idle;
}

Pool* take_pool(int size) {
  IdlePools& idle = idle_pools();
  std::lock_guard<std::mutex> const lock(idle.mutex);
  for (auto it = idle.pools.begin(); it != idle.pools.end(); ++it) {
    if ((*it)->size() != size) continue;
    Pool* const pool = *it;
    idle.pools.erase(it);
    return pool;
  }
  auto* const pool = new Pool(size);
  pool->start();
  return pool;
}

void give_back(Pool* pool) {
  IdlePools& idle = idle_pools();
  std::lock_guard<std::mutex> const lock(idle.mutex);
  idle.pools.push_back(pool);
}

}  // namespace

void run_workers(int num_workers, std::function<void()> const& work, std::function<void()> const& meanwhile,
                 std::function<void()> const& on_error) {
  Pool* const pool = take_pool(num_workers);
  pool->begin(work, on_error);
  std::exception_ptr error;
  try {
    meanwhile();
    while (!pool->ends_within(kBetweenSignals)) hooks().check_signals();
  } catch (Cancelled const&) {  // a worker has the error
  } catch (...) {
    error = std::current_exception();
    on_error();
  }
  std::exception_ptr const worker_error = pool->end();
  give_back(pool);
  if (error) std::rethrow_exception(error);
  if (worker_error) std::rethrow_exception(worker_error);
}

}  // namespace flux::cpu
