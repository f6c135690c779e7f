// Attention to rows of keys and values: directly from the cache for few queries, else packed.

#pragma once

#include <array>
#include <utility>

#include "attention_problem.h"

namespace quire {
namespace {

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

}  // namespace
}  // namespace quire
