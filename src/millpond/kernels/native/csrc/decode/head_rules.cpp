// After a step of heads with nested rules: what no rule keeps leaves, and the last entries that stay fill its slots.
#include <cstring>
#include <utility>
#include <vector>

#include "common/pages.hpp"

namespace mp {
namespace {

enum Kind : int64_t { SPECIAL_ALONE = 0, WITH_PUNCTUATION = 1, WITH_FREQUENT = 2, WITH_LOCAL = 3, EVERYTHING = 4 };
enum Class : uint8_t { OTHER = 0, PUNCTUATION = 1, SPECIAL = 2 };

// An integer in the order of the floats, then of the positions: the lowest leaves first.
int64_t rank_of(float score, int32_t position) {
  score += 0.0f;  // one zero of the two
  int32_t bits;
  std::memcpy(&bits, &score, 4);
  bits ^= (bits >> 31) & 0x7FFFFFFF;
  return (int64_t(bits) << 32) + position;
}

// What is known of one entry, and whether it leaves.
struct Entry {
  float score;
  int32_t position, age;
  uint8_t kind;  // a Class
  bool fixed, near, leaves;
  bool special() const { return kind == SPECIAL; }
  int64_t rank() const { return rank_of(score, position); }
};

using Entries = std::vector<Entry>;

struct Head {
  Entries entries;
  int64_t allowed, stays;  // how many may stay, and how many do
};

// The `spare` lowest of the entries that are free leave.
template <class Free>
void let_go(Head& head, int64_t spare, const Free& free, std::vector<std::pair<int64_t, Entry*>>& chosen) {
  if (spare <= 0) return;
  if (spare == 1) {
    Entry* lowest = nullptr;
    for (Entry& e : head.entries)
      if (!e.leaves && free(e) && (lowest == nullptr || e.rank() < lowest->rank())) lowest = &e;
    if (lowest != nullptr) lowest->leaves = true, --head.stays;
    return;
  }
  chosen.clear();
  for (Entry& e : head.entries)
    if (!e.leaves && free(e)) chosen.emplace_back(e.rank(), &e);
  spare = std::min<int64_t>(spare, int64_t(chosen.size()));
  if (spare < int64_t(chosen.size())) std::nth_element(chosen.begin(), chosen.begin() + spare, chosen.end());
  for (int64_t i = 0; i < spare; ++i) chosen[size_t(i)].second->leaves = true;
  head.stays -= spare;
}

// The heads of one sequence.
class Sequence {
 public:
  Sequence(const AdmitArgs& a, const Pool& pool, int64_t index)
      : a_(a), pool_(pool), index_(index), first_(a.sequences[index] * a.n_kv_heads), heads_(size_t(a.n_kv_heads)) {}

  void run() {
    for (int64_t h = 0; h < a_.n_kv_heads; ++h) load(h), apply(h);
    hold_together();
    for (int64_t h = 0; h < a_.n_kv_heads; ++h) close_gaps(h);
  }

 private:
  const int32_t* pages(int64_t h) const { return a_.table + (first_ + h) * a_.table_row; }
  Entries& entries(int64_t h) { return heads_[size_t(h)].entries; }

  void load(int64_t h) {
    const int64_t kind = a_.kinds[first_ + h], seen = a_.seen[index_], local = a_.local[first_];
    const int64_t *ids = a_.ids + a_.sequences[index_] * a_.ids_row, beyond = a_.n_classes - 1;
    const int64_t sinks = a_.sinks, hidden = a_.window > 0 ? a_.window : INT64_MAX;
    const uint8_t* classes = a_.classes;
    const int n = a_.lens[first_ + h];
    entries(h).resize(size_t(n));
    Entry* out = entries(h).data();
    int64_t stays = 0;
    for (int at = 0; at < n;) {
      const int run = pool_.run(at, n, n);
      const int32_t* positions = pool_.position(pages(h), at);
      const float* scores = pool_.score(pages(h), at);
      for (int i = 0; i < run; ++i) {
        const int32_t position = positions[i], age = int32_t(seen - position);
        const int64_t id = std::min(std::max<int64_t>(ids[position], 0), beyond);
        const uint8_t is = position < sinks ? uint8_t(SPECIAL) : classes[id];
        const bool fixed = is == SPECIAL || (is == PUNCTUATION && kind >= WITH_PUNCTUATION);
        // what is hidden from the next query leaves
        out[at + i] = {scores[i], position, age, is, fixed, age <= local && kind >= WITH_LOCAL, age >= hidden};
        stays += age < hidden;
      }
      at += run;
    }
    heads_[size_t(h)].stays = stays;
  }

