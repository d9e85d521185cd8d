// Memory that grows and stays.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace mp {

constexpr int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Make it thread_local: one per calling thread and use.
class Workspace {
 public:
  ~Workspace() { std::free(memory_); }
  // At least `bytes` of it, null if there is no memory; what was in it before is lost.
  char* get(int64_t bytes) {
    if (bytes > size_) {
      std::free(memory_);
      size_ = round_up(bytes + bytes / 4, 4096);
      memory_ = static_cast<char*>(std::aligned_alloc(4096, size_t(size_)));
      if (memory_ == nullptr) size_ = 0;
    }
    return memory_;
  }

 private:
  char* memory_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace mp
