// Draws by an exponential race.
#pragma once

#include "harness.hpp"

namespace check {

inline double arrival(uint64_t key, uint64_t id) {
  uint64_t z = key + (id + 1) * 0x9E3779B97F4A7C15u;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
  z = (z ^ z >> 27) * 0x94D049BB133111EBu;
  return -std::log((double((z ^ z >> 31) >> 12) + 0.5) / 4503599627370496.0);
}

inline void sampling(const Kernels& kernels, Report& report) {
  report.begin("draws by an exponential race", 0);
  Random random(9);
  for (const int64_t n : {1, 255, 256, 1000}) {
    for (const bool named : {false, true}) {
      const int64_t m = 40, row = n + 3;
      vector<float> weights(size_t(m * row));
      vector<int64_t> ids(size_t(m * row)), keys(static_cast<size_t>(m)), drawn(static_cast<size_t>(m));
      for (size_t i = 0; i < weights.size(); ++i) {
        weights[i] = i % 3 == 0 ? float(std::exp(3 * random.normal())) : 0.0f;
        ids[i] = int64_t(i) * 7919 % 150001;
      }
      for (int64_t r = 0; r < m; ++r) weights[size_t(r * row)] += 0.01f, keys[size_t(r)] = int64_t(uint64_t(r) * 0x5851F42D4C957F2Du);
      const mp::RaceArgs a{weights.data(), named ? ids.data() : nullptr, keys.data(), drawn.data(), m, n, row, row, 2};
      report.same("the result of race", kernels("mp_race", a), 0);
      for (int64_t r = 0; r < m; ++r) {
        int64_t first = 0;
        double best = -1;
        for (int64_t j = 0; j < n; ++j) {
          const uint64_t id = uint64_t(named ? ids[size_t(r * row + j)] : j);
          const double speed = double(weights[size_t(r * row + j)]) / arrival(uint64_t(keys[size_t(r)]), id);
          if (speed > best) best = speed, first = j;
        }
        report.same("what is drawn", drawn[size_t(r)], first);
      }
    }
  }
  report.end();
}

}  // namespace check
