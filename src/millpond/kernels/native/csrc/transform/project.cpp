// Tokens in the basis of a transform: z = matrix (x - mean), the sum over the channels in their order, each product fused
// with its sum.
//
// As in decode_pages.cpp every number is one chain of sums. Here tokens are the lanes: 32 of them lie side by side for
// each channel, and rows of the matrix are read as they are.
#include <algorithm>

#include "common/convert.hpp"
#include "common/threads.hpp"
#include "common/transpose.hpp"
#include "common/workspace.hpp"
#include "transform/fused.hpp"
#include "transform/transform_args.hpp"

namespace mp {
namespace {

#if defined(__AVX512F__)
constexpr int ROWS = 8;  // of the matrix at a time: with 32 tokens, sums that fit the registers
#else
constexpr int ROWS = 3;
#endif
constexpr int VECTORS = TOKENS / W;

// r[i]: W numbers of row i. After it r[c]: number c of all W rows.
MP_INLINE void turn_floats(vf (&r)[W]) {
#if defined(__AVX512F__)
  __m512i words[W];
  for (int i = 0; i < W; ++i) words[i] = (__m512i)r[i];
  turn(words);
  for (int i = 0; i < W; ++i) r[i] = (vf)words[i];
#elif defined(__AVX2__)
  __m256 words[W];
  for (int i = 0; i < W; ++i) words[i] = (__m256)r[i];
  turn(words);
  for (int i = 0; i < W; ++i) r[i] = (vf)words[i];
#else
  for (int i = 0; i < W; ++i)
    for (int c = 0; c < i; ++c) {
      const float upper = r[c][i];
      r[c][i] = r[i][c];
      r[i][c] = upper;
    }
#endif
}

template <class T>
MP_INLINE vf load_some(const T* p, int64_t n) {
  return n >= W ? load(p) : load_part(p, int(n));
}

// x - mean of n <= TOKENS tokens by channel, (d, TOKENS); 0 for a token behind the last.
template <class T>
void pack(const ProjectArgs& a, int64_t first, int n, float* to) {
  const T* from = static_cast<const T*>(a.x) + first * a.x_row;
  for (int64_t channel = 0; channel < a.d; channel += W) {
    const int64_t rest = a.d - channel;
    const vf mean = load_some(a.mean + channel, rest);
    const int columns = int(std::min<int64_t>(W, rest));
    for (int t = 0; t < TOKENS; t += W) {
      vf r[W];
      for (int i = 0; i < W; ++i)
        r[i] = t + i < n ? load_some(from + (t + i) * a.x_row + channel, rest) - mean : vf{};
      turn_floats(r);
      for (int c = 0; c < columns; ++c) store(to + (channel + c) * TOKENS + t, r[c]);
    }
  }
}

// Dimensions rows[0 .. n - 1] of 32 packed tokens, of which `tokens` are written.
void multiply(const ProjectArgs& a, const int* rows, int n, const float* x, int64_t first, int tokens) {
  const float* matrix[ROWS];
  for (int r = 0; r < ROWS; ++r) matrix[r] = a.matrix + rows[std::min(r, n - 1)] * a.d;
  vf sums[ROWS][VECTORS];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) sums[r][v] = vf{};
  for (int64_t channel = 0; channel < a.d; ++channel, x += TOKENS) {
    vf right[VECTORS];
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) right[v] = load(x + v * W);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      const vf left = splat(matrix[r][channel]);
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v) sums[r][v] = fused(left, right[v], sums[r][v]);
    }
  }
  for (int r = 0; r < n; ++r) {
    float* z = a.z + rows[r] * a.z_row + first;
    for (int v = 0; v < VECTORS && v * W < tokens; ++v) {
      const int rest = tokens - v * W;
      rest >= W ? store(z + v * W, sums[r][v]) : store_part(z + v * W, sums[r][v], rest);
    }
  }
}

}  // namespace

int project(const ProjectArgs& a) {
  const int64_t pages = (a.n + TOKENS - 1) / TOKENS, page = a.d * TOKENS;
  const int64_t together = std::max<int64_t>(1, std::min(pages, pages_together(a.d)));
  static thread_local Workspace workspace;
  const int64_t packed_bytes = round_up(together * page * 4, 64);
  char* memory = workspace.get(packed_bytes + a.rows * int64_t(sizeof(int)));
  if (memory == nullptr) return 1;
  float* packed = reinterpret_cast<float*>(memory);
  int* rows = reinterpret_cast<int*>(memory + packed_bytes);
  int64_t n_rows = 0;
  for (int64_t i = 0; i < a.rows; ++i)
    if (a.bits == nullptr || a.bits[i] > 0) rows[n_rows++] = int(i);
  const int threads = threads_for(a.n * n_rows * a.d, a.n_threads);
  for (int64_t begin = 0; begin < pages; begin += together) {
    const int64_t end = std::min(begin + together, pages);
    auto pack_page = [&](int64_t i) {
      const int64_t first = (begin + i) * TOKENS;
      const int n = int(std::min<int64_t>(TOKENS, a.n - first));
      float* to = packed + i * page;
      switch (a.dtype) {
        case F32: return pack<float>(a, first, n, to);
        case F16: return pack<f16>(a, first, n, to);
        default: return pack<bf16>(a, first, n, to);
      }
    };
    parallel_for(end - begin, threads, pack_page);
    auto multiply_rows = [&](int64_t i) {
      const int64_t row = i * ROWS;
      const int n = int(std::min<int64_t>(ROWS, n_rows - row));
      for (int64_t p = begin; p < end; ++p) {
        const int64_t first = p * TOKENS;
        multiply(a, rows + row, n, packed + (p - begin) * page, first, int(std::min<int64_t>(TOKENS, a.n - first)));
      }
    };
    parallel_for((n_rows + ROWS - 1) / ROWS, threads, multiply_rows);
  }
  return 0;
}

}  // namespace mp

extern "C" __attribute__((visibility("default"))) int mp_project(const mp::ProjectArgs* args) {
  return mp::project(*args);
}
