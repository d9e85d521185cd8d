// Regions that hold more than their caps: the entries of lowest value leave, and are taken into those that stay.
//
// Every region finds what its leavers are like; where a threshold moves, it is then known for the whole sequence; then
// every region takes in. A region is worked on by one thread, so results do not depend on the threads.
#include "common/threads.hpp"
#include "common/workspace.hpp"
#include "merge/merge_rules.hpp"

namespace mp {
namespace {

constexpr double ROUNDING = 1e-6;                 // cosines that differ by less are the same
constexpr int64_t BYTES_PER_THREAD = 64 * 1024;  // of entries: what a thread is worth waking for

class Merge {
 public:
  explicit Merge(const MergeArgs& args) : a_(args), pool_(args.pool) {}
  int run();

 private:
  bool moves() const { return a_.weigh == BY_EXP || a_.weigh == BY_COUNT; }
  void find(int r, char* scratch);
  void follow(int seq);
  void take_in(int r, char* scratch);
  template <class F>
  void for_regions(F f);

  const MergeArgs& a_;
  const Pool pool_;
  int n_regions_ = 0, longest_ = 0, most_leaving_ = 0, threads_ = 1;
  int64_t columns_ = 0, scratch_bytes_ = 0;
  char* scratch_ = nullptr;
  Leaver* leavers_ = nullptr;  // (R, most_leaving)
};

void Merge::find(int r, char* scratch) {
  const Region g(a_, pool_, r);
  if (g.leaving == 0) return;
  const Columns c(scratch, longest_);
  Leaver* leavers = leavers_ + int64_t(r) * most_leaving_;
  g.load(c);
  g.choose(c, leavers);
  if (a_.weigh == BY_CHANCE) return;
  const Rows rows(pool_, scratch + columns_);
  float* lowest = reinterpret_cast<float*>(scratch + columns_ + round_up(Rows::bytes(pool_), 64));
  for (int i = a_.weigh == BY_SCORE ? dropped(g, c, lowest) : 0; i < g.leaving; ++i) switch (pool_.dtype) {
      case F32: find_alike<float>(g, c, rows, leavers[i]); break;
      case F16: find_alike<f16>(g, c, rows, leavers[i]); break;
      default: find_alike<bf16>(g, c, rows, leavers[i]);
    }
}

// The threshold of a sequence moves to the mean of what was found in its regions.
void Merge::follow(int seq) {
  double total = 0;
  int64_t met = 0;
  const int first = seq * int(a_.n_kv_heads), end = first + int(a_.n_kv_heads);
  for (int r = first; r < end; ++r)
    for (int i = 0; i < Region::spare(a_, r); ++i) {
      const Leaver& e = leavers_[int64_t(r) * most_leaving_ + i];
      if (e.into >= 0) total += double(e.alike), ++met;
    }
  if (met == 0) return;
  const double before = a_.memory[seq], now = total / double(met);
  a_.memory[seq] = before != before ? now : a_.rate * now + (1 - a_.rate) * before;
}

void Merge::take_in(int r, char* scratch) {
  const Region g(a_, pool_, r);
  if (g.leaving == 0) return;
  const Columns c(scratch, longest_);
  Leaver* leavers = leavers_ + int64_t(r) * most_leaving_;
  if (moves()) {  // another region was worked on in between
    g.load(c);
    for (int i = 0; i < g.leaving; ++i) c.gone[leavers[i].slot] = 1;
  }
  const double bound = moves() ? a_.memory[g.seq] - ROUNDING : a_.threshold;
  for (int i = 0; i < g.leaving; ++i) {
    Leaver& e = leavers[i];
    if (a_.weigh == BY_SCORE ? !(double(e.alike) > bound) : double(e.alike) < bound) e.into = -1;
  }
  const Rows rows(pool_, scratch + columns_);
  if (a_.weigh == BY_CHANCE) {
    char* rest = scratch + columns_ + round_up(Rows::bytes(pool_), 64);
    join_next(g, c, rows, leavers, reinterpret_cast<int32_t*>(rest));
  } else {
    join_alike(g, c, rows, leavers);
  }
  g.close(c);
}

template <class F>
void Merge::for_regions(F f) {
  std::atomic<int> next{0};
  auto body = [&](int thread) {
    for (int r; (r = next.fetch_add(1, std::memory_order_relaxed)) < n_regions_;) f(r, scratch_ + thread * scratch_bytes_);
  };
  parallel(threads_, body);
}

int Merge::run() {
  n_regions_ = int(a_.n_seq * a_.n_kv_heads);
  int64_t entries = 0;
  for (int r = 0; r < n_regions_; ++r) {
    const int leaving = Region::spare(a_, r);
    if (leaving == 0) continue;
    most_leaving_ = std::max(most_leaving_, leaving);
    longest_ = std::max(longest_, int(a_.lens[r]));
    entries += a_.lens[r];
  }
  if (most_leaving_ == 0) return 0;
  const int64_t read = a_.weigh == BY_CHANCE ? 8 : 8 + pool_.key_dim * pool_.item;
  threads_ = int(std::min<int64_t>({std::max<int64_t>(1, a_.n_threads), n_regions_, 1 + entries * read / BYTES_PER_THREAD}));
  columns_ = Columns::bytes(longest_);
  const int64_t by_place = 4 * int64_t(longest_);
  scratch_bytes_ = round_up(columns_ + round_up(Rows::bytes(pool_), 64) + std::max(by_place, 4 * int64_t(most_leaving_)), 4096);
  const int64_t leavers = round_up(int64_t(n_regions_) * most_leaving_ * int64_t(sizeof(Leaver)), 64);
  static thread_local Workspace workspace;
  char* memory = workspace.get(leavers + threads_ * scratch_bytes_);
  if (memory == nullptr) return 1;
  leavers_ = reinterpret_cast<Leaver*>(memory);
  scratch_ = memory + leavers;
  if (!moves()) {
    for_regions([this](int r, char* scratch) { find(r, scratch), take_in(r, scratch); });
    return 0;
  }
  for_regions([this](int r, char* scratch) { find(r, scratch); });
  for (int s = 0; s < a_.n_seq; ++s) follow(s);
  for_regions([this](int r, char* scratch) { take_in(r, scratch); });
  return 0;
}

}  // namespace
}  // namespace mp

extern "C" __attribute__((visibility("default"))) int mp_merge_slots(const mp::MergeArgs* args) {
  return mp::Merge(*args).run();
}
