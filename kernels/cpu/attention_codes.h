// Attention to blocks of keys and values in 4 bits: directly from the codes for few queries, else widened.

#pragma once

#include <array>
#include <utility>

#include "attention_problem.h"

namespace quire {
namespace {

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

}  // namespace
}  // namespace quire
