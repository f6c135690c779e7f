// Attention over the paged KV cache, after FlashAttention-2 (Dao 2023) and its split over keys for decodes.
//
// A *tile* is up to kTileRows rows (queries × the heads that share a KV head) of one request. An *item* is a tile and a
// range of keys, and the unit of work of a thread. It processes the keys in steps: packs them into words (packed_kv.h),
// with keys transposed, which stay in the cache while all rows of the tile are computed, kBlockRows at a time
// (`attend_gathered`). For a tile of at most kDirectRows rows, as decodes have, packing does not pay off: it computes
// directly from the cache, kDirectKeys at a time (`attend_directly`). The lengths of items depend on the request alone,
// so neither threads nor other requests change a result. If a tile has several items, each stores its unnormalized
// sums, largest score and weight, which `merge` combines.
//
// Sparse attention is a decode for each query, with a table of slots instead of blocks.
//
// With a window, items start at the first key that the tile's first query attends to. Soft-capping, ALiBi and biases
// change scores before the softmax (`adjust`). A sink is a key without a value, which a tile's first item counts in
// advance.
//
// With keys and values in 4 bits (int4_kv.h), an item is a range of whole blocks, before that of the tile's last query.
// A tile's last item then has the blocks of its queries, from the recent ones.
//
// Scores are exponents of 2: they are multiplied by `scale · log2 e`.

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>
#include <utility>

#include "int4_kv.h"
#include "packed_kv.h"

namespace quire {
namespace {

constexpr int64_t kTileRows = 192;
constexpr int64_t kPackedKvWords = 1 << 14;  // of keys and values at a time, 64 KiB of the L2 cache,
constexpr int64_t kLeastKeys = 64, kMostKeys = 256;  // within these limits
constexpr int kDirectRows = 8;
constexpr int64_t kDirectKeys = 256;
static_assert(kMostKeys <= kDirectKeys && kBlockRows <= kDirectRows, "gathered keys use the same buffers");
constexpr int64_t kFewRows = 32;
constexpr int64_t kSplitFewRows = 512, kSplitManyRows = 2048;  // least keys of an item, if there are enough
constexpr int64_t kPlenty = 256;          // items of a request that keep all threads busy
constexpr int64_t kThreadWork = 1 << 16;  // least multiplications worth waking a thread for
constexpr int64_t kSparsePartials = 1 << 24;  // numbers of partial results of sparse attention at a time
constexpr float kLowest = -1e30f;         // the largest score of no keys: finite, so that differences are not NaN
constexpr int64_t kNoWindow = int64_t{1} << 60;
constexpr float kLog2E = 1.44269504088896341f;

struct Tile {
  int64_t request, head, first, queries;  // `first` counts from the request's first query
  int64_t splits, partial;                // `partial`: offset of its partial results, if there are several splits
};

struct Item {
  int64_t tile, split, begin, end;  // keys
};

// Pages of keys and values in 4 bits. `Problem::cache` has the recent blocks.
struct Int4Pages {
  View cache;
  Int4Layout layout;
  const int64_t* recent_slots;  // of each query's own token
};

struct Problem {
  View query, cache, tables, output;
  const int64_t* lengths;
  const int64_t* starts;
  float unit, cap;              // of scores, as exponents of 2; `cap` is 0 for none
  int64_t window;               // most keys that a query attends to
  const float *sinks, *slopes;  // per head, or null
  int64_t sinks_stride;         // from one token's sinks to the next one's; 0: they are the same
  std::optional<View> biases;   // see `reference.paged_attention`
  const int64_t* ends;          // likewise, or null
  float* logs;                  // likewise, or null
  bool has_slots;  // `tables` has the slot of each key, instead of the blocks
  Places places;
  int64_t group, head_dim, padded;  // `padded`: head_dim rounded up to whole vectors
  int64_t keys;                     // gathered at a time
  std::vector<Tile> tiles;
  std::vector<Item> items;
  std::unique_ptr<float[]> partials;
  std::optional<Int4Pages> pages = std::nullopt;

  int64_t rows(const Tile& tile) const { return tile.queries * group; }
  int64_t partial_size(const Tile& tile) const { return rows(tile) * (padded + 2); }
  int64_t token(const Tile& tile) const { return starts[tile.request] + tile.first; }  // of its first query
  int64_t position(const Tile& tile) const {                                           // the same in the request
    return lengths[tile.request] - (starts[tile.request + 1] - starts[tile.request]) + tile.first;
  }
  // Calls `body(row, query, head)` for a tile's rows; `query` counts from the tile's first.
  template <typename Body>
  void for_rows(const Tile& tile, Body&& body) const {
    for (int64_t query = 0, row = 0; query < tile.queries; ++query) {
      for (int64_t head = tile.head * group; head < (tile.head + 1) * group; ++head) body(row++, query, head);
    }
  }
  // The first key that a query attends to.
  int64_t begin(int64_t position) const { return std::max<int64_t>(0, position + 1 - window); }
  // The first key after those that query number `number` of a tile attends to.
  int64_t end(const Tile& tile, int64_t number) const {
    return ends ? ends[token(tile) + number] : position(tile) + number + 1;
  }
};

// The running state of a row of a tile.
struct Row {
  Floats weight;  // per lane
  float largest, slope;
  int64_t position;    // of its query
  int64_t begin, end;  // of the keys that its query attends to
  const void* biases;  // of its query and head, or null
};

// Finds the rows of `count` keys from `begin` on in the cache.
void find_rows(const Problem& p, const Tile& tile, int64_t begin, int64_t count, Place* rows) {
  const int64_t size = p.cache.element_size(), block_size = p.cache.size(3);
  const char* head = p.cache.data<const char>() + tile.head * p.cache.stride(2) * size;
  const int64_t* table = p.tables.data<const int64_t>() + tile.request * p.tables.stride(0);
  if (p.has_slots) {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t slot = table[begin + i];
      rows[i] = p.places.row(head + slot / block_size * p.cache.stride(1) * size, slot % block_size);
    }
    return;
  }
  for (int64_t i = 0, block = begin / block_size, offset = begin % block_size; i < count; ++block, offset = 0) {
    const char* first = head + table[block] * p.cache.stride(1) * size;
    for (; offset < block_size && i < count; ++offset) rows[i++] = p.places.row(first, offset);
  }
}

// The rows of the keys of the current step, and of the next step, which may be in the next item.
struct KeyRange {
  Place places[2][kDirectKeys], *rows = places[0], *next = places[1];
  int64_t first, count, num_next;  // `first`: the position of the first key
  int64_t bytes, to_values;
  bool has_scales;

