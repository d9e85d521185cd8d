// Rows times matrices, with what happens around them; rotary embedding, norms, gates; and whole layers.
#pragma once

#include "decode.hpp"
#include "harness.hpp"
#include "linear/layers_args.hpp"

namespace check {

inline double activated(double x, int64_t act) {
  switch (act) {
    case mp::SILU: return x / (1 + std::exp(-x));
    case mp::GELU: return 0.5 * x * (1 + std::erf(x / std::sqrt(2.0)));
    case mp::GELU_TANH: return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    case mp::RELU: return std::max(x, 0.0);
    default: return x;
  }
}

// Row `row` of x (m, k), normalised: RMSNorm or LayerNorm.
inline vector<double> normalised(const Numbers& x, int64_t row, int64_t k, const Numbers* weight, const Numbers* bias,
                                 bool centred, double eps) {
  vector<double> out;
  double mean = 0, squares = 0;
  for (int64_t i = 0; i < k; ++i) out.push_back(x[row * k + i]), mean += out.back() / double(k);
  if (weight == nullptr) return out;
  for (double& y : out) y -= centred ? mean : 0, squares += y * y / double(k);
  for (int64_t i = 0; i < k; ++i)
    out[size_t(i)] = out[size_t(i)] / std::sqrt(squares + eps) * (*weight)[i] + (bias != nullptr ? (*bias)[i] : 0);
  return out;
}

// Matrices of one dtype that rows go through together, with random numbers.
struct Matrices {
  int64_t k, dtype;
  vector<int64_t> sizes;
  vector<Numbers> weights, biases;
  Numbers norm, norm_bias;

