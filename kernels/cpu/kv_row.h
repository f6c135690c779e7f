// A row of the KV cache: one token's keys or values of one head, as `quire.kernels.cache` lays them out.

#pragma once

#include "vec.h"

namespace quire {

// Elements of a row; behind the integers of an int8 row stands their scale.
inline int64_t kv_row_size(at::ScalarType type, int64_t head_dim) {
  return type == at::ScalarType::Char ? head_dim + static_cast<int64_t>(sizeof(float)) : head_dim;
}

// Calls `body<C>()` for the element type of a KV cache.
template <typename Body>
void for_kv_type(at::ScalarType type, Body&& body) {
  if (type == at::ScalarType::Char) return body.template operator()<int8_t>();
  for_type(type, body);
}

template <typename C>
struct KvRow {
  const C* at = nullptr;

  KvRow() = default;
  KvRow(const char* row, int64_t) : at(reinterpret_cast<const C*>(row)) {}

  Floats load(int64_t i, auto n) const { return quire::load(at + i, n); }
};

template <>
struct KvRow<int8_t> {
  const int8_t* at = nullptr;
  float scale = 0.0f;

  KvRow() = default;
  KvRow(const char* row, int64_t head_dim)
      : at(reinterpret_cast<const int8_t*>(row)), scale(read<float>(row + head_dim)) {}

  Floats load(int64_t i, auto n) const { return quire::load(at + i, n) * scale; }
};

template <typename C>
void store_kv_row(const float* x, char* row, int64_t head_dim) {
  for_vectors(head_dim, [&](int64_t i, auto n) { store(reinterpret_cast<C*>(row) + i, load(x + i, n), n); });
}

// Symmetric: the largest becomes ±127.
template <>
inline void store_kv_row<int8_t>(const float* x, char* row, int64_t head_dim) {
  Floats largest = {};
  for_vectors(head_dim, [&](int64_t i, auto n) {
    const Floats part = load(x + i, n);
    largest = max(largest, max(part, -part));
  });
  const float scale = max(largest) / 127.0f;
  const Floats divisor = broadcast(scale > 0.0f ? scale : 1.0f);
  for_vectors(head_dim, [&](int64_t i, auto n) {
    const Floats whole = round(load(x + i, n) / divisor);
    store(reinterpret_cast<int8_t*>(row) + i, min(max(whole, broadcast(-127.0f)), broadcast(127.0f)), n);
  });
  std::memcpy(row + head_dim, &scale, sizeof(scale));
}

}  // namespace quire
