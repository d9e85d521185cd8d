// Reads of a file in small requests, one after another.
//
// A request is as long as a disk needs to be fast: one of many MiB keeps the disk's queue so full that a short read of
// another thread waits for all of it. Between two requests nothing waits for Python's lock.
#include <algorithm>
#include <cerrno>
#include <cstdint>

#if !defined(_WIN32)
#include <unistd.h>
#endif

// Reads n bytes from an offset of a file into `data`, at most `request` at a time. Returns how many there were until its
// end, or -errno.
extern "C" __attribute__((visibility("default"))) int64_t mp_read_file(
    int fd, char* data, int64_t n, int64_t offset, int64_t request) {
#if defined(_WIN32)
  return -ENOSYS;
#else
  int64_t done = 0;
  while (done < n) {
    const int64_t wanted = std::min(request, n - done);
    const ssize_t got = pread(fd, data + done, size_t(wanted), off_t(offset + done));
    if (got < 0) {
      if (errno == EINTR) continue;
      return -int64_t(errno);
    }
    done += got;
    if (got < wanted) break;
  }
  return done;
#endif
}
