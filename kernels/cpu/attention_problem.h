// What attention.cpp computes, and what it shares between keys of all kinds: tiles of queries, the rows of keys in the
// cache, and the softmax over keys, step by step.

#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

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

}  // namespace
}  // namespace quire
