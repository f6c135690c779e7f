// Operations on one row at a time.

#include "common.h"

namespace quire {
namespace {

template <typename T>
void silu_mul_rows(const T* x, T* out, int64_t rows, int64_t width) {
  at::parallel_for(0, rows, grain(2 * width), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* gate = x + row * 2 * width;
      const T* up = gate + width;
      T* to = out + row * width;
      for (int64_t i = 0; i < width; ++i) {
        const float g = gate[i];
        to[i] = static_cast<T>(g / (1.0f + std::exp(-g)) * static_cast<float>(up[i]));
      }
    }
  });
}

at::Tensor silu_mul(const at::Tensor& x) {
  const at::Tensor rows = x.contiguous();
  const int64_t width = rows.size(-1) / 2;
  std::vector<int64_t> shape = rows.sizes().vec();
  shape.back() = width;
  at::Tensor out = at::empty(shape, rows.options());
  for_type(rows.scalar_type(), [&]<typename T>() {
    silu_mul_rows(rows.const_data_ptr<T>(), out.mutable_data_ptr<T>(), rows.numel() / (2 * width), width);
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(quire, m) {
  m.def("silu_mul(Tensor x) -> Tensor", silu_mul);
}

}  // namespace quire