  KeyRange(const KeyRange&) = delete;  // `rows` and `next` point into it
  KeyRange(const Problem& p)
      : bytes(p.head_dim * p.cache.element_size()), to_values(p.cache.stride(0) * p.cache.element_size()),
        has_scales(p.places.to_scales) {}

  // Prefetches keys or values of the next step, from number `begin` on, into the L2 cache. A few at a time, between
  // computations, because the processor stalls with too many prefetches in flight.
  // Inlined, because the compiler removes a call that only prefetches as having no effect.
  [[gnu::always_inline]] void prefetch(int64_t begin, int64_t some, int64_t offset) const {
    for (const int64_t end = std::min(begin + some, num_next); begin < end; ++begin) {
      const Place row = next[begin] + offset;
      for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(row.numbers + at, 0, 2);
      if (has_scales) __builtin_prefetch(row.scale, 0, 2);
    }
  }
  [[gnu::always_inline]] void prefetch_keys(int64_t begin, int64_t some) const { prefetch(begin, some, 0); }
  [[gnu::always_inline]] void prefetch_values(int64_t begin, int64_t some) const { prefetch(begin, some, to_values); }

  // The rows of kLanes keys from number `begin` on, padded with the last one.
  template <typename C>
  void keys(int64_t begin, KvRow<C> (&row)[kLanes]) const {
    for (int i = 0; i < kLanes; ++i) row[i] = rows[std::min(begin + i, count - 1)];
  }

  // The values of `some` keys from number `begin` on, padded with the last one.
  template <typename C>
  void values(int64_t begin, int64_t some, KvRow<C>* row) const {
    for (int64_t i = 0; i < some; ++i) row[i] = rows[std::min(begin + i, count - 1)] + to_values;
  }
};

// Packs keys into `keys` `[head_dim / per_word, p.keys]`, padded with the last key to whole vectors, and values into
// `values` `[p.keys / per_word, padded]`.
template <typename Form, typename C>
void gather(const Problem& p, const KeyRange& range, float* keys, float* values) {
  const int64_t padded = p.padded, stride = p.keys;
  for (int64_t first = 0; first < range.count; first += kLanes) {
    KvRow<C> row[kLanes];
    range.keys(first, row);
    range.prefetch_keys(first, kLanes);
    for_vectors(p.head_dim / Form::kPerWord, [&](int64_t d, auto n) {
      Floats block[kLanes];
      transpose([&](int i) { return Form::load(row[i], d, n); }, block);
#pragma GCC unroll 16
      for (int i = 0; i < n; ++i) store(keys + (d + i) * stride + first, block[i]);
    });
  }
  for (int64_t i = 0; i < range.count; i += Form::kPerWord, values += padded) {
    range.prefetch_values(i, Form::kPerWord);
    KvRow<C> rows[Form::kPerWord];
    range.values(i, Form::kPerWord, rows);
    for_vectors(p.head_dim, [&](int64_t d, auto n) { store(values + d, Form::join(rows, d, n)); });
  }
}

// Number `at` to `at + kLanes` of `count` biases; 0 where there are none.
template <typename T>
Floats biases_at(const T* biases, int64_t at, int64_t count) {
  if (at >= 0 && at + kLanes <= count) return load(biases + at);
  const int64_t begin = std::max<int64_t>(0, -at), end = std::min<int64_t>(kLanes, count - at);
  if (begin >= end) return Floats{};
  float lanes[2 * kLanes] = {};
  store(lanes + begin, load(biases + at + begin, static_cast<int>(end - begin)));
  return load(lanes);
}

// Scales a row's scores to exponents of 2, and applies soft-capping, ALiBi and biases. `first`: the position of the
// first key.
void adjust(const Problem& p, const Row& row, int64_t first, int64_t columns, float* scores) {
  const float cap = p.cap * kLog2E;
  for (int64_t i = 0; i < columns; ++i) {
    Floats x = load(scores + i * kLanes) * p.unit;
    if (cap > 0.0f) x = tanh(x * (1.0f / cap)) * cap;
    const Ints distance = lane_numbers() + static_cast<int32_t>(first + i * kLanes - row.position);
    store(scores + i * kLanes, x + __builtin_convertvector(distance, Floats) * (row.slope * kLog2E));
  }
  if (!row.biases) return;
  const int64_t count = p.biases->size(2), with_bias = row.position + 1 - count;  // the first such key
  for_type(p.query.scalar_type(), [&]<typename T>() {
    for (int64_t i = std::max<int64_t>(0, (with_bias - first) / kLanes); i < columns; ++i) {
      float* at = scores + i * kLanes;
      const int64_t number = first + i * kLanes - with_bias;
      store(at, load(at) + biases_at(static_cast<const T*>(row.biases), number, count) * kLog2E);
    }
  });
}

// Masks all scores except those of the keys from `begin` to `end`.
void mask(int64_t begin, int64_t end, int64_t columns, float* scores) {
  for (int64_t i = 0; i < columns; ++i) {
    const Ints key = lane_numbers() + static_cast<int32_t>(i * kLanes);
    const Ints is_visible = (key >= static_cast<int32_t>(begin)) & (key < static_cast<int32_t>(end));
    const Floats nothing = broadcast(-std::numeric_limits<float>::infinity());
    store(scores + i * kLanes, is_visible ? load(scores + i * kLanes) : nothing);
  }
}

// Online softmax: turns a row's scores of the `count` keys from position `first` on into weights. Returns the factor
// for the previous sums.
float softmax(const Problem& p, int64_t first, int64_t count, int64_t columns, Row& row, float* scores) {
  const bool is_adjusted = p.cap > 0.0f || p.slopes || p.biases;
  if (is_adjusted) adjust(p, row, first, columns, scores);
  const float unit = is_adjusted ? 1.0f : p.unit;
  const int64_t begin = row.begin - first, end = std::min(count, row.end - first);
  if (begin > 0 || end < columns * kLanes) mask(begin, end, columns, scores);
  Floats top = broadcast(kLowest);
  for (int64_t i = 0; i < columns; ++i) top = max(load(scores + i * kLanes), top);
  const float before = row.largest, largest = std::max(before, max(top) * unit);
  const float factor = before == largest ? 1.0f : exp2(broadcast(before - largest))[0];
  Floats weight = row.weight * factor;
  for (int64_t i = 0; i < columns; ++i) {
    const Floats x = exp2(load(scores + i * kLanes) * unit - largest);
    weight += x;
    store(scores + i * kLanes, x);
  }
  row.largest = largest;
  row.weight = weight;
  return factor;
}

// Buffers for an item. They grow, and are reused by the thread.
struct Scratch {
  std::vector<Row> rows;
  std::vector<float> memory;
  float *queries, *sums, *keys, *values, *scores;

