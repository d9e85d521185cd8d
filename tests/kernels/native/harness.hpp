// What all checks share: the library under test, numbers of each storage type, pages, and comparisons with doubles.
//
// Nothing of the kernels is used but the layout of their structs, and no vector code, so that a fault of theirs cannot
// hide in what they are compared with.
#pragma once

#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "common/args.hpp"

namespace check {

using std::vector;
constexpr double INF = std::numeric_limits<double>::infinity();

// The same numbers on every platform.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15u + 1) {}
  uint32_t bits() {
    state_ ^= state_ << 13, state_ ^= state_ >> 7, state_ ^= state_ << 17;
    return uint32_t(state_ >> 32);
  }
  double uniform() { return bits() / 4294967296.0; }
  int64_t below(int64_t n) { return int64_t(bits() % uint64_t(n)); }
  double normal() {  // near enough: the sum of twelve
    double sum = -6;
    for (int i = 0; i < 12; ++i) sum += uniform();
    return sum;
  }
  template <class T>
  void shuffle(vector<T>& x) {
    for (size_t i = x.size(); i > 1; --i) std::swap(x[i - 1], x[size_t(below(int64_t(i)))]);
  }

 private:
  uint64_t state_;
};

// ------------------------------------------------------------------------------------------------ storage types

inline int64_t item_bytes(int64_t dtype) { return dtype == mp::F32 ? 4 : 2; }

// The nearest number of a storage type, ties to even.
inline double rounded(double x, int64_t dtype) {
  if (dtype == mp::F32) return double(float(x));
  if (x == 0 || !std::isfinite(x)) return x;
  const int mantissa = dtype == mp::BF16 ? 7 : 10, lowest = dtype == mp::BF16 ? -126 : -14;
  const double unit = std::ldexp(1.0, std::max(std::ilogb(x), lowest) - mantissa);
  return std::nearbyint(x / unit) * unit;
}

inline double get(const void* p, int64_t dtype, int64_t i) {
  if (dtype == mp::F32) return double(static_cast<const float*>(p)[i]);
  const uint16_t bits = static_cast<const uint16_t*>(p)[i];
  if (dtype == mp::BF16) {
    const uint32_t wide = uint32_t(bits) << 16;
    float x;
    std::memcpy(&x, &wide, 4);
    return double(x);
  }
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  const double size = exponent == 31 ? (mantissa != 0 ? NAN : INF)
                                     : std::ldexp(exponent > 0 ? 1024 + mantissa : mantissa, std::max(exponent, 1) - 25);
  return bits >> 15 != 0 ? -size : size;
}

// x must be a number of the type.
inline void set(void* p, int64_t dtype, int64_t i, double x) {
  if (dtype == mp::F32) {
    static_cast<float*>(p)[i] = float(x);
    return;
  }
  uint16_t& bits = static_cast<uint16_t*>(p)[i];
  if (dtype == mp::BF16) {
    const float narrow = float(x);
    uint32_t wide;
    std::memcpy(&wide, &narrow, 4);
    bits = uint16_t(wide >> 16);
    return;
  }
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const double size = std::fabs(x);
  if (!std::isfinite(x)) {
    bits = uint16_t(sign | (std::isnan(x) ? 0x7e00 : 0x7c00));
  } else if (size < 0x1p-14) {
    bits = uint16_t(sign | int(size * 0x1p24));
  } else {
    const int exponent = std::ilogb(size);
    bits = uint16_t(sign | (exponent + 15) << 10 | (int(std::ldexp(size, 10 - exponent)) & 1023));
  }
}

// Numbers of one storage type, set to NaN before they are written.
struct Numbers {
  int64_t dtype;
  vector<char> bytes;

  Numbers() : dtype(mp::F32) {}
  Numbers(int64_t type, int64_t n) : dtype(type), bytes(size_t(n * item_bytes(type)), char(0xFF)) {}
  double operator[](int64_t i) const { return get(bytes.data(), dtype, i); }
  void put(int64_t i, double x) { set(bytes.data(), dtype, i, rounded(x, dtype)); }
  void* data() { return bytes.data(); }
  int64_t size() const { return int64_t(bytes.size()) / item_bytes(dtype); }
};

inline Numbers normals(int64_t dtype, int64_t n, Random& random, double scale = 1.0) {
  Numbers x(dtype, n);
  for (int64_t i = 0; i < n; ++i) x.put(i, random.normal() * scale);
  return x;
}

