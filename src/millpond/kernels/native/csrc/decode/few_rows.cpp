// A few new tokens of each sequence, which decode one after another, in one pass over the pages.
//
// All new entries are stored first. Then row i of a sequence is what a step of its own would be, behind the rows before
// it: the same splits and chunks of slots, every sum in the same order, the parts put together by the same merge. So each
// row has the bits of that step. Keys and values are fetched once for all rows, which is what the pass is for.
//
// Nothing leaves and nothing is scored, and all entries lie in plain pages.
#include <vector>

#include "common/threads.hpp"
#include "decode/lse_merge.hpp"
#include "decode/store.hpp"

namespace mp {
namespace {

constexpr int64_t SLAB_BYTES = int64_t(64) << 20;  // of partial results that are held at once, about
constexpr int RUN = 32;                            // slots that stay in the L1 cache while all rows meet them
constexpr int64_t BYTES_PER_THREAD = 128 * 1024;   // of keys and values: what a thread is worth waking for

// One column: a decoding step of the sequences that have a token in it, over `lens` as they are by then.
struct Column {
  DecodeArgs args;
  std::vector<int32_t> lens;
};

class FewRows {
 public:
  explicit FewRows(const DecodeRowsArgs& args);
  int run();

 private:
  int rows(int r) const { return int(of_[size_t(first_.seq(r))].size()); }
  const Call& call(int r, int i) const { return calls_[size_t(of_[size_t(first_.seq(r))][size_t(i)])]; }
  Slab slab(int r, int i) const { return Slab(first_, slabs_ + ((r - begin_) * most_rows_ + i) * Slab::bytes(first_)); }
  char* room(int thread) const { return rooms_ + thread * room_bytes(); }
  int64_t room_bytes() const;
  void store();
  template <class T>
  void attend(int r, int split, int thread) const;
  void attend(int r, int split, int thread) const;
  void merge_all(int r, int thread) const;