  // What the rule of the head keeps.
  void apply(int64_t h) {
    const int64_t kind = a_.kinds[first_ + h];
    if (kind == EVERYTHING) return;
    const auto rest = [](const Entry& e) { return !e.fixed && !e.near; };
    int64_t spare = kind >= WITH_FREQUENT ? -a_.quota[index_] : 0;
    for (const Entry& e : entries(h)) spare += !e.leaves && rest(e);
    let_go(heads_[size_t(h)], spare, rest, chosen_);
  }

  // The longest are cut until all heads together hold no more than they may.
  void hold_together() {
    int64_t total = 0;
    std::vector<std::pair<int64_t, int64_t>> order;
    for (int64_t h = 0; h < a_.n_kv_heads; ++h) {
      order.emplace_back(heads_[size_t(h)].stays, h);
      total += order.back().first;
    }
    int64_t left = a_.most[index_];
    if (total <= left) return;
    std::sort(order.begin(), order.end());
    for (size_t i = 0; i < order.size(); ++i) {
      Head& head = heads_[size_t(order[i].second)];
      head.allowed = std::min(order[i].first, left / int64_t(order.size() - i));
      left -= head.allowed;
    }
    for (Head& head : heads_) {
      const int64_t newest = head.allowed / 2, sinks = a_.sinks;
      shorten(head, [newest](const Entry& e) { return !e.fixed && !(e.near && e.age <= newest); });
      shorten(head, [](const Entry& e) { return !e.special(); });
      shorten(head, [sinks](const Entry& e) { return e.position >= sinks; });
    }
  }

  template <class Free>
  void shorten(Head& head, const Free& free) {
    let_go(head, head.stays - head.allowed, free, chosen_);
  }

  void close_gaps(int64_t h) {
    const int64_t after = heads_[size_t(h)].stays;
    if (after == a_.lens[first_ + h]) return;
    const Entry* held = entries(h).data();
    int64_t from = after;
    for (int64_t to = 0; to < after; ++to) {
      if (!held[to].leaves) continue;
      while (held[from].leaves) ++from;
      move(pages(h), to, from++);
    }
    a_.lens[first_ + h] = int32_t(after);
  }

  void move(const int32_t* pages, int64_t to, int64_t from) {
    std::memcpy(pool_.key(pages, to), pool_.key(pages, from), size_t(pool_.key_dim * pool_.item));
    std::memcpy(pool_.value(pages, to), pool_.value(pages, from), size_t(pool_.value_dim * pool_.item));
    *pool_.position(pages, to) = *pool_.position(pages, from);
    *pool_.score(pages, to) = *pool_.score(pages, from);
    if (pool_.masses) *pool_.log_mass(pages, to) = *pool_.log_mass(pages, from);
  }

  const AdmitArgs& a_;
  const Pool& pool_;
  const int64_t index_, first_;
  std::vector<Head> heads_;
  std::vector<std::pair<int64_t, Entry*>> chosen_;
};

}  // namespace
}  // namespace mp

extern "C" __attribute__((visibility("default"))) int mp_admit(const mp::AdmitArgs* args) {
  const mp::Pool pool(args->pool);
  for (int64_t i = 0; i < args->n_sequences; ++i) mp::Sequence(*args, pool, i).run();
  return 0;
}