  Matrices(int64_t width, vector<int64_t> rows, int64_t type, Random& random)
      : k(width), dtype(type), sizes(rows), norm(normals(type, width, random)), norm_bias(normals(type, width, random)) {
    for (const int64_t n : rows) {
      weights.push_back(normals(type, n * k, random, 1 / std::sqrt(double(k))));
      biases.push_back(normals(type, n, random));
    }
  }
  mp::LinearArgs args(int64_t gate, bool with_norm, bool with_bias, bool centred) {
    mp::LinearArgs a{};
    a.norm = with_norm ? norm.data() : nullptr, a.norm_bias = with_norm && centred ? norm_bias.data() : nullptr;
    a.k = k, a.dtype = dtype, a.gate = gate, a.n_parts = int64_t(sizes.size()), a.centred = centred, a.eps = 1e-5;
    for (size_t p = 0; p < sizes.size(); ++p)
      a.parts[p] = {weights[p].data(), with_bias ? biases[p].data() : nullptr, nullptr, sizes[p], k};
    return a;
  }
  // Row x (k,) times part p.
  vector<double> times(const vector<double>& x, size_t p, bool with_bias) const {
    vector<double> out;
    for (int64_t j = 0; j < sizes[p]; ++j) {
      double sum = with_bias ? biases[p][j] : 0;
      for (int64_t i = 0; i < k; ++i) sum += x[size_t(i)] * weights[p][j * k + i];
      out.push_back(sum);
    }
    return out;
  }
};

inline void one_linear(const Kernels& kernels, Report& report, int64_t dtype, int64_t m, int64_t k, vector<int64_t> sizes,
                       int64_t gate, bool norm, bool bias, bool centred, bool residual, Random& random) {
  Matrices w(k, sizes, dtype, random);
  Numbers x = normals(dtype, m * k, random), rest = normals(dtype, m * sizes[0], random);
  vector<Numbers> out;
  for (const int64_t n : sizes) out.emplace_back(dtype, m * n);
  mp::LinearArgs a = w.args(gate, norm, bias, centred);
  a.x = x.data(), a.residual = residual ? rest.data() : nullptr, a.m = m, a.n_threads = 2;
  for (size_t p = 0; p < sizes.size(); ++p) a.out[p] = out[p].data();
  report.same("the result of linear", kernels("mp_linear", a), 0);
  const bool gated = gate != mp::NO_GATE && sizes.size() == 2;
  for (int64_t row = 0; row < m; ++row) {
    const vector<double> y = normalised(x, row, k, norm ? &w.norm : nullptr, norm && centred ? &w.norm_bias : nullptr, centred, 1e-5);
    for (size_t p = 0; p < (gated ? 1 : sizes.size()); ++p) {
      vector<double> product = w.times(y, p, bias);
      for (double& z : product) z = activated(z, gate);
      if (gated) {
        const vector<double> up = w.times(y, 1, bias);
        for (size_t j = 0; j < up.size(); ++j) product[j] *= up[j];
      }
      for (int64_t j = 0; j < sizes[p]; ++j)
        report.near("a product", out[p][row * sizes[p] + j], product[size_t(j)] + (residual ? rest[row * sizes[p] + j] : 0));
    }
  }
}

inline void gemm(const Kernels& kernels, Report& report, Random& random) {
  const int64_t m = 100, k = 64, n = 48;
  Matrices w(k, {n}, mp::BF16, random);
  Numbers x = normals(mp::BF16, m * k, random), rest = normals(mp::BF16, m * n, random), out(mp::BF16, m * n);
  const mp::GemmArgs a{x.data(), w.weights[0].data(), w.biases[0].data(), w.norm.data(), nullptr, rest.data(), out.data(),
                       m, k, n, 0, mp::SILU, 0, 2, 1e-5};
  const int result = kernels("mp_gemm", a);
  if (result == 2) {  // this hardware has no vectors of 16 floats
    report.same("the result of gemm", 2, 2);
    return;
  }
  report.same("the result of gemm", result, 0);
  for (int64_t row = 0; row < m; ++row) {
    const vector<double> product = w.times(normalised(x, row, k, &w.norm, nullptr, false, 1e-5), 0, true);
    for (int64_t j = 0; j < n; ++j)
      report.near("a product of gemm", out[row * n + j], activated(product[size_t(j)], mp::SILU) + rest[row * n + j]);
  }
}

inline void rows(const Kernels& kernels, Report& report, int64_t dtype, Random& random) {
  const int64_t m = 5, heads = 3, n = 37;
  Numbers x = normals(dtype, m * heads * n, random), weight = normals(dtype, n, random), bias = normals(dtype, n, random);
  Numbers out(dtype, m * heads * n);
  for (const bool centred : {false, true}) {
    const mp::NormArgs a{x.data(), weight.data(), centred ? bias.data() : nullptr, out.data(), m, heads, n, heads * n, n,
                         heads * n, n, dtype, centred, 2, 1e-5};
    report.same("the result of norm", kernels("mp_norm", a), 0);
    for (int64_t row = 0; row < m * heads; ++row) {
      const vector<double> y = normalised(x, row, n, &weight, centred ? &bias : nullptr, centred, 1e-5);
      for (int64_t i = 0; i < n; ++i) report.near("a number behind a norm", out[row * n + i], y[size_t(i)]);
    }
  }
  Numbers gate = normals(dtype, m * 2 * n, random), opened(dtype, m * n);
  const mp::GateArgs b{gate.data(), opened.data(), m, n, 2 * n, dtype, mp::GELU_TANH, 2};
  report.same("the result of gate", kernels("mp_gate", b), 0);
  for (int64_t i = 0; i < m * n; ++i) {
    const int64_t at = i / n * 2 * n + i % n;
    report.near("a number behind a gate", opened[i], activated(gate[at], mp::GELU_TANH) * gate[at + n]);
  }
  const int64_t dim = 20;
  Numbers q = normals(dtype, m * heads * 24, random), k = normals(dtype, m * 24, random), before = q, keys = k;
  Numbers cos = normals(dtype, m * dim, random), sin = normals(dtype, m * dim, random);
  const mp::RotateArgs r{q.data(), k.data(), cos.data(), sin.data(), m, heads, 1, dim, dim, heads * 24, 24, 24, 24, dtype, 2};
  report.same("the result of rotate", kernels("mp_rotate", r), 0);
  const auto turned = [&](const Numbers& was, int64_t head, int64_t row, int64_t d) {
    if (d >= dim) return was[head * 24 + d];
    const double other = d < dim / 2 ? -was[head * 24 + d + dim / 2] : was[head * 24 + d - dim / 2];
    return was[head * 24 + d] * cos[row * dim + d] + other * sin[row * dim + d];
  };
  for (int64_t i = 0; i < m * heads * 24; ++i) report.near("a turned query", q[i], turned(before, i / 24, i / 24 / heads, i % 24));
  for (int64_t i = 0; i < m * 24; ++i) report.near("a turned key", k[i], turned(keys, i / 24, i / 24, i % 24));
  vector<float> largest(static_cast<size_t>(m));
  vector<int64_t> at(static_cast<size_t>(m));
  Numbers some = normals(dtype, m * 101, random);
  some.put(101 + 77, NAN);
  some.put(2 * 101 + 100, 50), some.put(3 * 101 + 4, 50), some.put(3 * 101 + 90, 50);
  const mp::LargestArgs l{some.data(), largest.data(), at.data(), m, 101, 101, dtype, 2};
  report.same("the result of largest", kernels("mp_largest", l), 0);
  report.same("where NaN is", at[1], 77);
  report.same("where the largest is", at[2], 100);
  report.same("where the first of the largest is", at[3], 4);
  report.same("whether NaN is the largest", std::isnan(largest[1]), 1);
  report.near("the largest", double(largest[2]), 50);
  double most = -INF;
  for (int64_t i = 0; i < 101; ++i) most = std::max(most, some[i]);
  report.near("the largest", double(largest[0]), most);
}

// A layer as one call has the bits of its parts; each of these is compared with doubles above.
inline void layers(const Kernels& kernels, Report& report, int64_t dtype, Random& random) {
  const int64_t m = 3, width = 48, dim = 16, inner = 80;
  const DecodeCase c{2, dim, dim, 16, mp::SUM, mp::MEAN, mp::ACC, {30, 5, 61, 8, 20, 20}, 2, 0, 2, 0, 1, false, false, true, false};
  Matrices into(width, {4 * dim, 2 * dim, 2 * dim}, dtype, random), first(4 * dim, {width}, dtype, random);
  Matrices gates(width, {inner, inner}, dtype, random), last(inner, {width}, dtype, random);
  const Numbers input = normals(dtype, m * width, random);
  Numbers cos = normals(dtype, m * dim, random), sin = normals(dtype, m * dim, random), result[2];
  for (const bool together : {false, true}) {
    Random same(5);
    DecodeStep step(c, dtype, dtype, same);
    Numbers x = input, q(dtype, m * 4 * dim), k(dtype, m * 2 * dim), v(dtype, m * 2 * dim), seen(dtype, m * 4 * dim);
    mp::LayersArgs all{};
    mp::LayerArgs& a = all.layers[0];
    all.n = 1;
    a.heads.into = into.args(mp::NO_GATE, true, true, false);
    a.heads.into.x = x.data(), a.heads.into.m = m, a.heads.into.n_threads = 2;
    a.heads.into.out[0] = q.data(), a.heads.into.out[1] = k.data(), a.heads.into.out[2] = v.data();
    a.heads.turn = {q.data(), k.data(), cos.data(), sin.data(), m, 4, 2, dim, dim, 4 * dim, dim, 2 * dim, dim, dtype, 2};
    mp::DecodeArgs& attention = a.decode.plain;
    attention = step.args();
    attention.q = q.data(), attention.k_new = k.data(), attention.v_new = v.data(), attention.out = seen.data();
    a.behind.seen = seen.data(), a.behind.x = x.data(), a.behind.out = x.data(), a.behind.m = m, a.behind.n_threads = 2;
    a.behind.steps[0] = first.args(mp::NO_GATE, false, false, false);
    a.behind.steps[1] = gates.args(mp::SILU, true, false, false);
    a.behind.steps[2] = last.args(mp::NO_GATE, false, true, false);
    if (together) {
      report.same("the result of layers", kernels("mp_layers", all), 0);
    } else {
      Numbers middle(dtype, m * width), opened(dtype, m * inner), end(dtype, m * width);
      const auto product = [&](mp::LinearArgs l, Numbers& from, void* rest, Numbers& to) {
        l.x = from.data(), l.residual = rest, l.out[0] = to.data(), l.m = m, l.n_threads = 1;
        report.same("the result of linear", kernels("mp_linear", l), 0);
      };
      report.same("the result of linear", kernels("mp_linear", a.heads.into), 0);
      report.same("the result of rotate", kernels("mp_rotate", a.heads.turn), 0);
      report.same("the result of decode", kernels("mp_decode", attention), 0);
      product(a.behind.steps[0], seen, x.data(), middle);
      product(a.behind.steps[1], middle, nullptr, opened);
      product(a.behind.steps[2], opened, middle.data(), end);
      x = end;
    }
    result[together] = x;
  }
  for (int64_t i = 0; i < m * width; ++i) {
    report.near("a number behind a layer", result[1][i], result[0][i]);
    report.same("whether a number behind a layer is finite", std::isfinite(result[1][i]), 1);
  }
}

inline void linear(const Kernels& kernels, Report& report) {
  using namespace mp;
  for (const int64_t dtype : DTYPES) {
    Random random{uint64_t(dtype + 41)};
    report.begin(with_type("linear, rows and layers", dtype), 2 * tolerance_of(dtype));
    one_linear(kernels, report, dtype, 1, 96, {70}, NO_GATE, false, true, false, true, random);
    one_linear(kernels, report, dtype, 3, 100, {64, 20, 20}, NO_GATE, true, true, false, false, random);
    one_linear(kernels, report, dtype, 5, 33, {130, 130}, SILU, true, false, false, false, random);
    one_linear(kernels, report, dtype, 16, 64, {66, 66}, GELU_TANH, true, true, true, true, random);
    one_linear(kernels, report, dtype, 13, 40, {31}, GELU, false, false, false, false, random);
    one_linear(kernels, report, dtype, 2, 128, {31}, RELU, true, true, true, true, random);
    if (dtype == BF16) gemm(kernels, report, random);
    rows(kernels, report, dtype, random);
    layers(kernels, report, dtype, random);
    report.end();
  }
}

}  // namespace check