inline vector<float> floats(int64_t n, Random& random) {
  vector<float> x(static_cast<size_t>(n));
  for (float& y : x) y = float(random.normal());
  return x;
}

// ------------------------------------------------------------------------------------------------ pages

// A pool of pages whose memory is NaN where nothing was written, and a table of shuffled pages for some regions.
struct Pages {
  int64_t slots, key_dim, value_dim, dtype;
  bool masses;
  static constexpr int64_t PER_ARENA = 4;
  vector<vector<char>> memory;
  vector<int64_t> bases;
  vector<int32_t> table;
  int64_t per_region;

  // page_bytes: of a page whose keys and values lie in one row of array 0, see packed.hpp.
  Pages(int64_t n_regions, int64_t most, int64_t page_slots, int64_t key, int64_t value, int64_t type, bool with_masses,
        Random& random, int64_t page_bytes = 0)
      : slots(page_slots), key_dim(key), value_dim(value), dtype(type), masses(with_masses),
        per_region((most + page_slots - 1) / page_slots) {
    const int64_t n = n_regions * per_region, arenas = (n + PER_ARENA - 1) / PER_ARENA, rows = PER_ARENA * slots;
    const int64_t keys = page_bytes > 0 ? page_bytes / slots : key * item_bytes(type);
    const int64_t row_bytes[5] = {keys, value * item_bytes(type), 4, 4, 4};
    for (int which = 0; which < 5; ++which)
      for (int64_t a = 0; a < arenas; ++a) {
        memory.emplace_back(size_t(rows * row_bytes[which]), char(0xFF));
        bases.push_back(int64_t(reinterpret_cast<intptr_t>(memory.back().data())));
      }
    for (int64_t i = 0; i < n; ++i) table.push_back(int32_t(i));
    random.shuffle(table);
  }
  int64_t arenas() const { return int64_t(bases.size()) / 5; }
  mp::PoolArgs args() const {
    return {bases.data(), arenas(), PER_ARENA, slots, key_dim, value_dim, dtype, int64_t(masses)};
  }
  // Array `which` of the page that holds slot `slot` of a region, and the slot's row in it.
  void* place(int which, int64_t region, int64_t slot, int64_t& row) const {
    const int64_t page = table[size_t(region * per_region + slot / slots)];
    row = page % PER_ARENA * slots + slot % slots;
    return reinterpret_cast<void*>(intptr_t(bases[size_t(which * arenas() + page / PER_ARENA)]));
  }
  double key(int64_t region, int64_t slot, int64_t d) const { return number(0, key_dim, region, slot, d); }
  double value(int64_t region, int64_t slot, int64_t d) const { return number(1, value_dim, region, slot, d); }
  double number(int which, int64_t dim, int64_t region, int64_t slot, int64_t d) const {
    int64_t row;
    const void* memory = place(which, region, slot, row);
    return get(memory, dtype, row * dim + d);
  }
  int32_t& position(int64_t region, int64_t slot) const {
    int64_t row;
    void* memory = place(2, region, slot, row);
    return static_cast<int32_t*>(memory)[row];
  }
  float& score(int64_t region, int64_t slot) const { return side(3, region, slot); }
  float& log_mass(int64_t region, int64_t slot) const { return side(4, region, slot); }
  float& side(int which, int64_t region, int64_t slot) const {
    int64_t row;
    void* memory = place(which, region, slot, row);
    return static_cast<float*>(memory)[row];
  }
  // Slots 0 .. n - 1 of a region: random entries at ascending positions with gaps, in shuffled slots.
  void fill(int64_t region, int64_t n, Random& random) const {
    vector<int32_t> at;
    for (int32_t i = 0, p = 0; i < n; ++i) at.push_back(p), p += 1 + int32_t(random.below(2));
    random.shuffle(at);
    for (int64_t s = 0; s < n; ++s) {
      int64_t row;
      void* keys = place(0, region, s, row);
      for (int64_t d = 0; d < key_dim; ++d) set(keys, dtype, row * key_dim + d, rounded(random.normal(), dtype));
      void* values = place(1, region, s, row);
      for (int64_t d = 0; d < value_dim; ++d) set(values, dtype, row * value_dim + d, rounded(random.normal(), dtype));
      position(region, s) = at[size_t(s)];
      score(region, s) = float(random.uniform());
      log_mass(region, s) = float(random.uniform());
    }
  }
};

