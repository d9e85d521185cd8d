// A few rows times a matrix: out[m][n] = x[m] . w[n] + bias[n]. The matrix is read once, as fast as memory gives it.
//
// Every out[m][n] is summed over k in one order, lane by lane, whatever the other rows, the tile or the thread: a row
// of a batch has the same bits as the row alone.
#include <algorithm>

#include "convert.hpp"
#include "dot.hpp"
#include "threads.hpp"
#include "workspace.hpp"

namespace mp {
namespace {

constexpr int BLOCK = 64;                   // rows of w per work item
constexpr int MOST_ROWS = 16;               // of x
constexpr int64_t CACHED = 128 * 1024;      // bytes of w that stay in the L2 cache between passes over rows of x
constexpr int AHEAD = 16;                   // steps between the request of a vector of w and its use
constexpr int64_t BYTES_PER_THREAD = 128 * 1024;  // of w: what a thread is worth waking for

// Work items 0 .. n - 1: every thread has a run of neighbours, because memory is read fastest in long streams, and
// takes from the end of another's when its own is done.
class Shares {
 public:
  static constexpr int MOST = 64;  // threads
  Shares(int64_t n, int n_threads) : n_threads_(n_threads) {
    for (int t = 0; t < n_threads; ++t) left_[t].range = pack(n * t / n_threads, n * (t + 1) / n_threads);
  }
  // The next item of this thread, -1 if nothing is left.
  int64_t take(int thread) {
    for (int i = 0; i < n_threads_; ++i) {
      std::atomic<uint64_t>& range = left_[(thread + i) % n_threads_].range;
      uint64_t seen = range.load(std::memory_order_relaxed);
      while (uint32_t(seen >> 32) < uint32_t(seen)) {
        const int64_t begin = int64_t(seen >> 32), end = int64_t(uint32_t(seen));
        if (!range.compare_exchange_weak(seen, i == 0 ? pack(begin + 1, end) : pack(begin, end - 1))) continue;
        return i == 0 ? begin : end - 1;
      }
    }
    return -1;
  }

 private:
  static uint64_t pack(int64_t begin, int64_t end) { return uint64_t(begin) << 32 | uint64_t(end); }
  struct alignas(64) Left {
    std::atomic<uint64_t> range;  // begin in the upper half, end in the lower
  };
  Left left_[MOST];
  int n_threads_;
};

// Steps begin .. end of a tile: four rows of w, `row` numbers apart, meet H rows of x. Requests `ahead` + t * row.
template <class T, int H, bool kAhead>
MP_INLINE void steps(vf (&acc)[H][4], const T* w, int64_t row, const typename Lane<T>::Q* x, int64_t x_row, int begin,
                     int end, const T* ahead) {
  using L = Lane<T>;
  for (int d = begin; d < end; d += L::STEP) {
    typename L::V v[4];
#pragma GCC unroll 4
    for (int t = 0; t < 4; ++t) {
      if (kAhead) prefetch<64>(ahead + t * row + d);
      v[t] = L::key(w + t * row + d);
    }
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) {
      const typename L::V q = L::query(x + h * x_row + d);
#pragma GCC unroll 4
      for (int t = 0; t < 4; ++t) acc[h][t] = L::fma(acc[h][t], v[t], q);
    }
  }
}

// out[h * BLOCK + t] = x[h] . w[t] for four rows of w. `next`: the rows that will be read after these.
template <class T, int H, bool kAhead>
MP_INLINE void tile(const T* w, int64_t row, int dim, const typename Lane<T>::Q* x, int64_t x_row, float* out,
                    const T* next) {
  using L = Lane<T>;
  vf acc[H][4];
#pragma GCC unroll 4
  for (int h = 0; h < H; ++h)
#pragma GCC unroll 4
    for (int t = 0; t < 4; ++t) acc[h][t] = vf{};
  const int whole = dim / L::STEP * L::STEP, distance = AHEAD * L::STEP;
  const int turn = whole > distance ? whole - distance : 0;
  steps<T, H, kAhead>(acc, w, row, x, x_row, 0, turn, w + distance);
  steps<T, H, kAhead>(acc, w, row, x, x_row, turn, whole, next - turn);
  if (whole < dim) {
    typename L::V v[4];
#pragma GCC unroll 4
    for (int t = 0; t < 4; ++t) v[t] = L::key_part(w + t * row + whole, dim - whole);
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) {
      const typename L::V q = L::query(x + h * x_row + whole);
#pragma GCC unroll 4
      for (int t = 0; t < 4; ++t) acc[h][t] = L::fma(acc[h][t], v[t], q);
    }
  }
#pragma GCC unroll 4
  for (int h = 0; h < H; ++h) {
    const v4f sums = sum4(acc[h][0], acc[h][1], acc[h][2], acc[h][3]);
    std::memcpy(out + h * BLOCK, &sums, sizeof sums);
  }
}

