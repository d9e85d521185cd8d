// Rows into packed pages: chosen rows are gathered, encoded group by group, and their codes laid into tiles.
//
// The arithmetic is that of kernels/packed/groups.py, bit for bit: scales and zeros are rounded to float16 first.
#include <cmath>

#include "packed.hpp"
#include "threads.hpp"
#include "workspace.hpp"

namespace mp {
namespace {

struct PackedWriteArgs {
  PackedArgs packed;
  const int32_t *start, *count;  // (R,)
  const int32_t* index;          // (R, width)
  int64_t index_row, width, n_regions;
  const void *keys, *values;  // (R, N, dim)
  const int32_t* positions;   // (R, N)
  const float *scores, *log_masses;  // (R, N) or null
  int64_t k_dtype, v_dtype;
  int64_t k_region, k_row, v_region, v_row, p_region, p_row, s_region, s_row, m_region, m_row;  // strides
  int64_t n_threads;
};

enum Trouble : int { FINE = 0, NO_MEMORY = 1, NOT_FINITE = 2, TOO_LARGE = 3 };

// Rows (n, dim) of one side of a page as floats, and their codes.
struct Sheet {
  float* x;
  uint8_t* codes;
  int n, dim;
};

// The code of a float as e4m3, to nearest, ties to even; |f| <= 448.
inline uint8_t to_e4m3(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  const uint32_t sign = (u >> 24) & 0x80u, size = u & 0x7fffffffu;
  if (size < 0x3c800000u) {  // below 2^-6: multiples of 2^-9, which the adder rounds to
    float whole;
    std::memcpy(&whole, &size, 4);
    return uint8_t(sign | uint32_t(std::nearbyint(whole * 512.0f)));
  }
  return uint8_t(sign | ((size - 0x3c000000u + 0x7ffffu + ((size >> 20) & 1u)) >> 20));
}

inline float widened(f16 x) {
#if defined(__F16C__)
  return _cvtsh_ss(x.bits);
#else
  const f16 row[W] = {x};
  return load(row)[0];
#endif
}

// Round to float16 what becomes a scale or a zero.
inline float half_of_float(float x, f16* to, bool& large) {
  large |= std::fabs(x) > 65504.0f;
  *to = {float_to_f16(x)};
  return widened(*to);
}

// Codes of one group from its range: x = scale * code + zero.
struct Affine {
  float inverse, zero, low, high, shift;

