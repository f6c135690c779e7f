// Operations that process one row at a time.

#include "activation.h"
#include "int4_kv.h"
#include "kv_row.h"
#include "vec.h"

namespace quire {
namespace {

// Calls `body(f)` for the activation of that name, where `f(gate, up)` is the gated activation.
template <typename Body>
void for_gated(std::string_view name, Body&& body) {
  if (name == "silu") return body([](Floats gate, Floats up) { return silu(gate) * up; });
  if (name == "gelu") return body([](Floats gate, Floats up) { return gelu(gate) * up; });
  if (name == "gelu_tanh") return body([](Floats gate, Floats up) { return gelu_tanh(gate) * up; });
  if (name == "relu") return body([](Floats gate, Floats up) { return relu(gate) * up; });
  if (name == "relu2") return body([](Floats gate, Floats up) { return relu2(gate) * up; });
  if (name == "swiglu_oai") return body([](Floats gate, Floats up) { return swiglu_oai(gate, up); });
  if (name == "silu_7") return body([](Floats gate, Floats up) { return limited_silu<7>(gate, up); });
  if (name == "silu_16") return body([](Floats gate, Floats up) { return limited_silu<16>(gate, up); });
  if (name == "silu_clamped") return body([](Floats gate, Floats up) { return silu_clamped(gate, up); });
  STD_TORCH_CHECK(false, "no CPU kernel for the activation ", name);
}

// Calls `body(f)` for the activation of that name without gates.
template <typename Body>
void for_activation(std::string_view name, Body&& body) {
  if (name == "silu") return body([](Floats x) { return silu(x); });
  if (name == "gelu") return body([](Floats x) { return gelu(x); });
  if (name == "gelu_tanh") return body([](Floats x) { return gelu_tanh(x); });
  if (name == "quick_gelu") return body([](Floats x) { return quick_gelu(x); });
  if (name == "relu") return body([](Floats x) { return relu(x); });
  if (name == "relu2") return body([](Floats x) { return relu2(x); });
  STD_TORCH_CHECK(false, "no CPU kernel for the activation ", name);
}

Tensor activate(const Tensor& x, std::string_view activation) {
  const Tensor numbers = as_contiguous(x);
  Tensor out = empty(numbers.sizes(), numbers.scalar_type());
  for_type(numbers.scalar_type(), [&]<typename T>() {
    const T* from = numbers.const_data_ptr<T>();
    T* to = out.mutable_data_ptr<T>();
    for_activation(activation, [&](auto activated) {
      // Pieces are whole vectors, so that a number's place in its vector does not depend on the threads.
      parallel_for(0, vectors(numbers.numel()), kThreadElements / kLanes, [&](int64_t begin, int64_t end) {
        const int64_t first = begin * kLanes, last = std::min<int64_t>(end * kLanes, numbers.numel());
        for_vectors(last - first, [&](int64_t i, auto n) { store(to + first + i, activated(load(from + first + i, n)), n); });
      });
    });
  });
  return out;
}

Tensor act_mul(const Tensor& x, std::string_view activation) {
  const Tensor rows = as_contiguous(x);
  const int64_t width = rows.size(-1) / 2, count = width ? rows.numel() / (2 * width) : 0;
  std::vector<int64_t> shape = rows.sizes().vec();
  shape.back() = width;
  Tensor out = empty(shape, rows.scalar_type());
  for_type(rows.scalar_type(), [&]<typename T>() {
    const T* from = rows.const_data_ptr<T>();
    T* to = out.mutable_data_ptr<T>();
    for_gated(activation, [&](auto gated) {
      parallel_for(0, count, grain(2 * width), [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
          const T* gate = from + row * 2 * width;
          for_vectors(width, [&](int64_t i, auto n) {
            store(to + row * width + i, gated(load(gate + i, n), load(gate + width + i, n)), n);
          });
        }
      });
    });
  });
  return out;
}

// A tensor's rows along its last dimension, which is contiguous; the other dimensions are folded into two.
struct Rows {
  Tensor tensor;
  int64_t outer, inner, outer_stride, inner_stride, width;

  explicit Rows(const Tensor& x) : tensor(x.dim() <= 3 && x.stride(-1) == 1 ? x : as_contiguous(x)) {
    const int64_t dims = tensor.dim(), folded = std::min<int64_t>(dims, 3);
    width = tensor.size(-1);
    inner = dims >= 3 ? tensor.size(-2) : 1;
    inner_stride = dims >= 3 ? tensor.stride(-2) : 0;
    outer = 1;
    for (int64_t i = 0; i <= dims - folded && dims >= 2; ++i) outer *= tensor.size(i);
    outer_stride = dims >= 2 ? tensor.stride(-folded) : 0;
  }

  int64_t count() const { return outer * inner; }

