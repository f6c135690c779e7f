// The matmul by weights that are narrower than float32: bfloat16, float16, and groups of 4 bits with scale and zero.
//
// Weights lie in panels of 32 output features, [panels][in][32]. A thread takes whole panels. It widens a piece of a
// panel, kDepth inputs deep, into float32 that stays in the first cache, and multiplies all rows of x by it, kRows at
// once with their sums in registers. So each weight is read from memory and widened once, whatever the number of rows.

#include "common.h"

namespace quire {
namespace {

constexpr int kPanel = 32;
constexpr int kDepth = 256;  // kDepth x kPanel floats are 32 KiB

#ifdef __AVX512F__
constexpr int kLanes = 16, kRows = 12;  // 24 of 32 registers hold sums
#else
constexpr int kLanes = 8, kRows = 2;  // 8 of 16
#endif
constexpr int kVectors = kPanel / kLanes;
typedef float Vector __attribute__((vector_size(kLanes * 4), aligned(4)));

// sums[r][0..32) += x[r][0..depth) * piece, for `Rows` rows; they start from zero where `first`.
template <int Rows>
void multiply(const float* x, int64_t x_stride, const float* piece, int depth, float* sums, int64_t stride, bool first) {
  Vector acc[Rows][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) acc[r][v] = first ? Vector{} : *(const Vector*)(sums + r * stride + v * kLanes);
  for (int k = 0; k < depth; ++k) {
    Vector w[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) w[v] = *(const Vector*)(piece + k * kPanel + v * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      const float value = x[r * x_stride + k];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) acc[r][v] += value * w[v];
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) *(Vector*)(sums + r * stride + v * kLanes) = acc[r][v];
}

// All rows: kRows at a time, then the rest in one go.
template <int Rows = kRows>
void multiply_rows(const float* x, int64_t rows, int64_t x_stride, const float* piece, int depth, float* sums,
                   int64_t stride, bool first) {
  for (; rows >= Rows; rows -= Rows, x += Rows * x_stride, sums += Rows * stride)
    multiply<Rows>(x, x_stride, piece, depth, sums, stride, first);
  if constexpr (Rows > 1)
    if (rows > 0) multiply_rows<Rows - 1>(x, rows, x_stride, piece, depth, sums, stride, first);
}

// `widen(panel, begin, depth, piece)` writes inputs begin.. of a panel as float32. Returns [rows, panels * 32].
template <typename Widen>
at::Tensor matmul(const at::Tensor& x, int64_t panels, Widen widen) {
  TORCH_CHECK(x.dim() == 2 && x.is_contiguous() && x.scalar_type() == at::kFloat, "x is to be float32 rows");
  const int64_t rows = x.size(0), inputs = x.size(1), stride = panels * kPanel;
  at::Tensor out = at::empty({rows, stride}, x.options());
  const float* from = x.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  at::parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) {
    alignas(64) float piece[kDepth * kPanel];
    for (int64_t panel = begin; panel < end; ++panel) {
      for (int64_t k = 0; k < inputs; k += kDepth) {
        const int depth = static_cast<int>(std::min<int64_t>(kDepth, inputs - k));
        widen(panel, k, depth, piece);
        multiply_rows(from + k, rows, inputs, piece, depth, to + panel * kPanel, stride, k == 0);
      }
    }
  });
  return out;
}

// weight: [panels, in, 32] bfloat16 or float16.
at::Tensor widened_linear(const at::Tensor& x, const at::Tensor& weight) {
  TORCH_CHECK(weight.dim() == 3 && weight.is_contiguous() && weight.size(2) == kPanel && weight.size(1) == x.size(1),
              "the weight is to be [panels, in, 32]");
  at::Tensor out;
  for_type(weight.scalar_type(), [&]<typename T>() {
    const T* packed = weight.const_data_ptr<T>();
    out = matmul(x, weight.size(0), [&](int64_t panel, int64_t begin, int depth, float* piece) {
      const T* from = packed + (panel * weight.size(1) + begin) * kPanel;
#pragma omp simd
      for (int i = 0; i < depth * kPanel; ++i) piece[i] = static_cast<float>(from[i]);
    });
  });
  return out;
}

// weight: [panels, in, 16] bytes, feature j in the low half of byte j and feature j + 16 in the high half;
// scales and zeros: float32 [panels, groups, 32]. A weight is half * scale + zero.
at::Tensor int4_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& scales,
                       const at::Tensor& zeros) {
  TORCH_CHECK(weight.dim() == 3 && weight.is_contiguous() && weight.size(2) == kPanel / 2 &&
                  weight.size(1) == x.size(1) && weight.scalar_type() == at::kByte,
              "the weight is to be bytes [panels, in, 16]");
  TORCH_CHECK(scales.is_contiguous() && zeros.is_contiguous() && scales.sizes() == zeros.sizes() &&
                  scales.size(0) == weight.size(0) && scales.size(2) == kPanel && x.size(1) % scales.size(1) == 0,
              "scales and zeros are to be [panels, groups, 32]");
  const int64_t inputs = x.size(1), groups = scales.size(1), group = inputs / groups;
  const uint8_t* packed = weight.const_data_ptr<uint8_t>();
  const float* all_scales = scales.const_data_ptr<float>();
  const float* all_zeros = zeros.const_data_ptr<float>();
  return matmul(x, weight.size(0), [&](int64_t panel, int64_t begin, int depth, float* piece) {
    const uint8_t* from = packed + (panel * inputs + begin) * (kPanel / 2);
    for (int k = 0; k < depth; ++k) {
      const int64_t place = (panel * groups + (begin + k) / group) * kPanel;
      const float* scale = all_scales + place;
      const float* zero = all_zeros + place;
#pragma omp simd
      for (int j = 0; j < kPanel / 2; ++j) {
        const uint8_t byte = from[k * (kPanel / 2) + j];
        piece[k * kPanel + j] = static_cast<float>(byte & 15) * scale[j] + zero[j];
        piece[k * kPanel + j + 16] = static_cast<float>(byte >> 4) * scale[j + 16] + zero[j + 16];
      }
    }
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(quire, m) {
  m.def("widened_linear(Tensor x, Tensor weight) -> Tensor", widened_linear);
  m.def("int4_linear(Tensor x, Tensor weight, Tensor scales, Tensor zeros) -> Tensor", int4_linear);
}

}  // namespace quire
