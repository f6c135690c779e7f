// Layers with a recurrent state: the causal convolution, linear attention, the selective scan and RWKV's weighted means
// (see `reference.causal_conv`, `reference.linear_attention`, `reference.selective_scan` and `reference.wkv`).

#include "activation.h"
#include "vec.h"

namespace quire {
namespace {

// The segments of a step (`cache.StateSegments`).
struct Segments {
  Segments(const Tensor& starts, const Tensor& rows, const Tensor& read, const Tensor& write)
      : starts(as_contiguous(starts)), rows(as_contiguous(rows)), read(as_contiguous(read)),
        write(as_contiguous(write)) {}

  int64_t num_rows() const { return rows.size(0) - 1; }
  const int64_t* start() const { return starts.const_data_ptr<int64_t>(); }
  const int64_t* first() const { return rows.const_data_ptr<int64_t>(); }

  Tensor starts, rows, read, write;
};

// Convolves the channels from `begin` to `end` of one row. `seen` is a ring of the last inputs, in float32. `weight`
// has the weights of each place and, as those of place `size`, the biases.
template <typename T>
void convolve(const T* x, int64_t x_stride, const float* weight, int64_t size, T* inputs, int64_t page, T* out,
              int64_t channels, int64_t begin, int64_t end, const Segments& segments, int64_t row, bool with_silu) {
  const int64_t* const starts = segments.start();
  const int64_t* const read = segments.read.const_data_ptr<int64_t>();
  const int64_t* const write = segments.write.const_data_ptr<int64_t>();
  const int64_t first = segments.first()[row], last = segments.first()[row + 1], before = size - 1;
  for_vectors(end - begin, [&](int64_t at, auto n) {
    const int64_t channel = begin + at;
    std::vector<Floats> seen(size);
    for (int64_t i = 0; i < before; ++i)
      seen[i] = read[first] < 0 ? Floats{} : load(inputs + read[first] * page + i * channels + channel, n);
    int64_t newest = before;
    for (int64_t segment = first; segment < last; ++segment) {
      for (int64_t token = starts[segment]; token < starts[segment + 1]; ++token) {
        seen[newest] = load(x + token * x_stride + channel, n);
        Floats sum = load(weight + size * channels + channel, n);
        for (int64_t i = 0; i < size; ++i)
          sum += seen[(newest + 1 + i) % size] * load(weight + i * channels + channel, n);
        store(out + token * channels + channel, with_silu ? silu(sum) : sum, n);
        newest = (newest + 1) % size;
      }
      for (int64_t i = 0; write[segment] >= 0 && i < before; ++i)
        store(inputs + write[segment] * page + i * channels + channel, seen[(newest + 1 + i) % size], n);
    }
  });
}

Tensor causal_conv(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, Tensor inputs,
                   const Tensor& starts, const Tensor& rows, const Tensor& read, const Tensor& write, bool silu) {
  const int64_t tokens = x.size(0), channels = x.size(1), size = weight.size(1);
  STD_TORCH_CHECK(inputs.size(1) == size - 1 && inputs.size(2) == channels && inputs.stride(1) == channels &&
                      inputs.stride(2) == 1 && x.stride(1) == 1,
                  "the inputs of a convolution have another shape");
  STD_TORCH_CHECK(inputs.scalar_type() == x.scalar_type());
  const Segments segments(starts, rows, read, write);
  Tensor out = empty({tokens, channels}, x.scalar_type());
  std::vector<float> by_place((size + 1) * channels);
  const View weights(weight);
  for_type(weight.scalar_type(), [&]<typename W>() {
    for (int64_t channel = 0; channel < channels; ++channel)
      for (int64_t i = 0; i < size; ++i)
        by_place[i * channels + channel] =
            static_cast<float>(weights.data<W>()[channel * weights.stride(0) + i * weights.stride(1)]);
  });
  if (bias) {
    const Tensor biases = as_contiguous(*bias);
    for_type(biases.scalar_type(), [&]<typename W>() {
      for (int64_t channel = 0; channel < channels; ++channel)
        by_place[size * channels + channel] = static_cast<float>(biases.const_data_ptr<W>()[channel]);
    });
  }
  for_type(x.scalar_type(), [&]<typename T>() {
    const T* from = x.const_data_ptr<T>();
    T* memory = static_cast<T*>(inputs.mutable_data_ptr());
    T* to = out.mutable_data_ptr<T>();
    const int64_t page = inputs.stride(0), parts = vectors(channels);
    const int64_t work = parts * segments.num_rows(), each = std::max<int64_t>(1, tokens / segments.num_rows());
    parallel_for(0, work, grain(each * size * kLanes), [&](int64_t begin, int64_t end) {
      while (begin < end) {
        const int64_t row = begin / parts, part = begin % parts, count = std::min(parts - part, end - begin);
        convolve(from, x.stride(0), by_place.data(), size, memory, page, to, channels, part * kLanes,
                 std::min(channels, (part + count) * kLanes), segments, row, silu);
        begin += count;
      }
    });
  });
  return out;
}

constexpr int kVectors = 2;                       // of a tile's row
constexpr int64_t kTile = kVectors * kLanes;      // columns of a state that are processed together
constexpr int64_t kChunk = 64;                    // tokens whose queries and keys are prepared together
constexpr int64_t kTogether = 4;                  // heads with one key head, at most, that share a chunk
constexpr int64_t kAhead = 8;                     // tokens whose queries and keys, which lie far apart, are prefetched

template <typename T>
void prefetch(const T* row, int64_t width) {
  for (int64_t i = 0; i < width; i += 64 / int64_t{sizeof(T)}) __builtin_prefetch(row + i);
}

// The state of one head `[key_dim, value_dim]`, in tiles `[key_dim, kTile]` that fit into the first-level cache.
class HeadState {
 public:
  HeadState(int64_t key_dim, int64_t value_dim)
      : key_dim_(key_dim), value_dim_(value_dim), memory_(key_dim * tiles() * kTile) {}

