// The codec `transform`: codes equal to plain loops, and sums with the bits of fmaf in one order, on every hardware.
#pragma once

#include "harness.hpp"
#include "transform/transform_args.hpp"

namespace check {

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

inline uint32_t slow_crc32c(const uint8_t* p, int64_t n, uint32_t state = 0xFFFFFFFFu) {
  for (int64_t i = 0; i < n; ++i) {
    state ^= p[i];
    for (int bit = 0; bit < 8; ++bit) state = (state >> 1) ^ ((state & 1) != 0 ? 0x82F63B78u : 0u);
  }
  return state;
}

// The transform of one side, with two sets of levels and dimensions of 0 to 7 bits.
struct TransformSide {
  int64_t rows, d;
  vector<float> mean, matrix, shift, scale, levels;
  vector<uint8_t> bits;
  vector<int32_t> sets;

  TransformSide(int64_t n_rows, int64_t dim, bool plain, Random& random) : rows(n_rows), d(dim) {
    mean = floats(d, random), matrix = floats(rows * d, random);
    for (int64_t set = 0; set < 2; ++set)
      for (int width = 1; width <= mp::MOST_BITS; ++width) {
        vector<float> table = floats(1 << width, random);
        std::sort(table.begin(), table.end());
        levels.insert(levels.end(), table.begin(), table.end());
      }
    for (int64_t i = 0; i < rows; ++i) {
      shift.push_back(plain ? 0.0f : float(random.normal()));
      scale.push_back(plain ? 1.0f : float(0.5 + random.uniform()));
      const int64_t drawn = random.below(14);
      bits.push_back(uint8_t(drawn < 8 ? drawn : drawn % 3));
      sets.push_back(int32_t(random.below(2)));
    }
  }
  mp::CodedSide args() const { return {shift.data(), scale.data(), bits.data(), levels.data(), sets.data(), rows}; }
  const float* table(int64_t i) const {
    return levels.data() + sets[size_t(i)] * mp::LEVELS + (1 << bits[size_t(i)]) - 2;
  }
  int64_t n_planes() const {
    int64_t n = 0;
    for (const uint8_t width : bits) n += width;
    return n;
  }
  int code(float z, int64_t i) const {
    const float centred = z - shift[size_t(i)], u = centred / scale[size_t(i)];
    int below = 0;
    for (int k = 1; k < 1 << bits[size_t(i)]; ++k) {
      const float both = table(i)[k] + table(i)[k - 1];
      below += both * 0.5f < u;
    }
    return below;
  }
  vector<float> token(const vector<int>& codes) const {
    vector<float> x = mean;
    for (const bool coded : {false, true})
      for (int64_t i = 0; i < rows; ++i) {
        if ((bits[size_t(i)] > 0) != coded || (!coded && shift[size_t(i)] == 0)) continue;
        const float scaled = coded ? table(i)[codes[size_t(i)]] * scale[size_t(i)] : 0.0f;
        const float z = scaled + shift[size_t(i)];
        for (int64_t c = 0; c < d; ++c) x[size_t(c)] = std::fmaf(z, matrix[size_t(i * d + c)], x[size_t(c)]);
      }
    return x;
  }
};

inline void project(const Kernels& kernels, Report& report, int64_t dtype, int64_t n, int64_t rows, int64_t d) {
  Random random{uint64_t(n * 1000 + d)};
  const TransformSide side(rows, d, true, random);
  const int64_t x_row = d + 3, z_row = n + 5;
  Numbers x = normals(dtype, n * x_row, random, 3);
  vector<float> z(size_t(rows * z_row), -7.0f);
  const uint8_t* bits = rows > 30 ? side.bits.data() : nullptr;
  const mp::ProjectArgs a{x.data(), dtype, x_row, side.mean.data(), side.matrix.data(), bits, z.data(), z_row, n, rows, d, 2};
  report.same("the result of project", kernels("mp_project", a), 0);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t t = 0; t < z_row; ++t) {
      const bool written = t < n && (bits == nullptr || bits[i] > 0);
      float sum = 0;
      for (int64_t c = 0; written && c < d; ++c) {
        const float centred = float(x[t * x_row + c]) - side.mean[size_t(c)];
        sum = std::fmaf(side.matrix[size_t(i * d + c)], centred, sum);
      }
      report.same("the bits of z", bits_of(z[size_t(i * z_row + t)]), bits_of(written ? sum : -7.0f));
    }
}

