// What the Python side asks before it chooses a library.
#include <cstdint>

// Raised whenever a struct of args.hpp changes, so that a stale library is refused.
extern "C" __attribute__((visibility("default"))) int mp_abi_version() { return 17; }

// The best of the x86-64 libraries that this CPU can run: 0 baseline, 1 v3, 2 v4, 3 v4bf16. Always 0 elsewhere.
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
