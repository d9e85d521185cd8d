// A few rows times up to four matrices: out_p[m][n] = x[m] . w_p[n] + bias_p[n], each matrix read once, as fast as memory
// gives it. Around it, where asked for, what a decoder does in the same breath: x is normalised first, the outcome of one
// matrix is activated or that of two becomes a gate and what it gates, a residual is added to the outcome.
//
// Every out[m][n] is summed over k in one order, whatever the other rows, the tile or the thread: a row of a batch has
// the same bits as the row alone. What torch would have written to memory in between is rounded to the
// storage type.
#include <algorithm>
#include <cmath>

#include "common/convert.hpp"
#include "common/norm.hpp"
#include "common/threads.hpp"
#include "common/workspace.hpp"
#include "decode/dot.hpp"
#include "linear/epilogue.hpp"
#include "linear/few_rows.hpp"
#include "linear/few_rows_floats.hpp"
#include "linear/integer_rows.hpp"
#include "linear/quantized_rows.hpp"

namespace mp {
namespace {

constexpr int BLOCK = 64;                   // rows of w per work item
constexpr int MOST_ROWS = 16;               // of x that meet a row of w together
constexpr int MOST_GROUPS = 2;              // of so many rows
constexpr int64_t CACHED = 128 * 1024;      // bytes of w that stay in the L2 cache between passes over rows of x
constexpr int64_t BYTES_PER_THREAD = 128 * 1024;  // of w: what a thread is worth waking for

// What rows of x that meet w of type T are held as.
template <class T>
struct Held {
  using Q = float;
};

#if defined(MP_PAIRED_PRODUCTS)
template <>
struct Held<bf16> {
  using Q = bf16;
};
#endif

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

// out[h * BLOCK + t] = x[h] . w[t] for R (2 or 4) rows of w, `row` numbers apart. A sum has the
// same bits for every R and H. kAhead: the rows are neighbours in memory,
// and as many bytes are asked for, AHEAD of them, in the order in which memory gives them fastest.
template <class T, int H, int R, bool kAhead>
MP_INLINE void tile(const T* w, int64_t row, int dim, const typename Held<T>::Q* x, int64_t x_row, float* out) {
  using L = Lane<T>;
  vf acc[H][R];
#pragma GCC unroll 6
  for (int h = 0; h < H; ++h)
#pragma GCC unroll 4
    for (int t = 0; t < R; ++t) acc[h][t] = vf{};
  const char* ahead = reinterpret_cast<const char*>(w) + AHEAD;
  int d = 0;
  for (; d + L::STEP <= dim; d += L::STEP) {
    if (kAhead) prefetch<R * sizeof(T) * L::STEP>(ahead);
    ahead += R * sizeof(T) * L::STEP;
    typename L::V v[R];
#pragma GCC unroll 4
    for (int t = 0; t < R; ++t) v[t] = L::key(w + t * row + d);
#pragma GCC unroll 6
    for (int h = 0; h < H; ++h) {
      const typename L::V q = L::query(x + h * x_row + d);
#pragma GCC unroll 4
      for (int t = 0; t < R; ++t) acc[h][t] = L::fma(acc[h][t], v[t], q);
    }
  }
  if (d < dim) {
    typename L::V v[R];
#pragma GCC unroll 4
    for (int t = 0; t < R; ++t) v[t] = L::key_part(w + t * row + d, dim - d);
#pragma GCC unroll 6
    for (int h = 0; h < H; ++h) {
      const typename L::V q = L::query(x + h * x_row + d);
#pragma GCC unroll 4
      for (int t = 0; t < R; ++t) acc[h][t] = L::fma(acc[h][t], v[t], q);
    }
  }
#pragma GCC unroll 6
  for (int h = 0; h < H; ++h) {
    const v4f sums = sum4(acc[h][0], acc[h][1], acc[h][R - 2], acc[h][R - 1]);
    std::memcpy(out + h * BLOCK, &sums, R * sizeof(float));
  }
}

// Four rows of w for `heads` rows of x, at most H.
template <class T, bool kAhead, int H = MOST_HEADS>
MP_INLINE void tile_of(int heads, const T* w, int64_t row, int dim, const typename Held<T>::Q* x, int64_t x_row,
                       float* out) {
  if constexpr (H > 1)
    if (heads < H) return tile_of<T, kAhead, H - 1>(heads, w, row, dim, x, x_row, out);
  constexpr int R = H > HEADS ? 2 : 4;
  for (int t = 0; t < 4; t += R) tile<T, H, R, kAhead>(w + t * row, row, dim, x, x_row, out + t);
}

// All m rows of x for n <= BLOCK rows of w, tile by tile.
template <class T>
void block(const T* w, int n, int64_t row, int dim, const typename Held<T>::Q* x, int64_t x_row, int m, float* out) {
  const int full = n / 4 * 4;
  const int held = int(std::max<int64_t>(1, CACHED / (4 * int64_t(dim) * int64_t(sizeof(T))))) * 4;
  for (int from = 0; from < full; from += held) {
    const int to = std::min(full, from + held);
    for (int t = from; t < to; t += 4) {
      if (row == dim)
        tile_of<T, true>(m, w + t * row, row, dim, x, x_row, out + t);
      else
        tile_of<T, false>(m, w + t * row, row, dim, x, x_row, out + t);
    }
    for (int h = MOST_HEADS; h < m; h += MOST_HEADS)  // the other rows of x find these rows of w in the cache
      for (int t = from; t < to; t += 4)
        tile_of<T, false>(m - h, w + t * row, row, dim, x + h * x_row, x_row, out + h * BLOCK + t);
  }
  for (int t = full; t < n; ++t)  // the last 1 to 3 rows of w, each as all four of a tile
    for (int h = 0; h < m; ++h) {
      float same[4];
      tile<T, 1, 4, false>(w + t * row, 0, dim, x + h * x_row, x_row, same);
      out[h * BLOCK + t] = same[0];
    }
}

// The rows of x in the order in which `block` of w of type T reads them; `to`: room for MOST_ROWS rows.
template <class T>
const typename Held<T>::Q* arranged(const typename Held<T>::Q* rows, int64_t, int, typename Held<T>::Q*) { return rows; }

#if defined(__AVX512F__)
using HeldRow = Held<bf16>::Q;

template <>
void block<bf16>(const bf16* w, int n, int64_t row, int dim, const HeldRow* x, int64_t x_row, int m, float* out) {
  few_rows(w, n, row, dim, x, x_row, m, out, BLOCK);
}

template <>
const HeldRow* arranged<bf16>(const HeldRow* rows, int64_t x_row, int m, HeldRow* to) {
  if (!needs_order(m)) return rows;
  lay_out(rows, x_row, m, int(x_row), to);
  return to;
}
#endif

// The rows of x: normalised, rounded to T, padded with zeros. `wide`: room for a row.
template <class T>
void take_in(const LinearArgs& a, typename Held<T>::Q* x, int64_t x_row, float* wide) {
  using Q = typename Held<T>::Q;
  const int dim = int(a.k);
  const int64_t held = sizeof(Q) == 4 ? int64_t(F32) : int64_t(BF16);
  for (int h = 0; h < a.m; ++h) {
    Q* to = x + h * x_row;
    const void* from = static_cast<const char*>(a.x) + h * a.k * dtype_bytes(a.dtype);
    if (a.norm != nullptr) {
      normalise(wide, from, Norm{a.norm, a.norm_bias, a.centred, float(a.eps)}, a.dtype, dim);
      narrow(to, held, wide, dim);
    } else {
      copy_row(to, held, from, a.dtype, dim);
    }
    std::memset(to + dim, 0, size_t(x_row - dim) * sizeof(Q));
  }
}

// A matrix of numbers of type T, and the rows of x that meet it.
template <class T>
class PlainMatrix {
  using Q = typename Held<T>::Q;

