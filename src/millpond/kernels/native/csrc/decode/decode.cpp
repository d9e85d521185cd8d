// One decoding step of one layer over the whole ragged batch.
//
// Work items are (region, split). Every thread has a run of neighbours, because memory is read fastest in long streams,
// and takes from the end of another's when its own is done. The thread that finishes a region's last split completes
// the region while its weights are still in its cache. With fewer regions than threads the scoring pass is split too.
#include <mutex>

#include "common/threads.hpp"
#include "decode/lse_merge.hpp"
#include "decode/store.hpp"
#include "quantized/packed_attend.hpp"

namespace mp {
namespace {

struct RegionState {
  std::atomic<int> left;  // splits, and units of shared entries, not yet done
  int slab;               // which slab it uses, -1 before the first split
};

struct Item {
  int region, split;
};

// The work items that one thread begins with; it takes from the front, others from the back.
struct alignas(64) Share {
  Item front, back;
  std::atomic<int> left;
};

class Step {
 public:
  explicit Step(const DecodeArgs& args, const PackedArgs* packed = nullptr, SharedParts* shared = nullptr)
      : c_(args, packed), shared_(shared) {}
  int run();

 private:
  void choose_threads(int64_t n_items);
  void work(int thread);
  void attend_split(int r, int split, int thread);
  void combine(int r, int thread);
  void finish(int r, int thread);
  void settle(int r, int thread);
  int score_splits(int r) const;
  void score_in_parallel();
  void share_out(int n_items);
  bool take(int thread, Item& item);
  Ahead likely_next(int thread) const;

  Slab slab(int r) const { return Slab(c_, slabs_ + states_[r].slab * Slab::bytes(c_)); }
  Scratch scratch(int thread) const { return Scratch(c_, scratches_ + thread * Scratch::bytes(c_)); }
  float* shared_mean(int thread) const { return means_ + thread * int64_t(c_.most + W); }

