// For each row that leaves, the row that stays and is most like it: cosines in tiles, their maximum on the way.
#include <cmath>

#include "common/threads.hpp"
#include "prefill/pack.hpp"

namespace mp {
namespace {

constexpr int SOURCES = 4 * TILE_ROWS;  // per block
constexpr int ROW_PAD = 32;             // rows are padded with zeros to a multiple of this
constexpr float SMALLEST = 1e-12f;      // length of a row, at least

// One kind of row, keys or values: the targets of every head packed for `multiply`, and 1 / their lengths.
template <class T>
struct Side {
  static constexpr int STEP = Inner<T>::STEP;
  const void* from;
  int64_t dtype, head_stride, row_stride;
  int dim, pad, columns;  // columns: whole tiles
  T* packed;              // (H, columns / TILE, pad / STEP, TILE, STEP)
  float* inverse;         // (H, columns)

  int64_t bytes(int heads) const { return int64_t(heads) * columns * (pad * int64_t(sizeof(T)) + 4); }
  const void* row(int head, int64_t i) const { return offset(from, dtype, head * head_stride + i * row_stride); }
  T* tile(int head, int at, int d) const { return packed + (int64_t(head) * columns + at) * pad + d * TILE; }
};

template <class T>
float inverse_length(const T* row, int pad) {
  vf squares{};
  for (int d = 0; d < pad; d += W) squares += load(row + d) * load(row + d);
  return 1.0f / std::max(std::sqrt(sum(squares)), SMALLEST);
}

template <class T>
class Nearest {
 public:
  explicit Nearest(const NearestArgs& args) : a_(args) {}
  int run();

 private:
  static constexpr int64_t DTYPE = sizeof(T) == 4 ? int64_t(F32) : int64_t(BF16);
  struct Block {
    T *keys, *values;        // (pad / DEPTH, SOURCES, DEPTH)
    float *dots, *others;    // (SOURCES, TILE)
    float* best;             // (SOURCES, W): maxima by lane
    int32_t* at;             // (SOURCES, W): the place of each among the targets
    float *key_inverse, *value_inverse;  // (SOURCES,)
  };
  bool both() const { return a_.values != nullptr; }
  void load_row_as(T* to, const void* from, int64_t dtype, int dim, int pad) const {
    copy_row(to, DTYPE, from, dtype, dim);
    std::memset(to + dim, 0, size_t(pad - dim) * sizeof(T));
  }
  void list(int head);
  void pack(const Side<T>& side, int head, T* rows);
  void load_sources(const Side<T>& side, int head, int first, int n, T* to, float* inverse, T* row) const;
  void compare(int head, int n, const Block& b) const;
  template <bool kBoth>
  void best_of(int n, const Block& b, int c, vf inverse, vf other, vf beyond, vi place) const;
  void finish(int head, int first, int n, const Block& b) const;
  void multiply_side(const Side<T>& side, int head, int at, int n, const T* left, float* out) const;
  bool hopeless(int head, int at, int n, const Block& b) const;