  void fit(int64_t count, int64_t gathered, int64_t head_dim, int64_t padded) {
    const int64_t needed = (count + gathered) * (head_dim + padded) + kDirectKeys * kDirectRows;
    rows.resize(std::max<size_t>(rows.size(), count));
    memory.resize(std::max<size_t>(memory.size(), needed + 8 * kLanes));
    auto* at = reinterpret_cast<Floats*>((reinterpret_cast<uintptr_t>(memory.data()) + sizeof(Floats) - 1) /
                                         sizeof(Floats) * sizeof(Floats));
    const auto take = [&](int64_t size) { return reinterpret_cast<float*>(std::exchange(at, at + vectors(size))); };
    queries = take(count * head_dim);
    sums = take(count * padded);
    keys = take(gathered * head_dim);
    values = take(gathered * padded);
    scores = take(kDirectKeys * kDirectRows);
  }
};

template <typename T>
void load_queries(const Problem& p, const Tile& tile, float* to) {
  const T* first = p.query.data<const T>() + p.token(tile) * p.query.stride(0);
  p.for_rows(tile, [&](int64_t row, int64_t query, int64_t head) {
    const T* from = first + query * p.query.stride(0) + head * p.query.stride(1);
    for_vectors(p.head_dim, [&](int64_t d, auto n) { store(to + row * p.head_dim + d, load(from + d, n), n); });
  });
}

// `weight`: of all keys, of which the one with the largest score has 1.
template <typename T>
void store_row(const Problem& p, const Tile& tile, int64_t query, int64_t head, const float* sums, float largest,
               float weight) {
  const int64_t row = (p.token(tile) + query) * p.output.size(1) + head;
  const float factor = p.logs && weight == 0.0f ? 0.0f : 1.0f / weight;
  if (p.logs) p.logs[row] = (largest + std::log2(weight)) / kLog2E;
  T* to = p.output.data<T>() + row * p.head_dim;
  for_vectors(p.head_dim, [&](int64_t d, auto n) { store(to + d, load(sums + d) * factor, n); });
}

// Computes R rows' scores of kLanes keys from `first` on, transposing the keys in registers.
template <typename Form, typename C, int R>
void score(const float* queries, int64_t head_dim, const KeyRange& range, int64_t first, float* scores) {
  constexpr int kChains = R <= 4 ? 2 : 1;  // independent sums
  KvRow<C> keys[kLanes];
  range.keys(first, keys);
  Floats sums[kChains][R] = {};
  const int64_t words = head_dim / Form::kPerWord, ahead = (kLanes * kLanes + words - 1) / words;
  for_vectors(words, [&](int64_t d, auto n) {
    range.prefetch_keys(first + d / kLanes * ahead, ahead);
    Floats block[kLanes];
    transpose([&](int i) { return Form::load(keys[i], d, n); }, block);
#pragma GCC unroll 16
    for (int i = 0; i < n; ++i) {
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        Floats& sum = sums[i % kChains][r];
        sum = Form::add(sum, block[i], queries[r * words + d + i]);
      }
    }
  });
  for (int r = 0; r < R; ++r) {
    store(scores + r * kDirectKeys, kChains == 1 ? sums[0][r] : sums[0][r] + sums[kChains - 1][r]);
  }
}

// `sums = sums · factors + scores values`: R rows, N vectors of columns from `d` on.
template <typename Form, typename C, int R, int N>
void mix(const float* scores, const KvRow<C>* values, const KeyRange& range, int64_t d, float* sums, int64_t stride,
         const float* factors) {
  Floats mixed[R][N];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) mixed[r][n] = load(sums + r * stride + d + n * kLanes) * factors[r];
  }
  for (int64_t key = 0, word = 0; key < range.count; key += Form::kPerWord, ++word) {
    if (d == 0) range.prefetch_values(key, Form::kPerWord);
    Floats row[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) row[n] = Form::join(values + key, d + n * kLanes, AllLanes());
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) mixed[r][n] = Form::add(mixed[r][n], row[n], scores[r * kDirectKeys + word]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) store(sums + r * stride + d + n * kLanes, mixed[r][n]);
  }
}

// Computes all R rows of a tile directly from the keys and values in the cache.
template <typename Form, typename C, int R>
void attend_directly(const Problem& p, Scratch& scratch, const KeyRange& range) {
  constexpr int N = kRegisters == 32 ? (R <= 6 ? 4 : 2) : (R <= 6 ? 2 : 1);  // sums leave registers for a row
  const int64_t columns = vectors(range.count);
  KvRow<C> values[kDirectKeys];
  for (int64_t i = 0; i < columns; ++i) {
    score<Form, C, R>(scratch.queries, p.head_dim, range, i * kLanes, scratch.scores + i * kLanes);
  }
  range.values(0, columns * kLanes, values);
  float factors[R];
  for (int r = 0; r < R; ++r) {
    float* scores = scratch.scores + r * kDirectKeys;
    factors[r] = softmax(p, range.first, range.count, columns, scratch.rows[r], scores);
    Form::pack(scores, columns * kLanes, scores);
  }
  int64_t d = 0;
  for (; d + N * kLanes <= p.head_dim; d += N * kLanes) {
    mix<Form, C, R, N>(scratch.scores, values, range, d, scratch.sums, p.padded, factors);
  }
  for (; d < p.head_dim; d += kLanes) {
    mix<Form, C, R, 1>(scratch.scores, values, range, d, scratch.sums, p.padded, factors);
  }
}

