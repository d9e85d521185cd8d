// CRC-32C (reflected polynomial 0x82F63B78): by the instruction for it where the CPU has one, else by a table.
#include "common/crc32c.hpp"

#include <array>
#include <cstring>

#if defined(__SSE4_2__)
#include <nmmintrin.h>
#elif defined(__ARM_FEATURE_CRC32)  // all that this library runs on have it
#include <arm_acle.h>
#elif defined(__aarch64__) && defined(__linux__) && !defined(__clang__)  // the CPU is asked; Clang names it otherwise
#include <arm_acle.h>
#include <sys/auxv.h>
#define MP_ASK_FOR_CRC
#endif

#include "common/args.hpp"

namespace mp {
namespace {

constexpr uint32_t POLYNOMIAL = 0x82F63B78u;

constexpr std::array<uint32_t, 256> make_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t r = byte;
    for (int bit = 0; bit < 8; ++bit) r = (r >> 1) ^ ((r & 1) ? POLYNOMIAL : 0u);
    table[byte] = r;
  }
  return table;
}

constexpr std::array<uint32_t, 256> TABLE = make_table();

uint32_t by_bytes(uint32_t state, const uint8_t* p, int64_t n) {
  for (int64_t i = 0; i < n; ++i) state = (state >> 8) ^ TABLE[(state ^ p[i]) & 255];
  return state;
}

inline uint64_t eight(const uint8_t* p) {
  uint64_t word;
  std::memcpy(&word, p, 8);
  return word;
}

#if defined(__SSE4_2__)
uint32_t by_words(uint32_t state, const uint8_t* p, int64_t n) {
  uint64_t wide = state;
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) wide = _mm_crc32_u64(wide, eight(p + i));
  return by_bytes(uint32_t(wide), p + i, n - i);
}

uint32_t advance(uint32_t state, const uint8_t* p, int64_t n) { return by_words(state, p, n); }
#elif defined(__ARM_FEATURE_CRC32) || defined(MP_ASK_FOR_CRC)
#if defined(MP_ASK_FOR_CRC)
__attribute__((target("+crc")))
#endif
uint32_t by_words(uint32_t state, const uint8_t* p, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) state = __crc32cd(state, eight(p + i));
  return by_bytes(state, p + i, n - i);
}

uint32_t advance(uint32_t state, const uint8_t* p, int64_t n) {
#if defined(MP_ASK_FOR_CRC)
  constexpr unsigned long HAS_CRC32 = 1ul << 7;
  static const bool fast = (getauxval(AT_HWCAP) & HAS_CRC32) != 0;
  if (!fast) return by_bytes(state, p, n);
#endif
  return by_words(state, p, n);
}
#else
uint32_t advance(uint32_t state, const uint8_t* p, int64_t n) { return by_bytes(state, p, n); }
#endif

}  // namespace

uint32_t crc32c(const void* data, int64_t n, uint32_t before) {
  return ~advance(~before, static_cast<const uint8_t*>(data), n);
}

}  // namespace mp

extern "C" __attribute__((visibility("default"))) int mp_crc32c(const mp::ChecksumArgs* args) {
  const mp::ChecksumArgs& a = *args;
  for (int64_t i = 0; i < a.n; ++i)
    a.checksums[i] = mp::crc32c(a.rows + i * a.row_bytes, a.bytes, a.before == nullptr ? 0 : a.before[i]);
  return 0;
}
