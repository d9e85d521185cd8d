// What else a decoder does to rows between its matrices: norms, the rotary embedding and gates, a few rows per work item;
// and behind the last one, the likeliest token of each row.
#include <algorithm>

#include "common/convert.hpp"
#include "common/norm.hpp"
#include "common/threads.hpp"
#include "common/workspace.hpp"
#include "linear/epilogue.hpp"

namespace mp {
namespace {

constexpr int64_t BYTES_PER_ITEM = 64 * 1024;  // of x: what waking a thread is worth

// Call f(from, to, room) for all rows, `row_bytes` of memory each, on several threads where there are many; `floats`: of
// room that a thread needs. Returns 1 if there is no memory for it.
template <class F>
int by_rows(int64_t m, int64_t row_bytes, int64_t floats, int64_t n_threads, F& f) {
  const int64_t run = std::max<int64_t>(1, BYTES_PER_ITEM / std::max<int64_t>(1, row_bytes));
  const int64_t items = (m + run - 1) / run;
  const int threads = int(std::min(items, n_threads));
  const int64_t room = round_up(floats, 64);
  static thread_local Workspace workspace;
  float* all = reinterpret_cast<float*>(workspace.get(std::max(threads, 1) * room * 4));
  if (all == nullptr) return 1;
  std::atomic<int64_t> next{0};
  auto body = [&](int thread) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < items;)
      f(i * run, std::min(m, (i + 1) * run), all + thread * room);
  };
  parallel(threads, body);
  return 0;
}

// One head of one row, in place; as torch does it, each product is rounded to `dtype` before the sum.
void rotate(char* x, const float* cos, const float* sin, float* wide, float* turned, int dim, int64_t dtype) {
  const int half = dim / 2;
  widen(wide, x, dtype, dim);
  for (int i = 0; i < half; ++i) turned[i] = -wide[half + i] * sin[i];
  for (int i = half; i < dim; ++i) turned[i] = wide[i - half] * sin[i];
  for (int i = 0; i < dim; ++i) wide[i] *= cos[i];
  round_to(turned, dtype, dim);
  round_to(wide, dtype, dim);
  for (int i = 0; i < dim; ++i) wide[i] += turned[i];
  narrow(x, dtype, wide, dim);
}

// The largest of n numbers and where it stands first; the first NaN if there is one.
template <class T>
void find_largest(const T* x, int64_t n, float* largest, int64_t* at) {
  vf best = splat(-__builtin_inff());
  vi odd{};
  int64_t i = 0;
  for (; i + W <= n; i += W) {
    const vf v = load(x + i);
    best = vmax(v, best);  // NaN on the left gives the right side
    odd |= v != v;
  }
  float top = max(best);
  const vf last = i < n ? load_part(x + i, int(n - i)) : vf{};
  for (int j = 0; j < n - i; ++j) top = last[j] > top ? last[j] : top, odd[0] |= last[j] != last[j] ? -1 : 0;
  bool nan = false;
  for (int j = 0; j < W; ++j) nan |= odd[j] != 0;
  *largest = nan ? __builtin_nanf("") : top;
  for (int64_t from = 0; from < n; from += W) {
    const int there = int(std::min<int64_t>(W, n - from));
    const vf v = there == W ? load(x + from) : load_part(x + from, there);
    const vi here = (nan ? v != v : v == splat(top)) & (iota() < there);
    if (sum((vf)(here & (vi)splat(1.0f))) == 0.0f) continue;
    int64_t j = 0;
    while (here[j] == 0) ++j;
    *at = from + j;
    return;
  }
}

}  // namespace
}  // namespace mp

extern "C" __attribute__((visibility("default"))) int mp_largest(const mp::LargestArgs* args) {
  using namespace mp;
  const LargestArgs& a = *args;
  auto find = [&](int64_t row) {
    const int64_t from = row * a.x_row;
    switch (a.dtype) {
      case F32: return find_largest(static_cast<const float*>(a.x) + from, a.n, a.largest + row, a.at + row);
      case F16: return find_largest(static_cast<const f16*>(a.x) + from, a.n, a.largest + row, a.at + row);
      default: return find_largest(static_cast<const bf16*>(a.x) + from, a.n, a.largest + row, a.at + row);
    }
  };
  parallel_for(a.m, int(a.n_threads), find);
  return 0;
}

extern "C" __attribute__((visibility("default"))) int mp_rotate(const mp::RotateArgs* args) {
  using namespace mp;
  const RotateArgs& a = *args;
  const int dim = int(a.dim);
  const int64_t item = dtype_bytes(a.dtype), room = round_up(dim, 16);
  auto turn = [&](int64_t from, int64_t to, float* wide) {
    float *turned = wide + room, *cos = wide + 2 * room, *sin = wide + 3 * room;
    for (int64_t m = from; m < to; ++m) {
      widen(cos, static_cast<const char*>(a.cos) + m * a.cos_row * item, a.dtype, dim);
      widen(sin, static_cast<const char*>(a.sin) + m * a.cos_row * item, a.dtype, dim);
      for (int64_t h = 0; h < a.q_heads; ++h)
        rotate(static_cast<char*>(a.q) + (m * a.q_row + h * a.q_head) * item, cos, sin, wide, turned, dim, a.dtype);
      for (int64_t h = 0; h < a.k_heads; ++h)
        rotate(static_cast<char*>(a.k) + (m * a.k_row + h * a.k_head) * item, cos, sin, wide, turned, dim, a.dtype);
    }
  };
  return by_rows(a.m, (a.q_heads + a.k_heads) * dim * item, 4 * room, a.n_threads, turn);
}

extern "C" __attribute__((visibility("default"))) int mp_norm(const mp::NormArgs* args) {
  using namespace mp;
  const NormArgs& a = *args;
  const int64_t item = dtype_bytes(a.dtype);
  const Norm norm{a.weight, a.bias, a.centred, float(a.eps)};
  auto rows = [&](int64_t from, int64_t to, float* wide) {
    for (int64_t m = from; m < to; ++m)
      for (int64_t h = 0; h < a.heads; ++h) {
        normalise(wide, static_cast<const char*>(a.x) + (m * a.x_row + h * a.x_head) * item, norm, a.dtype, int(a.n));
        narrow(static_cast<char*>(a.out) + (m * a.out_row + h * a.out_head) * item, a.dtype, wide, int(a.n));
      }
  };
  return by_rows(a.m, a.heads * a.n * item, a.n, a.n_threads, rows);
}

extern "C" __attribute__((visibility("default"))) int mp_gate(const mp::GateArgs* args) {
  using namespace mp;
  constexpr int PART = 256;  // numbers that go through at once, in the L1 cache
  const GateArgs& a = *args;
  const int64_t item = dtype_bytes(a.dtype);
  auto rows = [&](int64_t from, int64_t to, float* gate) {
    float* up = gate + PART;
    for (int64_t m = from; m < to; ++m)
      for (int64_t j = 0; j < a.n; j += PART) {
        const int n = int(std::min<int64_t>(PART, a.n - j));
        const char* x = static_cast<const char*>(a.x) + (m * a.x_row + j) * item;
        widen(gate, x, a.dtype, n);
        widen(up, x + a.n * item, a.dtype, n);
        open_gate(gate, up, a.act, a.dtype, n);
        narrow(static_cast<char*>(a.out) + (m * a.n + j) * item, a.dtype, gate, n);
      }
  };
  return by_rows(a.m, 2 * a.n * item, 2 * PART, a.n_threads, rows);
}
