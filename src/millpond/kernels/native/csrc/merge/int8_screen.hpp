// Which entries of a head may be alike at all: their cosines in 8 bits, with a bound on what rounding can hide.
#pragma once

#include <cmath>

#include "merge/pairwise_scan.hpp"

namespace mp {

#if defined(__AVX512VNNI__)

// Rows a of length 1 are codes q times a unit u and an error of length e: a . b = u_a u_b q_a . q_b to within
// e_a + e_b + e_a e_b. Products of codes cost half of those of bf16.
class Screen {
 public:
  // False where there is no memory. Lengths are given by `scales`.
  template <class T>
  bool pack(Scan<T>& scan, const ScanArgs& a, int head, Workspace& workspace) {
    pad_ = int(round_up(a.dim, W));
    const int64_t columns = int64_t(scan.chunks) * COLUMNS, rows = round_up(columns, SCAN_ROWS);
    const int64_t bytes = (columns + rows) * pad_ + 4 * (columns + rows + scan.chunks);
    const int64_t scratch = W * pad_ * 5;  // of a thread: a row as floats, and W rows of codes
    char* memory = workspace.get(bytes + scan.threads() * scratch);
    if (memory == nullptr) return false;
    auto take = [&memory](int64_t size) { return std::exchange(memory, memory + size); };
    right_ = reinterpret_cast<int8_t*>(take(columns * pad_));
    left_ = reinterpret_cast<uint8_t*>(take(rows * pad_));
    units_ = reinterpret_cast<float*>(take(4 * rows));
    shifts_ = reinterpret_cast<int32_t*>(take(4 * columns));
    float* worst = reinterpret_cast<float*>(take(4 * scan.chunks));
    std::memset(left_, 0, size_t(rows * pad_));
    std::fill(units_ + columns, units_ + rows, 0.0f);
    scan.each(scan.chunks, [&](int thread, int c) { worst[c] = pack_chunk(a, head, c, memory + thread * scratch); });
    const float error = *std::max_element(worst, worst + scan.chunks);
    least_ = float(a.threshold) - error * (2 + error) - 1e-4f;  // and what the rounding of sums can do
    return true;
  }

  // Whether one of TILE_ROWS entries from `first` on may be alike to one of chunk c.
  bool may_hit(int first, int c) const {
    vf best[TILE_ROWS];
    for (vf& x : best) x = splat(-__builtin_inff());
    for (int at = c * COLUMNS; at < (c + 1) * COLUMNS; at += 2 * W) compare(left_ + int64_t(first) * pad_, at, best);
    for (int r = 0; r < TILE_ROWS; ++r)
      if (max(best[r]) * units_[first + r] > least_) return true;
    return false;
  }

 private:
  // Code the entries of a chunk; returns the largest error.
  float pack_chunk(const ScanArgs& a, int head, int chunk, char* scratch) {
    float worst = 0, *row = reinterpret_cast<float*>(scratch);
    int8_t* codes = reinterpret_cast<int8_t*>(scratch + 4 * pad_);
    for (int i = chunk * COLUMNS; i < (chunk + 1) * COLUMNS; i += W) {
      std::memset(codes, 0, size_t(W * pad_));
      for (int r = 0; r < W; ++r) {
        units_[i + r] = 0;
        if (i + r < int(a.lens[head])) {
          const float scale = a.scales[head * a.scale_head + i + r];
          std::memset(row, 0, size_t(4 * pad_));
          widen(row, offset(a.x, a.x_dtype, head * a.x_head + (i + r) * a.x_row), a.x_dtype, int(a.dim));
          const float error = code(row, scale, codes + r * pad_, units_[i + r]);
          if (error > worst) worst = error;
        }
        const int8_t* own = codes + r * pad_;
        uint8_t* left = left_ + int64_t((i + r) / TILE_ROWS) * TILE_ROWS * pad_ + (i + r) % TILE_ROWS * 4;
        for (int d = 0; d < pad_; d += 4, left += 4 * TILE_ROWS) {
          uint32_t four;
          std::memcpy(&four, own + d, 4);
          four ^= 0x80808080u;  // 128 more of each
          std::memcpy(left, &four, 4);
        }
        int32_t total = 0;
        for (int d = 0; d < pad_; ++d) total += own[d];
        shifts_[i + r] = -128 * total;
      }
      transpose(codes, right_ + int64_t(i) * pad_, W, pad_ / 4);
    }
    return worst;
  }

  // One row, its unit and its error; a row that is not finite is like no other.
  float code(const float* row, float scale, int8_t* to, float& unit) const {
    vf most{};
    for (int d = 0; d < pad_; d += W) most = vmax(vmax(load(row + d), -load(row + d)), most);
    const float top = max(most) * scale;
    if (!(top > 0 && top < 2)) return 0;
    unit = top / 127;
    const float steps = scale / unit;
    vf squares{};
    for (int d = 0; d < pad_; d += W) {
      const __m512i q = _mm512_cvtps_epi32((__m512)(load(row + d) * steps));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + d), _mm512_cvtsepi32_epi8(q));
      const vf left = load(row + d) * scale - to_float((vi)q) * unit;
      squares += left * left;
    }
    return std::sqrt(sum(squares));
  }

  // best = max(best, products with the columns at, ..., at + 2 W - 1), in units of the rows.
  __attribute__((noinline)) void compare(const uint8_t* left, int at, vf* best) const {
    __m512i acc[TILE_ROWS][2];
    const int8_t* right = right_ + int64_t(at) * pad_;
    const int64_t next = int64_t(W) * pad_;
#pragma GCC unroll 12
    for (int r = 0; r < TILE_ROWS; ++r)
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) acc[r][j] = _mm512_setzero_si512();
    for (int d = 0; d < pad_; d += 4, left += 4 * TILE_ROWS, right += 4 * W) {
      const __m512i b[2] = {_mm512_loadu_si512(right), _mm512_loadu_si512(right + next)};
#pragma GCC unroll 12
      for (int r = 0; r < TILE_ROWS; ++r) {
        int32_t four;
        std::memcpy(&four, left + 4 * r, 4);
        const __m512i a = _mm512_set1_epi32(four);
#pragma GCC unroll 2
        for (int j = 0; j < 2; ++j)  // GCC 12 keeps copies of what goes through the intrinsic
          __asm__("vpdpbusd %2, %1, %0" : "+v"(acc[r][j]) : "v"(a), "v"(b[j]));
      }
    }
    const vi shift[2] = {load(shifts_ + at), load(shifts_ + at + W)};
    const vf unit[2] = {load(units_ + at), load(units_ + at + W)};
#pragma GCC unroll 12
    for (int r = 0; r < TILE_ROWS; ++r)
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) best[r] = vmax(to_float((vi)acc[r][j] + shift[j]) * unit[j], best[r]);
  }

  int pad_ = 0;
  float least_ = 0;
  int8_t* right_ = nullptr;    // (columns / W, pad / 4, W, 4)
  uint8_t* left_ = nullptr;    // (rows / TILE_ROWS, pad / 4, TILE_ROWS, 4), 128 + code
  float* units_ = nullptr;     // (rows,), 0 for what is like nothing
  int32_t* shifts_ = nullptr;  // (columns,)
};

#else

// Without such products there is nothing to gain: all may be alike.
class Screen {
 public:
  template <class T>
  bool pack(Scan<T>&, const ScanArgs&, int, Workspace&) {
    return true;
  }
  bool may_hit(int, int) const { return true; }
};

#endif

}  // namespace mp
