#include "common/thread_pool.hpp"

#include <pthread.h>
#include <time.h>

#include <algorithm>

namespace mp {
namespace {

constexpr int SLOTS = 8, MOST_HELPERS = 255, LOOKS = 64;
constexpr int64_t LONG_SPIN_NS = 200'000, SHORT_SPIN_NS = 10'000, GAP_NS = 500'000;

int64_t now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Wait until ready() holds, for a while that is short after this thread's core was taken from it. Whether it holds.
class Spin {
 public:
  template <class F>
  bool until(const F& ready) {
    const int64_t begin = now();
    for (int64_t before = begin;;) {
      for (int i = 0; i < LOOKS; ++i, pause())
        if (ready()) {
          limit_ = std::min(LONG_SPIN_NS, limit_ + limit_ / 8);
          return true;
        }
      const int64_t at = now();
      if (at - before > GAP_NS) limit_ = SHORT_SPIN_NS;
      if (at - begin > limit_) return false;
      before = at;
    }
  }

 private:
  int64_t limit_ = LONG_SPIN_NS;
};

// One loop. `state` is its number, its n and the next t, so that a thread that comes late takes nothing of another loop:
// what the slot points to is read only by who has taken a t, and stays until all of those are done.
struct Slot {
  alignas(64) std::atomic<uint64_t> state{0};
  Body body = nullptr;
  void* context = nullptr;
  alignas(64) std::atomic<int> done{0};
  std::atomic<bool> taken{false}, waited_for{false};

  int take() {
    uint64_t s = state.load(std::memory_order_acquire);
    for (;;) {
      const uint64_t next = s & 0xFFFF, n = s >> 16 & 0xFFFF;
      if (next >= n) return -1;
      if (state.compare_exchange_weak(s, s + 1, std::memory_order_acq_rel, std::memory_order_acquire)) return int(next);
    }
  }
};

class Pool {
 public:
  void run(int n, int workers, Body body, void* context) {
    Slot* slot = free_slot();
    if (slot == nullptr) {  // as many loops as there are slots: this one gets no help
      for (int t = 0; t < n; ++t) body(context, t);
      return;
    }
    slot->body = body, slot->context = context;
    slot->done.store(0, std::memory_order_relaxed);
    const uint64_t number = (slot->state.load(std::memory_order_relaxed) >> 32) + 1;
    slot->state.store(number << 32 | uint64_t(n) << 16 | 1, std::memory_order_release);
    call_helpers(workers - 1);
    for (int t = 0; t >= 0; t = slot->take()) work(*slot, t);
    static thread_local Spin spin;
    const auto finished = [&] { return slot->done.load(std::memory_order_seq_cst) == n; };
    if (!spin.until(finished)) {
      pthread_mutex_lock(&mutex_);
      slot->waited_for.store(true, std::memory_order_seq_cst);
      while (!finished()) pthread_cond_wait(&ended_, &mutex_);
      slot->waited_for.store(false, std::memory_order_relaxed);
      pthread_mutex_unlock(&mutex_);
    }
    slot->taken.store(false, std::memory_order_release);
  }

 private:
  Slot* free_slot() {
    for (Slot& slot : slots_)
      if (!slot.taken.load(std::memory_order_relaxed) && !slot.taken.exchange(true, std::memory_order_acquire))
        return &slot;
    return nullptr;
  }

  void work(Slot& slot, int t) {
    slot.body(slot.context, t);
    slot.done.fetch_add(1, std::memory_order_seq_cst);
    if (!slot.waited_for.load(std::memory_order_seq_cst)) return;
    pthread_mutex_lock(&mutex_);
    pthread_cond_broadcast(&ended_);
    pthread_mutex_unlock(&mutex_);
  }

  void call_helpers(int wanted) {
    wanted = std::min(wanted, MOST_HELPERS);
    if (helpers_.load(std::memory_order_relaxed) < wanted) start(wanted);
    loops_.fetch_add(1, std::memory_order_seq_cst);
    if (asleep_.load(std::memory_order_seq_cst) == 0) return;
    pthread_mutex_lock(&mutex_);
    for (int i = std::min(wanted, asleep_.load(std::memory_order_relaxed)); i > 0; --i) pthread_cond_signal(&begun_);
    pthread_mutex_unlock(&mutex_);
  }

  void start(int wanted) {
    pthread_mutex_lock(&mutex_);
    while (helpers_.load(std::memory_order_relaxed) < wanted) {
      pthread_t thread;
      if (pthread_create(&thread, nullptr, [](void* pool) { return static_cast<Pool*>(pool)->help(); }, this)) break;
      pthread_detach(thread);
      helpers_.fetch_add(1, std::memory_order_relaxed);
    }
    pthread_mutex_unlock(&mutex_);
  }

  void* help() {
    Spin spin;
    for (;;) {
      const uint64_t seen = loops_.load(std::memory_order_seq_cst);
      bool helped = false;
      for (Slot& slot : slots_)
        for (int t; (t = slot.take()) >= 0; helped = true) work(slot, t);
      const auto called = [&] { return loops_.load(std::memory_order_seq_cst) != seen; };
      if (helped || spin.until(called)) continue;
      pthread_mutex_lock(&mutex_);
      asleep_.fetch_add(1, std::memory_order_seq_cst);
      while (!called()) pthread_cond_wait(&begun_, &mutex_);
      asleep_.fetch_sub(1, std::memory_order_relaxed);
      pthread_mutex_unlock(&mutex_);
    }
  }

  Slot slots_[SLOTS];
  alignas(64) std::atomic<uint64_t> loops_{0};
  std::atomic<int> helpers_{0}, asleep_{0};
  pthread_mutex_t mutex_ = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t begun_ = PTHREAD_COND_INITIALIZER, ended_ = PTHREAD_COND_INITIALIZER;
};

// Never destroyed: its threads outlive main. A child of fork has none of them, and begins with a pool of its own.
std::atomic<Pool*> current{nullptr};

Pool& pool() {
  Pool* found = current.load(std::memory_order_acquire);
  if (found != nullptr) return *found;
  static const int once = pthread_atfork(nullptr, nullptr, [] { current.store(nullptr, std::memory_order_release); });
  (void)once;
  Pool* made = new Pool;
  if (!current.compare_exchange_strong(found, made, std::memory_order_acq_rel)) {
    delete made;  // another thread was faster; this one has no threads yet
    return *found;
  }
  return *made;
}

}  // namespace

void run_in_pool(int n, int workers, Body body, void* context) { pool().run(n, workers, body, context); }

void Contention::note(int64_t now_ns, int64_t own_ns, int64_t late_ns) {
  if (late_ns < std::max(LATE_NS, own_ns)) {
    if (calm_.fetch_add(1, std::memory_order_relaxed) == CALM) length_.store(SHORTEST_NS, std::memory_order_relaxed);
    return;
  }
  calm_.store(0, std::memory_order_relaxed);
  const int64_t length = length_.load(std::memory_order_relaxed);
  until_.store(now_ns + length, std::memory_order_relaxed);
  length_.store(std::min(2 * length, LONGEST_NS), std::memory_order_relaxed);
}

}  // namespace mp
