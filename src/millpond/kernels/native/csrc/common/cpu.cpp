// What the Python side asks before it chooses a library.
#include <cstdint>

// Raised whenever a struct of args.hpp or what the Python side calls changes, so that a stale library is refused.
extern "C" __attribute__((visibility("default"))) int mp_abi_version() { return 34; }

// Which x86-64 libraries this CPU can run: up to 0 baseline, 1 v3, 2 v4, 3 v4bf16 and v4fma. Always 0 elsewhere.
extern "C" __attribute__((visibility("default"))) int mp_cpu_level() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("bmi2")) return 0;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq") ||
      !__builtin_cpu_supports("avx512cd"))
    return 1;
  return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni") ? 3 : 2;
#else
  return 0;
#endif
}

// Whether products of floats take less time than those of pairs of bf16, where there are both. An Intel core (2 MiB of L2)
// was seen to begin a vector of pairs every other cycle and two of floats in each: 88 and 176 GFLOP/s. An AMD Zen 5 core
// gives 529 with pairs.
extern "C" __attribute__((visibility("default"))) int mp_cpu_prefers_floats() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_is("intel");
#else
  return 0;
#endif
}
