// Common to all kernels: tensors, thread granularity, and dispatch on the element type.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

namespace quire {

// Least elements worth waking a thread for.
constexpr int64_t kThreadElements = 1 << 14;

// Least rows of `width` elements for one thread.
inline int64_t grain(int64_t width) { return std::max<int64_t>(1, kThreadElements / std::max<int64_t>(1, width)); }

// Calls `body<T>()` for the element type of a tensor: float, bfloat16 or half.
template <typename Body>
void for_type(at::ScalarType type, Body&& body) {
  switch (type) {
    case at::ScalarType::Float: return body.template operator()<float>();
    case at::ScalarType::BFloat16: return body.template operator()<at::BFloat16>();
    case at::ScalarType::Half: return body.template operator()<at::Half>();
    default: TORCH_CHECK(false, "no CPU kernel for elements of type ", type);
  }
}

}  // namespace quire
