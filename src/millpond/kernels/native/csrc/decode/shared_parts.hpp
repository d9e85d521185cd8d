// What the regions of a step find in runs of entries that several sequences share: units of work of that step, in one
// loop with those of the regions' own entries.
#pragma once

#include <vector>

#include "decode/shared_run.hpp"

namespace mp {

// A row of the values that a query found in a range of shared entries, and its logits' maximum and sum of weights.
// Maxima are in units of log 2.
struct FoundRow {
  float top, total;
  const float* out;
};

class SharedParts {
 public:
  SharedParts(const AttendArgs* runs, int n_runs) : n_kv_heads_(int(runs->n_kv_heads)) {
    for (int i = 0; i < n_runs; ++i) runs_.emplace_back(runs[i]);
    int n_seq = 0;
    for (const SharedRun& run : runs_)
      for (int64_t m = 0; m < run.args().n_members; ++m) n_seq = std::max(n_seq, int(run.args().members[m]) + 1);
    n_seq_ = n_seq;
    member_.assign(runs_.size() * size_t(n_seq), -1);
    for (size_t i = 0; i < runs_.size(); ++i)
      for (int64_t m = 0; m < runs_[i].args().n_members; ++m)
        member_[i * size_t(n_seq) + size_t(runs_[i].args().members[m])] = int32_t(m);
    for (const SharedRun& run : runs_) {
      first_.push_back(units_);
      units_ += run.units();
      room_bytes_ = std::max(room_bytes_, run.room_bytes());
      found_bytes_ += run.found_bytes();
      work_ += run.work();
    }
  }
  int units() const { return units_; }
  double work() const { return work_; }
  int64_t bytes(int threads) const { return found_bytes_ + threads * room_bytes_; }
  void use(char* memory) {
    for (SharedRun& run : runs_) run.use(memory), memory += run.found_bytes();
    rooms_ = memory;
  }
  void attend(int unit, int thread) const {
    const size_t i = run_of(unit);
    runs_[i].attend(unit - first_[i], rooms_ + thread * room_bytes_);
  }

  // Units whose findings region r takes in.
  int waits_for(int r) const {
    int n = 0;
    for (size_t i = 0; i < runs_.size(); ++i) {
      const int m = member(i, r / n_kv_heads_), group = runs_[i].group();
      if (m >= 0) n += runs_[i].ranges() * (1 + ((m * group) / MOST_ROWS != (m * group + group - 1) / MOST_ROWS));
    }
    return n;
  }
  // f(region) for every region that takes in what a unit found.
  template <class F>
  void for_regions(int unit, F&& f) const {
    const size_t i = run_of(unit);
    const SharedRun& run = runs_[i];
    const int part = run.part(unit - first_[i]), group = run.group();
    const int begin = run.first(part) / group, last = (run.first(part) + run.rows(part) - 1) / group;
    for (int m = begin; m <= last; ++m) f(int(run.args().members[m]) * n_kv_heads_ + run.head(part));
  }
  // f(FoundRow) for query head h of region r's group, in the order of runs and ranges.
  template <class F>
  void for_found(int r, int h, F&& f) const {
    const int head = r % n_kv_heads_;
    for (size_t i = 0; i < runs_.size(); ++i) {
      const int m = member(i, r / n_kv_heads_);
      if (m < 0) continue;
      const SharedRun& run = runs_[i];
      const int row = m * run.group() + h, part = run.part(head, row), at = row - run.first(part);
      for (int j = 0; j < run.used(head); ++j) {
        const Found found = run.found(part, j);
        f(FoundRow{found.top[at], found.total[at], found.out + int64_t(at) * run.value_pad()});
      }
    }
  }

 private:
  size_t run_of(int unit) const {
    size_t i = runs_.size() - 1;
    while (first_[i] > unit) --i;
    return i;
  }
  int member(size_t run, int seq) const { return seq < n_seq_ ? member_[run * size_t(n_seq_) + size_t(seq)] : -1; }

  std::vector<SharedRun> runs_;
  std::vector<int32_t> member_;  // (runs, sequences): which member of a run a sequence is, -1 for none
  std::vector<int> first_;       // unit of each run
  int n_kv_heads_, n_seq_ = 0, units_ = 0;
  int64_t room_bytes_ = 0, found_bytes_ = 0;
  double work_ = 0;
  char* rooms_ = nullptr;
};

}  // namespace mp
