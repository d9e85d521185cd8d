// What scores want of the products of all entries with many vectors: sums of their sizes, or the newest that are alike.
#include "merge/int8_screen.hpp"

#include <mutex>
#include <vector>

namespace mp {
namespace {

constexpr int NOTED = 32;  // an entry that is alike to so many notes no more of them, and no older ones

template <class T>
int absolute_sums(const ScanArgs& a) {
  static thread_local Workspace workspace;
  Scan<T> scan(a);
  if (!scan.reserve(workspace)) return 1;
  for (int head = 0; head < int(a.n_heads); ++head) {
    scan.pack(head);
    scan.blocks(head, [&](const typename Scan<T>::Block& block) {
      vf sums[SCAN_ROWS] = {};
      for (int c = 0; c < scan.chunks; ++c) {
        const float* p = block.chunk(c);
        for (int r = 0; r < block.n; ++r)
          for (int i = 0; i < COLUMNS; i += W) {
            const vf x = load(p + r * COLUMNS + i);
            sums[r] += vmax(x, -x);
          }
      }
      for (int r = 0; r < block.n; ++r) a.sums[head * a.n_rows + block.first + r] = sum(sums[r]);
    });
  }
  return 0;
}

// For each entry of one head the newest others whose cosine with it is above the threshold.
//
// Two entries have one cosine. So first each entry looks at newer ones, from the newest on, until it has enough; what it
// is alike to is noted for those too, who may find no newer ones. Then those who have not enough look at older entries,
// and only where these had stopped before they came to them.
template <class T>
class Alike {
 public:
  using Block = typename Scan<T>::Block;

  Alike(const ScanArgs& args, int head, const Screen& screen)
      : a_(args), screen_(screen), n_(args.lens[head]), most_(int(args.most)), scales_(args.scales + head * args.scale_head),
        at_(args.at + head * args.n_rows * args.most), cosines_(args.cosines + head * args.n_rows * args.most),
        reach_(size_t(args.n_rows), 0), found_(size_t(args.n_rows), 0) {}

  void run(Scan<T>& scan, int head) {
    scan.blocks(head, [&](const Block& block) { look_at_newer(block); });
    newer_ = found_;
    for (const Pair& pair : noted_) insert(pair.newer, pair.older, pair.cosine);
    scan.blocks(head, [&](const Block& block) { look_at_older(block); });
  }

 private:
  struct Pair {
    int older, newer;
    float cosine;
  };

  // Call hit(column, cosine) for the entries of chunk c that are like `self`, the newest first.
  template <class F>
  void hits(const float* products, int c, int self, F hit) const {
    const float *others = scales_ + c * COLUMNS, own = scales_[self], threshold = float(a_.threshold);
    vf best = load(products) * load(others);
    for (int i = W; i < COLUMNS; i += W) best = vmax(load(products + i) * load(others + i), best);
    if (!(max(best) * own > threshold)) return;
    for (int i = std::min(COLUMNS, n_ - c * COLUMNS) - 1; i >= 0; --i) {
      const float cosine = products[i] * others[i] * own;
      if (cosine > threshold) hit(c * COLUMNS + i, cosine);
    }
  }

  // Call visit(r, products) for the rows of a block that still want to see chunk c: its products with the chunk, null
  // where none can be alike. It says whether any was; then the next chunk is multiplied without asking first.
  template <class Wants, class Visit>
  void see(const Block& block, int rows, int c, bool* sure, Wants wants, Visit visit) const {
    for (int begin = 0; begin < rows; begin += TILE_ROWS) {
      const int end = std::min(begin + TILE_ROWS, rows);
      bool& alike = sure[begin / TILE_ROWS];
      bool any = false, met = false;
      for (int r = begin; r < end; ++r) any |= wants(r);
      if (!any) continue;
      const bool looks = alike || screen_.may_hit(block.first + begin, c);
      if (looks) block.rows(c, begin, end - begin);
      for (int r = begin; r < end; ++r)
        if (wants(r)) met |= visit(r, looks ? block.out + r * COLUMNS : nullptr);
      alike = met;
    }
  }

