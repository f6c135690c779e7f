// Before and after an 8-bit matmul: quantization of rows to bytes, and scaling of the sums.

#include "vec.h"

namespace quire {
namespace {

constexpr float kZero = 128.0f;  // the byte that represents 0
constexpr float kSteps = 127.0f;

template <typename T>
void quantize(const T* x, uint8_t* out, float* scales, int64_t rows, int64_t columns) {
  parallel_for(0, rows, grain(columns), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* from = x + row * columns;
      uint8_t* to = out + row * columns;
      Floats largest = {};
      for_vectors(columns, [&](int64_t i, auto n) {
        const Floats part = load(from + i, n);
        largest = max(largest, max(part, -part));
      });
      const float scale = max(largest) / kSteps;
      const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
      scales[row] = scale;
#pragma omp simd
      for (int64_t i = 0; i < columns; ++i) {
        to[i] = static_cast<uint8_t>(static_cast<int32_t>(std::nearbyint(static_cast<float>(from[i]) * inverse) + kZero));
      }
    }
  });
}

template <typename From, typename T>
void scale(const From* x, const float* scales, const T* bias, T* out, int64_t rows, int64_t columns) {
  parallel_for(0, rows, grain(columns), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const From* from = x + row * columns;
      T* to = out + row * columns;
      const float by = scales[row];
      for_vectors(columns, [&](int64_t i, auto n) {
        const Floats scaled = load(from + i, n) * by;
        store(to + i, bias ? scaled + load(bias + i, n) : scaled, n);
      });
    }
  });
}

std::tuple<Tensor, Tensor> quantize_rows(const Tensor& x) {
  STD_TORCH_CHECK(x.dim() == 2, "quantize_rows needs [rows, columns]");
  const Tensor from = as_contiguous(x);
  Tensor bytes = empty(from.sizes(), ScalarType::Byte);
  Tensor scales = empty({from.size(0)}, ScalarType::Float);
  for_type(from.scalar_type(), [&]<typename T>() {
    quantize(from.const_data_ptr<T>(), bytes.mutable_data_ptr<uint8_t>(), scales.mutable_data_ptr<float>(),
             from.size(0), from.size(1));
  });
  return {bytes, scales};
}

Tensor scale_rows(const Tensor& x, const Tensor& scales, const std::optional<Tensor>& bias, ScalarType dtype) {
  STD_TORCH_CHECK(x.dim() == 2 && x.is_contiguous(), "scale_rows needs contiguous rows");
  STD_TORCH_CHECK(!bias || (bias->scalar_type() == dtype && bias->is_contiguous()), "the bias has the wrong type");
  const bool in_place = x.scalar_type() == dtype;
  STD_TORCH_CHECK(in_place || x.scalar_type() == ScalarType::Float,
                  "scale_rows needs float32 or the type of its result");
  Tensor out = in_place ? x : empty(x.sizes(), dtype);
  for_type(dtype, [&]<typename T>() {
    const auto from = [&]<typename From>() {
      scale(x.const_data_ptr<From>(), scales.const_data_ptr<float>(), bias ? bias->const_data_ptr<T>() : nullptr,
            out.mutable_data_ptr<T>(), x.size(0), x.size(1));
    };
    in_place ? from.template operator()<T>() : from.template operator()<float>();
  });
  return out;
}

}  // namespace

QUIRE_OPERATION(quantize_rows, "(Tensor x) -> (Tensor, Tensor)")
QUIRE_OPERATION(scale_rows, "(Tensor(a!) x, Tensor scales, Tensor? bias, ScalarType dtype) -> Tensor(a!)")

}  // namespace quire
