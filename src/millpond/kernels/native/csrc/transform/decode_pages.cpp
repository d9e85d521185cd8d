// Pages of codes back to keys and values: x = start + sum over i of z[i] * matrix[i], over the dimensions that have bits
// in their order, each product fused with its sum.
//
// Every number of the result is one chain of sums, whatever the tile, the thread and the instruction set: all have equal
// bits. Pages are taken some at a time: first their codes become z, 32 tokens of a dimension side by side; then panels of
// columns of the matrix are packed, without the rows of dimensions that have no bits, and multiplied with all of them.
#include <algorithm>
#include <cstring>

#include "common/convert.hpp"
#include "common/threads.hpp"
#include "common/workspace.hpp"
#include "transform/fused.hpp"
#include "transform/transform_args.hpp"

namespace mp {
namespace {

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int ROWS = 8;  // tokens of a tile: with its vectors of columns, sums that fit the registers
#else
constexpr int ROWS = 4;
#endif
constexpr int VECTORS = 3;                  // of a panel, at most
constexpr int PANEL = VECTORS * W;          // columns
constexpr int64_t Z_BYTES = 512 * 1024;     // of the pages that are taken at a time, about
constexpr int TABLE_END = 16;               // floats behind tables that a look-up may read and not use

// A dimension that has bits: its row of the matrix, its first plane in a page, and its numbers by code.
struct Dimension {
  int row, plane, bits, numbers;
};

// W codes from token `first` on: bit j of each is in plane j.
MP_INLINE vi codes_at(const uint8_t* planes, int bits, vu lanes) {
  vi code{};
  for (int j = 0; j < bits; ++j) {
    uint32_t word;
    std::memcpy(&word, planes + 4 * j, 4);
    code |= (vi)(((vu)splat(int32_t(word)) >> lanes) & 1u) << j;
  }
  return code;
}

MP_INLINE vf look_up(const float* numbers, vi code, int bits) {
#if defined(__AVX512F__)
  if (bits <= 4) return (vf)_mm512_permutexvar_ps((__m512i)code, (__m512)load(numbers));
  if (bits == 5) return (vf)_mm512_permutex2var_ps((__m512)load(numbers), (__m512i)code, (__m512)load(numbers + W));
  return (vf)_mm512_i32gather_ps((__m512i)code, numbers, 4);
#elif defined(__AVX2__)
  if (bits <= 3) return (vf)_mm256_permutevar8x32_ps((__m256)load(numbers), (__m256i)code);
  return (vf)_mm256_i32gather_ps(numbers, (__m256i)code, 4);
#else
  (void)bits;
  vf found;
  for (int i = 0; i < W; ++i) found[i] = numbers[code[i]];
  return found;
#endif
}

// A side of the call: what all its pages share.
class Side {
 public:
  Side(const BackTransform& args, int first_plane) : a_(args), first_plane_(first_plane) {
    for (int64_t i = 0; i < a_.coded.rows; ++i) {
      const int bits = a_.coded.bits[i];
      planes_ += bits, n_ += bits > 0, numbers_ += bits > 0 ? 1 << bits : 0;
    }
  }
  int n() const { return n_; }
  int planes() const { return planes_; }
  int panels() const { return int((a_.d + PANEL - 1) / PANEL); }
  int64_t products() const { return n_ * a_.d; }
  int64_t bytes() const { return dimensions_bytes() + round_up((numbers_ + TABLE_END + panels() * PANEL) * 4, 64); }

  void prepare(char* memory);
  void expand(const uint8_t* page, float* z) const;
  void multiply(int panel, const float* z, int64_t z_page, int64_t first, int64_t end, int64_t dtype, float* packed) const;

 private:
  int64_t dimensions_bytes() const { return round_up(n_ * int64_t(sizeof(Dimension)), 64); }
  template <int C>
  void tile(const float* z, const float* packed, int64_t column, int64_t token, int64_t dtype) const;

