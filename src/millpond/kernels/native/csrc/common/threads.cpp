// torch brings its own copy of the OpenMP runtime. A second copy would keep a second pool of spinning threads, so the
// one that is already loaded is looked up by name instead of linking any.
#include "common/threads.hpp"

#include <dlfcn.h>

#include <thread>
#include <vector>

namespace mp {
namespace {

using GompParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

GompParallel find_runtime() {
  void* found = dlsym(RTLD_DEFAULT, "GOMP_parallel");
  if (found == nullptr) {
    if (void* library = dlopen("libgomp.so.1", RTLD_NOW | RTLD_LOCAL)) found = dlsym(library, "GOMP_parallel");
  }
  return reinterpret_cast<GompParallel>(found);
}

struct Job {
  Body body;
  void* context;
  std::atomic<int> tickets;
  int n;
};

// A thread takes tickets until none is left: right also where the runtime grants fewer threads than asked for.
void work(void* data) {
  Job& job = *static_cast<Job*>(data);
  for (int t; (t = job.tickets.fetch_add(1, std::memory_order_relaxed)) < job.n;) job.body(job.context, t);
}

}  // namespace

void run_parallel(int n_threads, Body body, void* context) {
  if (n_threads <= 1) {
    body(context, 0);
    return;
  }
  static const GompParallel gomp = find_runtime();
  Job job{body, context, {0}, n_threads};
  if (gomp != nullptr) {
    gomp(work, &job, unsigned(n_threads), 0);
    return;
  }
  std::vector<std::thread> helpers;
  for (int i = 1; i < n_threads; ++i) helpers.emplace_back(work, &job);
  work(&job);
  for (std::thread& helper : helpers) helper.join();
}

}  // namespace mp