template <typename Form, typename C, int... R>
constexpr auto direct(std::integer_sequence<int, R...>) {
  return std::array{attend_directly<Form, C, R + 1>...};
}

// Computes one block of rows at a time, with those gathered keys and values that any of its rows attends to.
template <typename Form>
void attend_gathered(const Problem& p, Scratch& scratch, const KeyRange& range, int64_t rows) {
  const int64_t blocks = (rows + kBlockRows - 1) / kBlockRows, words = p.head_dim / Form::kPerWord;
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t first = block * rows / blocks, few = (block + 1) * rows / blocks - first;
    const int64_t begin = std::max<int64_t>(0, scratch.rows[first].begin - range.first) / kLanes * kLanes;
    const int64_t end = std::min(range.count, scratch.rows[first + few - 1].end - range.first);
    if (end <= begin) continue;
    const int64_t columns = vectors(end - begin), depth = (end - begin + Form::kPerWord - 1) / Form::kPerWord;
    multiply<Form>(few, columns, scratch.queries + first * words, words, scratch.keys + begin, p.keys, scratch.scores,
                   p.keys, words, nullptr);
    float factors[kBlockRows];
    for (int64_t i = 0; i < few; ++i) {
      float* scores = scratch.scores + i * p.keys;
      factors[i] = softmax(p, range.first + begin, range.count - begin, columns, scratch.rows[first + i], scores);
      Form::pack(scores, columns * kLanes, scores);
    }
    multiply<Form>(few, p.padded / kLanes, scratch.scores, p.keys, scratch.values + begin / Form::kPerWord * p.padded,
                   p.padded, scratch.sums + first * p.padded, p.padded, depth, factors);
  }
}

// Calls `body<Form, C>()` for the form of words and the element type of the cache.
template <typename Body>
void for_form(const Problem& p, Body&& body) {
  for_kv_type(p.cache.scalar_type(), [&]<typename C>() {
#ifdef __AVX512BF16__
    if constexpr (std::is_same_v<C, BFloat16>) {
      if (p.head_dim % 2 == 0 && !p.pages) return body.template operator()<Pairs, C>();
    }
#endif
    body.template operator()<Numbers, C>();
  });
}

// Computes R rows' scores of a block's keys; `scaled` has room for R queries.
template <int R>
void score_block(const float* queries, const Int4Layout& layout, const Int4Block& block, float* scaled, float* scores) {
  constexpr int kMost = kRegisters == 32 ? 8 : 4;
  const int64_t size = layout.head_dim, half = layout.key_bytes;
  if constexpr (R > kMost) {
    score_block<kMost>(queries, layout, block, scaled, scores);
    score_block<R - kMost>(queries + kMost * size, layout, block, scaled, scores + kMost * kDirectKeys);
  } else {
    constexpr int kChains = R <= 4 ? 2 : 1;  // independent sums
    Floats offsets[R] = {};
    for_vectors(size, [&](int64_t d, auto n) {
      const Floats scale = load(block.key_scales + d, n), offset = load(block.key_scales + size + d, n);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const Floats query = load(queries + r * size + d, n);
        store(scaled + r * size + d, query * scale, n);
        offsets[r] += query * offset;
      }
    });
    float offset[R];
    for (int r = 0; r < R; ++r) offset[r] = sum(offsets[r]);
    if (half < kLanes) {
      Floats sums[kChains][R] = {};
      for (int64_t d = 0; d < size; d += kChains) {
#pragma GCC unroll 2
        for (int c = 0; c < kChains; ++c) {
          const Floats keys = load_codes(block.keys + (d + c) * half);
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) sums[c][r] += keys * scaled[r * size + d + c];
        }
      }
      for (int r = 0; r < R; ++r) {
        store(scores + r * kDirectKeys, (kChains == 1 ? sums[0][r] : sums[0][r] + sums[kChains - 1][r]) + offset[r]);
      }
      return;
    }
    for (int64_t i = 0; i < half; i += kLanes) {
      Floats low[R] = {}, high[R] = {};
      for (int64_t d = 0; d < size; ++d) {
        const CodePair keys(block.keys + d * half + i, AllLanes());
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          low[r] += keys.low * scaled[r * size + d];
          high[r] += keys.high * scaled[r * size + d];
        }
      }
      for (int r = 0; r < R; ++r) {
        store(scores + r * kDirectKeys + i, low[r] + offset[r]);
        store(scores + r * kDirectKeys + half + i, high[r] + offset[r]);
      }
    }
  }
}

// `sums = sums · factors + scores values + offsets`: R rows, N vectors of columns from `d` on, and as many half a head
// further.
template <int R, int N>
void mix_codes(const Int4Layout& layout, const Int4Block* blocks, int64_t count, const float* scores, int64_t d,
               float* sums, int64_t stride, const float* factors, const float* offsets) {
  const int64_t half = layout.head_dim / 2;
  Floats low[R][N], high[R][N];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      const float* at = sums + r * stride + d + n * kLanes;
      low[r][n] = load(at) * factors[r] + offsets[r], high[r][n] = load(at + half) * factors[r] + offsets[r];
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t key = 0; key < layout.block_size; ++key, ++scores) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        const CodePair values(blocks[i].values + key * half + d + n * kLanes, AllLanes());
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          low[r][n] += values.low * scores[r * kDirectKeys];
          high[r][n] += values.high * scores[r * kDirectKeys];
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      float* at = sums + r * stride + d + n * kLanes;
      store(at, low[r][n]), store(at + half, high[r][n]);
    }
  }
}