// 1 + 2^-24 + 2^-60 is 1 where a product is rounded before its sum, and where the sum is rounded to double first; and
// what is left of a product that is near to its addend.
inline void rounded_once(const Kernels& kernels, Report& report) {
  const float least = 0x1p-24f, mean[4] = {};
  const float matrix[4][4] = {{1, least * (1 + 0x1p-12f), 0, 0}, {1, 0, least, least}, {0x1p-126f, 0x1p-74f, 0, 0}, {-1, 0, 0, 1}};
  const float x[4] = {1, 1 - 4095 * 0x1p-24f, 1 + 0x1p-23f, 1 + 0x1p-22f};
  vector<float> z(4);
  const mp::ProjectArgs a{x, mp::F32, 4, mean, matrix[0], nullptr, z.data(), 1, 1, 4, 4, 1};
  report.same("the result of project", kernels("mp_project", a), 0);
  for (int i = 0; i < 4; ++i) {
    float sum = 0;
    for (int c = 0; c < 4; ++c) sum = std::fmaf(matrix[i][c], x[c], sum);
    report.same("the bits of a sum", bits_of(z[size_t(i)]), bits_of(sum));
  }
  report.same("the bits of 1 + 2^-23", bits_of(z[0]), bits_of(1 + 0x1p-23f));
}

inline void pages(const Kernels& kernels, Report& report, int64_t n_pages, bool plain, bool by_token, int64_t dtype) {
  Random random{uint64_t(n_pages * 10 + dtype + plain)};
  const TransformSide sides[2] = {{70, 83, plain, random}, {37, 48, plain, random}};
  const int64_t n = n_pages * mp::TOKENS, planes = sides[0].n_planes() + sides[1].n_planes();
  const int64_t page_bytes = mp::PAGE_HEADER + 4 * planes;
  vector<uint8_t> pages(size_t(n_pages * page_bytes), uint8_t(0xAA));
  mp::EncodePagesArgs e{};
  vector<float> z[2];
  for (int s = 0; s < 2; ++s) {
    z[s] = floats(n * sides[s].rows, random);
    e.sides[s] = {sides[s].args(), z[s].data(), by_token ? sides[s].rows : 1, by_token ? 1 : n};
  }
  e.pages = pages.data(), e.n_pages = n_pages, e.page_bytes = page_bytes;
  e.unit = 0xDEADBEEF, e.layer = 9, e.first = 5, e.n_threads = 2;
  report.same("the result of encode", kernels("mp_encode_pages", e), 0);
  const auto number = [&](int s, int64_t token, int64_t i) {
    return z[s][size_t(by_token ? token * sides[s].rows + i : i * n + token)];
  };
  for (int64_t p = 0; p < n_pages; ++p) {
    const uint8_t* page = pages.data() + p * page_bytes;
    const uint8_t head[12] = {0xEF, 0xBE, 0xAD, 0xDE, 9, 0, 32, 0, uint8_t(5 + p), 0, 0, 0};
    for (int i = 0; i < 12; ++i) report.same("a byte of the header", page[i], head[i]);
    const uint32_t crc = ~slow_crc32c(page + 16, page_bytes - 16, slow_crc32c(page, 12));
    for (int i = 0; i < 4; ++i) report.same("a byte of the checksum", page[12 + i], crc >> (8 * i) & 255);
    int64_t plane = 0;
    for (int s = 0; s < 2; ++s)
      for (int64_t i = 0; i < sides[s].rows; ++i)
        for (int bit = 0; bit < sides[s].bits[size_t(i)]; ++bit, ++plane)
          for (int t = 0; t < mp::TOKENS; ++t) {
            const int code = sides[s].code(number(s, p * mp::TOKENS + t, i), i);
            report.same("a bit", page[16 + 4 * plane + t / 8] >> (t % 8) & 1, code >> bit & 1);
          }
  }
  const auto wrong = [&](const vector<uint8_t>& given) {
    int64_t found[2];
    const mp::CheckPagesArgs c{given.data(), n_pages, page_bytes, 0xDEADBEEF, 9, 5, found};
    report.same("the result of check", kernels("mp_check_pages", c), 0);
    return found[0] * 100 + found[1];
  };
  report.same("pages that are wrong", wrong(pages), -101);
  if (n_pages > 1) {
    vector<uint8_t> spoiled = pages;
    spoiled[size_t(page_bytes + 20)] ^= 8;
    report.same("a damaged page", wrong(spoiled), 99);
    std::copy(pages.begin(), pages.begin() + page_bytes, spoiled.begin() + page_bytes);
    report.same("a page of elsewhere", wrong(spoiled), -99);
  }
  mp::DecodePagesArgs d{};
  Numbers out[2];
  for (int s = 0; s < 2; ++s) {
    out[s] = Numbers(dtype, n * (sides[s].d + 2));
    d.sides[s] = {sides[s].args(), sides[s].mean.data(), sides[s].matrix.data(), out[s].data(), sides[s].d + 2, sides[s].d};
  }
  d.pages = pages.data(), d.n_pages = n_pages, d.page_bytes = page_bytes, d.dtype = dtype, d.n_threads = 2;
  report.same("the result of decode", kernels("mp_decode_pages", d), 0);
  for (int s = 0; s < 2; ++s)
    for (int64_t t = 0; t < n; ++t) {
      vector<int> codes;
      for (int64_t i = 0; i < sides[s].rows; ++i) codes.push_back(sides[s].code(number(s, t, i), i));
      const vector<float> x = sides[s].token(codes);
      for (int64_t c = 0; c < sides[s].d; ++c) {
        const int64_t at = t * (sides[s].d + 2) + c;
        if (dtype == mp::F32)
          report.same("the bits of x", bits_of(static_cast<float*>(out[s].data())[at]), bits_of(x[size_t(c)]));
        else
          report.near("x", out[s][at], rounded(double(x[size_t(c)]), dtype));
      }
    }
}

