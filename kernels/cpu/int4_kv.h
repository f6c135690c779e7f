// Blocks of keys and values in 4 bits, of one head, in the layout of `quire.kernels.int4_kv`.
//
// The codes of a feature's keys follow each other, so that the scores of a block are sums of vectors of keys, and nothing
// is transposed. Scales and offsets are not applied to the codes, but to queries and weights.

#pragma once

#include "kv_row.h"

namespace quire {

struct Int4Layout {
  int64_t head_dim, block_size, key_bytes, to_key_scales, to_values, to_value_scales, bytes;

  Int4Layout(int64_t head_dim, int64_t block_size)
      : head_dim(head_dim), block_size(block_size), key_bytes(block_size / 2),
        to_key_scales(head_dim * key_bytes), to_values(to_key_scales + 4 * head_dim),
        to_value_scales(to_values + block_size * (head_dim / 2)), bytes(to_value_scales + 4 * block_size) {}

  // Checks a cache, and finds the size of its heads.
  static Int4Layout of(const Tensor& cache) {
    const int64_t block_size = cache.size(3), row = cache.size(4), head_dim = (row - 4) * block_size / (block_size + 4);
    const Int4Layout layout(head_dim, block_size);
    STD_TORCH_CHECK(cache.scalar_type() == ScalarType::Byte && block_size % 2 == 0 && head_dim % 2 == 0 &&
                        layout.bytes == block_size * row && cache.stride(4) == 1 && cache.stride(3) == row,
                    "the cache does not have blocks of 4-bit numbers");
    return layout;
  }
};

// One head of a block.
struct Int4Block {
  const uint8_t *keys, *values;
  const Half *key_scales, *value_scales;  // then as many offsets

  Int4Block() = default;
  Int4Block(const uint8_t* at, const Int4Layout& layout)
      : keys(at), values(at + layout.to_values),
        key_scales(reinterpret_cast<const Half*>(at + layout.to_key_scales)),
        value_scales(reinterpret_cast<const Half*>(at + layout.to_value_scales)) {}
};

using Codes = uint8_t __attribute__((vector_size(kLanes)));

// The numbers in the low bits, whatever the others are.
inline Floats to_floats(Codes codes) {
#if defined(__AVX512F__)
  const __m512 numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(std::bit_cast<__m128i>(codes)), numbers);
#else
  return __builtin_convertvector(__builtin_convertvector(codes & 15, Ints), Floats);
#endif
}

inline Codes high_codes(Codes both) {
#if defined(__AVX512F__)
  return std::bit_cast<Codes>(_mm_srli_epi16(std::bit_cast<__m128i>(both), 4));
#else
  return both >> 4;
#endif
}

// The codes in the low bits, and those in the high bits.
struct CodePair {
  Floats low, high;

  CodePair(Codes both) : low(to_floats(both)), high(to_floats(high_codes(both))) {}
  CodePair(const uint8_t* at, AllLanes) : CodePair(read<Codes>(at)) {}
  CodePair(const uint8_t* at, int n) : CodePair(load_some(at, n)) {}

 private:
  static Codes load_some(const uint8_t* at, int n) {
    Codes some = {};
    std::memcpy(&some, at, n);
    return some;
  }
};

// The kLanes codes in half as many bytes: those in the low bits, then those in the high ones.
inline Floats load_codes(const uint8_t* at) {
#if defined(__AVX512F__)
  const __m128i both = _mm_set1_epi64x(read<int64_t>(at));
  return to_floats(std::bit_cast<Codes>(_mm_srlv_epi64(both, _mm_set_epi64x(4, 0))));
#else
  float lanes[kLanes];
  for (int i = 0; i < kLanes / 2; ++i) lanes[i] = at[i] & 15, lanes[i + kLanes / 2] = at[i] >> 4;
  return load(lanes);
#endif
}

// Quantizes `numbers` `[rows, size]`: their codes to `codes`, scales and offsets to `scales` and `offsets`. Each row,
// or with `by_column` each column, has one of them.
inline void find_codes(const float* numbers, int64_t rows, int64_t size, bool by_column, uint8_t* codes, Half* scales,
                       Half* offsets) {
  constexpr float kLargestOffset = 65504.0f;
  const auto clamped = [&](int64_t at, auto n) {
    return min(max(load(numbers + at, n), broadcast(-kLargestOffset)), broadcast(kLargestOffset));
  };
  const auto write = [&](int64_t at, Floats scale, Floats offset, auto n) {
    const Floats code = round((clamped(at, n) - offset) / (scale > 0.0f ? scale : broadcast(1.0f)));
    store(reinterpret_cast<int8_t*>(codes) + at, min(max(code, Floats{}), broadcast(15.0f)), n);
  };
  if (by_column) {
    for_vectors(size, [&](int64_t i, auto n) {
      Floats low = clamped(i, n), high = low;
      for (int64_t row = 1; row < rows; ++row) {
        const Floats x = clamped(row * size + i, n);
        low = min(low, x), high = max(high, x);
      }
      store(scales + i, (high - low) / 15.0f, n), store(offsets + i, low, n);
      const Floats scale = load(scales + i, n), offset = load(offsets + i, n);
      for (int64_t row = 0; row < rows; ++row) write(row * size + i, scale, offset, n);
    });
    return;
  }
  for (int64_t row = 0; row < rows; ++row) {
    Floats low = broadcast(numbers[row * size]), high = low;
    low = high = min(max(low, broadcast(-kLargestOffset)), broadcast(kLargestOffset));
    for_vectors(size, [&](int64_t i, auto n) {
      const Floats x = clamped(row * size + i, n), first = lane_numbers() < static_cast<int32_t>(n) ? x : low;
      low = min(low, first);
      high = max(high, lane_numbers() < static_cast<int32_t>(n) ? x : high);
    });
    const float least = -max(-low), most = max(high);
    scales[row] = (most - least) / 15.0f, offsets[row] = least;
    const Floats scale = broadcast(scales[row]), offset = broadcast(offsets[row]);
    for_vectors(size, [&](int64_t i, auto n) { write(row * size + i, scale, offset, n); });
  }
}

}  // namespace quire