  Call c_;
  SharedParts* shared_;  // null: no entries are shared
  std::atomic<int> next_shared_{0};
  int threads_ = 1;
  bool apart_ = false;  // attention first, then scores: both split over the threads
  RegionState* states_ = nullptr;
  float* scores_ = nullptr;  // per region: the new entry's accumulator
  std::atomic<int>* heads_left_ = nullptr;  // per sequence
  int* free_ = nullptr;                     // stack of free slabs
  int n_free_ = 0;
  Share* shares_ = nullptr;  // per thread; written under the mutex, its own front read without it
  char *slabs_ = nullptr, *scratches_ = nullptr;
  float* means_ = nullptr;
  std::mutex mutex_;
};

// A thread is worth waking for this many bytes of keys and values.
constexpr int64_t BYTES_PER_THREAD = 128 * 1024;
// Regions of fewer entries than SHORT pass so fast that memory is asked for the slot of one that comes later.
constexpr int SHORT = 128, LOOK_AHEAD = 4;

void Step::choose_threads(int64_t n_items) {
  int64_t slots = 0, packed = 0;
  for (int r = 0; r < c_.n_regions; ++r)
    if (c_.active(r)) slots += c_.a.lens[r], packed += c_.packed_lens(r);
  const int64_t bytes = slots * (c_.pool.key_dim + c_.pool.value_dim) * c_.pool.item +
                        (packed > 0 ? packed * c_.packed->page_bytes / c_.packed->pool.slots : 0);
  const int64_t worth =
      1 + bytes / BYTES_PER_THREAD + (shared_ != nullptr ? int64_t(shared_->work() / SHARED_WORK_PER_THREAD) : 0);
  threads_ = int(std::max<int64_t>(1, std::min({c_.a.n_threads, worth, n_items})));
  apart_ = c_.n_regions < threads_;
}

void Step::share_out(int n_items) {
  Item item{0, 0};
  for (int t = 0, at = 0; t < threads_; ++t) {
    const int end = int(int64_t(n_items) * (t + 1) / threads_);
    shares_[t].front = item;
    shares_[t].left.store(end - at, std::memory_order_relaxed);
    for (; at < end; ++at) {
      shares_[t].back = item;
      item = item.split + 1 < c_.splits(item.region) ? Item{item.region, item.split + 1} : Item{item.region + 1, 0};
    }
  }
}

bool Step::take(int thread, Item& item) {
  std::lock_guard<std::mutex> lock(mutex_);
  int from = thread;
  for (int t = 0; t < threads_ && shares_[thread].left == 0; ++t)
    if (shares_[t].left > shares_[from].left) from = t;
  Share& share = shares_[from];
  if (share.left == 0) return false;
  share.left.store(share.left - 1, std::memory_order_relaxed);
  if (from == thread) {
    item = share.front;
    share.front = item.split + 1 < c_.splits(item.region) ? Item{item.region, item.split + 1} : Item{item.region + 1, 0};
  } else {
    item = share.back;
    share.back = item.split > 0 ? Item{item.region, item.split - 1}
                                : Item{item.region - 1, item.region > 0 ? c_.splits(item.region - 1) - 1 : 0};
  }
  if (states_[item.region].slab < 0) states_[item.region].slab = free_[--n_free_];
  return true;
}

// Only a guess where another thread takes that item first, which is harmless.
Ahead Step::likely_next(int thread) const {
  const auto [r, split] = shares_[thread].front;
  if (shares_[thread].left.load(std::memory_order_relaxed) == 0 || !c_.active(r)) return {nullptr, 0, 0};
  const int at = split * SPLIT;
  if (at >= c_.a.lens[r]) return {nullptr, 0, 0};
  return {c_.pages(r), at, std::min(CHUNK, c_.a.lens[r] - at)};
}

void Step::attend_split(int r, int split, int thread) {
  if (split >= c_.plain_splits(r)) return attend_packed(c_, r, split, slab(r), scratch(thread));
  const auto next = [this, thread] { return likely_next(thread); };
  switch (c_.pool.dtype) {
    case F32: return attend<float>(c_, r, split, slab(r), scratch(thread), next);
    case F16: return attend<f16>(c_, r, split, slab(r), scratch(thread), next);
    default: return attend<bf16>(c_, r, split, slab(r), scratch(thread), next);
  }
}

// Output and log-sum-exp of a region whose splits are done, and the new entry's accumulator.
void Step::combine(int r, int thread) {
  scores_[r] = 0.0f;
  if (!c_.active(r)) return leave_out(c_, r);
  const float received = merge(c_, r, slab(r), scratch(thread), shared_);
  if (c_.gathers) scores_[r] = received;
}

// The new entry of region r, or of its whole sequence where the KV heads decide together.
void Step::settle(int r, int thread) {
  if (!c_.active(r)) return;
  if (!averaged(c_)) return store_alone(c_, r, slab(r), scores_[r]);
  const int seq = c_.seq(r);
  if (heads_left_[seq].fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  store_shared(c_, seq, shared_mean(thread), scores_ + seq * c_.a.n_kv_heads);
}

int Step::score_splits(int r) const { return c_.gathers || c_.full(r) ? c_.splits(r) : 0; }

// Region r, whose parts are all done.
void Step::finish(int r, int thread) {
  combine(r, thread);
  for (int i = 0; c_.active(r) && i < score_splits(r); ++i) score_part(c_, r, i, slab(r), scratch(thread).factors);
  settle(r, thread);
  std::lock_guard<std::mutex> lock(mutex_);
  free_[n_free_++] = states_[r].slab;
}

// Shared entries first: their units are the longest, and own entries of other regions fill up what time they leave.
void Step::work(int thread) {
  const int units = shared_ != nullptr ? shared_->units() : 0;
  for (int i; (i = next_shared_.fetch_add(1, std::memory_order_relaxed)) < units;) {
    shared_->attend(i, thread);
    if (apart_) continue;
    shared_->for_regions(i, [&](int r) {
      if (states_[r].left.fetch_sub(1, std::memory_order_acq_rel) == 1) finish(r, thread);
    });
  }
  for (Item item; take(thread, item);) {
    const auto [r, split] = item;
    const int later = c_.a.lens[r] < SHORT ? r + LOOK_AHEAD : r;  // short regions are done before memory has answered
    if (split == c_.splits(r) - 1 && later < c_.n_regions) prefetch_slot(c_, later);
    if (c_.active(r)) attend_split(r, split, thread);
    if (apart_ || states_[r].left.fetch_sub(1, std::memory_order_acq_rel) != 1) continue;
    finish(r, thread);
  }
}

void Step::score_in_parallel() {
  std::atomic<int> next{0};
  const int per_region = int(Slab::splits(c_));
  for (int r = 0; r < c_.n_regions; ++r) combine(r, 0);
  auto body = [&](int thread) {
    for (int i; (i = next.fetch_add(1, std::memory_order_relaxed)) < c_.n_regions * per_region;) {
      const int r = i / per_region, split = i % per_region;
      if (c_.active(r) && split < score_splits(r)) score_part(c_, r, split, slab(r), scratch(thread).factors);
    }
  };
  parallel(threads_, body);
  for (int r = 0; r < c_.n_regions; ++r) settle(r, 0);
}

int Step::run() {
  const int n = c_.n_regions;
  int64_t n_items = 0;
  for (int r = 0; r < n; ++r) n_items += c_.splits(r);
  choose_threads(n_items + (shared_ != nullptr ? shared_->units() : 0));
  // begun: one worked on, and one at each end of a share; or those that wait for shared entries
  const int n_slabs = apart_ || shared_ != nullptr ? n : std::min(n, 3 * threads_);
  int64_t bytes = 0;
  auto reserve = [&bytes](int64_t size) { return std::exchange(bytes, bytes + round_up(size, 64)); };
  const int64_t slabs = reserve(n_slabs * Slab::bytes(c_)), scratches = reserve(threads_ * Scratch::bytes(c_));
  const int64_t means = reserve(averaged(c_) ? threads_ * int64_t(c_.most + W) * 4 : 0);
  const int64_t states = reserve(n * int64_t(sizeof(RegionState))), scores = reserve(n * int64_t(sizeof(float)));
  const int64_t counters = reserve(c_.a.n_seq * int64_t(sizeof(std::atomic<int>)));
  const int64_t stack = reserve(n_slabs * int64_t(sizeof(int)));
  static thread_local Workspace workspace;
  const int64_t shares = reserve(threads_ * int64_t(sizeof(Share)));
  const int64_t of_shared = (bytes = round_up(bytes, 4096), reserve(shared_ != nullptr ? shared_->bytes(threads_) : 0));
  char* memory = workspace.get(bytes);
  if (memory == nullptr) return 1;
  slabs_ = memory + slabs;
  scratches_ = memory + scratches;
  means_ = reinterpret_cast<float*>(memory + means);
  states_ = reinterpret_cast<RegionState*>(memory + states);
  scores_ = reinterpret_cast<float*>(memory + scores);
  heads_left_ = reinterpret_cast<std::atomic<int>*>(memory + counters);
  free_ = reinterpret_cast<int*>(memory + stack);
  shares_ = reinterpret_cast<Share*>(memory + shares);
  if (shared_ != nullptr) shared_->use(memory + of_shared);
  for (int i = 0; i < n_slabs; ++i) free_[i] = n_slabs - 1 - i;
  n_free_ = n_slabs;
  for (int r = 0; r < n; ++r) {
    states_[r].left.store(c_.splits(r) + (shared_ != nullptr ? shared_->waits_for(r) : 0), std::memory_order_relaxed);
    states_[r].slab = apart_ ? r : -1;
  }
  for (int s = 0; s < c_.a.n_seq; ++s) heads_left_[s].store(int(c_.a.n_kv_heads), std::memory_order_relaxed);
  share_out(int(n_items));
  auto body = [this](int thread) { work(thread); };
  parallel(threads_, body);
  if (apart_) score_in_parallel();
  return 0;
}

}  // namespace
}  // namespace mp

extern "C" __attribute__((visibility("default"))) int mp_decode(const mp::DecodeArgs* args) {
  return mp::Step(*args).run();
}

// The regions of the second struct belong to those of the first: a part of their entries lies in packed pages.
extern "C" __attribute__((visibility("default"))) int mp_decode_packed(const mp::PackedDecodeArgs* args) {
  return mp::Step(args->plain, &args->packed).run();
}

// Nothing leaves and nothing is scored. Runs of entries that several sequences share come before each sequence's own.
extern "C" __attribute__((visibility("default"))) int mp_decode_shared(const mp::SharedDecodeArgs* args) {
  mp::SharedParts shared(reinterpret_cast<const mp::AttendArgs*>(args + 1), int(args->n_runs));
  return mp::Step(args->decode, nullptr, &shared).run();
}
