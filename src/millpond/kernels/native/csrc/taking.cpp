// Sums and means of rows that go into others.
#include "pages.hpp"
#include "threads.hpp"
#include "workspace.hpp"

namespace mp {
namespace {

// to += weight * from
template <class N>
void add_row(N* to, const float* from, N weight, int dim) {
  for (int d = 0; d < dim; ++d) to[d] += weight * N(from[d]);
}

const void* row_of(const TakeArgs& a, int64_t head, int64_t i) {
  return offset(a.x, a.dtype, head * a.x_head + i * a.x_row);
}

// Where rows take others in their mean, else the row as it is. `total`: (N,). `row`: (dim,).
void mean_rows(const TakeArgs& a, int64_t head, float* total, float* row) {
  const int dim = int(a.dim);
  const int64_t first = head * a.n;
  float* out = static_cast<float*>(a.out) + first * dim;
  for (int64_t i = 0; i < a.n; ++i) {
    widen(out + i * dim, row_of(a, head, i), a.dtype, dim);
    total[i] = -1.0f;  // nothing yet
  }
  for (int64_t i = 0; i < a.n; ++i) {
    if (!a.leaves[first + i]) continue;
    const int64_t to = a.into[first + i];
    if (total[to] < 0.0f) {
      total[to] = float(a.own[first + to]);
      for (int d = 0; d < dim; ++d) out[to * dim + d] *= total[to];
    }
    const float weight = float(a.weight[first + i]);
    widen(row, row_of(a, head, i), a.dtype, dim);
    add_row(out + to * dim, row, weight, dim);
    total[to] += weight;
  }
  for (int64_t i = 0; i < a.n; ++i)
    for (int d = 0; total[i] >= 0.0f && d < dim; ++d) out[i * dim + d] /= total[i];
}

void add_rows(const TakeArgs& a, int64_t head, float* row) {
  const int dim = int(a.dim);
  const int64_t first = head * a.n;
  double* out = static_cast<double*>(a.out) + head * a.n_out * dim;
  std::fill(out, out + a.n_out * dim, 0.0);
  for (int64_t i = 0; i < a.n; ++i) {
    if (!a.leaves[first + i]) continue;
    widen(row, row_of(a, head, i), a.dtype, dim);
    add_row(out + a.into[first + i] * dim, row, a.weight[first + i], dim);
  }
}

}  // namespace
}  // namespace mp

// With `own` the means, else the sums.
extern "C" __attribute__((visibility("default"))) int mp_take(const mp::TakeArgs* args) {
  using namespace mp;
  const int threads = int(std::max<int64_t>(1, std::min(args->n_threads, args->n_heads)));
  const int64_t floats = round_up(args->n + args->dim, 16);
  static thread_local Workspace workspace;
  char* memory = workspace.get(threads * floats * 4);
  if (memory == nullptr) return 1;
  std::atomic<int64_t> next{0};
  auto body = [&](int thread) {
    float* row = reinterpret_cast<float*>(memory) + thread * floats;
    for (int64_t h; (h = next.fetch_add(1, std::memory_order_relaxed)) < args->n_heads;)
      args->own != nullptr ? mean_rows(*args, h, row + args->dim, row) : add_rows(*args, h, row);
  };
  parallel(threads, body);
  return 0;
}
