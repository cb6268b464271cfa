// The threads of the kernels: a loop over tasks, shared by the calling thread and sleeping or briefly spinning helpers.
//
// Unlike an OpenMP region it never waits for a helper that has not begun: on a core that another process keeps busy
// a helper may be away for a whole time slice, and the caller then does the work alone. Helpers spin for a moment after
// each job, because the next kernel of a step is some microseconds away and waking a sleeping thread takes longer than
// a small kernel; they offer their core to others while they spin, and sleep when no step is running.

#pragma once

#include <cstdint>

namespace edge {

// Calls task(context, i) for i = 0 .. num_tasks - 1, in any order, on up to num_threads threads; returns when all are
// done. Work inside a task that calls this again, or that comes from another thread meanwhile, runs on its own thread.
void run_tasks(int num_threads, int64_t num_tasks, void (*task)(void* context, int64_t i), void* context);

// The same with a callable.
template <class Body>
void parallel(int num_threads, int64_t num_tasks, const Body& body) {
  auto call = [](void* context, int64_t i) { (*static_cast<const Body*>(context))(i); };
  run_tasks(num_threads, num_tasks, call, const_cast<Body*>(&body));
}

}  // namespace edge
