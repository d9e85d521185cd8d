// Memory in pages of 2 MiB: fewer address translations on the way of a stream.
#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

// Ask the kernel to hold the whole pages inside these bytes as huge ones, now where it can. What the memory holds does
// not change. Returns the bytes that are huge now, as far as is known; 0 where the system has no such thing.
extern "C" __attribute__((visibility("default"))) int64_t mp_use_huge_pages(void* memory, int64_t bytes) {
#if defined(__linux__)
  constexpr uintptr_t PAGE = uintptr_t(2) << 20;
  constexpr int ADVISE = 14, COLLAPSE = 25;  // MADV_HUGEPAGE, MADV_COLLAPSE (Linux 6.1), not in every libc header
  const uintptr_t begin = (uintptr_t(memory) + PAGE - 1) / PAGE * PAGE, end = (uintptr_t(memory) + uintptr_t(bytes)) / PAGE * PAGE;
  if (end <= begin) return 0;
  void* whole = reinterpret_cast<void*>(begin);
  madvise(whole, end - begin, ADVISE);
  return madvise(whole, end - begin, COLLAPSE) == 0 ? int64_t(end - begin) : 0;
#else
  (void)memory, (void)bytes;
  return 0;
#endif
}