  void look_at_newer(const Block& block) {
    std::vector<Pair> noted;
    int pairs[SCAN_ROWS] = {};
    bool sure[SCAN_ROWS / TILE_ROWS] = {};
    const int own = block.first / COLUMNS, rows = std::min(block.n, n_ - block.first);
    for (int r = 0; r < rows; ++r) reach_[size_t(block.first + r)] = (n_ - 1) / COLUMNS + 1;
    bool open = rows > 0;
    for (int c = (n_ - 1) / COLUMNS; c >= own && open; --c) {
      open = false;
      const auto wants = [&](int r) { return found_[size_t(block.first + r)] < most_ || pairs[r] < NOTED; };
      see(block, rows, c, sure, wants, [&](int r, const float* products) {
        const int self = block.first + r;
        int& found = found_[size_t(self)];
        const int before = pairs[r];
        if (products != nullptr)
          hits(products, c, self, [&](int other, float cosine) {
            if (other <= self) return;
            if (++pairs[r] < NOTED) noted.push_back({self, other, cosine});
            if (found < most_) put(self, found++, other, cosine);
          });
        if (pairs[r] < NOTED) reach_[size_t(self)] = c;
        open |= found < most_;
        return pairs[r] > before;
      });
    }
    const std::lock_guard<std::mutex> guard(lock_);
    noted_.insert(noted_.end(), noted.begin(), noted.end());
  }

  void look_at_older(const Block& block) {
    const int rows = std::min(block.n, n_ - block.first), own = block.first / COLUMNS;
    bool sure[SCAN_ROWS / TILE_ROWS] = {};
    for (int c = (block.first + rows - 1) / COLUMNS; c >= 0; --c) {
      bool open = false;
      for (int r = 0; r < rows; ++r) open |= lacks(block.first + r, (c + 1) * COLUMNS);
      if (!open) return;
      const int end = std::min(n_, (c + 1) * COLUMNS);
      if (*std::max_element(reach_.begin() + c * COLUMNS, reach_.begin() + end) <= own) continue;  // all is noted
      const auto wants = [&](int r) { return lacks(block.first + r, (c + 1) * COLUMNS); };
      see(block, rows, c, sure, wants, [&](int r, const float* products) {
        bool met = false;
        const int self = block.first + r;
        if (products != nullptr)
          hits(products, c, self, [&](int other, float cosine) {
            met = true;
            if (other < self) insert(self, other, cosine);
          });
        return met;
      });
    }
  }

  // Whether an entry may still find one among those before `end`.
  bool lacks(int self, int end) const {
    const int found = found_[size_t(self)];
    return newer_[size_t(self)] < most_ && (found < most_ || at_[self * most_ + found - 1] < end);
  }

  void put(int self, int place, int other, float cosine) {
    at_[int64_t(self) * most_ + place] = other, cosines_[int64_t(self) * most_ + place] = cosine;
  }

  // Take an older entry in behind the newer ones, in order; the oldest gives way.
  void insert(int self, int other, float cosine) {
    int& found = found_[size_t(self)];
    const int32_t* at = at_ + int64_t(self) * most_;
    int place = newer_[size_t(self)];
    while (place < found && at[place] > other) ++place;
    if (place == most_ || (place < found && at[place] == other)) return;
    found = std::min(found + 1, most_);
    for (int i = found - 1; i > place; --i) put(self, i, at[i - 1], cosines_[int64_t(self) * most_ + i - 1]);
    put(self, place, other, cosine);
  }

  const ScanArgs& a_;
  const Screen& screen_;
  const int n_, most_;
  const float* scales_;
  int32_t* at_;
  float* cosines_;
  std::vector<int> reach_;  // (N,): the oldest chunk of which an entry has noted all
  std::vector<int> found_, newer_;
  std::vector<Pair> noted_;
  std::mutex lock_;
};

template <class T>
int newest_alike(const ScanArgs& a) {
  static thread_local Workspace workspace;
  static thread_local Workspace codes;
  Scan<T> scan(a);
  Screen screen;
  if (!scan.reserve(workspace)) return 1;
  for (int head = 0; head < int(a.n_heads); ++head) {
    if (a.lens[head] <= 0) continue;
    scan.pack(head);
    if (!screen.pack(scan, a, head, codes)) return 1;
    Alike<T>(a, head, screen).run(scan, head);
  }
  return 0;
}

}  // namespace
}  // namespace mp

extern "C" __attribute__((visibility("default"))) int mp_absolute_sums(const mp::ScanArgs* args) {
#if defined(__AVX512BF16__)
  if (args->x_dtype == mp::BF16 && args->y_dtype == mp::BF16) return mp::absolute_sums<mp::bf16>(*args);
#endif
  return mp::absolute_sums<float>(*args);
}

extern "C" __attribute__((visibility("default"))) int mp_newest_alike(const mp::ScanArgs* args) {
#if defined(__AVX512BF16__)
  if (args->x_dtype == mp::BF16) return mp::newest_alike<mp::bf16>(*args);
#endif
  return mp::newest_alike<float>(*args);
}
