// One run of entries that many queries share, cut into units of work.
//
// A unit is a range of entries of one KV head with some of its rows. How a run is cut depends on its shape alone, and
// what units find is put together in the order of the ranges, so results do not depend on the threads.
#pragma once

#include "decode/shared_prefix_call.hpp"

namespace mp {

constexpr int SHORTEST = 512;                           // entries of a range, at least, unless there are fewer
constexpr int UNITS = 128;                              // of a run, about: enough for many threads
constexpr double SHARED_WORK_PER_THREAD = 1 << 20;      // products that a thread is worth waking for

class SharedRun {
 public:
  explicit SharedRun(const AttendArgs& args) : a_(args), group_(int(args.n_heads / args.n_kv_heads)) {
    const int heads = int(args.n_kv_heads);
    for (int h = 0; h < heads; ++h) longest_ = std::max(longest_, int(args.lens[h]));
    rows_ = int(args.n_members) * group_;
    parts_ = (rows_ + MOST_ROWS - 1) / MOST_ROWS;
    together_ = int(round_up(std::min(rows_, MOST_ROWS), BLOCK_ROWS));
    value_pad_ = int(round_up(args.pool.value_dim, TILE));
    const int most = std::max(1, UNITS / (heads * parts_));
    range_ = int(round_up(std::max(SHORTEST, (longest_ + most - 1) / most), CHUNK_KEYS));
    ranges_ = std::max(1, (longest_ + range_ - 1) / range_);
  }
  const AttendArgs& args() const { return a_; }
  int group() const { return group_; }
  int value_pad() const { return value_pad_; }
  int ranges() const { return ranges_; }
  int parts() const { return int(a_.n_kv_heads) * parts_; }  // units of a part have the same rows of the same head
  int units() const { return parts() * ranges_; }
  int part(int unit) const { return unit / ranges_; }
  int part(int head, int row) const { return head * parts_ + row / MOST_ROWS; }
  int head(int part) const { return part / parts_; }
  int first(int part) const { return part % parts_ * MOST_ROWS; }
  int rows(int part) const { return std::min(MOST_ROWS, rows_ - first(part)); }
  int used(int head) const { return (int(a_.lens[head]) + range_ - 1) / range_; }  // ranges that have entries
  double work() const {
    return double(rows_) * double(a_.n_kv_heads) * double(longest_) * double(a_.pool.key_dim + a_.pool.value_dim);
  }

  // Memory for what all units find, and for a thread; `use` hands over the first.
  int64_t found_bytes() const { return round_up(units() * Found::bytes(together_, value_pad_), 4096); }
  int64_t room_bytes() const;
  void use(char* found) { found_ = found; }
  Found found(int part, int range) const {
    return Found(together_, value_pad_, found_ + (int64_t(part) * ranges_ + range) * Found::bytes(together_, value_pad_));
  }
  void attend(int unit, char* room) const;

 private:
  template <class T>
  void attend_as(int unit, char* room) const;

  const AttendArgs& a_;
  int group_, rows_ = 0, longest_ = 0, together_ = 0, value_pad_ = 0;  // together_: rows of a part, padded
  int parts_ = 1, ranges_ = 1, range_ = 1;                             // parts_: of a head
  char* found_ = nullptr;
};

}  // namespace mp