// ------------------------------------------------------------------------------------------------ results

class Report {
 public:
  void begin(const std::string& family, double tolerance) {
    family_ = family, tolerance_ = tolerance, worst_ = 0, numbers_ = 0, failed_ = 0;
  }
  // found = expected within tolerance * (1 + |expected|).
  void near(const char* what, double found, double expected) {
    ++numbers_;
    const double error = found == expected ? 0 : std::fabs(found - expected) / (1 + std::fabs(expected));
    if (error <= tolerance_) {
      worst_ = std::max(worst_, error);
      return;
    }
    if (failed_++ < 3) std::printf("  %s: %s is %.9g and should be %.9g\n", family_.c_str(), what, found, expected);
  }
  void same(const char* what, int64_t found, int64_t expected) {
    ++numbers_;
    if (found == expected) return;
    if (failed_++ < 3)
      std::printf("  %s: %s is %lld and should be %lld\n", family_.c_str(), what, (long long)found, (long long)expected);
  }
  // An error no larger than what rounding leaves.
  void within(const char* what, double error, double bound) {
    ++numbers_;
    if (std::fabs(error) <= bound) return;
    if (failed_++ < 3) std::printf("  %s: %s is off by %.9g, at most %.9g\n", family_.c_str(), what, error, bound);
  }
  void end() {
    const char* verdict = failed_ > 0 || numbers_ == 0 ? "WRONG" : "ok";
    std::printf("%-40s %8lld numbers, largest error %.1e of %.1e  %s\n", family_.c_str(), (long long)numbers_, worst_,
                tolerance_, verdict);
    wrong_ += failed_ > 0 || numbers_ == 0;
  }
  int wrong() const { return wrong_; }

 private:
  std::string family_;
  double tolerance_ = 0, worst_ = 0;
  int64_t numbers_ = 0, failed_ = 0;
  int wrong_ = 0;
};

// Sums are made in float whatever the storage type; what is stored is rounded to it.
inline double tolerance_of(int64_t dtype) { return dtype == mp::F32 ? 1e-5 : dtype == mp::F16 ? 2e-3 : 1.6e-2; }
inline std::string with_type(const char* family, int64_t dtype) {
  return std::string(family) + (dtype == mp::F32 ? ", f32" : dtype == mp::F16 ? ", f16" : ", bf16");
}
constexpr int64_t DTYPES[] = {mp::F32, mp::F16, mp::BF16};

// The library under test.
class Kernels {
 public:
  // Whether some products are made of pairs of bf16 or of whole numbers, to which queries and weights are rounded.
  const bool pairs;

  explicit Kernels(const std::string& path)
      : pairs(path.find("v4bf16") + 1 + path.find("v4fma") + 1 > 0), handle_(dlopen(path.c_str(), RTLD_NOW)) {
    if (handle_ != nullptr) return;
    std::printf("cannot load the library: %s\n", dlerror());
    std::exit(2);
  }
  template <class Function>
  Function* symbol(const char* name) const {
    void* found = dlsym(handle_, name);
    if (found == nullptr) {
      std::printf("the library has no %s\n", name);
      std::exit(2);
    }
    return reinterpret_cast<Function*>(found);
  }
  template <class Args>
  int operator()(const char* name, const Args& args) const {
    return symbol<int(const void*)>(name)(&args);
  }

 private:
  void* handle_;
};

// ------------------------------------------------------------------------------------------------ attention

// Softmax over logits (-inf: hidden) and, in the denominator alone, a sink; returns the log of the denominator.
inline double softmax(vector<double>& logits, const float* sink) {
  double top = sink != nullptr ? double(*sink) : -INF, total = 0;
  for (double x : logits) top = std::max(top, x);
  if (top == -INF) {
    for (double& x : logits) x = 0;
    return -INF;
  }
  for (double& x : logits) total += x = std::exp(x - top);
  if (sink != nullptr) total += std::exp(double(*sink) - top);
  for (double& x : logits) x /= total;
  return top + std::log(total);
}

inline double soft_cap(double x, double cap) { return cap != 0 ? cap * std::tanh(x / cap) : x; }

// The query heads of a group as one number.
inline double reduced(const vector<double>& p, int64_t how) {
  double most = 0, sum = 0;
  for (double x : p) most = std::max(most, x), sum += x;
  return how == mp::MAX ? most : how == mp::MEAN ? sum / double(p.size()) : sum;
}

}  // namespace check
