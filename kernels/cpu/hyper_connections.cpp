// Hyper-connections (see `reference.mhc_pre` and `reference.mhc_post`).
//
// Nearly all of a decode's time is that of reading the function, which is float32: a product is computed for some tokens
// and kFunctions rows of it at once, and the norm's factor is applied to the product.

#include "vec.h"

namespace quire {
namespace {

constexpr int kFunctions = 6;
constexpr int kTokens = kRegisters / 8;  // their products with kFunctions rows stay in registers

// Calls `body` with `count`, from 1 to `Most`, as a constant.
template <int Most, typename Body>
void with_constant(int64_t count, Body&& body) {
  if constexpr (Most > 1) {
    if (count < Most) return with_constant<Most - 1>(count, body);
  }
  body(std::integral_constant<int, Most>());
}

template <int Tokens, int Functions, typename T>
void multiply(const T* x, const float* function, int64_t width, float* out, int64_t stride) {
  Floats sums[Tokens][Functions] = {};
  for_vectors(width, [&](int64_t i, auto n) {
    Floats factors[Functions];
    for (int f = 0; f < Functions; ++f) factors[f] = load(function + f * width + i, n);
    for (int t = 0; t < Tokens; ++t) {
      const Floats part = load(x + t * width + i, n);
      for (int f = 0; f < Functions; ++f) sums[t][f] += part * factors[f];
    }
  });
  for (int t = 0; t < Tokens; ++t)
    for (int f = 0; f < Functions; ++f) out[t * stride + f] = sum(sums[t][f]);
}

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// Divides `count` numbers, which are `stride` apart, by their sum plus `eps`.
void divide_by_sum(float* x, int64_t count, int64_t stride, float eps) {
  float total = 0.0f;
  for (int64_t i = 0; i < count; ++i) total += x[i * stride];
  const float factor = 1.0f / (total + eps);
  for (int64_t i = 0; i < count; ++i) x[i * stride] *= factor;
}

// Replaces the weights of the mixing by doubly stochastic ones.
void make_stochastic(float* mixed, int64_t streams, float eps, int64_t iterations) {
  for (int64_t row = 0; row < streams; ++row) {
    float* const of = mixed + row * streams;
    const float most = *std::max_element(of, of + streams);
    float total = 0.0f;
    for (int64_t i = 0; i < streams; ++i) total += of[i] = std::exp(of[i] - most);
    for (int64_t i = 0; i < streams; ++i) of[i] = of[i] / total + eps;
  }
  for (int64_t i = 0; i < iterations; ++i) {
    for (int64_t row = 0; i > 0 && row < streams; ++row) divide_by_sum(mixed + row * streams, streams, 1, eps);
    for (int64_t column = 0; column < streams; ++column) divide_by_sum(mixed + column, streams, streams, eps);
  }
}

std::tuple<Tensor, Tensor, Tensor> mhc_pre(const Tensor& x, const Tensor& function, const Tensor& base,
                                           const Tensor& scale, int64_t num_streams, double norm_eps, double eps,
                                           int64_t iterations, double magnitude, double output_eps) {
  const int64_t tokens = x.size(0), width = x.size(1), hidden = width / num_streams, kinds = scale.size(0);
  const int64_t written = kinds > 1 ? num_streams : 0, mixes = kinds > 2 ? num_streams : 0;
  const int64_t functions = num_streams + written + mixes * mixes;
  STD_TORCH_CHECK(hidden * num_streams == width && function.size(0) == functions && function.size(1) == width &&
                      base.size(0) == functions && 1 <= kinds && kinds <= 3,
                  "the weights of a hyper-connection have another shape");
  const Tensor rows = as_contiguous(x), matrix = of_type(function, ScalarType::Float);
  const Tensor bases = of_type(base, ScalarType::Float), scales = of_type(scale, ScalarType::Float);
  Tensor read = empty({tokens, hidden}, x.scalar_type()), outputs = empty({tokens, written}, ScalarType::Float);
  Tensor mixed = empty({tokens, mixes, mixes}, ScalarType::Float);
  const Tensor memory = empty({tokens, functions}, ScalarType::Float);
  const float *from = matrix.const_data_ptr<float>(), *b = bases.const_data_ptr<float>();
  const float* s = scales.const_data_ptr<float>();
  float* const products = memory.mutable_data_ptr<float>();
  for_type(x.scalar_type(), [&]<typename T>() {
    const T* streams = rows.const_data_ptr<T>();
    const int64_t tiles = (tokens + kTokens - 1) / kTokens, parts = (functions + kFunctions - 1) / kFunctions;
    const int64_t work = width * kFunctions * std::min<int64_t>(kTokens, tokens);
    parallel_for(0, tiles * parts, grain(work), [&](int64_t begin, int64_t end) {
      for (int64_t item = begin; item < end; ++item) {  // all tokens for some functions, then for the next ones
        const int64_t token = item % tiles * kTokens, first = item / tiles * kFunctions;
        with_constant<kTokens>(std::min<int64_t>(kTokens, tokens - token), [&](auto t) {
          with_constant<kFunctions>(std::min<int64_t>(kFunctions, functions - first), [&](auto f) {
            multiply<t, f>(streams + token * width, from + first * width, width, products + token * functions + first,
                           functions);
          });
        });
      }
    });
    parallel_for(0, tokens, grain(2 * width), [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) {
        const T* row = streams + token * width;
        float* weights = products + token * functions;
        Floats squares = {};
        for_vectors(width, [&](int64_t i, auto n) {
          const Floats part = load(row + i, n);
          squares += part * part;
        });
        const float factor = 1.0f / std::sqrt(sum(squares) / static_cast<float>(width) + static_cast<float>(norm_eps));
        for (int64_t i = 0; i < functions; ++i) {
          weights[i] = weights[i] * factor * s[std::min<int64_t>(i / num_streams, 2)] + b[i];
        }
        for (int64_t i = 0; i < num_streams; ++i) weights[i] = sigmoid(weights[i]) + static_cast<float>(eps);
        for (int64_t i = 0; i < written; ++i) {
          outputs.mutable_data_ptr<float>()[token * written + i] =
              static_cast<float>(magnitude) * sigmoid(weights[num_streams + i]) + static_cast<float>(output_eps);
        }
        if (mixes > 0) {
          make_stochastic(weights + 2 * num_streams, num_streams, static_cast<float>(eps), iterations);
          std::copy(weights + 2 * num_streams, weights + functions,
                    mixed.mutable_data_ptr<float>() + token * mixes * mixes);
        }
        T* to = read.mutable_data_ptr<T>() + token * hidden;
        for_vectors(hidden, [&](int64_t i, auto n) {
          Floats total = {};
          for (int64_t stream = 0; stream < num_streams; ++stream)
            total += load(row + stream * hidden + i, n) * weights[stream];
          store(to + i, total, n);
        });
      }
    });
  });
  return {read, outputs, mixed};
}

Tensor mhc_post(const Tensor& x, const Tensor& streams, const Tensor& outputs, const Tensor& mixed) {
  const int64_t tokens = x.size(0), hidden = x.size(1), count = outputs.size(1);
  const bool mixes = mixed.size(1) > 0;
  STD_TORCH_CHECK(streams.size(0) == tokens && streams.size(1) == count * hidden &&
                      streams.scalar_type() == x.scalar_type() &&
                      (!mixes || (mixed.size(1) == count && mixed.size(2) == count)),
                  "the streams have another shape");
  const Tensor added = as_contiguous(x), before = as_contiguous(streams);
  const Tensor of_output = of_type(outputs, ScalarType::Float), of_streams = of_type(mixed, ScalarType::Float);
  Tensor out = empty({tokens, count * hidden}, x.scalar_type());
  for_type(x.scalar_type(), [&]<typename T>() {
    const T *layer = added.const_data_ptr<T>(), *from = before.const_data_ptr<T>();
    T* const to = out.mutable_data_ptr<T>();
    parallel_for(0, tokens * count, grain(hidden * (1 + count)), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const int64_t token = row / count, stream = row % count;
        const float own = of_output.const_data_ptr<float>()[row];
        if (!mixes) {
          for_vectors(hidden, [&](int64_t i, auto n) {
            store(to + row * hidden + i, load(layer + token * hidden + i, n) * own + load(from + row * hidden + i, n), n);
          });
          continue;
        }
        const float* weights = of_streams.const_data_ptr<float>() + token * count * count + stream;
        for_vectors(hidden, [&](int64_t i, auto n) {
          Floats total = load(layer + token * hidden + i, n) * own;
          for (int64_t other = 0; other < count; ++other)
            total += load(from + (token * count + other) * hidden + i, n) * weights[other * count];
          store(to + row * hidden + i, total, n);
        });
      }
    });
  });
  return out;
}

}  // namespace

QUIRE_OPERATION(mhc_pre,
                "(Tensor x, Tensor function, Tensor base, Tensor scale, int num_streams, float norm_eps, float eps, "
                "int iterations, float magnitude, float output_eps) -> (Tensor, Tensor, Tensor)")
QUIRE_OPERATION(mhc_post, "(Tensor x, Tensor streams, Tensor outputs, Tensor mixed) -> Tensor")

}  // namespace quire