// The same for all columns.
template <int R>
void mix_blocks(const Int4Layout& layout, const Int4Block* blocks, int64_t count, const float* scores, float* sums,
                int64_t stride, const float* factors, const float* offsets) {
  constexpr int kMost = kRegisters == 32 ? 8 : 6;
  if constexpr (R > kMost) {
    mix_blocks<4>(layout, blocks, count, scores, sums, stride, factors, offsets);
    mix_blocks<R - 4>(layout, blocks, count, scores + 4 * kDirectKeys, sums + 4 * stride, stride, factors + 4,
                      offsets + 4);
  } else {
    constexpr int N = R * 8 <= kMost * 3 ? 4 : R * 4 <= kMost * 3 ? 2 : 1;  // sums leave registers for a row
    int64_t d = 0;
    for (; d + N * kLanes <= layout.head_dim / 2; d += N * kLanes) {
      mix_codes<R, N>(layout, blocks, count, scores, d, sums, stride, factors, offsets);
    }
    for (; d < layout.head_dim / 2; d += kLanes) {
      mix_codes<R, 1>(layout, blocks, count, scores, d, sums, stride, factors, offsets);
    }
  }
}

// Computes all R rows of a tile directly from blocks of codes.
template <int R>
void attend_codes(const Problem& p, Scratch& scratch, const KeyRange& range, const Int4Block* blocks) {
  const Int4Layout& layout = p.pages->layout;
  const int64_t size = layout.block_size, count = range.count / size, columns = vectors(range.count);
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t at = 0; i + 1 < count && at < layout.to_values; at += 64) {
      __builtin_prefetch(blocks[i + 1].keys + at, 0, 2);
    }
    score_block<R>(scratch.queries, layout, blocks[i], scratch.keys, scratch.scores + i * size);
    for (int64_t at = 0; at < layout.bytes - layout.to_values; at += 64) __builtin_prefetch(blocks[i].values + at, 0, 2);
  }
  float factors[R], offsets[R];
  for (int r = 0; r < R; ++r) {
    float* scores = scratch.scores + r * kDirectKeys;
    factors[r] = softmax(p, range.first, range.count, columns, scratch.rows[r], scores);
    Floats offset = {};
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t key = 0; key < size; key += kLanes) {
        const Floats weights = load(scores + i * size + key);
        offset += weights * load(blocks[i].value_scales + size + key);
        store(scores + i * size + key, weights * load(blocks[i].value_scales + key));
      }
    }
    offsets[r] = sum(offset);
  }
  mix_blocks<R>(layout, blocks, count, scratch.scores, scratch.sums, p.padded, factors, offsets);
}

template <int... R>
constexpr auto direct_codes(std::integer_sequence<int, R...>) {
  return std::array{attend_codes<R + 1>...};
}

// As `gather`, of blocks of codes.
void gather_codes(const Problem& p, const Int4Block* blocks, int64_t count, Scratch& scratch) {
  const Int4Layout& layout = p.pages->layout;
  const int64_t size = layout.head_dim, half = layout.key_bytes, value_bytes = size / 2;
  std::vector<float> of_keys(2 * size), of_values(2 * layout.block_size);
  const auto widen = [](const Half* from, std::vector<float>& to) {
    for_vectors(to.size(), [&](int64_t i, auto n) { store(to.data() + i, load(from + i, n), n); });
  };
  float *keys = scratch.keys, *values = scratch.values;
  for (const Int4Block* block = blocks; block < blocks + count; ++block, keys += layout.block_size) {
    widen(block->key_scales, of_keys);
    widen(block->value_scales, of_values);
    for (int64_t d = 0; d < size; ++d) {
      const float scale = of_keys[d], offset = of_keys[size + d];
      if (2 * half == kLanes) {
        store(keys + d * p.keys, load_codes(block->keys + d * half) * scale + offset);
        continue;
      }
      for_vectors(half, [&](int64_t i, auto n) {
        const CodePair codes(block->keys + d * half + i, n);
        store(keys + d * p.keys + i, codes.low * scale + offset, n);
        store(keys + d * p.keys + half + i, codes.high * scale + offset, n);
      });
    }
    for (int64_t key = 0; key < layout.block_size; ++key, values += p.padded) {
      const float scale = of_values[key], offset = of_values[layout.block_size + key];
      for_vectors(value_bytes, [&](int64_t i, auto n) {
        const CodePair codes(block->values + key * value_bytes + i, n);
        store(values + i, codes.low * scale + offset, n);
        store(values + value_bytes + i, codes.high * scale + offset, n);
      });
    }
  }
}

// Prepares the rows of an item's tile, before its first keys.
void start(const Problem& p, const Item& item, Scratch& scratch) {
  const Tile& tile = p.tiles[item.tile];
  const int64_t rows = p.rows(tile);
  scratch.fit(std::max(rows, kTileRows), p.keys, p.head_dim, p.padded);
  for_type(p.query.scalar_type(), [&]<typename T>() { load_queries<T>(p, tile, scratch.queries); });
  for_form(p, [&]<typename Form, typename>() { Form::pack(scratch.queries, rows * p.head_dim, scratch.queries); });
  std::fill_n(scratch.sums, rows * p.padded, 0.0f);
  const bool has_sink = p.sinks && item.split == 0;
  p.for_rows(tile, [&](int64_t row, int64_t query, int64_t head) {
    const int64_t token = p.token(tile) + query;
    const int64_t position = p.position(tile) + query;
    Row& to = scratch.rows[row] = {Floats{has_sink ? 1.0f : 0.0f}, kLowest, p.slopes ? p.slopes[head] : 0.0f,
                                   position, p.begin(position), p.end(tile, query), nullptr};
    if (has_sink) to.largest = std::max(p.sinks[token * p.sinks_stride + head] * kLog2E, kLowest);
    if (p.biases) {
      const int64_t offset = token * p.biases->stride(0) + head * p.biases->stride(1);
      to.biases = p.biases->data<const char>() + offset * p.biases->element_size();
    }
  });
}

