// CRC-32 as zlib computes it (reflected polynomial 0xEDB88320), by products without carries.
#include "common/crc32.hpp"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace mp {
namespace {

constexpr uint32_t POLYNOMIAL = 0xEDB88320u;  // bit 31 is x^0

constexpr uint32_t times_x(uint32_t r) { return (r >> 1) ^ ((r & 1) ? POLYNOMIAL : 0u); }

// x^n modulo the polynomial, as the second factor of a product of reflected numbers, which comes out one bit too low.
constexpr uint64_t power(int n) {
  uint32_t r = 0x80000000u;
  for (int i = 0; i < n; ++i) r = times_x(r);
  return uint64_t(r) << 1;
}

constexpr std::array<uint32_t, 256> make_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t r = byte;
    for (int bit = 0; bit < 8; ++bit) r = times_x(r);
    table[byte] = r;
  }
  return table;
}

constexpr std::array<uint32_t, 256> TABLE = make_table();

uint32_t by_bytes(uint32_t state, const uint8_t* p, int64_t n) {
  for (int64_t i = 0; i < n; ++i) state = (state >> 8) ^ TABLE[(state ^ p[i]) & 255];
  return state;
}

#if defined(__x86_64__)
#define MP_CLMUL __attribute__((target("pclmul,sse4.1")))

// What 16 bytes count for when they are moved on by the bits of `by`: x^(bits + 32) and x^(bits - 32).
MP_CLMUL inline __m128i moved(__m128i bytes, __m128i by) {
  return _mm_xor_si128(_mm_clmulepi64_si128(bytes, by, 0x00), _mm_clmulepi64_si128(bytes, by, 0x11));
}

MP_CLMUL inline __m128i at(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }

// Four lanes of 16 bytes, each moved on by 64 at a time; then into one, whose 16 bytes have the checksum of all.
MP_CLMUL uint32_t by_products(uint32_t state, const uint8_t* p, int64_t n) {
  const __m128i by_64 = _mm_set_epi64x(int64_t(power(512 - 32)), int64_t(power(512 + 32)));
  const __m128i by_16 = _mm_set_epi64x(int64_t(power(128 - 32)), int64_t(power(128 + 32)));
  __m128i lanes[4];
  for (int j = 0; j < 4; ++j) lanes[j] = at(p + 16 * j);
  lanes[0] = _mm_xor_si128(lanes[0], _mm_cvtsi32_si128(int(state)));
  int64_t i = 64;
  for (; i + 64 <= n; i += 64)
    for (int j = 0; j < 4; ++j) lanes[j] = _mm_xor_si128(moved(lanes[j], by_64), at(p + i + 16 * j));
  __m128i sum = lanes[0];
  for (int j = 1; j < 4; ++j) sum = _mm_xor_si128(moved(sum, by_16), lanes[j]);
  uint8_t last[16];
  std::memcpy(last, &sum, 16);
  return by_bytes(by_bytes(0, last, 16), p + i, n - i);
}
#endif

}  // namespace

bool has_crc32() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_supports("pclmul");
#else
  return false;
#endif
}

uint32_t crc32(const void* data, int64_t n, uint32_t before) {
  const uint8_t* p = static_cast<const uint8_t*>(data);
#if defined(__x86_64__)
  if (n >= 64) return ~by_products(~before, p, n);
#endif
  return ~by_bytes(~before, p, n);
}

}  // namespace mp

// The checksum of n bytes that follow others whose checksum is `before` (0: none do); -1 where this CPU multiplies
// with carries only.
extern "C" __attribute__((visibility("default"))) int64_t mp_crc32(const void* data, int64_t n, uint32_t before) {
  return mp::has_crc32() ? int64_t(mp::crc32(data, n, before)) : -1;
}
