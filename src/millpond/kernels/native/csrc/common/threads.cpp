// torch brings its own copy of the OpenMP runtime. A second copy would keep a second pool of spinning threads, so the
// one that is already loaded is looked up by name instead of linking any; where its threads lose their cores to other
// processes, those of thread_pool.cpp take over for a while.
#include "common/threads.hpp"

#include <dlfcn.h>
#include <pthread.h>
#include <time.h>

#include <cstdlib>
#include <cstring>

#include "common/thread_pool.hpp"

namespace mp {
namespace {

using GompParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

GompParallel find_runtime() {
  const char* chosen = std::getenv("MILLPOND_THREADS");
  if (chosen != nullptr && std::strcmp(chosen, "pool") == 0) return nullptr;
  void* found = dlsym(RTLD_DEFAULT, "GOMP_parallel");
  if (found == nullptr) {
    if (void* library = dlopen("libgomp.so.1", RTLD_NOW | RTLD_LOCAL)) found = dlsym(library, "GOMP_parallel");
  }
  return reinterpret_cast<GompParallel>(found);
}

bool always_runtime() {
  const char* chosen = std::getenv("MILLPOND_THREADS");
  return chosen != nullptr && std::strcmp(chosen, "openmp") == 0;
}

int64_t now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

struct Job {
  Body body;
  void* context;
  std::atomic<int> tickets;
  int n;
  pthread_t caller;
  int64_t worked_until;
};

// A thread takes tickets until none is left: right also where the runtime grants fewer threads than asked for.
void work(void* data) {
  Job& job = *static_cast<Job*>(data);
  for (int t; (t = job.tickets.fetch_add(1, std::memory_order_relaxed)) < job.n;) job.body(job.context, t);
  if (pthread_equal(pthread_self(), job.caller)) job.worked_until = now();
}

}  // namespace

void run_parallel(int n_threads, Body body, void* context) {
  if (n_threads <= 1) {
    body(context, 0);
    return;
  }
  static const GompParallel gomp = find_runtime();
  static const bool stays = always_runtime();
  static Contention contention;
  const int64_t begin = now();
  if (gomp == nullptr || (!stays && contention.seen(begin))) {
    run_in_pool(n_threads, body, context);
    return;
  }
  Job job{body, context, {0}, n_threads, pthread_self(), begin};
  gomp(work, &job, unsigned(n_threads), 0);
  const int64_t end = now();
  contention.note(end, job.worked_until - begin, end - job.worked_until);
}

}  // namespace mp
