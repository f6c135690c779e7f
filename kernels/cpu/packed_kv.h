// Packed KV: keys and values as words of 32 bits, their products, and transposition of square blocks.
//
// A word is one float32 or, if the cache is bfloat16 and the processor multiplies bfloat16 pairs, two bfloat16: two
// features of a key, or two keys of a feature. Queries and weights are then rounded to bfloat16 too; sums are float32.

#pragma once

#include <array>
#include <utility>

#include "kv_row.h"

namespace quire {

constexpr int kBlockRows = 6;
constexpr int kBlockVectors = kRegisters == 32 ? 4 : 2;  // with kBlockRows, sums fill three quarters of the registers

// Words of one float32.
struct Numbers {
  static constexpr int kPerWord = 1;

  // Loads words from `i` on of a row of the cache.
  static Floats load(const auto& row, int64_t i, auto n) { return row.load(i, n); }

  // Loads words of features from `d` on, of one key's row.
  static Floats join(const auto* row, int64_t d, auto n) { return row->load(d, n); }

  static Floats add(Floats sum, Floats words, float word) { return sum + words * word; }

  static void pack(const float*, int64_t, float*) {}
};

#ifdef __AVX512BF16__
// Words of two bfloat16, for heads of an even size.
struct Pairs {
  static constexpr int kPerWord = 2;
  using Row = KvRow<BFloat16>;

  static Floats load(const Row& row, int64_t i, AllLanes) { return read<Floats>(row.at + 2 * i); }
  static Floats load(const Row& row, int64_t i, int n) {
    return std::bit_cast<Floats>(_mm512_maskz_loadu_epi32((1 << n) - 1, row.at + 2 * i));
  }

  // Interleaves the features of two keys' rows.
  static Floats join(const Row* rows, int64_t d, auto n) {
    const auto features = [&](const Row& row) { return _mm256_maskz_loadu_epi16((1 << n) - 1, row.at + d); };
    const __m512i first = _mm512_castsi256_si512(features(rows[0]));
    const __m512i both = _mm512_inserti64x4(first, features(rows[1]), 1);
    return _mm512_castsi512_ps(_mm512_permutexvar_epi16(interleaved(), both));
  }

  // The permutation that interleaves the halves of a vector.
  static __m512i interleaved() {
    const __m512i numbers = std::bit_cast<__m512i>(lane_numbers());
    return _mm512_or_si512(numbers, _mm512_slli_epi32(_mm512_add_epi32(numbers, _mm512_set1_epi32(kLanes)), 16));
  }

  static Floats add(Floats sum, Floats words, float word) {
    return _mm512_dpbf16_ps(sum, std::bit_cast<__m512bh>(words), std::bit_cast<__m512bh>(_mm512_set1_ps(word)));
  }

  // Packs `count` numbers into half as many words, possibly in place.
  static void pack(const float* x, int64_t count, float* words) {
    for (int64_t i = 0; i < count; i += kLanes) {
      const __m256bh halves = _mm512_cvtneps_pbh(quire::load(x + i));
      std::memcpy(reinterpret_cast<char*>(words) + i * 2, &halves, sizeof(halves));
    }
  }
};
#endif

// `c = a b`, or `c = c · factors + a b` with factors: M rows, N vectors of columns, `depth` words deep.
template <typename Form, int M, int N>
void multiply(const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* c, int64_t c_stride,
              int64_t depth, const float* factors) {
  Floats sums[M][N];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      sums[m][n] = factors ? load(c + m * c_stride + n * kLanes) * factors[m] : Floats{};
    }
  }
  for (int64_t k = 0; k < depth; ++k) {
    Floats row[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) row[n] = load(b + k * b_stride + n * kLanes);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) sums[m][n] = Form::add(sums[m][n], row[n], a[m * a_stride + k]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) store(c + m * c_stride + n * kLanes, sums[m][n]);
  }
}

template <typename Form, int... I>
constexpr auto blocks(std::integer_sequence<int, I...>) {
  return std::array{multiply<Form, I / kBlockVectors + 1, I % kBlockVectors + 1>...};
}

template <typename Form>
void multiply(int64_t rows, int64_t columns, const float* a, int64_t a_stride, const float* b, int64_t b_stride,
              float* c, int64_t c_stride, int64_t depth, const float* factors) {
  static constexpr auto kMultiply = blocks<Form>(std::make_integer_sequence<int, kBlockRows * kBlockVectors>());
  for (int64_t n = 0; n < columns; n += kBlockVectors) {
    const int64_t few = std::min<int64_t>(kBlockVectors, columns - n);
    kMultiply[(rows - 1) * kBlockVectors + few - 1](a, a_stride, b + n * kLanes, b_stride, c + n * kLanes, c_stride,
                                                    depth, factors);
  }
}

constexpr int kPart = 4;  // numbers in 128 bits, within which shuffles are cheapest

// Interleaves the first (with H = 2, the last) numbers of each part of `a` and `b`, in runs of `Size` numbers.
template <int Size, int H, int... I>
inline Floats zip(Floats a, Floats b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, (I / kPart * kPart + H + I % Size + I % kPart / (2 * Size) * Size +
                                        (I / Size % 2 ? kLanes : 0))...);
}

// Every other part of `a`, then of `b`, starting with part H.
template <int H, int... I>
inline Floats unzip(Floats a, Floats b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, (2 * (I / kPart) * kPart + H * kPart + I % kPart)...);
}

// Transposes the square block whose rows `row` returns, in registers: first squares of a part's width, then the parts.
template <typename GetRow>
inline void transpose(GetRow row, Floats (&block)[kLanes]) {
  constexpr auto lanes = std::make_integer_sequence<int, kLanes>();
#pragma GCC unroll 4
  for (int i = 0; i < kLanes; i += kPart) {
    const Floats first = row(i), second = row(i + 1), third = row(i + 2), fourth = row(i + 3);
    const Floats a = zip<1, 0>(first, second, lanes), b = zip<1, 2>(first, second, lanes);
    const Floats c = zip<1, 0>(third, fourth, lanes), d = zip<1, 2>(third, fourth, lanes);
    block[i] = zip<2, 0>(a, c, lanes), block[i + 1] = zip<2, 2>(a, c, lanes);
    block[i + 2] = zip<2, 0>(b, d, lanes), block[i + 3] = zip<2, 2>(b, d, lanes);
  }
  constexpr int kParts = kLanes / kPart;
#pragma GCC unroll 4
  for (int i = 0; i < kPart; ++i) {
    if constexpr (kParts == 2) {
      const Floats a = block[i], b = block[i + kPart];
      block[i] = unzip<0>(a, b, lanes), block[i + kPart] = unzip<1>(a, b, lanes);
    }
    if constexpr (kParts == 4) {
      const Floats a = block[i], b = block[i + kPart], c = block[i + 2 * kPart], d = block[i + 3 * kPart];
      const Floats ab = unzip<0>(a, b, lanes), cd = unzip<0>(c, d, lanes);
      block[i] = unzip<0>(ab, cd, lanes), block[i + 2 * kPart] = unzip<1>(ab, cd, lanes);
      const Floats odd_ab = unzip<1>(a, b, lanes), odd_cd = unzip<1>(c, d, lanes);
      block[i + kPart] = unzip<0>(odd_ab, odd_cd, lanes), block[i + 3 * kPart] = unzip<1>(odd_ab, odd_cd, lanes);
    }
  }
}

}  // namespace quire