// Attends to the rows of the cache. `following`: the next item of this thread, if any.
void attend_rows(Problem& p, const Item& item, const Item* following, Scratch& scratch) {
  const Tile& tile = p.tiles[item.tile];
  const int64_t rows = p.rows(tile);
  const bool is_direct = rows <= kDirectRows && p.head_dim % kLanes == 0;
  KeyRange range(p);
  const int64_t keys = item.end - item.begin, most = is_direct ? kDirectKeys : p.keys;
  const int64_t steps = std::max<int64_t>(1, (keys + most - 1) / most);  // there may be no keys
  const int64_t step = is_direct ? vectors((keys + steps - 1) / steps) * kLanes : p.keys;
  find_rows(p, tile, item.begin, std::min(step, keys), range.rows);
  for (int64_t key = item.begin; key < item.end; key += step, std::swap(range.rows, range.next)) {
    range.first = key;
    range.count = std::min(step, item.end - key);
    const Item* next = key + step < item.end ? &item : following;
    const int64_t begin = next == &item ? key + step : next ? next->begin : 0;
    range.num_next = next ? std::min(step, next->end - begin) : 0;
    if (next) find_rows(p, p.tiles[next->tile], begin, range.num_next, range.next);
    for_form(p, [&]<typename Form, typename C>() {
      if (is_direct) {
        static constexpr auto kDirect = direct<Form, C>(std::make_integer_sequence<int, kDirectRows>());
        kDirect[rows - 1](p, scratch, range);
      } else {
        gather<Form, C>(p, range, scratch.keys, scratch.values);
        attend_gathered<Form>(p, scratch, range, rows);
      }
    });
  }
}

// Attends to blocks in 4 bits and, with a tile's last item, to the queries' own blocks.
void attend_blocks(Problem& p, const Item& item, Scratch& scratch) {
  const Int4Layout& layout = p.pages->layout;
  const View& pages = p.pages->cache;
  const Tile& tile = p.tiles[item.tile];
  const int64_t rows = p.rows(tile), size = layout.block_size;
  const int64_t* table = p.tables.data<const int64_t>() + tile.request * p.tables.stride(0);
  const uint8_t* head = pages.data<const uint8_t>() + tile.head * pages.stride(2);
  const bool is_direct = rows <= kDirectRows && p.head_dim % (2 * kLanes) == 0 &&
                         (size == kLanes || layout.key_bytes % kLanes == 0);
  const int64_t most = is_direct ? kDirectKeys : p.keys, step = most / size * size;
  KeyRange range(p);
  Int4Block blocks[kDirectKeys / 2];
  for (int64_t row = 0; row < rows; ++row) scratch.rows[row].end = scratch.rows[row].position / size * size;
  for (int64_t key = item.begin; key < item.end; key += step) {
    range.first = key, range.count = std::min(step, item.end - key);
    const int64_t count = range.count / size;
    for (int64_t i = 0; i < count; ++i) blocks[i] = Int4Block(head + table[key / size + i] * pages.stride(1), layout);
    if (is_direct) {
      static constexpr auto kDirect = direct_codes(std::make_integer_sequence<int, kDirectRows>());
      kDirect[rows - 1](p, scratch, range, blocks);
    } else {
      gather_codes(p, blocks, count, scratch);
      attend_gathered<Numbers>(p, scratch, range, rows);
    }
  }
  if (item.split + 1 < tile.splits) return;
  for (int64_t row = 0; row < rows; ++row) {
    Row& own = scratch.rows[row];
    own.begin = std::max(own.begin, own.end), own.end = own.position + 1;
  }
  const int64_t position = p.position(tile), end = position + tile.queries, bytes = p.cache.element_size();
  const char* recent = p.cache.data<const char>() + tile.head * p.cache.stride(2) * bytes;
  range.num_next = 0;
  for (int64_t key = position / size * size; key < end; key += most) {
    range.first = key, range.count = std::min(most, end - key);
    for (int64_t i = 0; i < range.count; ++i) {
      const int64_t query = std::max<int64_t>(0, (key + i) / size * size - position);  // the first one of the block
      const int64_t block = std::max<int64_t>(0, p.pages->recent_slots[p.token(tile) + query]) / size;
      range.rows[i] = p.places.row(recent + block * p.cache.stride(1) * bytes, (key + i) % size);
    }
    for_form(p, [&]<typename Form, typename C>() {
      if (is_direct) {
        static constexpr auto kDirect = direct<Form, C>(std::make_integer_sequence<int, kDirectRows>());
        kDirect[rows - 1](p, scratch, range);
      } else {
        gather<Form, C>(p, range, scratch.keys, scratch.values);
        attend_gathered<Form>(p, scratch, range, rows);
      }
    });
  }
}

// `following`: as of `attend_rows`.
void attend(Problem& p, const Item& item, const Item* following, Scratch& scratch) {
  const Tile& tile = p.tiles[item.tile];
  const int64_t rows = p.rows(tile);
  start(p, item, scratch);
  if (p.pages) attend_blocks(p, item, scratch);
  else attend_rows(p, item, following, scratch);
  if (tile.splits == 1) {
    for_type(p.query.scalar_type(), [&]<typename T>() {
      p.for_rows(tile, [&](int64_t row, int64_t query, int64_t head) {
        const Row& of = scratch.rows[row];
        store_row<T>(p, tile, query, head, scratch.sums + row * p.padded, of.largest, sum(of.weight));
      });
    });
    return;
  }
  float* partial = p.partials.get() + tile.partial + item.split * p.partial_size(tile);
  partial = std::copy_n(scratch.sums, rows * p.padded, partial);
  for (int64_t row = 0; row < rows; ++row) {
    partial[row] = scratch.rows[row].largest;
    partial[rows + row] = sum(scratch.rows[row].weight);
  }
}