  const NearestArgs& a_;
  Side<T> keys_{}, values_{};
  int32_t *targets_ = nullptr, *sources_ = nullptr;  // (H, N): columns
  int32_t *n_targets_ = nullptr, *n_sources_ = nullptr;
};

template <class T>
void Nearest<T>::list(int head) {
  const int64_t first = head * a_.n;
  int targets = 0, sources = 0;
  for (int i = 0; i < int(a_.n); ++i) {
    if (a_.targets[first + i]) targets_[first + targets++] = i;
    if (a_.sources[first + i]) sources_[first + sources++] = i;
    a_.into[first + i] = i;
    a_.alike[first + i] = -__builtin_inf();
  }
  n_targets_[head] = targets, n_sources_[head] = sources;
}

template <class T>
void Nearest<T>::pack(const Side<T>& side, int head, T* rows) {
  const int n = n_targets_[head];
  float* inverse = side.inverse + int64_t(head) * side.columns;
  for (int i = 0; i < n; i += TILE) {
    for (int c = 0; c < TILE; ++c) {
      T* row = rows + c * side.pad;
      if (i + c < n)
        load_row_as(row, side.row(head, targets_[head * a_.n + i + c]), side.dtype, side.dim, side.pad);
      else
        std::memset(row, 0, size_t(side.pad) * sizeof(T));
      inverse[i + c] = inverse_length(row, side.pad);
    }
    transpose(rows, side.tile(head, i, 0), TILE, side.pad / Side<T>::STEP);
  }
}

template <class T>
void Nearest<T>::load_sources(const Side<T>& side, int head, int first, int n, T* to, float* inverse, T* row) const {
  for (int r = 0; r < n; ++r) {
    load_row_as(row, side.row(head, sources_[head * a_.n + first + r]), side.dtype, side.dim, side.pad);
    inverse[r] = inverse_length(row, side.pad);
    for (int d = 0; d < side.pad; d += DEPTH)
      std::memcpy(to + int64_t(d) * SOURCES + r * DEPTH, row + d, size_t(std::min(DEPTH, side.pad - d)) * sizeof(T));
  }
}

template <class T>
void Nearest<T>::multiply_side(const Side<T>& side, int head, int at, int n, const T* left, float* out) const {
  for (int d = 0; d < side.pad; d += DEPTH)
    multiply(n, left + int64_t(d) * SOURCES, side.tile(head, at, d), std::min(DEPTH, side.pad - d), TILE, out, TILE, d > 0);
}

// Whether no key of a tile is alike enough for any values to make up for it: both cosines count, and none is above 1.
template <class T>
bool Nearest<T>::hopeless(int head, int at, int n, const Block& b) const {
  if (!(a_.floor >= 0)) return false;
  const float* inverse = keys_.inverse + int64_t(head) * keys_.columns + at;
  const float least = float(a_.floor) * 0.9999f;  // beyond rounding
  for (int r = 0; r < n; ++r) {
    vf best = load(b.dots + r * TILE) * load(inverse);
    for (int c = W; c < TILE; c += W) best = vmax(load(b.dots + r * TILE + c) * load(inverse + c), best);
    if (max(best) * b.key_inverse[r] > least) return false;
  }
  return true;
}

template <class T>
void Nearest<T>::compare(int head, int n, const Block& b) const {
  const int targets = n_targets_[head];
  for (int r = 0; r < n; ++r) store(b.best + r * W, splat(-__builtin_inff())), store(b.at + r * W, vi{});
  for (int at = 0; at < targets; at += TILE) {
    multiply_side(keys_, head, at, n, b.keys, b.dots);
    if (both() && hopeless(head, at, n, b)) continue;
    if (both()) multiply_side(values_, head, at, n, b.values, b.others);
    for (int c = 0; c < TILE && at + c < targets; c += W) {
      const vf inverse = load(keys_.inverse + int64_t(head) * keys_.columns + at + c);
      const vf other = both() ? load(values_.inverse + int64_t(head) * values_.columns + at + c) : vf{};
      const vi place = iota() + (at + c);
      const vf beyond = select(place < targets, vf{}, splat(-__builtin_inff()));  // columns that are no targets
      both() ? best_of<true>(n, b, c, inverse, other, beyond, place) : best_of<false>(n, b, c, inverse, other, beyond, place);
    }
  }
}

// One vector of targets against n sources; of equal ones the first stays.
template <class T>
template <bool kBoth>
void Nearest<T>::best_of(int n, const Block& b, int c, vf inverse, vf other, vf beyond, vi place) const {
  for (int r = 0; r < n; ++r) {
    vf x = load(b.dots + r * TILE + c) * inverse;
    if (kBoth) {
      const vf y = load(b.others + r * TILE + c) * other;
      x = (x < y ? x : y) > vf{} ? x * y : splat(-1.0f);
    }
    x += beyond;
    const vf best = load(b.best + r * W);
    const vi at = load(b.at + r * W);
    store(b.best + r * W, x > best ? x : best);
    store(b.at + r * W, x > best ? place : at);
  }
}

template <class T>
void Nearest<T>::finish(int head, int first, int n, const Block& b) const {
  const int64_t row = head * a_.n;
  for (int r = 0; r < n; ++r) {
    float best = -__builtin_inff();
    int32_t place = INT32_MAX;
    for (int l = 0; l < W; ++l) {
      const int32_t at = b.at[r * W + l];
      const float x = b.best[r * W + l];
      if (x > best || (x == best && at < place)) best = x, place = at;
    }
    if (place == INT32_MAX || !(best > -__builtin_inff())) continue;
    const int column = sources_[row + first + r];
    const float scale = both() ? b.key_inverse[r] * b.value_inverse[r] : b.key_inverse[r];
    const double alike = !both() || best > -1.0f ? double(best) * double(scale) : -1.0;
    if (!(alike > a_.floor)) continue;
    a_.into[row + column] = targets_[row + place];
    a_.alike[row + column] = alike;
  }
}

template <class T>
int Nearest<T>::run() {
  const int heads = int(a_.n_heads), columns = int(round_up(a_.n, TILE));
  keys_ = {a_.keys, a_.k_dtype, a_.k_head, a_.k_row, int(a_.key_dim), int(round_up(a_.key_dim, ROW_PAD)), columns, nullptr, nullptr};
  values_ = {a_.values, a_.v_dtype, a_.v_head, a_.v_row, int(a_.value_dim), int(round_up(a_.value_dim, ROW_PAD)), columns, nullptr, nullptr};
  int64_t bytes = 0;
  auto reserve = [&bytes](int64_t size) { return std::exchange(bytes, bytes + round_up(size, 64)); };
  const int64_t lists = reserve(heads * a_.n * 8), counts = reserve(heads * 8);
  const int64_t keys = reserve(keys_.bytes(heads)), values = reserve(both() ? values_.bytes(heads) : 0);
  const int widest = std::max(keys_.pad, both() ? values_.pad : 0);
  const int64_t lefts = round_up(widest, DEPTH) * SOURCES * int64_t(sizeof(T)), rows = TILE * widest * int64_t(sizeof(T));
  const int64_t block = round_up(2 * lefts + rows + 4 * SOURCES * (2 * TILE + 2 * W + 2), 64);
  const int threads = int(std::max<int64_t>(1, a_.n_threads));
  const int64_t blocks = reserve(threads * block);
  static thread_local Workspace workspace;
  char* memory = workspace.get(bytes);
  if (memory == nullptr) return 1;
  targets_ = reinterpret_cast<int32_t*>(memory + lists), sources_ = targets_ + heads * a_.n;
  n_targets_ = reinterpret_cast<int32_t*>(memory + counts), n_sources_ = n_targets_ + heads;
  auto place = [heads](Side<T>& side, char* at) {
    side.packed = reinterpret_cast<T*>(at);
    side.inverse = reinterpret_cast<float*>(at + int64_t(heads) * side.columns * side.pad * int64_t(sizeof(T)));
  };
  place(keys_, memory + keys), place(values_, memory + values);
  auto scratch = [&](int thread) { return memory + blocks + thread * block; };
  std::atomic<int> next_head{0};
  auto prepare = [&](int thread) {
    T* row = reinterpret_cast<T*>(scratch(thread) + 2 * lefts);
    for (int h; (h = next_head.fetch_add(1, std::memory_order_relaxed)) < heads;) {
      list(h);
      pack(keys_, h, row);
      if (both()) pack(values_, h, row);
    }
  };
  parallel(std::min(threads, heads), prepare);
  const int per_head = int((a_.n + SOURCES - 1) / SOURCES);
  std::atomic<int> next{0};
  auto work = [&](int thread) {
    char* own = scratch(thread);
    T* row = reinterpret_cast<T*>(own + 2 * lefts);
    float* floats = reinterpret_cast<float*>(own + 2 * lefts + rows);
    auto take = [&floats](int n) { return std::exchange(floats, floats + n); };
    const Block b{reinterpret_cast<T*>(own), reinterpret_cast<T*>(own + lefts), take(SOURCES * TILE), take(SOURCES * TILE),
                  take(SOURCES * W), reinterpret_cast<int32_t*>(take(SOURCES * W)), take(SOURCES), take(SOURCES)};
    for (int i; (i = next.fetch_add(1, std::memory_order_relaxed)) < heads * per_head;) {
      const int h = i / per_head, first = i % per_head * SOURCES, n = std::min(SOURCES, n_sources_[h] - first);
      if (n <= 0 || n_targets_[h] == 0) continue;
      load_sources(keys_, h, first, n, b.keys, b.key_inverse, row);
      if (both()) load_sources(values_, h, first, n, b.values, b.value_inverse, row);
      compare(h, n, b);
      finish(h, first, n, b);
    }
  };
  parallel(threads, work);
  return 0;
}

}  // namespace
}  // namespace mp

extern "C" __attribute__((visibility("default"))) int mp_nearest(const mp::NearestArgs* args) {
#if defined(__AVX512BF16__)
  if (args->k_dtype == mp::BF16 && (args->values == nullptr || args->v_dtype == mp::BF16)) return mp::Nearest<mp::bf16>(*args).run();
#endif
  return mp::Nearest<float>(*args).run();
}
