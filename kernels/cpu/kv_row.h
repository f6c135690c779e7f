// A row of the KV cache: one token's keys or values of one head, in the layout of `quire.kernels.cache`.

#pragma once

#include <torch/headeronly/util/Float8_e4m3fn.h>

#include "vec.h"

namespace quire {

using Fp8 = torch::headeronly::Float8_e4m3fn;

template <typename C>
constexpr bool kIsQuantized = std::is_same_v<C, int8_t> || std::is_same_v<C, Fp8>;

template <typename C>
constexpr float kLargest = std::is_same_v<C, int8_t> ? 127.0f : 448.0f;  // what a row's largest magnitude maps to

// The factor to apply to the result of `load_number`.
template <typename C>
constexpr float kUnit = std::is_same_v<C, Fp8> ? 256.0f : 1.0f;

template <typename C>
Floats load_number(const C* x, auto n) {
  return load(x, n);
}

// Reads the bits as a float16, whose exponent bias is 15 instead of 7. Rows contain no NaN.
inline Floats load_number(const Fp8* x, AllLanes) {
  using Bits = uint8_t __attribute__((vector_size(kLanes)));
  const Halves bits = __builtin_convertvector(read<Bits>(x), Halves);
  return from_halves((bits & 0x80) << 8 | (bits & 0x7F) << 7);
}

inline Floats load_number(const Fp8* x, int n) {
  Fp8 row[kLanes] = {};
  std::memcpy(row, x, n);
  return load_number(row, AllLanes());
}

// Rounds to nearest, ties to even.
inline void store_number(int8_t* to, Floats x, auto n) { store(to, round(x), n); }

// |x| ≤ 448. Below 2⁻⁶ the bits count steps of 2⁻⁹; above, they are those of the float, whose exponent bias is 127.
inline void store_number(Fp8* to, Floats x, AllLanes) {
  using Bits = uint8_t __attribute__((vector_size(kLanes)));
  const Words bits = std::bit_cast<Words>(x), plain = bits & 0x7FFFFFFF;
  const Words rounded = ((plain + 0x7FFFF + (plain >> 20 & 1)) >> 20) - (120 << 3);
  const Words steps = std::bit_cast<Words>(__builtin_convertvector(round(max(x, -x) * 512.0f), Ints));
  const Words number = plain < std::bit_cast<uint32_t>(0x1p-6f) ? steps : rounded;
  const Bits bytes = __builtin_convertvector(number | bits >> 24 & 0x80, Bits);
  std::memcpy(to, &bytes, sizeof(bytes));
}

inline void store_number(Fp8* to, Floats x, int n) {
  Fp8 row[kLanes];
  store_number(row, x, AllLanes());
  std::memcpy(to, row, n);
}

// Calls `body<C>()` for the element type of a KV cache.
template <typename Body>
void for_kv_type(ScalarType type, Body&& body) {
  if (type == ScalarType::Char) return body.template operator()<int8_t>();
  if (type == ScalarType::Float8_e4m3fn) return body.template operator()<Fp8>();
  for_type(type, body);
}

// The address of a row.
struct Place {
  const char *numbers, *scale;  // `scale` of quantized caches only

  Place operator+(int64_t bytes) const { return {numbers + bytes, scale + bytes}; }
};

// The addresses of the rows of one head of a block, which starts at `at`.
struct Places {
  int64_t row_bytes, to_scales;  // `row_bytes` of the numbers; `to_scales` is 0 if there are none

  Places(const Tensor& cache, int64_t head_dim) {
    const int64_t size = cache.element_size(), scale = cache.size(4) - head_dim;
    int64_t expected = 0;
    for_kv_type(cache.scalar_type(), [&]<typename C>() { expected = kIsQuantized<C> ? sizeof(float) : 0; });
    STD_TORCH_CHECK(scale == expected && cache.stride(4) == 1 && (!scale || cache.stride(3) == cache.size(4)),
                    "the rows of the cache do not match heads of ", head_dim);
    row_bytes = scale ? head_dim : cache.stride(3) * size;
    to_scales = scale ? cache.size(3) * head_dim : 0;
  }

  Place row(const char* at, int64_t number) const {
    return {at + number * row_bytes, at + to_scales + number * static_cast<int64_t>(sizeof(float))};
  }
};

template <typename C>
struct KvRow {
  const C* at = nullptr;

  KvRow() = default;
  KvRow(const Place& place) : at(reinterpret_cast<const C*>(place.numbers)) {}

  Floats load(int64_t i, auto n) const { return quire::load(at + i, n); }
};

template <typename C>
  requires kIsQuantized<C>
struct KvRow<C> {
  const C* at = nullptr;
  float scale = 0.0f;

  KvRow() = default;
  KvRow(const Place& place)
      : at(reinterpret_cast<const C*>(place.numbers)), scale(read<float>(place.scale) * kUnit<C>) {}

  Floats load(int64_t i, auto n) const { return load_number(at + i, n) * scale; }
};

template <typename C>
void store_kv_row(const float* x, const Place& place, int64_t head_dim) {
  C* row = reinterpret_cast<C*>(const_cast<char*>(place.numbers));
  if constexpr (!kIsQuantized<C>) {
    for_vectors(head_dim, [&](int64_t i, auto n) { store(row + i, load(x + i, n), n); });
  } else {
    constexpr float kMost = kLargest<C>;
    Floats largest = {};
    for_vectors(head_dim, [&](int64_t i, auto n) {
      const Floats part = load(x + i, n);
      largest = max(largest, max(part, -part));
    });
    const float scale = max(largest) / kMost;
    const Floats divisor = broadcast(scale > 0.0f ? scale : 1.0f);
    for_vectors(head_dim, [&](int64_t i, auto n) {
      store_number(row + i, min(max(load(x + i, n) / divisor, broadcast(-kMost)), broadcast(kMost)), n);
    });
    std::memcpy(const_cast<char*>(place.scale), &scale, sizeof(scale));
  }
}

}  // namespace quire