  std::vector<Column> columns_;
  std::vector<Call> calls_;            // of the columns
  std::vector<std::vector<int>> of_;   // per sequence: its columns, in order
  int most_rows_ = 0, begin_ = 0;      // begin_: the first region that is worked on now
  Call first_;                         // what all columns share; its `most` is that of the longest
  char *slabs_ = nullptr, *rooms_ = nullptr;
};

FewRows::FewRows(const DecodeRowsArgs& rows) : columns_(size_t(rows.n_columns)), of_(size_t(rows.decode.n_seq)), first_(rows.decode) {
  const DecodeArgs& a = rows.decode;
  const int n_regions = first_.n_regions;
  std::vector<int32_t> lens(a.lens, a.lens + n_regions);
  calls_.reserve(columns_.size());
  for (int64_t j = 0; j < rows.n_columns; ++j) {
    Column& column = columns_[size_t(j)];
    column.lens = lens;
    DecodeArgs& own = column.args = a;
    own.q = offset(a.q, a.q_dtype, j * rows.q_row);
    own.k_new = offset(a.k_new, a.k_dtype, j * rows.k_row);
    own.v_new = offset(a.v_new, a.v_dtype, j * rows.v_row);
    own.q_pos = a.q_pos + j * a.n_seq;
    own.lens = column.lens.data();
    own.out = static_cast<char*>(a.out) + j * a.n_seq * a.n_heads * a.pool.value_dim * dtype_bytes(a.q_dtype);
    own.lse = a.lse + j * a.n_seq * a.n_heads;
    calls_.emplace_back(own);
    first_.most = std::max(first_.most, calls_.back().most);
    for (int r = 0; r < n_regions; ++r) lens[size_t(r)] += calls_.back().active(r);
    for (int s = 0; s < int(a.n_seq); ++s)
      if (own.q_pos[s] >= 0) of_[size_t(s)].push_back(int(j));
  }
  for (const auto& own : of_) most_rows_ = std::max(most_rows_, int(own.size()));
}

// Per thread: what a step needs, and queries, weights, maxima, sums and outputs of all rows of a region.
int64_t FewRows::room_bytes() const {
  const int64_t heads = int64_t(most_rows_) * first_.group, query = round_up(first_.pool.key_dim, QUERY_PAD);
  return Scratch::bytes(first_) + round_up(4 * (heads * (query + CHUNK + first_.out_stride + 2) + 4 * W), 4096);
}

void FewRows::store() {
  for (const Call& c : calls_)
    for (int r = 0; r < c.n_regions; ++r) {
      if (!c.active(r)) {
        leave_out(c, r);
        continue;
      }
      put_entry(c, r, c.a.lens[r], 0.0f);
      first_.a.lens[r] += 1;
    }
}

// Part number `split` of region r, for all rows that have one.
template <class T>
void FewRows::attend(int r, int split, int thread) const {
  using Q = typename Lane<T>::Q;
  const Call& c = first_;
  const int group = c.group, n_rows = rows(r), heads = n_rows * group, stride = c.out_stride;
  const int key_dim = int(c.pool.key_dim), value_dim = int(c.pool.value_dim), q_stride = int(round_up(key_dim, QUERY_PAD));
  const Scratch scratch(c, room(thread));
  float* at_rows = reinterpret_cast<float*>(room(thread) + Scratch::bytes(c));
  auto take = [&at_rows](int64_t n) { return std::exchange(at_rows, at_rows + round_up(n, W)); };
  float *held = take(int64_t(heads) * q_stride), *weights = take(int64_t(heads) * CHUNK), *out = take(int64_t(heads) * stride);
  float *top = take(heads), *total = take(heads);
  Q* query = reinterpret_cast<Q*>(held);
  for (int i = 0; i < n_rows; ++i) load_queries(call(r, i), r, q_stride, query + int64_t(i) * group * q_stride);
  std::fill(top, top + heads, LOW);
  std::fill(total, total + heads, 0.0f);
  std::fill(out, out + int64_t(heads) * stride, 0.0f);

  const int32_t* pages = c.pages(r);
  const int begin = split * SPLIT, shortest = call(r, 0).a.lens[r];  // each row sees one slot more than that before it
  const int end = std::min(begin + SPLIT, shortest + n_rows - 1);
  const int from = std::max(0, begin + (begin > 0) - shortest);  // the first row that sees any slot of this part
  for (int at = begin; at < end; at += CHUNK) {
    const int n = std::min(CHUNK, end - at);
    const int skip = std::max(from, at + (at > 0) - shortest);  // rows that end before this chunk
    for (int i = 0; i < n;) {
      const int run = c.pool.run(at + i, at + n, RUN);
      const char* later = i + run < n ? c.pool.key(pages, at + i + run) : c.pool.value(pages, at);
      dot_run<T>(reinterpret_cast<const T*>(c.pool.key(pages, at + i)), int(round_up(run, 4)), key_dim,
                 query + int64_t(skip) * group * q_stride, q_stride, heads - skip * group,
                 weights + int64_t(skip) * group * CHUNK + i, CHUNK, later);
      i += run;
    }
    for (int i = skip; i < n_rows; ++i) {
      const int seen = std::min(n, shortest + i - at), h = i * group;
      if (seen > 0)
        soften_chunk(call(r, i), r, c.plain_part(r), at, seen, slab(r, i), scratch, weights + int64_t(h) * CHUNK, top + h,
                     total + h, out + int64_t(h) * stride);
    }
    const int common = std::max(0, std::min(n, shortest + skip - at));  // slots that all these rows see
    auto weigh = [&](int first, int last, int row, int n_heads) {
      for (int i = first; i < last;) {
        const int run = c.pool.run(at + i, at + last, RUN);
        const char* later = i + run < n ? c.pool.value(pages, at + i + run) : at + n < end ? c.pool.key(pages, at + n) : c.pool.value(pages, at + i);
        weigh_run<T>(reinterpret_cast<const T*>(c.pool.value(pages, at + i)), run, value_dim,
                     weights + int64_t(row) * group * CHUNK + i, CHUNK, n_heads, out + int64_t(row) * group * stride, stride,
                     later);
        i += run;
      }
    };
    weigh(0, common, skip, heads - skip * group);
    for (int i = skip; i < n_rows; ++i) weigh(common, std::min(n, shortest + i - at), i, group);
  }
  for (int i = from; i < n_rows; ++i) {
    const Slab to = slab(r, i);
    const int h = i * group;
    std::copy(top + h, top + h + group, to.top + split * group);
    std::copy(total + h, total + h + group, to.total + split * group);
    std::copy(out + int64_t(h) * stride, out + int64_t(h + group) * stride, to.out + int64_t(split) * group * stride);
  }
}

void FewRows::attend(int r, int split, int thread) const {
  switch (first_.pool.dtype) {
    case F32: return attend<float>(r, split, thread);
    case F16: return attend<f16>(r, split, thread);
    default: return attend<bf16>(r, split, thread);
  }
}

void FewRows::merge_all(int r, int thread) const {
  for (int i = 0; i < rows(r); ++i) merge(call(r, i), r, slab(r, i), Scratch(first_, room(thread)));
}

int FewRows::run() {
  store();
  if (most_rows_ == 0) return 0;
  const Call& c = first_;
  const int64_t per_region = most_rows_ * Slab::bytes(c);
  const int together = int(std::max<int64_t>(1, std::min<int64_t>(c.n_regions, SLAB_BYTES / per_region)));
  int64_t slots = 0;
  for (int r = 0; r < c.n_regions; ++r) slots += c.a.lens[r];
  const int64_t worth = 1 + slots * (c.pool.key_dim + c.pool.value_dim) * c.pool.item / BYTES_PER_THREAD;
  static thread_local Workspace workspace;
  slabs_ = workspace.get(together * per_region + c.a.n_threads * room_bytes());
  if (slabs_ == nullptr) return 1;
  rooms_ = slabs_ + together * per_region;
  std::vector<std::pair<int, int>> items;
  for (begin_ = 0; begin_ < c.n_regions; begin_ += together) {
    const int end = std::min(begin_ + together, c.n_regions);
    items.clear();
    for (int r = begin_; r < end; ++r)
      for (int i = 0; rows(r) > 0 && i < call(r, rows(r) - 1).splits(r); ++i) items.emplace_back(r, i);
    const int threads = int(std::max<int64_t>(1, std::min({c.a.n_threads, worth, int64_t(items.size())})));
    std::atomic<int> next{0};
    auto body = [&](int thread) {
      for (int i; (i = next.fetch_add(1, std::memory_order_relaxed)) < int(items.size());)
        attend(items[size_t(i)].first, items[size_t(i)].second, thread);
    };
    parallel(threads, body);
    next = begin_;
    auto finish = [&](int thread) {
      for (int r; (r = next.fetch_add(1, std::memory_order_relaxed)) < end;) merge_all(r, thread);
    };
    parallel(std::min(threads, end - begin_), finish);
  }
  return 0;
}

}  // namespace
}  // namespace mp

extern "C" __attribute__((visibility("default"))) int mp_decode_rows(const mp::DecodeRowsArgs* args) {
  return mp::FewRows(*args).run();
}