  const BackTransform& a_;
  int first_plane_, planes_ = 0, n_ = 0;
  int64_t numbers_ = 0;
  Dimension* dimensions_ = nullptr;
  float *tables_ = nullptr, *start_ = nullptr;
};

// The dimensions that have bits with their numbers, s q + m with two roundings; and where sums start: the mean, and what
// dimensions without bits add to all tokens.
void Side::prepare(char* memory) {
  dimensions_ = reinterpret_cast<Dimension*>(memory);
  tables_ = reinterpret_cast<float*>(memory + dimensions_bytes());
  start_ = tables_ + numbers_ + TABLE_END;
  const CodedSide& c = a_.coded;
  std::memset(static_cast<void*>(tables_ + numbers_), 0, size_t(TABLE_END + panels() * PANEL) * 4);
  std::memcpy(start_, a_.mean, size_t(a_.d) * 4);
  int at = 0, plane = first_plane_, numbers = 0;
  for (int64_t i = 0; i < c.rows; ++i) {
    const int bits = c.bits[i];
    if (bits > 0) {
      dimensions_[at++] = {int(i), plane, bits, numbers};
      const float* levels = levels_of(c, i);
      for (int code = 0; code < 1 << bits; ++code) tables_[numbers + code] = levels[code] * c.scale[i] + c.shift[i];
      plane += bits, numbers += 1 << bits;
    } else if (c.shift[i] != 0.0f) {
      const float* row = a_.matrix + i * a_.d;
      const vf shift = splat(c.shift[i]);
      int64_t column = 0;
      for (; column + W <= a_.d; column += W)
        store(start_ + column, fused(shift, load(row + column), load(start_ + column)));
      if (column < a_.d) {
        const int rest = int(a_.d - column);
        store_part(start_ + column, fused(shift, load_part(row + column, rest), load(start_ + column)), rest);
      }
    }
  }
}

// z of a page, (n, TOKENS).
void Side::expand(const uint8_t* page, float* z) const {
  const vu lanes = (vu)iota();
  for (int i = 0; i < n_; ++i, z += TOKENS) {
    const Dimension& dimension = dimensions_[i];
    const uint8_t* planes = page + PAGE_HEADER + 4 * int64_t(dimension.plane);
    const float* numbers = tables_ + dimension.numbers;
    for (int t = 0; t < TOKENS; t += W)
      store(z + t, look_up(numbers, codes_at(planes, dimension.bits, lanes + uint32_t(t)), dimension.bits));
  }
}

// ROWS tokens times C vectors of columns.
template <int C>
void Side::tile(const float* z, const float* packed, int64_t column, int64_t token, int64_t dtype) const {
  vf sums[ROWS][C];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 3
    for (int c = 0; c < C; ++c) sums[r][c] = load(start_ + column + c * W);
  for (int i = 0; i < n_; ++i, z += TOKENS, packed += C * W) {
    vf right[C];
#pragma GCC unroll 3
    for (int c = 0; c < C; ++c) right[c] = load(packed + c * W);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      const vf left = splat(z[r]);
#pragma GCC unroll 3
      for (int c = 0; c < C; ++c) sums[r][c] = fused(left, right[c], sums[r][c]);
    }
  }
  const int width = int(std::min<int64_t>(C * W, a_.d - column));
  char* out = static_cast<char*>(a_.out) + (token * a_.out_row + column) * dtype_bytes(dtype);
  for (int r = 0; r < ROWS; ++r, out += a_.out_row * dtype_bytes(dtype)) {
    float row[C * W];
#pragma GCC unroll 3
    for (int c = 0; c < C; ++c) store(row + c * W, sums[r][c]);
    narrow(out, dtype, row, width);
  }
}

// Pages first .. end of the output from their z. `packed`: room for a panel.
void Side::multiply(int panel, const float* z, int64_t z_page, int64_t first, int64_t end, int64_t dtype,
                    float* packed) const {
  const int64_t column = int64_t(panel) * PANEL;
  const int width = int(std::min<int64_t>(PANEL, a_.d - column)), vectors = (width + W - 1) / W;
  float* to = packed;
  for (int i = 0; i < n_; ++i, to += vectors * W) {
    const float* from = a_.matrix + dimensions_[i].row * a_.d + column;
    int c = 0;
    for (; c + W <= width; c += W) store(to + c, load(from + c));
    if (c < width) store(to + c, load_part(from + c, width - c));
  }
  for (int64_t page = first; page < end; ++page, z += z_page)
    for (int t = 0; t < TOKENS; t += ROWS) {
      const int64_t token = page * TOKENS + t;
      if (vectors == 3)
        tile<3>(z + t, packed, column, token, dtype);
      else if (vectors == 2)
        tile<2>(z + t, packed, column, token, dtype);
      else
        tile<1>(z + t, packed, column, token, dtype);
    }
}

int decode_pages(const DecodePagesArgs& a) {
  const Side keys(a.sides[0], 0);
  Side sides[2] = {keys, Side(a.sides[1], keys.planes())};
  const int64_t z_page = int64_t(sides[0].n() + sides[1].n()) * TOKENS;
  const int64_t together =
      std::max<int64_t>(1, std::min(a.n_pages, Z_BYTES / std::max<int64_t>(4, z_page * 4)));
  const int64_t z_bytes = round_up(together * z_page * 4, 64);
  const int64_t packed_bytes = round_up(std::max<int64_t>(1, std::max(sides[0].n(), sides[1].n())) * PANEL * 4, 4096);
  const int threads =
      threads_for(a.n_pages * TOKENS * (sides[0].products() + sides[1].products()), a.n_threads);
  static thread_local Workspace workspace;
  char* memory = workspace.get(sides[0].bytes() + sides[1].bytes() + z_bytes + threads * packed_bytes);
  if (memory == nullptr) return 1;
  for (Side& side : sides) side.prepare(memory), memory += side.bytes();
  float* z = reinterpret_cast<float*>(memory);
  memory += z_bytes;
  const int64_t panels = sides[0].panels() + sides[1].panels();
  for (int64_t first = 0; first < a.n_pages; first += together) {
    const int64_t end = std::min(first + together, a.n_pages);
    auto expand = [&](int64_t i) {
      const uint8_t* page = a.pages + (first + i) * a.page_bytes;
      sides[0].expand(page, z + i * z_page);
      sides[1].expand(page, z + i * z_page + int64_t(sides[0].n()) * TOKENS);
    };
    parallel_for(end - first, threads, expand);
    std::atomic<int64_t> next{0};
    auto multiply = [&](int thread) {
      float* packed = reinterpret_cast<float*>(memory + thread * packed_bytes);
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < panels;) {
        const bool of_values = i >= sides[0].panels();
        const int panel = int(of_values ? i - sides[0].panels() : i);
        const float* from = z + (of_values ? int64_t(sides[0].n()) * TOKENS : 0);
        sides[of_values].multiply(panel, from, z_page, first, end, a.dtype, packed);
      }
    };
    parallel(int(std::min<int64_t>(threads, panels)), multiply);
  }
  return 0;
}

}  // namespace
}  // namespace mp

extern "C" __attribute__((visibility("default"))) int mp_decode_pages(const mp::DecodePagesArgs* args) {
  return mp::decode_pages(*args);
}