  template <typename T>
  const T* row(int64_t i) const {
    return tensor.const_data_ptr<T>() + i / inner * outer_stride + i % inner * inner_stride;
  }
};

// `out = row / rms(row) · (weight + offset)`, with the sum of squares in float32.
template <typename T>
void normalize(const T* row, Floats squares, const T* weight, T* out, int64_t width, float eps, float offset) {
  const float factor = 1.0f / std::sqrt(sum(squares) / static_cast<float>(width) + eps);
  for_vectors(width, [&](int64_t i, auto n) {
    store(out + i, load(row + i, n) * factor * (load(weight + i, n) + offset), n);
  });
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps, double offset) {
  const Rows rows(x);
  const Tensor weights = of_type(weight, x.scalar_type());
  Tensor out = empty(x.sizes(), x.scalar_type());
  for_type(x.scalar_type(), [&]<typename T>() {
    const T* w = weights.const_data_ptr<T>();
    T* to = out.mutable_data_ptr<T>();
    parallel_for(0, rows.count(), grain(rows.width), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const T* from = rows.row<T>(row);
        Floats squares = {};
        for_vectors(rows.width, [&](int64_t i, auto n) {
          const Floats part = load(from + i, n);
          squares += part * part;
        });
        normalize(from, squares, w, to + row * rows.width, rows.width, eps, offset);
      }
    });
  });
  return out;
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps,
                                        double offset) {
  STD_TORCH_CHECK(x.sizes() == residual.sizes() && x.scalar_type() == residual.scalar_type());
  const Rows rows(x), residuals(residual);
  const Tensor weights = of_type(weight, x.scalar_type());
  Tensor out = empty(x.sizes(), x.scalar_type()), total = empty(x.sizes(), x.scalar_type());
  for_type(x.scalar_type(), [&]<typename T>() {
    const T* w = weights.const_data_ptr<T>();
    T* to = out.mutable_data_ptr<T>();
    T* totals = total.mutable_data_ptr<T>();
    parallel_for(0, rows.count(), grain(rows.width), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const T *a = rows.row<T>(row), *b = residuals.row<T>(row);
        T* added = totals + row * rows.width;
        Floats squares = {};
        for_vectors(rows.width, [&](int64_t i, auto n) {
          store(added + i, load(a + i, n) + load(b + i, n), n);
          const Floats part = load(added + i, n);  // as rounded to T
          squares += part * part;
        });
        normalize(added, squares, w, to + row * rows.width, rows.width, eps, offset);
      }
    });
  });
  return {out, total};
}

// Rotates the first `half` features of a head with the second; copies the rest. `rotations`: cosines, then sines.
template <typename T>
void rotate(const T* head, const float* cos_sin, T* out, int64_t half, int64_t head_dim) {
  for_vectors(half, [&](int64_t i, auto n) {
    const Floats first = load(head + i, n), second = load(head + half + i, n);
    const Floats cos = load(cos_sin + i, n), sin = load(cos_sin + half + i, n);
    store(out + i, first * cos - second * sin, n);
    store(out + half + i, second * cos + first * sin, n);
  });
  std::copy(head + 2 * half, head + head_dim, out + 2 * half);
}

template <typename T>
void widen(const T* row, float* out, int64_t width) {
  for_vectors(width, [&](int64_t i, auto n) { store(out + i, load(row + i, n), n); });
}

// Without values, the cache has one side, of keys. A token whose slot is negative is not stored.
Tensor rotary_write_kv(const Tensor& query, const Tensor& key, const std::optional<Tensor>& value,
                       const Tensor& rotations, Tensor cache, const Tensor& slots) {
  const int64_t tokens = query.size(0), head_dim = query.size(2), key_dim = key.size(2), block_size = cache.size(3);
  const int64_t half = rotations.size(1) / 2;
  const Places layout(cache, key_dim);
  STD_TORCH_CHECK(rotations.size(1) == 2 * half && 2 * half <= std::min(head_dim, key_dim),
                  "rotary_dim exceeds the head size");
  STD_TORCH_CHECK(cache.size(0) == (value ? 2 : 1), "the cache has ", cache.size(0), " sides");
  STD_TORCH_CHECK(key.scalar_type() == query.scalar_type() && (!value || value->scalar_type() == query.scalar_type()));
  const Rows queries(query), keys(key), values(value ? *value : key);
  const Tensor cos_sin = as_contiguous(rotations), places = as_contiguous(slots);
  Tensor out = empty(query.sizes(), query.scalar_type());
  decltype(&store_kv_row<float>) store_row;
  for_kv_type(cache.scalar_type(), [&]<typename C>() { store_row = store_kv_row<C>; });
  char* const data = static_cast<char*>(cache.mutable_data_ptr());
  const auto place = [&](int64_t side, int64_t slot, int64_t head) {
    const int64_t first = side * cache.stride(0) + slot / block_size * cache.stride(1) + head * cache.stride(2);
    return layout.row(data + cache.element_size() * first, slot % block_size);
  };
  for_type(query.scalar_type(), [&]<typename T>() {
    T* to = out.mutable_data_ptr<T>();
    const int64_t width = head_dim * queries.inner + 2 * key_dim * keys.inner;
    parallel_for(0, tokens, grain(width), [&](int64_t begin, int64_t end) {
      std::vector<T> rotated(key_dim);
      std::vector<float> wide(key_dim);
      for (int64_t token = begin; token < end; ++token) {
        const float* token_cos_sin = cos_sin.const_data_ptr<float>() + token * 2 * half;
        const int64_t slot = places.const_data_ptr<int64_t>()[token];
        for (int64_t head = 0; head < queries.inner; ++head) {
          const int64_t row = token * queries.inner + head;
          rotate(queries.row<T>(row), token_cos_sin, to + row * head_dim, half, head_dim);
        }
        for (int64_t head = 0; slot >= 0 && head < keys.inner; ++head) {
          const int64_t row = token * keys.inner + head;
          rotate(keys.row<T>(row), token_cos_sin, rotated.data(), half, key_dim);
          widen(rotated.data(), wide.data(), key_dim);  // rounded to T before it is stored
          store_row(wide.data(), place(0, slot, head), key_dim);
          if (!value) continue;
          widen(values.row<T>(row), wide.data(), key_dim);
          store_row(wide.data(), place(1, slot, head), key_dim);
        }
      }
    });
  });
  return out;
}

