// torch brings its own copy of the OpenMP runtime. A second copy would keep a second pool of spinning threads, so the
// one that is already loaded is looked up by name instead of linking any; where its threads lose their cores to other
// processes, those of thread_pool.cpp take over for a while. A loop never has more threads than there are CPUs, and where
// several threads of the process call loops, each has its part of them: a loop that is not split waits for nobody.
#include "common/threads.hpp"

#include <dlfcn.h>
#include <pthread.h>
#include <time.h>

#include <algorithm>
#include <climits>
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

// All n calls of body on `workers` threads, this one included.
void run_on(int workers, int n, Body body, void* context, int64_t begin) {
  if (workers <= 1) {
    for (int t = 0; t < n; ++t) body(context, t);
    return;
  }
  static const GompParallel gomp = find_runtime();
  static const bool stays = always_runtime();
  static Contention contention;
  if (gomp == nullptr || (!stays && contention.seen(begin))) {
    run_in_pool(n, workers, body, context);
    return;
  }
  Job job{body, context, {0}, n, pthread_self(), begin};
  gomp(work, &job, unsigned(workers), 0);
  const int64_t end = now();
  contention.note(end, job.worked_until - begin, end - job.worked_until);
}

std::atomic<int> most_threads{INT_MAX};  // of all loops that run at once

// Threads that call loops, as several engines of a process do: how many there are now. Each has a place of its own for
// the time until which it counts.
class Callers {
 public:
  // While it lives this thread is in a loop; it counts as a caller for a while after that.
  class Inside {
   public:
    explicit Inside(Callers& callers) : place_(callers.place()) { place_.store(INT64_MAX, std::memory_order_relaxed); }
    ~Inside() { place_.store(now() + LATELY_NS, std::memory_order_relaxed); }

   private:
    std::atomic<int64_t>& place_;
  };

  int count(int64_t now_ns) const {
    int n = 0;
    for (const auto& until : until_) n += until.load(std::memory_order_relaxed) > now_ns;
    return n;
  }

 private:
  static constexpr int PLACES = 16;
  static constexpr int64_t LATELY_NS = 20'000'000;  // longer than a step is outside of loops

  std::atomic<int64_t>& place() {
    static thread_local const unsigned own = next_.fetch_add(1, std::memory_order_relaxed);
    return until_[own % PLACES];
  }

  std::atomic<int64_t> until_[PLACES] = {};
  std::atomic<unsigned> next_{0};
};

Callers callers;

}  // namespace

void run_parallel(int n_threads, Body body, void* context) {
  const int most = most_threads.load(std::memory_order_relaxed);
  const int wanted = std::min(n_threads, most);
  if (wanted <= 1) return run_on(1, n_threads, body, context, 0);
  const int64_t begin = now();
  Callers::Inside inside(callers);
  run_on(std::clamp(most / callers.count(begin), 1, wanted), n_threads, body, context, begin);
}

}  // namespace mp

// The CPUs that this process may use: more threads would only take each other's. Loops of several callers share them.
extern "C" __attribute__((visibility("default"))) void mp_limit_threads(int most) {
  mp::most_threads.store(std::max(1, most), std::memory_order_relaxed);
}