// `tile` for `heads` rows of x, at most H.
template <class T, bool kAhead, int H = HEADS>
MP_INLINE void tile_of(int heads, const T* w, int64_t row, int dim, const typename Lane<T>::Q* x, int64_t x_row,
                       float* out, const T* next) {
  if constexpr (H > 1)
    if (heads < H) return tile_of<T, kAhead, H - 1>(heads, w, row, dim, x, x_row, out, next);
  tile<T, H, kAhead>(w, row, dim, x, x_row, out, next);
}

// All m rows of x for n <= BLOCK rows of w, tile by tile.
template <class T>
void block(const T* w, int n, int64_t row, int dim, const typename Lane<T>::Q* x, int64_t x_row, int m, float* out,
           const T* next) {
  const int full = n / 4 * 4;
  const int held = int(std::max<int64_t>(1, CACHED / (4 * int64_t(dim) * int64_t(sizeof(T))))) * 4;
  for (int from = 0; from < full; from += held) {
    const int to = std::min(full, from + held);
    for (int t = from; t < to; t += 4) {
      const T* here = w + t * row;
      tile_of<T, true>(m, here, row, dim, x, x_row, out + t, t + 4 < full ? here + 4 * row : next);
    }
    for (int h = HEADS; h < m; h += HEADS)  // the other rows of x find these rows of w in the cache
      for (int t = from; t < to; t += 4)
        tile_of<T, false>(m - h, w + t * row, row, dim, x + h * x_row, x_row, out + h * BLOCK + t, w);
  }
  for (int t = full; t < n; ++t)  // the last 1 to 3 rows of w, each as all four of a tile
    for (int h = 0; h < m; ++h) {
      float same[4];
      tile<T, 1, false>(w + t * row, 0, dim, x + h * x_row, x_row, same, w);
      out[h * BLOCK + t] = same[0];
    }
}

template <class T>
int linear(const LinearArgs& a) {
  using Q = typename Lane<T>::Q;
  static thread_local Workspace workspace;
  const int m = int(a.m), dim = int(a.k);
  const int64_t x_row = round_up(dim, QUERY_PAD);
  Q* x = reinterpret_cast<Q*>(workspace.get(m * x_row * int64_t(sizeof(Q))));
  if (x == nullptr) return 1;
  for (int h = 0; h < m; ++h) {
    Q* to = x + h * x_row;
    const void* from = static_cast<const char*>(a.x) + h * a.x_row * dtype_bytes(a.dtype);
    copy_row(to, sizeof(Q) == 4 ? int64_t(F32) : int64_t(BF16), from, a.dtype, dim);
    std::memset(to + dim, 0, size_t(x_row - dim) * sizeof(Q));
  }
  const T* w = static_cast<const T*>(a.w);
  const int64_t n_blocks = (a.n + BLOCK - 1) / BLOCK, item = dtype_bytes(a.dtype);
  const int64_t worth = 1 + a.n * dim * item / BYTES_PER_THREAD;
  const int n_threads = int(std::min({a.n_threads, worth, n_blocks, int64_t(Shares::MOST)}));
  Shares shares(n_blocks, n_threads);
  auto work = [&](int thread) {
    float out[MOST_ROWS * BLOCK], bias[BLOCK];
    for (int64_t i; (i = shares.take(thread)) >= 0;) {
      const int n = int(a.n - i * BLOCK < BLOCK ? a.n - i * BLOCK : BLOCK);
      const T* here = w + i * BLOCK * a.w_row;
      const T* next = i + 1 < n_blocks ? here + BLOCK * a.w_row : here;
      block<T>(here, n, a.w_row, dim, x, x_row, m, out, next);
      if (a.bias != nullptr) widen(bias, static_cast<const char*>(a.bias) + i * BLOCK * item, a.dtype, n);
      for (int h = 0; h < m; ++h) {
        float* sums = out + h * BLOCK;
        for (int t = 0; a.bias != nullptr && t < n; ++t) sums[t] += bias[t];
        narrow(static_cast<char*>(a.out) + (h * a.n + i * BLOCK) * item, a.dtype, sums, n);
      }
    }
  };
  parallel(n_threads, work);
  return 0;
}

}  // namespace
}  // namespace mp

extern "C" __attribute__((visibility("default"))) int mp_linear(const mp::LinearArgs* args) {
  switch (args->dtype) {
    case mp::F32: return mp::linear<float>(*args);
    case mp::F16: return mp::linear<mp::f16>(*args);
    default: return mp::linear<mp::bf16>(*args);
  }
}
