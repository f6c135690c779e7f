// Common to all kernels: tensors, registration, thread granularity, and dispatch on the element type.
//
// Of torch, only its stable ABI is used (torch/csrc/stable), so that a compiled library works with every torch from
// TORCH_TARGET_VERSION on.

#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <vector>

// Registers the function `name` as the operation torch.ops.quire.name. The schema gives its arguments and results.
#define QUIRE_OPERATION(name, schema)                              \
  STABLE_TORCH_LIBRARY_FRAGMENT(quire, m) { m.def(#name schema); } \
  STABLE_TORCH_LIBRARY_IMPL(quire, CPU, m) { m.impl(#name, TORCH_BOX(&quire::Operation<&name>::call)); }

// What kernels of the second library need of the first one: see compiler.py.
#define QUIRE_EXPORT __attribute__((visibility("default")))

namespace quire {

// An argument `str` as the caller of `Operation` passes it.
struct Text : std::string {};

// `function`, with a `Text` for each `std::string_view`: up to torch 2.13, the headers' conversion to a `std::string`
// leaks one at each call (https://github.com/pytorch/pytorch/issues/191340).
template <auto function>
struct Operation;

template <typename Result, typename... Arguments, Result (*function)(Arguments...)>
struct Operation<function> {
  static Result call(std::conditional_t<std::is_same_v<Arguments, std::string_view>, Text, Arguments>... arguments) {
    return function(arguments...);
  }
};

}  // namespace quire

template <>
struct torch::stable::detail::ToImpl<quire::Text> {
  // The other arguments depend on torch's version: none is needed.
  static quire::Text call(StableIValue value, auto...) {
    const auto handle = to<StringHandle>(value);
    const char* data;
    size_t length;
    TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &data));
    TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
    quire::Text text{std::string(data, length)};
    TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
    return text;
  }
};

namespace quire {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Uninitialized and contiguous.
inline Tensor empty(std::span<const int64_t> sizes, ScalarType type) {
  std::vector<int64_t> strides(sizes.size());
  for (int64_t i = std::ssize(sizes) - 1, size = 1; i >= 0; --i)
    size *= std::max<int64_t>(1, sizes[i]), strides[i] = size / std::max<int64_t>(1, sizes[i]);
  AtenTensorHandle handle;
  const auto dtype = torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(std::ssize(sizes), sizes.data(), strides.data(), dtype,
                                                  aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

inline Tensor empty(std::initializer_list<int64_t> sizes, ScalarType type) {
  return empty(std::span(sizes.begin(), sizes.size()), type);
}

// The memory and shape of a tensor that lives at least as long, looked up once: a call into torch takes nanoseconds.
class View {
 public:
  explicit View(const Tensor& x)
      : data_(x.data_ptr()), type_(x.scalar_type()), element_size_(x.element_size()), sizes_(x.sizes().data()),
        strides_(x.strides().data()) {}

  template <typename T>
  T* data() const {
    return static_cast<T*>(data_);
  }
  ScalarType scalar_type() const { return type_; }
  int64_t element_size() const { return element_size_; }
  int64_t size(int64_t dim) const { return sizes_[dim]; }
  int64_t stride(int64_t dim) const { return strides_[dim]; }

 private:
  void* data_;
  ScalarType type_;
  int64_t element_size_;
  const int64_t *sizes_, *strides_;
};

// `x`, or a contiguous copy.
inline Tensor as_contiguous(const Tensor& x) { return x.is_contiguous() ? x : torch::stable::contiguous(x); }

// `x` with contiguous elements of `type`.
inline Tensor of_type(const Tensor& x, ScalarType type) {
  return as_contiguous(x.scalar_type() == type ? x : torch::stable::to(x, type));
}

inline int64_t num_threads() { return torch::stable::get_num_threads(); }

// Least elements worth waking a thread for.
constexpr int64_t kThreadElements = 1 << 14;

// Least rows of `width` elements for one thread.
inline int64_t grain(int64_t width) { return std::max<int64_t>(1, kThreadElements / std::max<int64_t>(1, width)); }

// Calls `body<T>()` for the element type of a tensor: float, bfloat16 or half.
template <typename Body>
void for_type(ScalarType type, Body&& body) {
  switch (type) {
    case ScalarType::Float:
      return body.template operator()<float>();
    case ScalarType::BFloat16:
      return body.template operator()<BFloat16>();
    case ScalarType::Half:
      return body.template operator()<Half>();
    default:
      STD_TORCH_CHECK(false, "no CPU kernel for elements of type ", type);
  }
}

}  // namespace quire
