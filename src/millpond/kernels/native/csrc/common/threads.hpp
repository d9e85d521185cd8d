// Parallel loops on the thread pool that torch already has.
#pragma once

#include <atomic>
#include <cstdint>

namespace mp {

using Body = void (*)(void* context, int thread);

// Run body(context, 0 .. n_threads - 1), on the OpenMP pool of the process where there is one.
void run_parallel(int n_threads, Body body, void* context);

// Call f(thread) on n_threads threads.
template <class F>
void parallel(int n_threads, F& f) {
  run_parallel(n_threads, [](void* context, int thread) { (*static_cast<F*>(context))(thread); }, &f);
}

// Call f(item) for every item, handed out in order.
template <class F>
void parallel_for(int64_t n, int n_threads, F& f) {
  std::atomic<int64_t> next{0};
  auto body = [&](int) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) f(i);
  };
  parallel(int(n < n_threads ? n : n_threads), body);
}

}  // namespace mp
