// See pool.h.

#include "pool.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kSpin = std::chrono::microseconds(200);  // longer than what lies between two kernels of a step
constexpr int kPausesPerYield = 100;
constexpr int kMaxThreads = 255;

// The processor that this thread runs on; -1: unknown.
inline int current_cpu() {
#if defined(__linux__)
  return sched_getcpu();
#else
  return -1;
#endif
}

// Moves this thread off `cpu`, if it may run elsewhere; afterwards it may run where it could before.
void leave_cpu(int cpu) {
#if defined(__linux__)
  cpu_set_t all, others;
  if (cpu < 0 || cpu >= CPU_SETSIZE || sched_getaffinity(0, sizeof all, &all) != 0) return;
  others = all;
  CPU_CLR(cpu, &others);
  if (CPU_COUNT(&others) > 0 && sched_setaffinity(0, sizeof others, &others) == 0)
    sched_setaffinity(0, sizeof all, &all);
#endif
}

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Pool {
 public:
  void run(int num_threads, int64_t num_tasks, void (*task)(void*, int64_t), void* context) {
    if (num_threads < 2 || num_tasks < 2 || num_tasks > UINT32_MAX || busy_.exchange(true, std::memory_order_acquire)) {
      for (int64_t i = 0; i < num_tasks; ++i) task(context, i);
      return;
    }
    const int num_helpers = int(std::min<int64_t>({num_threads - 1, num_tasks - 1, kMaxThreads}));
    start_helpers(num_helpers);
    caller_cpu_.store(current_cpu(), std::memory_order_relaxed);
    task_ = task;
    context_ = context;
    num_tasks_ = num_tasks;
    num_done_.store(0, std::memory_order_relaxed);
    open_.store(uint64_t(++num_jobs_) << 40 | uint64_t(num_helpers) << 32 | uint64_t(num_tasks));
    if (num_asleep_.load() > 0) {
      { std::lock_guard<std::mutex> lock(sleep_); }
      wake_.notify_all();
    }
    work(num_helpers - 1);
    for (int spins = 1; num_done_.load(std::memory_order_acquire) < num_tasks; ++spins)
      spins % kPausesPerYield == 0 ? void(sched_yield()) : pause();
    busy_.store(false, std::memory_order_release);
  }

 private:
  void start_helpers(int num_helpers) {
    try {
      for (; num_started_ < num_helpers; ++num_started_) std::thread(&Pool::help, this, num_started_).detach();
    } catch (const std::system_error&) {  // no more threads are allowed; those that there are do the work
    }
  }

  // What is open to take: the job's number, how many helpers may join, and how many tasks are left, in one word, so
  // that a claim fails if anything has changed since the word was read.
  bool has_work(uint64_t open, int helper) const { return uint32_t(open) > 0 && helper < int(open >> 32 & 255); }

  // Takes a share of what is left until nothing is: large shares first, because a word that another core has just
  // written takes longer to get than many a task.
  void work(int helper) {
    int64_t num_done = 0;
    uint64_t open = open_.load(std::memory_order_acquire);
    while (has_work(open, helper)) {
      const int64_t num_left = uint32_t(open), num_threads = 1 + (open >> 32 & 255);
      const int64_t share = std::max<int64_t>(1, num_left / (2 * num_threads));
      if (!open_.compare_exchange_weak(open, open - share, std::memory_order_acq_rel)) continue;
      // With a task claimed the job cannot end, so that its fields hold still.
      const int64_t first = num_tasks_ - num_left;
      for (int64_t i = first; i < first + share; ++i) task_(context_, i);
      num_done += share;
      open = open_.load(std::memory_order_acquire);
    }
    if (num_done > 0) num_done_.fetch_add(num_done, std::memory_order_release);
  }

  void help(int helper) {
    for (;;) {
      wait_for_work(helper);
      work(helper);
    }
  }

  // A helper that was woken on the caller's processor can stay there for long, because the system sees two threads that
  // often give way to each other: it would help nobody.
  void make_way() const {
    const int cpu = current_cpu();
    if (cpu >= 0 && cpu == caller_cpu_.load(std::memory_order_relaxed)) leave_cpu(cpu);
  }

  void wait_for_work(int helper) {
    const auto deadline = Clock::now() + kSpin;
    do {
      for (int i = 0; i < kPausesPerYield; ++i) {
        if (has_work(open_.load(std::memory_order_relaxed), helper)) return;
        pause();
      }
      sched_yield();
      make_way();
    } while (Clock::now() < deadline);
    std::unique_lock<std::mutex> lock(sleep_);
    ++num_asleep_;  // before the last look at open_: either this sees the job, or the job's caller sees a sleeper
    wake_.wait(lock, [&] { return has_work(open_.load(), helper); });
    --num_asleep_;
    lock.unlock();
    make_way();
  }

  std::atomic<bool> busy_{false};
  std::atomic<int> caller_cpu_{-1};
  int num_started_ = 0;
  uint32_t num_jobs_ = 0;
  void (*task_)(void*, int64_t) = nullptr;
  void* context_ = nullptr;
  int64_t num_tasks_ = 0;
  alignas(64) std::atomic<uint64_t> open_{0};
  alignas(64) std::atomic<int64_t> num_done_{0};
  alignas(64) std::atomic<int> num_asleep_{0};
  std::mutex sleep_;
  std::condition_variable wake_;
};

}  // namespace

void edge::run_tasks(int num_threads, int64_t num_tasks, void (*task)(void*, int64_t), void* context) {
  static Pool* const pool = new Pool;  // never destroyed: its threads outlive main
  pool->run(num_threads, num_tasks, task, context);
}