 public:
  static int64_t room(const LinearArgs& a) { return 2 * held(a) + x_row(a) * 4; }
  static int64_t row_bytes(const LinearArgs& a) { return a.k * dtype_bytes(a.dtype); }

  PlainMatrix(const LinearArgs& a, char* memory)
      : m_(int(a.m)), dim_(int(a.k)), n_groups_(groups(a)), together_((m_ + n_groups_ - 1) / n_groups_), x_row_(x_row(a)) {
    Q* rows = reinterpret_cast<Q*>(memory);
    take_in<T>(a, rows, x_row_, reinterpret_cast<float*>(memory + 2 * held(a)));
    for (int g = 0; g < n_groups_; ++g)
      x_[g] = arranged<T>(rows + g * together_ * x_row_, x_row_, std::min(together_, m_ - g * together_),
                          reinterpret_cast<Q*>(memory + held(a)) + g * MOST_ROWS * x_row_);
    // rows of w that stay in the L2 cache until every group has met them: whole tiles
    slice_ = n_groups_ == 1 ? BLOCK : int(std::clamp<int64_t>(2 * CACHED / row_bytes(a) / 16 * 16, 16, BLOCK));
  }

  // out[h * BLOCK + t] = x[h] . w[begin + t], t < n.
  void product(const LinearPart& part, int64_t begin, int n, float* out) const {
    const T* w = static_cast<const T*>(part.w) + begin * part.w_row;
    for (int t = 0; t < n; t += slice_)
      for (int g = 0, h = 0; g < n_groups_; ++g, h += together_)
        block<T>(w + t * part.w_row, std::min(slice_, n - t), part.w_row, dim_, x_[g], x_row_,
                 std::min(together_, m_ - h), out + h * BLOCK + t);
  }

