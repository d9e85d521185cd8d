// All products of the entries of a head with many other vectors, a block of entries and a chunk of vectors at a time.
#pragma once

#include "common/threads.hpp"
#include "prefill/pack.hpp"

namespace mp {

constexpr int SCAN_ROWS = 4 * TILE_ROWS;          // entries of a block
constexpr double SCAN_PER_THREAD = 1 << 20;       // products that a thread is worth waking for

// The other vectors of one head at a time, packed for `multiply`, and room for a block of each thread. The unit of work
// is a block, done by one thread, so results do not depend on the threads.
template <class T>
class Scan {
 public:
  // The products of the entries first, first + 1, ... (n of them) of a head.
  struct Block {
    const Scan& scan;
    const T* left;  // (pad / DEPTH, SCAN_ROWS, DEPTH)
    float* out;     // (SCAN_ROWS, COLUMNS)
    int head, first, n;

    // With chunk c of the vectors: (n, COLUMNS), 0 where there is no vector.
    const float* chunk(int c) const { return rows(c, 0, n), out; }

    // The products with chunk c of `count` entries from the `begin`-th of the block on: those rows of `out`.
    void rows(int c, int begin, int count) const {
      for (int i = 0; i < COLUMNS; i += TILE)
        for (int d = 0; d < scan.pad_; d += DEPTH)
          multiply(count, left + int64_t(d) * SCAN_ROWS + begin * DEPTH,
                   scan.packed_ + int64_t(c * COLUMNS + i) * scan.pad_ + d * TILE, std::min(DEPTH, scan.pad_ - d), TILE,
                   out + begin * COLUMNS + i, COLUMNS, d > 0);
    }
  };

  explicit Scan(const ScanArgs& args)
      : columns(int(args.n_sets * args.n_others)), chunks((columns + COLUMNS - 1) / COLUMNS), a_(args),
        dim_(int(args.dim)), pad_(int(round_up(dim_, Inner<T>::STEP))) {
    const double work = double(a_.n_rows) * double(columns) * double(dim_);
    threads_ = int(std::min<double>(double(a_.n_threads), 1 + work / SCAN_PER_THREAD));
  }

  // False where there is no memory.
  bool reserve(Workspace& workspace) {
    const int64_t item = int64_t(sizeof(T)), packed = round_up(int64_t(chunks) * COLUMNS * pad_ * item, 4096);
    left_bytes_ = round_up(round_up(pad_, DEPTH) * SCAN_ROWS * item, 64);
    room_bytes_ = round_up(std::max(left_bytes_ + SCAN_ROWS * COLUMNS * 4, TILE * pad_ * item), 4096);
    char* memory = workspace.get(packed + threads_ * room_bytes_);
    packed_ = reinterpret_cast<T*>(memory), rooms_ = memory + packed;
    return memory != nullptr;
  }

  void pack(int head) {
    each(chunks, [&](int thread, int c) { pack_chunk(head, c, reinterpret_cast<T*>(rooms_ + thread * room_bytes_)); });
  }

  // Call visit(block) for every block of entries of the head that was packed.
  template <class F>
  void blocks(int head, F visit) {
    each(int((a_.n_rows + SCAN_ROWS - 1) / SCAN_ROWS), [&](int thread, int b) {
      char* room = rooms_ + thread * room_bytes_;
      const int first = b * SCAN_ROWS, n = std::min(SCAN_ROWS, int(a_.n_rows) - first);
      T* left = reinterpret_cast<T*>(room);
      load_entries(left, head, first, n);
      visit(Block{*this, left, reinterpret_cast<float*>(room + left_bytes_), head, first, n});
    });
  }

  // Call f(thread, i) for every i < n.
  template <class F>
  void each(int n, F f) {
    std::atomic<int> next{0};
    auto body = [&](int thread) {
      for (int i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) f(thread, i);
    };
    parallel(std::min(n, threads_), body);
  }
  int threads() const { return threads_; }

  const int columns, chunks;

 private:
  void pack_chunk(int head, int chunk, T* rows) {
    for (int i = chunk * COLUMNS; i < (chunk + 1) * COLUMNS; i += TILE) {
      for (int c = 0; c < TILE; ++c) {
        if (i + c < columns)
          load_row(rows + c * pad_, other(head, i + c), a_.y_dtype, dim_, pad_);
        else
          std::memset(rows + c * pad_, 0, size_t(pad_) * sizeof(T));
      }
      transpose(rows, packed_ + int64_t(i) * pad_, TILE, pad_ / Inner<T>::STEP);
    }
  }
  void load_entries(T* left, int head, int first, int n) const {
    for (int r = 0; r < n; ++r)
      for (int d = 0; d < dim_; d += DEPTH) {
        const void* from = offset(a_.x, a_.x_dtype, head * a_.x_head + (first + r) * a_.x_row + d);
        load_row(left + d * SCAN_ROWS + r * DEPTH, from, a_.x_dtype, std::min(DEPTH, dim_ - d),
                 std::min(DEPTH, pad_ - d));
      }
  }
  const void* other(int head, int i) const {
    const int64_t set = head * a_.n_sets + i / a_.n_others;
    return offset(a_.y, a_.y_dtype, set * a_.y_head + i % a_.n_others * a_.y_row);
  }

  const ScanArgs& a_;
  const int dim_, pad_;
  int threads_;
  int64_t left_bytes_ = 0, room_bytes_ = 0;
  T* packed_ = nullptr;  // (chunks * COLUMNS / TILE, pad / STEP, TILE, STEP)
  char* rooms_ = nullptr;
};

}  // namespace mp