template <typename T>
void merge(Problem& p, const Tile& tile) {
  const int64_t rows = p.rows(tile), size = p.partial_size(tile);
  float* first = p.partials.get() + tile.partial;
  p.for_rows(tile, [&](int64_t row, int64_t query, int64_t head) {
    const int64_t to_largest = rows * p.padded + row, to_weight = to_largest + rows;
    float largest = kLowest, weight = 0.0f;
    for (int64_t split = 0; split < tile.splits; ++split) largest = std::max(largest, first[split * size + to_largest]);
    float* sums = first + row * p.padded;
    for (int64_t split = 0; split < tile.splits; ++split) {
      const float* part = first + split * size;
      const float factor = exp2(broadcast(part[to_largest] - largest))[0];
      weight += part[to_weight] * factor;
      for (int64_t d = 0; d < p.padded; d += kLanes) {
        const Floats x = load(part + row * p.padded + d) * factor;
        store(sums + d, split ? load(sums + d) + x : x);
      }
    }
    store_row<T>(p, tile, query, head, sums, largest, weight);
  });
}

// Orders tiles from a request's last to its first: the longest items come first, so that threads finish together.
int64_t plan(Problem& p, int64_t begin_request, int64_t end_request, int64_t kv_heads) {
  int64_t work = 0, partials = 0;
  const int64_t width = std::max<int64_t>(1, kTileRows / p.group);
  for (int64_t request = begin_request; request < end_request; ++request) {
    const int64_t count = p.starts[request + 1] - p.starts[request];
    const int64_t tiles = (count + width - 1) / width * kv_heads;
    if (count == 0) continue;
    for (int64_t first = (count - 1) / width * width; first >= 0; first -= width) {
      for (int64_t head = 0; head < kv_heads; ++head) {
        Tile tile{request, head, first, std::min(width, count - first), 1, partials};
        int64_t begin = p.begin(p.position(tile)), end = p.end(tile, tile.queries - 1), rows = p.rows(tile);
        int64_t length = std::max(rows <= kFewRows || count == 1 ? kSplitFewRows : kSplitManyRows,
                                  (end - begin) * tiles / kPlenty);
        if (p.pages) {  // whole blocks, before that of the last query
          const int64_t size = p.pages->layout.block_size;
          end = (end - 1) / size * size, begin = std::min(begin / size * size, end);
          length = (length + size - 1) / size * size;
        }
        tile.splits = std::max<int64_t>(1, (end - begin + length - 1) / length);
        if (tile.splits > 1) partials += tile.splits * p.partial_size(tile);
        work += rows * (end - begin) * p.head_dim;
        const int64_t number = static_cast<int64_t>(p.tiles.size());
        for (int64_t split = 0; split < tile.splits; ++split) {
          const int64_t from = begin + split * length;
          p.items.push_back({number, split, from, std::min(end, from + length)});
        }
        p.tiles.push_back(tile);
      }
    }
  }
  if (partials) p.partials = std::make_unique_for_overwrite<float[]>(partials);
  return work;
}

// Computes the requests from `first` to `last`.
void compute(Problem& p, int64_t first, int64_t last) {
  for_form(p, [&]<typename Form, typename>() {
    p.keys = std::clamp(kPackedKvWords / (2 * p.padded / Form::kPerWord) / kLanes * kLanes, kLeastKeys, kMostKeys);
  });
  if (p.pages) p.keys = std::max(p.keys, vectors(p.pages->layout.block_size) * kLanes);
  const int64_t work = plan(p, first, last, p.cache.size(2));
  const int64_t threads =
      std::min<int64_t>({num_threads(), 1 + work / kThreadWork, static_cast<int64_t>(p.items.size())});
  std::atomic<size_t> next = 0;
  parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    static thread_local Scratch scratch;
    for (size_t item = next++, following; item < p.items.size(); item = following) {
      const bool is_plenty = next + threads < p.items.size();  // else another thread may be free sooner
      following = is_plenty ? next++ : p.items.size();
      attend(p, p.items[item], following < p.items.size() ? &p.items[following] : nullptr, scratch);
      if (!is_plenty) following = next++;
    }
  });
  if (!p.partials) return;
  parallel_for(0, p.tiles.size(), grain(p.padded * p.group), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (p.tiles[i].splits > 1) for_type(p.query.scalar_type(), [&]<typename T>() { merge<T>(p, p.tiles[i]); });
    }
  });
}

void check_logs(const std::optional<Tensor>& logs, int64_t tokens, int64_t heads) {
  STD_TORCH_CHECK(!logs || (logs->numel() == tokens * heads && logs->is_contiguous() &&
                            logs->scalar_type() == ScalarType::Float),
                  "logs must be float32 [tokens, heads]");
}

Tensor attend_all(const Tensor& query, const Tensor& cache, const Tensor& block_tables,
                  const Tensor& sequence_lengths, const Tensor& query_starts, double scale, int64_t window,
                  double softcap, const std::optional<Tensor>& sinks, const std::optional<Tensor>& slopes,
                  const std::optional<Tensor>& biases, const std::optional<Tensor>& ends,
                  std::optional<Tensor> logs,
                  const std::optional<Int4Pages>& pages) {
  const int64_t tokens = query.size(0), heads = query.size(1), head_dim = query.size(2), kv_heads = cache.size(2);
  STD_TORCH_CHECK(heads % kv_heads == 0 && block_tables.stride(1) == 1);
  STD_TORCH_CHECK(!slopes || (slopes->numel() == heads && slopes->is_contiguous()), "slopes must be [heads]");
  const bool has_own_sinks = sinks && sinks->dim() == 2;
  STD_TORCH_CHECK(!sinks || (sinks->numel() == (has_own_sinks ? tokens : 1) * heads && sinks->is_contiguous()),
                  "sinks must be [heads] or [tokens, heads]");
  STD_TORCH_CHECK(!biases || (biases->dim() == 3 && biases->size(0) == tokens && biases->size(1) == heads &&
                              biases->stride(2) == 1 && biases->scalar_type() == query.scalar_type()),
                  "biases must be [tokens, heads, keys], of the type of the query");
  STD_TORCH_CHECK(!ends || (ends->numel() == tokens && ends->is_contiguous()), "ends must be [tokens]");
  STD_TORCH_CHECK(!logs || ends, "logs need ends");
  check_logs(logs, tokens, heads);
  const Tensor rows = query.stride(2) == 1 ? query : as_contiguous(query);
  const Tensor lengths = as_contiguous(sequence_lengths), starts = as_contiguous(query_starts);
  Tensor out = empty(query.sizes(), query.scalar_type());
  Problem p{View(rows),
            View(cache),
            View(block_tables),
            View(out),
            lengths.const_data_ptr<int64_t>(),
            starts.const_data_ptr<int64_t>(),
            static_cast<float>(scale) * kLog2E,
            static_cast<float>(softcap),
            window ? window : kNoWindow,
            sinks ? sinks->const_data_ptr<float>() : nullptr,
            slopes ? slopes->const_data_ptr<float>() : nullptr,
            has_own_sinks ? heads : 0,
            biases ? std::optional(View(*biases)) : std::nullopt,
            ends ? ends->const_data_ptr<int64_t>() : nullptr,
            logs ? logs->mutable_data_ptr<float>() : nullptr,
            false,
            Places(cache, head_dim),
            heads / kv_heads,
            head_dim,
            vectors(head_dim) * kLanes,
            0,
            {},
            {},
            nullptr,
            pages};
  compute(p, 0, lengths.size(0));
  return out;
}