 private:
  static int groups(const LinearArgs& a) { return int((a.m + MOST_ROWS - 1) / MOST_ROWS); }
  static int64_t x_row(const LinearArgs& a) { return round_up(a.k, QUERY_PAD); }
  static int64_t held(const LinearArgs& a) { return round_up(groups(a) * MOST_ROWS * x_row(a) * int64_t(sizeof(Q)), 64); }

  int m_, dim_, n_groups_, together_, slice_;
  int64_t x_row_;
  const Q* x_[MOST_GROUPS];
};

// A matrix of codes of BITS bits, and the rows of x, as floats, that meet it.
template <int BITS>
class QuantizedMatrix {
 public:
  static int64_t room(const LinearArgs& a) { return 4 * (a.m * (a.k + a.k / GROUP + W) + a.k); }
  static int64_t row_bytes(const LinearArgs& a) { return a.k / GROUP * (GROUP * BITS / 8 + 2 * kinds(BITS)); }

  QuantizedMatrix(const LinearArgs& a, char* memory) : m_(int(a.m)), dim_(int(a.k)), x_(reinterpret_cast<float*>(memory)) {
    sums_ = x_ + a.m * a.k;
    take_in<float>(a, x_, a.k, sums_ + a.m * (dim_ / GROUP + W));
    sum_groups(x_, m_, dim_, sums_);
  }

  void product(const LinearPart& part, int64_t begin, int n, float* out) const {
    for (int t = 0; t < n; ++t) {
      const QuantizedRow<BITS> row(part.w, part.scales, begin + t, dim_);
      meet(row, m_, x_, sums_, dim_, out + t, BLOCK);
    }
  }

 protected:
  int m_, dim_;
  float *x_, *sums_;
};

#if defined(MP_INTEGER_ROWS)
// The same with rows of 16-bit floats, which are held as integers.
template <int BITS>
class IntegerMatrix : QuantizedMatrix<BITS> {
  using Floats = QuantizedMatrix<BITS>;

 public:
  using Floats::row_bytes;
  static int64_t room(const LinearArgs& a) { return floats(a) + IntegerRows<BITS>::room(a.m, a.k); }

  IntegerMatrix(const LinearArgs& a, char* memory)
      : Floats(a, memory), rows_(this->x_, this->m_, this->dim_, memory + floats(a)) {}

  void product(const LinearPart& part, int64_t begin, int n, float* out) const {
    for (int t = 0; t < n; ++t) {
      const QuantizedRow<BITS> row(part.w, part.scales, begin + t, this->dim_);
      for (int h = 0; h < this->m_; h += ROWS_TOGETHER) {
        const float* sums = this->sums_ + int64_t(h) * (row.groups + W);
        meet_some(this->m_ - h, row, rows_.rows(h), sums, out + h * BLOCK + t, BLOCK);
      }
    }
  }

 private:
  static int64_t floats(const LinearArgs& a) { return round_up(Floats::room(a), 64); }

  IntegerRows<BITS> rows_;
};
#endif

// Matrices of codes, some of 4 bits and some of 8: known by the bytes of their rows.
template <template <int> class Matrix>
class MixedMatrices {
 public:
  static int64_t room(const LinearArgs& a) { return first(a) + Matrix<8>::room(a); }
  static int64_t row_bytes(const LinearArgs& a) { return Matrix<8>::row_bytes(a); }

  MixedMatrices(const LinearArgs& a, char* memory) : dim_(a.k), four_(a, memory), eight_(a, memory + first(a)) {}

  void product(const LinearPart& part, int64_t begin, int n, float* out) const {
    part.w_row < dim_ ? four_.product(part, begin, n, out) : eight_.product(part, begin, n, out);
  }

 private:
  static int64_t first(const LinearArgs& a) { return round_up(Matrix<4>::room(a), 64); }

