// The compression of groups of tokens to entries (see `reference.compress_tokens`).

#include "kv_row.h"

namespace quire {
namespace {

struct Group {
  int64_t request, token, last;  // the last token, by its place in the step, and its position
};

// Computes an entry in float32. `rows` are the inputs of the group's tokens, and of those of the group before, which
// have gates if `gated`.
template <typename T>
void compress(std::span<const T* const> rows, bool gated, const float* bias, int64_t ratio, int64_t width,
              int64_t head_dim, float* out) {
  const int64_t parts = width / head_dim, count = std::ssize(rows), missing = parts * ratio - count;
  for_vectors(head_dim, [&](int64_t i, auto n) {
    const auto feature = [&](int64_t row) { return (missing + row) / ratio * head_dim + i; };
    const auto gate = [&](int64_t row) {
      const int64_t place = (missing + row) % ratio;
      const Floats own = load(bias + place * width + feature(row), n);
      return gated ? load(rows[row] + width + feature(row), n) + own : own;
    };
    Floats most = gate(0);
    for (int64_t row = 1; row < count; ++row) most = max(most, gate(row));
    Floats weights = {}, total = {};
    for (int64_t row = 0; row < count; ++row) {
      const Floats weight = exp(gate(row) - most);
      weights += weight;
      total += weight * load(rows[row] + feature(row), n);
    }
    store(out + i, total / weights, n);
  });
}

// Normalizes an entry in place.
void normalize(float* entry, const float* weight, float eps, int64_t head_dim) {
  Floats squares = {};
  for_vectors(head_dim, [&](int64_t i, auto n) {
    const Floats part = load(entry + i, n);
    squares += part * part;
  });
  const float factor = 1.0f / std::sqrt(sum(squares) / static_cast<float>(head_dim) + eps);
  for_vectors(head_dim, [&](int64_t i, auto n) {
    store(entry + i, load(entry + i, n) * factor * load(weight + i, n), n);
  });
}

// Puts the last `2 * half` features of an entry, pairs side by side, first, in halves that are rotated.
void rotate(const float* entry, const float* cos_sin, int64_t half, int64_t head_dim, float* out) {
  const int64_t plain = head_dim - 2 * half;
  for_vectors(plain, [&](int64_t i, auto n) { store(out + 2 * half + i, load(entry + i, n), n); });
  for (int64_t i = 0, at = plain; i < half; ++i, at += 2) {
    const float first = entry[at], second = entry[at + 1];
    const float cos = cos_sin[i], sin = cos_sin[half + i];
    out[i] = first * cos - second * sin;
    out[half + i] = second * cos + first * sin;
  }
}

void compress_tokens(const Tensor& inputs, const Tensor& position_bias, const std::optional<Tensor>& weight, double eps,
                     const Tensor& rotations, Tensor cache, const Tensor& slots, const Tensor& block_tables,
                     const Tensor& sequence_lengths, const Tensor& query_starts, const Tensor& entry_tables) {
  const int64_t ratio = position_bias.size(0), width = position_bias.size(1), head_dim = cache.size(4);
  const int64_t span = width / head_dim * ratio, block_size = inputs.size(3), rows = cache.size(3);
  const int64_t half = rotations.size(1) / 2;
  const bool gated = inputs.size(4) == 2 * width;
  STD_TORCH_CHECK((gated || inputs.size(4) == width) && inputs.stride(4) == 1 && width % head_dim == 0 &&
                      2 * half <= head_dim && rotations.size(1) == 2 * half && block_size % rows == 0,
                  "the inputs of entries have another shape");
  STD_TORCH_CHECK(block_tables.stride(1) == 1 && entry_tables.stride(1) == 1);
  const Places layout(cache, head_dim);
  const Tensor bias = of_type(position_bias, ScalarType::Float);
  std::optional<Tensor> factors;
  if (weight) factors = of_type(*weight, ScalarType::Float);
  const float* const weights = factors ? factors->const_data_ptr<float>() : nullptr;
  const Tensor cos_sin = as_contiguous(rotations), begins = as_contiguous(query_starts);
  const Tensor places = as_contiguous(slots), lengths = as_contiguous(sequence_lengths);
  const int64_t *slot = places.const_data_ptr<int64_t>(), *length = lengths.const_data_ptr<int64_t>();
  const int64_t* const start = begins.const_data_ptr<int64_t>();
  std::vector<Group> groups;
  for (int64_t request = 0; request < lengths.size(0); ++request) {
    for (int64_t token = start[request]; token < start[request + 1]; ++token) {
      const int64_t position = length[request] - start[request + 1] + token;
      if ((position + 1) % ratio == 0 && slot[token] >= 0) groups.push_back({request, token, position});
    }
  }
  if (groups.empty()) return;
  const View from(inputs), to(cache), tables(block_tables), entries(entry_tables);
  for_type(inputs.scalar_type(), [&]<typename T>() {
    for_type(cache.scalar_type(), [&]<typename C>() {
      parallel_for(0, std::ssize(groups), grain(4 * span * head_dim), [&](int64_t begin, int64_t end) {
        std::vector<const T*> found(span);
        std::vector<float> memory(2 * head_dim);
        float *const entry = memory.data(), *const rotated = entry + head_dim;
        for (int64_t i = begin; i < end; ++i) {
          const auto [request, token, last] = groups[i];
          const int64_t count = std::min(span, last + 1);
          const int64_t* const table = tables.data<const int64_t>() + request * tables.stride(0);
          for (int64_t row = 0; row < count; ++row) {
            const int64_t place = last + 1 - count + row;
            found[row] = from.data<const T>() + table[place / block_size] * from.stride(1) +
                         place % block_size * from.stride(3);
          }
          compress<T>(std::span(found).first(count), gated, bias.const_data_ptr<float>(), ratio, width, head_dim,
                      entry);
          if (weights) normalize(entry, weights, static_cast<float>(eps), head_dim);
          rotate(entry, cos_sin.const_data_ptr<float>() + token * 2 * half, half, head_dim, rotated);
          const int64_t block = entries.data<const int64_t>()[request * entries.stride(0) + last / block_size];
          const char* first = to.data<const char>() + block * to.stride(1) * to.element_size();
          store_kv_row<C>(rotated, layout.row(first, last % block_size / (block_size / rows)), head_dim);
        }
      });
    });
  });
}

}  // namespace

QUIRE_OPERATION(compress_tokens,
                "(Tensor inputs, Tensor position_bias, Tensor? weight, float eps, Tensor rotations, Tensor(a!) cache, "
                "Tensor slots, Tensor block_tables, Tensor sequence_lengths, Tensor query_starts, Tensor entry_tables) "
                "-> ()")

}  // namespace quire