  int64_t tiles() const { return (value_dim_ + kTile - 1) / kTile; }
  float* tile(int64_t number) { return memory_.data() + number * key_dim_ * kTile; }

  void clear() { std::fill(memory_.begin(), memory_.end(), 0.0f); }

  void read(const float* from) {
    each([&](float* mine, int64_t place, int64_t count) { std::copy_n(from + place, count, mine); });
  }

  void write(float* to) {
    each([&](const float* mine, int64_t place, int64_t count) { std::copy_n(mine, count, to + place); });
  }

 private:
  template <typename Body>
  void each(const Body& body) {
    for (int64_t number = 0; number < tiles(); ++number)
      for (int64_t i = 0; i < key_dim_; ++i)
        body(tile(number) + i * kTile, i * value_dim_ + number * kTile, std::min(kTile, value_dim_ - number * kTile));
  }

  int64_t key_dim_, value_dim_;
  std::vector<float> memory_;
};

// Queries and keys of a chunk's tokens, for one key head, and decays, for one head. A token has a decay, or one for each
// feature.
struct Chunk {
  Chunk(int64_t key_dim, int64_t decays)
      : key_dim(key_dim), decays(decays), query(kChunk * key_dim), key(kChunk * key_dim), decay(kChunk * decays),
        dot(kChunk), beta(kChunk) {}

  template <typename T>
  void prepare(int64_t token, const T* query_row, const T* key_row, float scale, float eps) {
    float *q = query.data() + token * key_dim, *k = key.data() + token * key_dim;
    Floats q_length{}, k_length{}, both{};
    for_vectors(key_dim, [&](int64_t i, auto n) {
      const Floats a = load(query_row + i, n), b = load(key_row + i, n);
      q_length += a * a, k_length += b * b, both += a * b;
      store(q + i, a, n), store(k + i, b, n);
    });
    const float by_q = scale * (eps > 0 ? 1 / std::sqrt(sum(q_length) + eps) : 1.0f);
    const float by_k = eps > 0 ? 1 / std::sqrt(sum(k_length) + eps) : 1.0f;
    for (int64_t i = 0; i < key_dim; ++i) q[i] *= by_q, k[i] *= by_k;
    dot[token] = sum(both) * by_q * by_k;
  }

  void prepare_decay(int64_t token, const float* logarithms) {
    for (int64_t i = 0; i < decays; ++i) decay[token * decays + i] = std::exp(logarithms[i]);
  }