  Affine(float least, float most, int bits, bool symmetric, f16* scale_at, f16* zero_at, bool& large) {
    const int half = 1 << (bits - 1);
    const float spread = symmetric ? (most > -least ? most : -least) / float(half - 1)
                                   : (most - least) / float((1 << bits) - 1);
    const float scale = half_of_float(spread, scale_at, large);
    zero = symmetric ? 0.0f : half_of_float(least, zero_at, large);
    inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    low = symmetric ? float(1 - half) : 0.0f;
    high = symmetric ? float(half - 1) : float((1 << bits) - 1);
    shift = symmetric ? float(half) : 0.0f;
  }
};

MP_INLINE vf to_whole(vf x) {  // to nearest, ties to even, for |x| < 2^22
  const vf magic = splat(12582912.0f);
  return (x + magic) - magic;
}

MP_INLINE vf clamped(vf x, vf low, vf high) {
  x = select(x < low, low, x);
  return select(x > high, high, x);
}

inline void put_codes(uint8_t* to, vf code) {
  typedef uint8_t vb __attribute__((vector_size(W)));
  const vb bytes = __builtin_convertvector(__builtin_convertvector(code, vi), vb);
  std::memcpy(to, &bytes, W);
}

// Groups of `group` slots of each channel; scales and zeros (groups, dim). `page`: of the first slot.
void encode_by_channel(const SideArgs& a, const Sheet& s, int first, char* page, bool& large) {
  const int bits = bits_of(int(a.format)), group = int(a.group);
  for (int begin = 0; begin < s.n; begin += group) {
    f16* scales = reinterpret_cast<f16*>(page + a.scales) + int64_t(first + begin) / group * s.dim;
    f16* zeros = a.zeros >= 0 ? reinterpret_cast<f16*>(page + a.zeros) + int64_t(first + begin) / group * s.dim : nullptr;
    for (int d = 0; d < s.dim; d += W) {
      const float* x = s.x + int64_t(begin) * s.dim + d;
      vf least = load(x), most = least;
      for (int t = 1; t < group; ++t) {
        const vf y = load(x + int64_t(t) * s.dim);
        least = select(y < least, y, least);
        most = select(y > most, y, most);
      }
      vf zero{}, inverse{}, low{}, high{}, shift{};
      for (int i = 0; i < W; ++i) {
        const Affine f(least[i], most[i], bits, zeros == nullptr, scales + d + i, zeros + d + i, large);
        zero[i] = f.zero, inverse[i] = f.inverse, low[i] = f.low, high[i] = f.high, shift[i] = f.shift;
      }
      for (int t = 0; t < group; ++t) {
        const vf y = (load(x + int64_t(t) * s.dim) - zero) * inverse;
        put_codes(s.codes + int64_t(begin + t) * s.dim + d, clamped(to_whole(y), low, high) + shift);
      }
    }
  }
}

// Groups of `group` channels of each slot; scales and zeros (groups, slots).
void encode_by_slot(const SideArgs& a, const Sheet& s, int first, int slots, char* page, bool& large) {
  const int bits = bits_of(int(a.format)), group = int(a.group);
  for (int g = 0; g * group < s.dim; ++g) {
    f16* scales = reinterpret_cast<f16*>(page + a.scales) + int64_t(g) * slots + first;
    f16* zeros = a.zeros >= 0 ? reinterpret_cast<f16*>(page + a.zeros) + int64_t(g) * slots + first : nullptr;
    for (int t = 0; t < s.n; ++t) {
      const float* x = s.x + int64_t(t) * s.dim + g * group;
      vf least = load(x), most = least;
      for (int d = W; d < group; d += W) {
        const vf y = load(x + d);
        least = select(y < least, y, least);
        most = select(y > most, y, most);
      }
      const Affine f(-max(-least), max(most), bits, zeros == nullptr, scales + t, zeros + t, large);
      for (int d = 0; d < group; d += W) {
        const vf y = clamped(to_whole((load(x + d) - f.zero) * f.inverse), splat(f.low), splat(f.high)) + f.shift;
        put_codes(s.codes + int64_t(t) * s.dim + g * group + d, y);
      }
    }
  }
}

void encode_e4m3(const SideArgs& a, const Sheet& s, char* page) {
  vf most{};
  for (int64_t i = 0; i < int64_t(s.n) * s.dim; i += W) {
    const vf x = load(s.x + i);
    most = vmax(most, select(x < vf{}, -x, x));
  }
  const float scale = max(most) / 448.0f, inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
  std::memcpy(page + a.scales, &scale, 4);
  for (int64_t i = 0; i < int64_t(s.n) * s.dim; ++i)
    s.codes[i] = to_e4m3(std::min(448.0f, std::max(-448.0f, s.x[i] * inverse)));
}

// Where code number `depth` of a lane lies: word, and bit in it.
struct Place {
  int word, bit;
};
template <int BITS>
constexpr Place place(int depth) {
  const int e = depth % (32 / BITS);
  return {depth / (32 / BITS), BITS * (e / 2) + 16 * (e % 2)};
}

// The low bits of 32 / BITS neighbouring codes as one word.
template <int BITS>
inline uint32_t word_of(const uint8_t* codes) {
  uint32_t even = 0, odd = 0;
#if defined(__BMI2__)
  const uint64_t mask = 0x0001000100010001u * ((1u << BITS) - 1);
  for (int i = 0, at = 0; i < 32 / BITS; i += 8, at += 4 * BITS) {
    uint64_t eight = 0;
    std::memcpy(&eight, codes + i, BITS == 8 ? 4 : 8);
    even |= uint32_t(_pext_u64(eight, mask)) << at;
    odd |= uint32_t(_pext_u64(eight, mask << 8)) << at;
  }
#else
  for (int i = 32 / BITS; i > 0; i -= 2) {
    even = even << BITS | (codes[i - 2] & ((1u << BITS) - 1));
    odd = odd << BITS | (codes[i - 1] & ((1u << BITS) - 1));
  }
#endif
  return even | odd << 16;
}

template <int F>
void lay_keys(const SideArgs& a, const Sheet& s, int first, char* page) {
  constexpr int per = per_word(F);
  const int words = int(low_words(F, s.dim)), top = int(top_words(s.dim));
  for (int t = 0; t < s.n; ++t) {
    const int tile = (first + t) / LANES, lane = (first + t) % LANES;
    uint32_t* low = reinterpret_cast<uint32_t*>(page + a.codes) + tile * words * LANES + lane;
    const uint8_t* codes = s.codes + int64_t(t) * s.dim;
    for (int w = 0; w < words; ++w, codes += per) low[w * LANES] = word_of<low_bits(F)>(codes);
    if (bits_of(F) != 3) continue;
    uint32_t* third = reinterpret_cast<uint32_t*>(page + a.top) + tile * top * LANES + lane;
    for (int d = 0; d < s.dim; ++d) {
      const Place p = place<1>(d);
      if (d % 32 == 0) third[p.word * LANES] = 0;
      third[p.word * LANES] |= uint32_t(s.codes[int64_t(t) * s.dim + d] >> 2) << p.bit;
    }
  }
}

// BITS bits of codes >> `drop` of slots first .. first + n, 16 channels wide. `words`: of the page's tile.
template <int BITS>
void lay_lanes(uint32_t* words, const uint8_t* codes, int stride, int first, int n, int drop) {
  constexpr int per = 32 / BITS;
  constexpr uint32_t mask = (1u << BITS) - 1;
  for (int t = 0; t < n;) {
    const int in_word = (first + t) % per, run = std::min(n - t, per - in_word);
    uint32_t* word = words + (first + t) / per * LANES;
    uint32_t sum[LANES] = {}, kept = 0;  // kept: the bits of slots that are not written
    if (run < per) {
      kept = ~0u;
      for (int e = in_word; e < in_word + run; ++e) kept &= ~(mask << place<BITS>(e).bit);
    }
    for (int e = 0; e < run; ++e, ++t) {
      const int bit = place<BITS>(in_word + e).bit;
      const uint8_t* from = codes + int64_t(t) * stride;
      for (int i = 0; i < LANES; ++i) sum[i] |= (uint32_t(from[i]) >> drop & mask) << bit;
    }
    for (int i = 0; i < LANES; ++i) word[i] = (word[i] & kept) | sum[i];
  }
}

template <int F>
void lay_values(const SideArgs& a, const Sheet& s, int first, int slots, char* page) {
  for (int c = 0; c < s.dim / LANES; ++c) {
    const uint8_t* codes = s.codes + c * LANES;
    uint32_t* low = reinterpret_cast<uint32_t*>(page + a.codes) + c * low_words(F, slots) * LANES;
    lay_lanes<low_bits(F)>(low, codes, s.dim, first, s.n, 0);
    if (bits_of(F) != 3) continue;
    lay_lanes<1>(reinterpret_cast<uint32_t*>(page + a.top) + c * top_words(slots) * LANES, codes, s.dim, first, s.n, 2);
  }
}

bool finite(const Sheet& s) {
  vi bad{};
  for (int64_t i = 0; i < int64_t(s.n) * s.dim; i += W) {
    const vf x = load(s.x + i);
    bad |= ~((x - x) == vf{});
  }
  int any = 0;
  for (int i = 0; i < W; ++i) any |= bad[i];
  return any == 0;
}

int encode(const SideArgs& a, const Sheet& s, int first, int slots, char* page, bool is_key) {
  if (a.format == ROWS) {
    narrow(page + a.codes + int64_t(first) * s.dim * 2, BF16, s.x, s.n * s.dim);
    return FINE;
  }
  if (!finite(s)) return NOT_FINITE;
  bool large = false;
  if (a.format == FP8)
    encode_e4m3(a, s, page);
  else if (a.by_channel)
    encode_by_channel(a, s, first, page, large);
  else
    encode_by_slot(a, s, first, slots, page, large);
  with_format(a.format, [&](auto f) {
    is_key ? lay_keys<f>(a, s, first, page) : lay_values<f>(a, s, first, slots, page);
  });
  return large ? TOO_LARGE : FINE;
}

// Slots [begin, end) of region r, all in one page.
int write_run(const PackedWriteArgs& a, const PackedPool& pool, int64_t r, int64_t begin, int64_t end, char* memory) {
  const int32_t* pages = pool.pages(int(r));
  const int n = int(end - begin), slots = int(pool.pool.slots), first = int(begin & (slots - 1));
  const int key_dim = int(pool.pool.key_dim), value_dim = int(pool.pool.value_dim), dim = std::max(key_dim, value_dim);
  char* page = pool.page(pages, begin);
  const int32_t* rows = a.index + r * a.index_row + (begin - a.start[r]);
  const int32_t* channels = a.packed.channels != nullptr ? a.packed.channels + r * key_dim : nullptr;
  const float* balance = a.packed.balance != nullptr ? a.packed.balance + r * key_dim : nullptr;
  Sheet s{reinterpret_cast<float*>(memory), reinterpret_cast<uint8_t*>(memory) + int64_t(slots) * dim * 4, n, key_dim};
  for (int t = 0; t < n; ++t) {
    const void* from = offset(a.keys, a.k_dtype, r * a.k_region + rows[t] * a.k_row);
    float* to = s.x + int64_t(t) * key_dim;
    if (channels == nullptr)
      widen(to, from, a.k_dtype, key_dim);
    else
      for (int d = 0; d < key_dim; ++d) widen(to + d, offset(from, a.k_dtype, channels[d]), a.k_dtype, 1);
    for (int d = 0; balance != nullptr && d < key_dim; ++d) to[d] /= balance[d];
  }
  if (const int trouble = encode(a.packed.key, s, first, slots, page, true); trouble != FINE) return trouble;
  s.dim = value_dim;
  for (int t = 0; t < n; ++t)
    widen(s.x + int64_t(t) * value_dim, offset(a.values, a.v_dtype, r * a.v_region + rows[t] * a.v_row), a.v_dtype, value_dim);
  if (const int trouble = encode(a.packed.value, s, first, slots, page, false); trouble != FINE) return trouble;
  for (int t = 0; t < n; ++t) {
    const int64_t row = rows[t], slot = begin + t;
    *pool.pool.position(pages, slot) = a.positions[r * a.p_region + row * a.p_row];
    *pool.pool.score(pages, slot) = a.scores != nullptr ? a.scores[r * a.s_region + row * a.s_row] : 0.0f;
    if (pool.pool.masses)
      *pool.pool.log_mass(pages, slot) = a.log_masses != nullptr ? a.log_masses[r * a.m_region + row * a.m_row] : 0.0f;
  }
  return FINE;
}

}  // namespace
}  // namespace mp

