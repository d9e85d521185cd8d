// Numbers of the transform to pages of codes, planes of bits with a header and a checksum: see codec/transform/page.py.
// Compile without contraction of a * b + c, so that codes are those of the torch reference for equal numbers.
#include <algorithm>
#include <cstring>

#include "common/convert.hpp"
#include "common/crc32c.hpp"
#include "common/simd.hpp"
#include "common/threads.hpp"
#include "common/workspace.hpp"
#include "transform/transform_args.hpp"

namespace mp {
namespace {

// Bit i: whether lane i is negative.
MP_INLINE uint32_t negative(vi x) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask((__m512i)x);
#elif defined(__AVX2__)
  return uint32_t(_mm256_movemask_ps((__m256)x));
#elif defined(__SSE2__)
  return uint32_t(_mm_movemask_ps((__m128)x));
#else
  uint32_t bits = 0;
  for (int i = 0; i < W; ++i) bits |= uint32_t(x[i] < 0) << i;
  return bits;
#endif
}

void put(uint8_t* to, uint32_t x) { std::memcpy(to, &x, 4); }

// Where a page belongs: its header but for the checksum.
void put_place(uint8_t* page, int64_t unit, int64_t layer, int64_t number) {
  put(page, uint32_t(unit));
  put(page + 4, uint32_t(layer) | uint32_t(TOKENS) << 16);
  put(page + 8, uint32_t(number));
}

constexpr int PLACE = PAGE_HEADER - 4;  // bytes

// Of all but itself.
uint32_t checksum(const uint8_t* page, int64_t page_bytes) {
  return crc32c(page + PAGE_HEADER, page_bytes - PAGE_HEADER, crc32c(page, PLACE, 0));
}

// The planes of a dimension's 32 tokens. A code is how many cuts lie below (z - shift) / scale, two roundings.
void put_planes(const float* z, float shift, float scale, const float* cuts, int bits, uint8_t* planes) {
  const int n_cuts = (1 << bits) - 1;
  uint32_t words[MOST_BITS] = {};
  for (int t = 0; t < TOKENS; t += W) {
    const vf u = (load(z + t) - splat(shift)) / splat(scale);
    vi code = splat(int32_t(n_cuts));
    for (int i = 0; i < n_cuts; ++i) code += (vi)(splat(cuts[i]) >= u);  // a mask is -1
    for (int j = 0; j < bits; ++j) words[j] |= negative(code << (31 - j)) << t;
  }
  for (int j = 0; j < bits; ++j) put(planes + 4 * j, words[j]);
}

int64_t n_cuts_of(const CodedSide& side) {
  int64_t n = 0;
  for (int64_t i = 0; i < side.rows; ++i) n += (1 << side.bits[i]) - 1;
  return n;
}

// The cuts of all dimensions, halfway between neighbouring levels.
void fill_cuts(const CodedSide& side, float* cuts) {
  for (int64_t i = 0; i < side.rows; ++i) {
    const float* levels = levels_of(side, i);
    for (int k = 1; k < 1 << side.bits[i]; ++k) *cuts++ = (levels[k] + levels[k - 1]) * 0.5f;
  }
}

uint8_t* put_side(const NumbersOfSide& side, int64_t page, const float* cuts, uint8_t* planes) {
  const CodedSide& c = side.coded;
  const float* from = side.z + page * TOKENS * side.z_row;
  for (int64_t i = 0; i < c.rows; ++i) {
    const int bits = c.bits[i];
    if (bits == 0) continue;
    const float* z = from + i * side.z_column;
    float row[TOKENS];
    if (side.z_row != 1) {
      for (int t = 0; t < TOKENS; ++t) row[t] = z[t * side.z_row];
      z = row;
    }
    put_planes(z, c.shift[i], c.scale[i], cuts, bits, planes);
    planes += 4 * bits, cuts += (1 << bits) - 1;
  }
  return planes;
}

}  // namespace

