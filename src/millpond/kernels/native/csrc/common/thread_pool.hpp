// Threads of our own, for CPUs that other processes use too: nobody waits for a thread that has not begun.
#pragma once

#include <atomic>
#include <cstdint>

#include "common/threads.hpp"

namespace mp {

// Calls body(context, t) for every t below n, on this thread and up to workers - 1 of the pool that find the time. Where
// none does, this thread makes all of the calls; what it waits for at the end are calls that others have begun.
void run_in_pool(int n, int workers, Body body, void* context);

// When to leave the runtime's threads for ours. The runtime ends a loop when all of its threads have come to the end,
// those included that had nothing to do: a thread whose core was taken from it holds up all others for milliseconds.
// Several threads may call these; what they write over each other is worth no lock.
class Contention {
 public:
  // Whether the next loop should run in the pool.
  bool seen(int64_t now_ns) const { return now_ns < until_.load(std::memory_order_relaxed); }
  // A loop of the runtime took this thread `own_ns` of work, and then `late_ns` of waiting for others.
  void note(int64_t now_ns, int64_t own_ns, int64_t late_ns);

 private:
  static constexpr int64_t LATE_NS = 1'000'000, SHORTEST_NS = 50'000'000, LONGEST_NS = 2'000'000'000;
  static constexpr int CALM = 200;  // loops in a row after which an earlier wait is forgotten
  std::atomic<int64_t> until_{0}, length_{SHORTEST_NS};
  std::atomic<int> calm_{0};
};

}  // namespace mp