  int64_t key_dim, decays;
  std::vector<float> query, key, decay, dot, beta;
};

// Runs a tile through the tokens of a chunk. A token's update is added to the state when the next token reads it, so
// that the state is read and written once for each token.
template <bool kOneDecay, typename T>
void run_tile(float* state, const Chunk& chunk, int64_t tokens, bool is_delta, bool has_beta, const T* value,
              int64_t value_stride, T* out, int64_t out_stride, int64_t width) {
  using Row = Floats[kVectors];
  const int64_t key_dim = chunk.key_dim;
  Row update{};
  const float* before = chunk.key.data();  // the key of `update`
  for (int64_t token = 0; token < tokens; ++token) {
    const float *q = chunk.query.data() + token * key_dim, *k = chunk.key.data() + token * key_dim;
    const float* d = chunk.decay.data() + token * chunk.decays;
    const float decay = d[0];
    Row seen{}, answer{};
    for (int64_t i = 0; i < key_dim; ++i) {
      // Read once: to the compiler, what is stored might change them.
      const float of_before = before[i], of_key = k[i], of_query = q[i], by = kOneDecay ? decay : d[i];
      for (int v = 0; v < kVectors; ++v) {
        float* const place = state + i * kTile + v * kLanes;
        const Floats now = (read<Floats>(place) + of_before * update[v]) * by;
        std::memcpy(place, &now, sizeof(now));
        seen[v] += of_key * now;
        answer[v] += of_query * now;
      }
    }
    for_vectors(width, [&](int64_t at, auto n) {
      Floats& mine = update[at / kLanes];
      mine = load(value + token * value_stride + at, n);
      if (is_delta) mine -= seen[at / kLanes];
      if (has_beta) mine *= chunk.beta[token];
      store(out + token * out_stride + at, answer[at / kLanes] + chunk.dot[token] * mine, n);
    });
    before = k;
  }
  for (int64_t i = 0; i < key_dim; ++i)
    for (int v = 0; v < kVectors; ++v) {
      float* const place = state + i * kTile + v * kLanes;
      const Floats now = read<Floats>(place) + before[i] * update[v];
      std::memcpy(place, &now, sizeof(now));
    }
}

Tensor linear_attention(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& decays,
                        const std::optional<Tensor>& betas, Tensor matrices, const Tensor& starts, const Tensor& rows,
                        const Tensor& read_pages, const Tensor& write_pages, double scale, double eps, bool is_delta) {
  const int64_t heads = value.size(1), value_dim = value.size(2);
  const int64_t key_heads = key.size(1), key_dim = key.size(2);
  STD_TORCH_CHECK(matrices.size(1) == heads && matrices.size(2) == key_dim && matrices.size(3) == value_dim &&
                      matrices.stride(3) == 1 && matrices.stride(2) == value_dim,
                  "the states have another shape");
  STD_TORCH_CHECK(query.stride(2) == 1 && key.stride(2) == 1 && value.stride(2) == 1 && heads % key_heads == 0);
  STD_TORCH_CHECK(query.scalar_type() == value.scalar_type() && key.scalar_type() == value.scalar_type());
  const Segments segments(starts, rows, read_pages, write_pages);
  const bool per_feature = decays.dim() == 3;
  const Tensor decay = as_contiguous(decays), beta = as_contiguous(betas ? *betas : decays);
  Tensor out = empty(value.sizes(), value.scalar_type());
  const View states(matrices), queries(query), keys(key), values(value);
  const int64_t* const read = segments.read.const_data_ptr<int64_t>();
  const int64_t* const write = segments.write.const_data_ptr<int64_t>();
  for_type(value.scalar_type(), [&]<typename T>() {
    const int64_t work = segments.num_rows() * heads;
    T* const results = out.mutable_data_ptr<T>();
    parallel_for(0, work, 1, [&](int64_t begin, int64_t end) {
      const int64_t sharing = heads / key_heads;  // a key head
      std::vector<HeadState> heads_together(std::min(sharing, kTogether), HeadState(key_dim, value_dim));
      Chunk chunk(key_dim, per_feature ? key_dim : 1);
      const auto run = per_feature ? run_tile<false, T> : run_tile<true, T>;
      for (int64_t item = begin, together; item < end; item += together) {
        const int64_t row = item / heads, first_head = item % heads, key_head = first_head / sharing;
        const int64_t first = segments.first()[row], last = segments.first()[row + 1];
        together = std::min({sharing - first_head % sharing, end - item, kTogether});
        if (first == last) continue;
        const auto page = [&](int64_t number, int64_t head) {
          return states.data<float>() + number * states.stride(0) + head * states.stride(1);
        };
        const auto query_row = [&](int64_t token) {
          return queries.data<const T>() + token * queries.stride(0) + key_head * queries.stride(1);
        };
        const auto key_row = [&](int64_t token) {
          return keys.data<const T>() + token * keys.stride(0) + key_head * keys.stride(1);
        };
        const auto each_head = [&](auto&& body) {
          for (int64_t i = 0; i < together; ++i) body(heads_together[i], first_head + i);
        };
        each_head([&](HeadState& state, int64_t head) {
          if (read[first] < 0) state.clear();
          else state.read(page(read[first], head));
        });
        for (int64_t segment = first; segment < last; ++segment) {
          const int64_t stop = segments.start()[segment + 1];
          for (int64_t from = segments.start()[segment]; from < stop; from += kChunk) {
            const int64_t count = std::min(kChunk, stop - from);
            for (int64_t token = 0; token < count; ++token) {
              const int64_t ahead = std::min(from + token + kAhead, stop - 1);
              prefetch(query_row(ahead), key_dim);
              prefetch(key_row(ahead), key_dim);
              chunk.prepare(token, query_row(from + token), key_row(from + token), static_cast<float>(scale),
                            static_cast<float>(eps));
            }
            each_head([&](HeadState& state, int64_t head) {
              for (int64_t token = 0; token < count; ++token) {
                const int64_t at = (from + token) * heads + head;
                chunk.prepare_decay(token, decay.const_data_ptr<float>() + at * chunk.decays);
                if (betas) chunk.beta[token] = beta.const_data_ptr<float>()[at];
              }
              for (int64_t tile = 0; tile < state.tiles(); ++tile)
                run(state.tile(tile), chunk, count, is_delta, betas.has_value(),
                    values.data<const T>() + from * values.stride(0) + head * values.stride(1) + tile * kTile,
                    values.stride(0), results + (from * heads + head) * value_dim + tile * kTile, heads * value_dim,
                    std::min(kTile, value_dim - tile * kTile));
            });
          }
          if (write[segment] >= 0)
            each_head([&](HeadState& state, int64_t head) { state.write(page(write[segment], head)); });
        }
      }
    });
  });
  return out;
}

constexpr int kScanned = 4;  // vectors of channels that are scanned together, as far as a row has so many

// Runs some channels of the state of one row, `[state_size, channels]`, through the row's tokens.
template <typename T>
void scan(const T* x, int64_t x_stride, const float* steps, const float* rates, const T* keys, int64_t key_stride,
          const T* queries, int64_t query_stride, float* matrices, int64_t page, T* out, int64_t channels,
          int64_t state_size, int64_t begin, int64_t end, const Segments& segments, int64_t row) {
  const int64_t* const starts = segments.start();
  const int64_t* const read = segments.read.const_data_ptr<int64_t>();
  const int64_t* const write = segments.write.const_data_ptr<int64_t>();
  const int64_t first = segments.first()[row], last = segments.first()[row + 1];
  std::vector<Floats> states(state_size * kScanned), all_rates(state_size * kScanned);
  const auto run = [&]<int N>(int64_t channel, auto n) {
    using Row = Floats[N];
    Row *const state = reinterpret_cast<Row*>(states.data()), *const rate = reinterpret_cast<Row*>(all_rates.data());
    const auto each = [&](auto&& body) {
      for (int64_t i = 0; i < state_size; ++i)
        for (int v = 0; v < N; ++v) body(i, v, i * channels + channel + v * kLanes);
    };
    each([&](int64_t i, int v, int64_t place) {
      rate[i][v] = load(rates + place, n);
      state[i][v] = read[first] < 0 ? Floats{} : load(matrices + read[first] * page + place, n);
    });
    for (int64_t segment = first; segment < last; ++segment) {
      for (int64_t token = starts[segment]; token < starts[segment + 1]; ++token) {
        Row step, update, answer{};
        for (int v = 0; v < N; ++v) {
          step[v] = load(steps + token * channels + channel + v * kLanes, n);
          update[v] = step[v] * load(x + token * x_stride + channel + v * kLanes, n);
        }
        for (int64_t i = 0; i < state_size; ++i) {
          const float key = keys[token * key_stride + i], query = queries[token * query_stride + i];
          for (int v = 0; v < N; ++v) {
            state[i][v] = exp(step[v] * rate[i][v]) * state[i][v] + key * update[v];
            answer[v] += query * state[i][v];
          }
        }
        for (int v = 0; v < N; ++v) store(out + token * channels + channel + v * kLanes, answer[v], n);
      }
      if (write[segment] >= 0)
        each([&](int64_t i, int v, int64_t place) { store(matrices + write[segment] * page + place, state[i][v], n); });
    }
  };
  int64_t channel = begin;
  for (; channel + kScanned * kLanes <= end; channel += kScanned * kLanes)
    run.template operator()<kScanned>(channel, AllLanes());
  for_vectors(end - channel, [&](int64_t at, auto n) { run.template operator()<1>(channel + at, n); });
}

Tensor selective_scan(const Tensor& x, const Tensor& step, const Tensor& rates, const Tensor& key, const Tensor& query,
                      Tensor matrices, const Tensor& starts, const Tensor& rows, const Tensor& read,
                      const Tensor& write) {
  const int64_t tokens = x.size(0), channels = x.size(1), state_size = rates.size(0);
  STD_TORCH_CHECK(matrices.size(1) == 1 && matrices.size(2) == state_size && matrices.size(3) == channels &&
                      matrices.stride(3) == 1 && matrices.stride(2) == channels,
                  "the states have another shape");
  STD_TORCH_CHECK(x.stride(1) == 1 && key.stride(1) == 1 && query.stride(1) == 1);
  STD_TORCH_CHECK(key.scalar_type() == x.scalar_type() && query.scalar_type() == x.scalar_type());
  const Segments segments(starts, rows, read, write);
  const Tensor by_token = as_contiguous(step), rate = as_contiguous(rates);
  Tensor out = empty({tokens, channels}, x.scalar_type());
  const View states(matrices);
  for_type(x.scalar_type(), [&]<typename T>() {
    const int64_t parts = vectors(channels), work = parts * segments.num_rows();
    const int64_t each = std::max<int64_t>(1, tokens / segments.num_rows());
    T* const results = out.mutable_data_ptr<T>();
    parallel_for(0, work, grain(each * state_size * kLanes * 8), [&](int64_t begin, int64_t end) {
      while (begin < end) {
        const int64_t row = begin / parts, part = begin % parts, count = std::min(parts - part, end - begin);
        if (segments.first()[row] < segments.first()[row + 1])
          scan(x.const_data_ptr<T>(), x.stride(0), by_token.const_data_ptr<float>(), rate.const_data_ptr<float>(),
               key.const_data_ptr<T>(), key.stride(0), query.const_data_ptr<T>(), query.stride(0),
               states.data<float>(), states.stride(0), results, channels, state_size, part * kLanes,
               std::min(channels, (part + count) * kLanes), segments, row);
        begin += count;
      }
    });
  });
  return out;
}

constexpr float kLowestExponent = -1e38f;  // before the first token

// Runs the channels from `begin` to `end` of one row through its tokens. A page has three rows `[channels]`.
template <typename T>
void weigh(const T* keys, int64_t key_stride, const T* values, int64_t value_stride, const float* decays,
           const float* bonuses, float* matrices, int64_t page, T* out, int64_t channels, int64_t begin, int64_t end,
           const Segments& segments, int64_t row) {
  const int64_t* const starts = segments.start();
  const int64_t* const read = segments.read.const_data_ptr<int64_t>();
  const int64_t* const write = segments.write.const_data_ptr<int64_t>();
  const int64_t first = segments.first()[row], last = segments.first()[row + 1];
  for_vectors(end - begin, [&](int64_t at, auto n) {
    const int64_t channel = begin + at;
    const Floats decay = load(decays + channel, n), bonus = load(bonuses + channel, n);
    Floats total{}, weight{}, largest = broadcast(kLowestExponent);
    if (read[first] >= 0) {
      const float* const from = matrices + read[first] * page + channel;
      total = load(from, n), weight = load(from + channels, n), largest = load(from + 2 * channels, n);
    }
    for (int64_t segment = first; segment < last; ++segment) {
      for (int64_t token = starts[segment]; token < starts[segment + 1]; ++token) {
        const Floats key = load(keys + token * key_stride + channel, n);
        const Floats value = load(values + token * value_stride + channel, n);
        Floats top = max(largest, key + bonus), before = exp(largest - top), own = exp(key + bonus - top);
        store(out + token * channels + channel, (before * total + own * value) / (before * weight + own), n);
        top = max(largest + decay, key), before = exp(largest + decay - top), own = exp(key - top);
        total = before * total + own * value, weight = before * weight + own, largest = top;
      }
      if (write[segment] < 0) continue;
      float* const to = matrices + write[segment] * page + channel;
      store(to, total, n), store(to + channels, weight, n), store(to + 2 * channels, largest, n);
    }
  });
}

Tensor wkv(const Tensor& key, const Tensor& value, const Tensor& decay, const Tensor& bonus, Tensor matrices,
           const Tensor& starts, const Tensor& rows, const Tensor& read, const Tensor& write) {
  const int64_t tokens = key.size(0), channels = key.size(1);
  STD_TORCH_CHECK(matrices.size(1) == 1 && matrices.size(2) == 3 && matrices.size(3) == channels &&
                      matrices.stride(3) == 1 && matrices.stride(2) == channels,
                  "the states have another shape");
  STD_TORCH_CHECK(key.stride(1) == 1 && value.stride(1) == 1 && key.scalar_type() == value.scalar_type());
  STD_TORCH_CHECK(value.size(0) == tokens && value.size(1) == channels && decay.numel() == channels &&
                      bonus.numel() == channels,
                  "the values, decays or bonuses have another shape");
  const Segments segments(starts, rows, read, write);
  const Tensor decays = as_contiguous(decay), bonuses = as_contiguous(bonus);
  Tensor out = empty({tokens, channels}, value.scalar_type());
  const View states(matrices);
  for_type(value.scalar_type(), [&]<typename T>() {
    const int64_t parts = vectors(channels), work = parts * segments.num_rows();
    const int64_t each = std::max<int64_t>(1, tokens / segments.num_rows());
    T* const results = out.mutable_data_ptr<T>();
    parallel_for(0, work, grain(each * kLanes * 64), [&](int64_t begin, int64_t end) {
      while (begin < end) {
        const int64_t row = begin / parts, part = begin % parts, count = std::min(parts - part, end - begin);
        if (segments.first()[row] < segments.first()[row + 1])
          weigh(key.const_data_ptr<T>(), key.stride(0), value.const_data_ptr<T>(), value.stride(0),
                decays.const_data_ptr<float>(), bonuses.const_data_ptr<float>(), states.data<float>(),
                states.stride(0), results, channels, part * kLanes, std::min(channels, (part + count) * kLanes),
                segments, row);
        begin += count;
      }
    });
  });
  return out;
}

}  // namespace

QUIRE_OPERATION(causal_conv,
                "(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) inputs, Tensor starts, Tensor rows, Tensor read, "
                "Tensor write, bool silu) -> Tensor")
QUIRE_OPERATION(linear_attention,
                "(Tensor query, Tensor key, Tensor value, Tensor decay, Tensor? beta, Tensor(a!) matrices, Tensor "
                "starts, Tensor rows, Tensor read, Tensor write, float scale, float eps, bool is_delta) -> Tensor")
QUIRE_OPERATION(wkv,
                "(Tensor key, Tensor value, Tensor decay, Tensor bonus, Tensor(a!) matrices, Tensor starts, Tensor "
                "rows, Tensor read, Tensor write) -> Tensor")
QUIRE_OPERATION(selective_scan,
                "(Tensor x, Tensor step, Tensor rates, Tensor key, Tensor query, Tensor(a!) matrices, Tensor starts, "
                "Tensor rows, Tensor read, Tensor write) -> Tensor")

}  // namespace quire