// Packs `rows` of 2 · half codes, with these distances, into rows of `half` bytes: see `quire.kernels.int4_kv`.
void pack_codes(const uint8_t* codes, int64_t rows, int64_t half, int64_t row_step, int64_t step, uint8_t* to) {
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t i = 0; i < half; ++i) {
      const uint8_t* at = codes + row * row_step + i * step;
      *to++ = static_cast<uint8_t>(at[0] | at[half * step] << 4);
    }
  }
}

// See `quire.kernels.int4_kv`.
void quantize_kv(const Tensor& recent, Tensor cache, const Tensor& recent_slots, const Tensor& slots) {
  const Int4Layout layout = Int4Layout::of(cache);
  const int64_t size = layout.head_dim, block_size = layout.block_size, heads = cache.size(2);
  STD_TORCH_CHECK(recent.size(0) == 2 && recent.size(2) == heads && recent.size(3) == block_size &&
                      recent.size(4) == size && recent.stride(4) == 1 && recent.stride(3) == size,
                  "the recent blocks do not have the shape of the cache");
  const Tensor from = as_contiguous(recent_slots), to = as_contiguous(slots);
  std::vector<std::pair<int64_t, int64_t>> blocks;
  for (int64_t token = 0; token < to.size(0); ++token) {
    const int64_t slot = to.const_data_ptr<int64_t>()[token];
    if (slot >= 0 && slot % block_size == block_size - 1) {
      blocks.emplace_back(from.const_data_ptr<int64_t>()[token] / block_size, slot / block_size);
    }
  }
  uint8_t* const data = static_cast<uint8_t*>(cache.mutable_data_ptr());
  for_type(recent.scalar_type(), [&]<typename T>() {
    const T* numbers = recent.const_data_ptr<T>();
    parallel_for(0, std::ssize(blocks) * heads, grain(2 * block_size * size), [&](int64_t begin, int64_t end) {
      std::vector<float> wide(block_size * size);
      std::vector<uint8_t> codes(block_size * size);
      for (int64_t i = begin; i < end; ++i) {
        const auto [source, target] = blocks[i / heads];
        const int64_t head = i % heads;
        uint8_t* at = data + target * cache.stride(1) + head * cache.stride(2);
        for (int64_t side = 0; side < 2; ++side) {
          const int64_t first = side * recent.stride(0) + source * recent.stride(1) + head * recent.stride(2);
          widen(numbers + first, wide.data(), block_size * size);
          Half* scales = reinterpret_cast<Half*>(at + (side ? layout.to_value_scales : layout.to_key_scales));
          find_codes(wide.data(), block_size, size, side == 0, codes.data(), scales, scales + (side ? block_size : size));
          if (side) pack_codes(codes.data(), block_size, size / 2, size, 1, at + layout.to_values);
          else pack_codes(codes.data(), size, block_size / 2, 1, size, at);
        }
      }
    });
  });
}

}  // namespace

Gated find_gated(std::string_view name) {
  Gated gated = nullptr;
  for_gated(name, [&](auto function) { gated = function; });
  return gated;
}

QUIRE_OPERATION(activate, "(Tensor x, str activation) -> Tensor")
QUIRE_OPERATION(act_mul, "(Tensor x, str activation) -> Tensor")
QUIRE_OPERATION(rms_norm, "(Tensor x, Tensor weight, float eps, float offset) -> Tensor")
QUIRE_OPERATION(add_rms_norm, "(Tensor x, Tensor residual, Tensor weight, float eps, float offset) -> (Tensor, Tensor)")
QUIRE_OPERATION(rotary_write_kv,
                "(Tensor query, Tensor key, Tensor? value, Tensor rotations, Tensor(a!) cache, Tensor slots) -> Tensor")
QUIRE_OPERATION(quantize_kv, "(Tensor recent, Tensor(a!) cache, Tensor recent_slots, Tensor slots) -> ()")

}  // namespace quire