Tensor paged_attention(const Tensor& query, const Tensor& cache, const Tensor& block_tables,
                       const Tensor& sequence_lengths, const Tensor& query_starts, double scale, int64_t window,
                       double softcap, const std::optional<Tensor>& sinks, const std::optional<Tensor>& slopes,
                       const std::optional<Tensor>& biases, const std::optional<Tensor>& ends,
                       std::optional<Tensor> logs) {
  return attend_all(query, cache, block_tables, sequence_lengths, query_starts, scale, window, softcap, sinks, slopes,
                    biases, ends, logs, std::nullopt);
}

// See `quire.kernels.int4_kv`.
Tensor int4_attention(const Tensor& query, const Tensor& cache, const Tensor& block_tables,
                      const Tensor& sequence_lengths, const Tensor& query_starts, double scale, const Tensor& recent,
                      const Tensor& recent_slots, int64_t window, double softcap, const std::optional<Tensor>& sinks,
                      const std::optional<Tensor>& slopes, const std::optional<Tensor>& biases) {
  const Int4Layout layout = Int4Layout::of(cache);
  const Tensor own = as_contiguous(recent_slots);
  STD_TORCH_CHECK(layout.head_dim == query.size(2) && layout.block_size == recent.size(3) &&
                      layout.block_size <= kDirectKeys && cache.size(2) == recent.size(2) &&
                      own.numel() == query.size(0),
                  "the cache, the recent blocks and the queries do not match");
  return attend_all(query, recent, block_tables, sequence_lengths, query_starts, scale, window, softcap, sinks, slopes,
                    biases, std::nullopt, std::nullopt, Int4Pages{View(cache), layout, own.const_data_ptr<int64_t>()});
}

// See `reference.sparse_attention`.
Tensor sparse_attention(const Tensor& query, const Tensor& cache, const Tensor& slots, const Tensor& counts,
                        double scale, const std::optional<Tensor>& sinks, std::optional<Tensor> logs) {
  const int64_t tokens = query.size(0), heads = query.size(1), head_dim = query.size(2), kv_heads = cache.size(2);
  STD_TORCH_CHECK(heads % kv_heads == 0 && slots.size(0) == tokens && slots.stride(1) == 1);
  STD_TORCH_CHECK(!sinks || (sinks->numel() == heads && sinks->is_contiguous()), "sinks must be [heads]");
  check_logs(logs, tokens, heads);
  const Tensor rows = query.stride(2) == 1 ? query : as_contiguous(query), lengths = as_contiguous(counts);
  Tensor out = empty(query.sizes(), query.scalar_type());
  std::vector<int64_t> starts(tokens + 1);
  std::iota(starts.begin(), starts.end(), 0);
  const int64_t padded = vectors(head_dim) * kLanes;
  const int64_t partials = (slots.size(1) / kSplitFewRows + 1) * heads * (padded + 2);
  const int64_t most = std::max<int64_t>(1, kSparsePartials / partials);
  for (int64_t first = 0; first < tokens; first += most) {
    Problem p{View(rows),
              View(cache),
              View(slots),
              View(out),
              lengths.const_data_ptr<int64_t>(),
              starts.data(),
              static_cast<float>(scale) * kLog2E,
              0.0f,
              kNoWindow,
              sinks ? sinks->const_data_ptr<float>() : nullptr,
              nullptr,
              0,
              std::nullopt,
              nullptr,
              logs ? logs->mutable_data_ptr<float>() : nullptr,
              true,
              Places(cache, head_dim),
              heads / kv_heads,
              head_dim,
              padded,
              0,
              {},
              {},
              nullptr};
    compute(p, first, std::min(tokens, first + most));
  }
  return out;
}

}  // namespace

QUIRE_OPERATION(
    int4_attention,
    "(Tensor query, Tensor cache, Tensor block_tables, Tensor sequence_lengths, Tensor query_starts, float scale, "
    "Tensor recent, Tensor recent_slots, int window=0, float softcap=0.0, Tensor? sinks=None, Tensor? slopes=None, "
    "Tensor? biases=None) -> Tensor")

QUIRE_OPERATION(sparse_attention,
                "(Tensor query, Tensor cache, Tensor slots, Tensor counts, float scale, Tensor? sinks=None, "
                "Tensor(a!)? logs=None) -> Tensor")

QUIRE_OPERATION(
    paged_attention,
    "(Tensor query, Tensor cache, Tensor block_tables, Tensor sequence_lengths, Tensor query_starts, float scale, "
    "int window=0, float softcap=0.0, Tensor? sinks=None, Tensor? slopes=None, Tensor? biases=None, Tensor? ends=None, "
    "Tensor(a!)? logs=None) -> Tensor")

}  // namespace quire