// In one call as in two.
inline void tokens(const Kernels& kernels, Report& report, int64_t n_pages) {
  Random random{uint64_t(n_pages)};
  const TransformSide sides[2] = {{70, 83, false, random}, {37, 48, false, random}};
  const int64_t n = n_pages * mp::TOKENS, planes = sides[0].n_planes() + sides[1].n_planes();
  const int64_t page_bytes = mp::PAGE_HEADER + 4 * planes;
  vector<uint8_t> found(size_t(n_pages * page_bytes)), expected(found.size(), uint8_t(1));
  mp::EncodeTokensArgs a{};
  Numbers x[2];
  vector<float> z[2];
  for (int s = 0; s < 2; ++s) {
    const TransformSide& side = sides[s];
    x[s] = normals(mp::BF16, n * side.d, random), z[s].resize(size_t(n * side.rows));
    a.tokens[s] = {x[s].data(), mp::BF16, side.d, side.mean.data(), side.matrix.data(), nullptr, z[s].data(), n, n, side.rows, side.d, 2};
    report.same("the result of project", kernels("mp_project", a.tokens[s]), 0);
    a.pages.sides[s] = {side.args(), z[s].data(), 1, n};
  }
  a.pages.pages = expected.data(), a.pages.n_pages = n_pages, a.pages.page_bytes = page_bytes, a.pages.n_threads = 2;
  a.pages.unit = 1, a.pages.layer = 2, a.pages.first = 3;
  report.same("the result of encode", kernels("mp_encode_pages", a.pages), 0);
  a.pages.pages = found.data();
  report.same("the result of encode", kernels("mp_encode_tokens", a), 0);
  for (size_t i = 0; i < found.size(); ++i) report.same("a byte of a page", found[i], expected[i]);
}

inline void transform(const Kernels& kernels, Report& report) {
  report.begin("checksums (CRC-32C)", 0);
  vector<uint8_t> bytes;
  Random random(4);
  for (int i = 0; i < 4000; ++i) bytes.push_back(uint8_t(random.bits()));
  for (const int64_t n : {0, 1, 7, 8, 9, 63, 300}) {
    uint32_t before[9], found[9];
    for (int i = 0; i < 9; ++i) before[i] = ~slow_crc32c(bytes.data(), i);
    const mp::ChecksumArgs a{bytes.data() + 11, before, found, 9, n, n + 3};
    report.same("the result of crc32c", kernels("mp_crc32c", a), 0);
    for (int i = 0; i < 9; ++i)
      report.same("a checksum", found[i], ~slow_crc32c(bytes.data() + 11 + i * (n + 3), n, ~before[i]));
  }
  report.end();
  report.begin("tokens in the basis of a transform", 0);
  for (const int64_t dtype : DTYPES) project(kernels, report, dtype, 33, 20, 45);
  project(kernels, report, mp::F32, 5, 1, 3);
  rounded_once(kernels, report);
  project(kernels, report, mp::F32, 96, 50, 192);
  project(kernels, report, mp::F32, 260, 9, 1100);  // more than is taken at a time
  report.end();
  report.begin("pages of codes", 0);
  for (const bool plain : {false, true})
    for (const int64_t n : {0, 1, 3}) pages(kernels, report, n, plain, plain, mp::F32);
  tokens(kernels, report, 1);
  tokens(kernels, report, 120);  // more than are taken at a time
  for (const int64_t dtype : DTYPES) pages(kernels, report, 70, false, true, dtype);  // more than are taken at a time
  report.end();
}

}  // namespace check