  int64_t dim_;
  Matrix<4> four_;
  Matrix<8> eight_;
};

template <class Matrix>
int linear(const LinearArgs& a) {
  static thread_local Workspace workspace;
  char* memory = workspace.get(Matrix::room(a));
  if (memory == nullptr) return 1;
  const Matrix matrix(a, memory);
  const int m = int(a.m);
  const int64_t item = dtype_bytes(a.dtype);
  const bool gated = a.gate != NO_GATE && a.n_parts == 2, activated = a.gate != NO_GATE && !gated;
  const int n_parts = gated ? 1 : int(a.n_parts);  // with a gate, both matrices make one part
  int64_t first[MOST_PARTS + 1] = {0}, bytes = 0;   // of the work items: BLOCK rows of one part each
  for (int p = 0; p < n_parts; ++p) {
    first[p + 1] = first[p] + (a.parts[p].n + BLOCK - 1) / BLOCK;
    bytes += (gated ? 2 : 1) * a.parts[p].n * Matrix::row_bytes(a);
  }
  const int64_t n_blocks = first[n_parts], worth = 1 + bytes / BYTES_PER_THREAD;
  const int n_threads = int(std::min({a.n_threads, worth, n_blocks, int64_t(Shares::MOST)}));
  Shares shares(n_blocks, n_threads);
  auto product = [&](const LinearPart& part, int64_t begin, int n, float* out) {
    matrix.product(part, begin, n, out);
    if (part.bias == nullptr) return;
    float bias[BLOCK];
    widen(bias, static_cast<const char*>(part.bias) + begin * item, a.dtype, n);
    for (int h = 0; h < m; ++h)
      for (int t = 0; t < n; ++t) out[h * BLOCK + t] += bias[t];
  };
  auto work = [&](int thread) {
    float out[MOST_GROUPS * MOST_ROWS * BLOCK], other[MOST_GROUPS * MOST_ROWS * BLOCK];
    for (int64_t i; (i = shares.take(thread)) >= 0;) {
      int p = 0;
      while (i >= first[p + 1]) ++p;
      const LinearPart& part = a.parts[p];
      const int64_t begin = (i - first[p]) * BLOCK;
      const int n = int(part.n - begin < BLOCK ? part.n - begin : BLOCK);
      product(part, begin, n, out);
      if (gated) product(a.parts[1], begin, n, other);
      for (int h = 0; h < m; ++h) {
        float* sums = out + h * BLOCK;
        if (gated) open_gate(sums, other + h * BLOCK, a.gate, a.dtype, n);
        if (activated) activate(sums, a.gate, a.dtype, n);
        const int64_t place = (h * part.n + begin) * item;
        if (a.residual != nullptr) add(sums, static_cast<const char*>(a.residual) + place, a.dtype, n);
        narrow(static_cast<char*>(a.out[p]) + place, a.dtype, sums, n);
      }
    }
  };
  parallel(n_threads, work);
  return 0;
}

template <template <int> class Matrix>
int linear_of_codes(const LinearArgs& args) {
  switch (args.bits) {
    case 4: return linear<Matrix<4>>(args);
    case 8: return linear<Matrix<8>>(args);
    default: return linear<MixedMatrices<Matrix>>(args);
  }
}

int run(const LinearArgs& args) {
#if defined(MP_INTEGER_ROWS)
  if (args.bits != 0 && args.dtype != F32) return linear_of_codes<IntegerMatrix>(args);
#endif
  if (args.bits != 0) return linear_of_codes<QuantizedMatrix>(args);
  switch (args.dtype) {
    case F32: return linear<PlainMatrix<float>>(args);
    case F16: return linear<PlainMatrix<f16>>(args);
    default: return linear<PlainMatrix<bf16>>(args);
  }
}

LinearArgs step(const BehindArgs& a, int i, const void* x, const void* residual, void* out) {
  LinearArgs args = a.steps[i];
  args.x = x, args.residual = residual, args.out[0] = out;
  args.m = a.m, args.n_threads = a.n_threads;
  return args;
}

}  // namespace
}  // namespace mp

extern "C" __attribute__((visibility("default"))) int mp_linear(const mp::LinearArgs* args) { return mp::run(*args); }

extern "C" __attribute__((visibility("default"))) int mp_widen(const mp::WidenArgs* args) {
  return args->bits == 4 ? mp::widen_rows<4>(*args) : mp::widen_rows<8>(*args);
}

extern "C" int mp_rotate(const mp::RotateArgs* args);

extern "C" __attribute__((visibility("default"))) int mp_heads(const mp::HeadsArgs* args) {
  return mp::run(args->into) || mp_rotate(&args->turn);
}

extern "C" __attribute__((visibility("default"))) int mp_behind(const mp::BehindArgs* args) {
  using namespace mp;
  static thread_local Workspace workspace;
  const LinearArgs* steps = args->steps;
  const int64_t row = args->m * dtype_bytes(steps->dtype), held = round_up(row * steps[0].parts[0].n, 64);
  char* middle = workspace.get(held + row * steps[1].parts[0].n);
  if (middle == nullptr) return 1;
  char* opened = middle + held;
  return run(step(*args, 0, args->seen, args->x, middle)) || run(step(*args, 1, middle, nullptr, opened)) ||
         run(step(*args, 2, opened, middle, args->out));
}