// Formats of tables, fixed scales and entries beside the codes are not written here.
extern "C" __attribute__((visibility("default"))) int mp_write_packed(const void* raw) {
  using namespace mp;
  const PackedWriteArgs& a = *static_cast<const PackedWriteArgs*>(raw);
  const PackedPool pool(a.packed);
  const int64_t slots = pool.pool.slots, pages = (a.width + slots - 1) / slots + 1;  // a run may begin inside a page
  const int64_t dim = std::max(pool.pool.key_dim, pool.pool.value_dim);
  std::atomic<int> trouble{FINE};
  auto body = [&](int64_t item) {
    static thread_local Workspace workspace;
    const int64_t r = item / pages, first_page = a.start[r] / slots + item % pages, end = a.start[r] + a.count[r];
    const int64_t begin = std::max<int64_t>(a.start[r], first_page * slots), stop = std::min(end, (first_page + 1) * slots);
    if (begin >= stop) return;
    char* memory = workspace.get(slots * dim * 5);
    const int found = memory == nullptr ? NO_MEMORY : write_run(a, pool, r, begin, stop, memory);
    if (found != FINE) trouble.store(found, std::memory_order_relaxed);
  };
  parallel_for(a.n_regions * pages, int(a.n_threads), body);
  return trouble.load();
}
