// Draws by an exponential race: item j of weight w_j arrives at e_j / w_j, e_j exponential, and the first one is drawn.
#include <algorithm>
#include <cmath>

#include "common/args.hpp"
#include "common/threads.hpp"

namespace mp {
namespace {

constexpr int64_t BLOCK = 256;  // items whose numbers are made together
constexpr uint64_t STEP = 0x9E3779B97F4A7C15u;

// 52 random bits of (key, id) as a number inside (0, 1); 1 minus it is exact.
// SplitMix64 (Steele, Lea and Flood 2014): the mix of the id-th state behind `key`.
inline double uniform(uint64_t key, uint64_t id) {
  uint64_t z = key + (id + 1) * STEP;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  z ^= z >> 31;
  return (double(int64_t(z >> 12)) + 0.5) * 0x1p-52;
}

// The item of the largest w_j / e_j. Since e = -log(u) >= 1 - u, only where w / (1 - u) is larger than the best so far
// the logarithm is taken.
int64_t first_to_arrive(const float* weights, const int64_t* ids, int64_t n, uint64_t key) {
  double most[BLOCK], best = 0;
  int64_t at = 0;
  for (int64_t from = 0; from < n; from += BLOCK) {
    const int64_t m = std::min(BLOCK, n - from);
    const float* w = weights + from;
    float heaviest = 0;
    for (int64_t j = 0; j < m; ++j) heaviest = std::max(heaviest, w[j]);
    if (heaviest == 0) continue;
    if (ids != nullptr)
      for (int64_t j = 0; j < m; ++j) most[j] = double(w[j]) / (1 - uniform(key, uint64_t(ids[from + j])));
    else
      for (int64_t j = 0; j < m; ++j) most[j] = double(w[j]) / (1 - uniform(key, uint64_t(from + j)));
    for (int64_t j = 0; j < m; ++j) {
      if (most[j] <= best) continue;
      const uint64_t id = uint64_t(ids != nullptr ? ids[from + j] : from + j);
      const double speed = double(w[j]) / -std::log(uniform(key, id));
      if (speed > best) best = speed, at = from + j;
    }
  }
  return at;
}

}  // namespace
}  // namespace mp

extern "C" __attribute__((visibility("default"))) int mp_race(const mp::RaceArgs* args) {
  using namespace mp;
  const RaceArgs& a = *args;
  auto draw = [&](int64_t row) {
    const int64_t* ids = a.ids == nullptr ? nullptr : a.ids + row * a.id_row;
    a.drawn[row] = first_to_arrive(a.weights + row * a.weight_row, ids, a.n, uint64_t(a.keys[row]));
  };
  parallel_for(a.m, int(a.n_threads), draw);
  return 0;
}