int encode_pages(const EncodePagesArgs& a) {
  const int64_t n_key_cuts = n_cuts_of(a.sides[0].coded), n_cuts = n_key_cuts + n_cuts_of(a.sides[1].coded);
  static thread_local Workspace workspace;
  float* cuts = reinterpret_cast<float*>(workspace.get(std::max<int64_t>(64, n_cuts * 4)));
  if (cuts == nullptr) return 1;
  fill_cuts(a.sides[0].coded, cuts);
  fill_cuts(a.sides[1].coded, cuts + n_key_cuts);
  auto encode = [&](int64_t i) {
    uint8_t* page = a.pages + i * a.page_bytes;
    uint8_t* planes = put_side(a.sides[0], i, cuts, page + PAGE_HEADER);
    put_side(a.sides[1], i, cuts + n_key_cuts, planes);
    put_place(page, a.unit, a.layer, a.first + i);
    put(page + PLACE, checksum(page, a.page_bytes));
  };
  parallel_for(a.n_pages, threads_for(a.n_pages * TOKENS * n_cuts, a.n_threads), encode);
  return 0;
}

namespace {

// z of some pages at a time goes no further than the cache.
int encode_tokens(const EncodeTokensArgs& a) {
  const int64_t together = std::max<int64_t>(1, std::min(a.pages.n_pages, pages_together(a.tokens[0].d)));
  const int64_t z_row = together * TOKENS + 16;  // an odd number of lines of the cache
  static thread_local Workspace workspace;
  float* z = reinterpret_cast<float*>(workspace.get((a.tokens[0].rows + a.tokens[1].rows) * z_row * 4));
  if (z == nullptr) return 1;
  for (int64_t first = 0; first < a.pages.n_pages; first += together) {
    EncodePagesArgs pages = a.pages;
    pages.pages += first * pages.page_bytes, pages.first += first;
    pages.n_pages = std::min(together, a.pages.n_pages - first);
    for (int s = 0; s < 2; ++s) {
      ProjectArgs tokens = a.tokens[s];
      tokens.x = static_cast<const char*>(tokens.x) + first * TOKENS * tokens.x_row * dtype_bytes(tokens.dtype);
      tokens.bits = pages.sides[s].coded.bits;
      tokens.n = pages.n_pages * TOKENS;
      tokens.z = s == 0 ? z : z + a.tokens[0].rows * z_row, tokens.z_row = z_row;
      if (project(tokens) != 0) return 1;
      pages.sides[s].z = tokens.z, pages.sides[s].z_row = 1, pages.sides[s].z_column = z_row;
    }
    if (encode_pages(pages) != 0) return 1;
  }
  return 0;
}

void check_pages(const CheckPagesArgs& a) {
  a.found[0] = a.found[1] = -1;
  for (int64_t i = 0; i < a.n_pages; ++i) {
    const uint8_t* page = a.pages + i * a.page_bytes;
    uint8_t right[PAGE_HEADER];
    put_place(right, a.unit, a.layer, a.first + i);
    put(right + PLACE, checksum(page, a.page_bytes));
    if (a.found[0] < 0 && std::memcmp(page + PLACE, right + PLACE, PAGE_HEADER - PLACE) != 0) a.found[0] = i;
    if (a.found[1] < 0 && std::memcmp(page, right, PLACE) != 0) a.found[1] = i;
  }
}

}  // namespace
}  // namespace mp

extern "C" __attribute__((visibility("default"))) int mp_encode_tokens(const mp::EncodeTokensArgs* args) {
  return mp::encode_tokens(*args);
}

extern "C" __attribute__((visibility("default"))) int mp_check_pages(const mp::CheckPagesArgs* args) {
  mp::check_pages(*args);
  return 0;
}

extern "C" __attribute__((visibility("default"))) int mp_encode_pages(const mp::EncodePagesArgs* args) {
  return mp::encode_pages(*args);
}
