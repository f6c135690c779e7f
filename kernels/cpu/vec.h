// Vectors of the host's widest registers, as the compiler's vector types: operators work lane by lane.
//
// Elements of any type are loaded to and stored from float32; at the end of a row, `n` lanes, with zeros in the others.

#pragma once

#include "threads.h"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include <bit>
#include <cstring>
#include <type_traits>
#include <utility>

namespace quire {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRegisters = 32;
#else
constexpr int kRegisters = 16;
#endif

using Floats = float __attribute__((vector_size(4 * kLanes)));
using Ints = int32_t __attribute__((vector_size(4 * kLanes)));
using Words = uint32_t __attribute__((vector_size(4 * kLanes)));
using Shorts = int16_t __attribute__((vector_size(4 * kLanes)));
using Halves = uint16_t __attribute__((vector_size(2 * kLanes)));
using Bytes = int8_t __attribute__((vector_size(kLanes)));

constexpr int64_t vectors(int64_t width) { return (width + kLanes - 1) / kLanes; }

inline Floats broadcast(float x) { return Floats{} + x; }
inline Floats max(Floats a, Floats b) { return a > b ? a : b; }
inline Floats min(Floats a, Floats b) { return a < b ? a : b; }

// 0, 1, 2, …
inline Ints lane_numbers() {
  Ints numbers;
  for (int i = 0; i < kLanes; ++i) numbers[i] = i;
  return numbers;
}

// Reduces the lanes with `combine`.
template <int Half = kLanes / 2, typename Combine>
inline float reduce(Floats x, Combine combine) {
  const auto far = [&]<int... I>(std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(x, x, ((I + Half) % kLanes)...);
  }(std::make_integer_sequence<int, kLanes>());
  x = combine(x, far);
  if constexpr (Half > 1) return reduce<Half / 2>(x, combine);
  else return x[0];
}

inline float sum(Floats x) {
  return reduce(x, [](Floats a, Floats b) { return a + b; });
}

inline float max(Floats x) {
  return reduce(x, [](Floats a, Floats b) { return max(a, b); });
}

template <typename To, typename From>
inline To read(const From* from) {
  To to;
  std::memcpy(&to, from, sizeof(To));
  return to;
}

// Broadcasts the word at `x`. The asm hides from the compiler that the lanes are equal: it would compute one lane and
// broadcast the result, which costs more than a vector operation.
inline Words repeat(const char* x) {
  Words words = Words{} + read<uint32_t>(x);
#if defined(__x86_64__)
  asm("" : "+v"(words));
#endif
  return words;
}

inline Floats load(const float* x) { return read<Floats>(x); }

inline Floats load(const BFloat16* x) {
  return std::bit_cast<Floats>(__builtin_convertvector(read<Halves>(x), Words) << 16);
}

inline Floats from_halves(Halves bits) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(std::bit_cast<__m256i>(bits));
#elif defined(__F16C__) && defined(__AVX2__)
  return _mm256_cvtph_ps(std::bit_cast<__m128i>(bits));
#elif defined(__aarch64__)
  return std::bit_cast<Floats>(vcvt_f32_f16(std::bit_cast<float16x4_t>(bits)));
#else
  Floats out;
  for (int i = 0; i < kLanes; ++i) out[i] = Half(bits[i], Half::from_bits());
  return out;
#endif
}

inline Floats load(const Half* x) { return from_halves(read<Halves>(x)); }

inline Floats load(const int8_t* x) {
#if defined(__AVX512F__)
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(read<__m128i>(x)));
#elif defined(__AVX2__)
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(x))));
#elif defined(__aarch64__)
  const int8x8_t bytes = vreinterpret_s8_u32(vdup_n_u32(read<uint32_t>(x)));
  return std::bit_cast<Floats>(vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(bytes)))));
#else
  return __builtin_convertvector(__builtin_convertvector(read<Bytes>(x), Ints), Floats);
#endif
}

inline void store(float* to, Floats x) { std::memcpy(to, &x, sizeof(x)); }
inline void store(char* to, Words x) { std::memcpy(to, &x, sizeof(x)); }

inline void store(BFloat16* to, Floats x) {
  const Words bits = std::bit_cast<Words>(x);
  const Words rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;  // round to nearest, ties to even
  const Halves halves = __builtin_convertvector(x == x ? rounded : (bits >> 16 | 0x40), Halves);
  std::memcpy(to, &halves, sizeof(halves));
}

inline void store(Half* to, Floats x) {
#if defined(__AVX512F__)
  const __m256i halves = _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
  std::memcpy(to, &halves, sizeof(halves));
#elif defined(__F16C__) && defined(__AVX2__)
  const __m128i halves = _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
  std::memcpy(to, &halves, sizeof(halves));
#elif defined(__aarch64__)
  const float16x4_t halves = vcvt_f16_f32(std::bit_cast<float32x4_t>(x));
  std::memcpy(to, &halves, sizeof(halves));
#else
  for (int i = 0; i < kLanes; ++i) to[i] = x[i];
#endif
}

// Integers from -128 to 127.
inline void store(int8_t* to, Floats x) {
  const Bytes bytes = __builtin_convertvector(__builtin_convertvector(x, Ints), Bytes);
  std::memcpy(to, &bytes, sizeof(bytes));
}

// Integers from -32768 to 32767.
inline void store(int16_t* to, Floats x) {
  using Narrow = int16_t __attribute__((vector_size(2 * kLanes)));
  const Narrow narrow = __builtin_convertvector(__builtin_convertvector(x, Ints), Narrow);
  std::memcpy(to, &narrow, sizeof(narrow));
}

// With two 16-bit numbers per lane, the sum of their products.
inline Ints sum_of_pairs(Shorts a, Shorts b) {
#if defined(__AVX512BW__)
  return std::bit_cast<Ints>(_mm512_madd_epi16(std::bit_cast<__m512i>(a), std::bit_cast<__m512i>(b)));
#elif defined(__AVX2__) && !defined(__AVX512F__)
  return std::bit_cast<Ints>(_mm256_madd_epi16(std::bit_cast<__m256i>(a), std::bit_cast<__m256i>(b)));
#else
  const Ints first = std::bit_cast<Ints>(a), second = std::bit_cast<Ints>(b);
  return (first << 16 >> 16) * (second << 16 >> 16) + (first >> 16) * (second >> 16);
#endif
}

// Adds it.
inline Ints add_pairs(Ints sum, Shorts a, Shorts b) {
#if defined(__AVX512VNNI__)
  return std::bit_cast<Ints>(
      _mm512_dpwssd_epi32(std::bit_cast<__m512i>(sum), std::bit_cast<__m512i>(a), std::bit_cast<__m512i>(b)));
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
  return std::bit_cast<Ints>(
      _mm256_dpwssd_avx_epi32(std::bit_cast<__m256i>(sum), std::bit_cast<__m256i>(a), std::bit_cast<__m256i>(b)));
#else
  return sum + sum_of_pairs(a, b);
#endif
}

#ifdef __AVX512BF16__
// With two bfloat16 per lane, adds the sum of their products with the two at `x`.
inline Floats add_bfloat16_pairs(Floats sum, Words pairs, const char* x) {
  return _mm512_dpbf16_ps(sum, std::bit_cast<__m512bh>(pairs),
                          std::bit_cast<__m512bh>(_mm512_set1_epi32(read<int32_t>(x))));
}
#endif

// The words of `a` and `b` in turns.
inline std::pair<Words, Words> interleave(Words a, Words b) {
  return [&]<int... I>(std::integer_sequence<int, I...>) {
    return std::pair(__builtin_shufflevector(a, b, (I / 2 + I % 2 * kLanes)...),
                     __builtin_shufflevector(a, b, (kLanes / 2 + I / 2 + I % 2 * kLanes)...));
  }(std::make_integer_sequence<int, kLanes>());
}

#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__)) || defined(__ARM_FEATURE_DOTPROD)
#define QUIRE_DOT_BYTES  // `dot_bytes` is one instruction
#endif

#if defined(__ARM_FEATURE_DOTPROD)
constexpr bool kDotsSigned = true;
#else
constexpr bool kDotsSigned = false;
#endif

// With four bytes per lane, adds the sum of their products with the four signed bytes at `x`. The bytes are unsigned or,
// with kDotsSigned, signed.
inline Ints dot_bytes(Ints sum, Words bytes, const char* x) {
#if defined(__AVX512VNNI__)
  return std::bit_cast<Ints>(_mm512_dpbusd_epi32(std::bit_cast<__m512i>(sum), std::bit_cast<__m512i>(bytes),
                                                 _mm512_set1_epi32(read<int32_t>(x))));
#elif defined(QUIRE_DOT_BYTES) && defined(__AVX2__)
  return std::bit_cast<Ints>(_mm256_dpbusd_avx_epi32(std::bit_cast<__m256i>(sum), std::bit_cast<__m256i>(bytes),
                                                     _mm256_set1_epi32(read<int32_t>(x))));
#elif defined(QUIRE_DOT_BYTES)
  return std::bit_cast<Ints>(vdotq_s32(std::bit_cast<int32x4_t>(sum), std::bit_cast<int8x16_t>(bytes),
                                       vreinterpretq_s8_u32(vdupq_n_u32(read<uint32_t>(x)))));
#else
  const Shorts of_x = std::bit_cast<Shorts>(repeat(x));
  sum += sum_of_pairs(std::bit_cast<Shorts>(bytes & 0x00FF00FF), of_x << 8 >> 8);
  return sum + sum_of_pairs(std::bit_cast<Shorts>(bytes >> 8 & 0x00FF00FF), of_x >> 8);
#endif
}

#if !defined(QUIRE_DOT_BYTES) && (defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__)))
#define QUIRE_PAIRS_OF_BYTES
// With four unsigned bytes per lane, the sums of two products each with the four signed bytes at `x`, which saturate.
inline Shorts pairs_of_bytes(Words bytes, const char* x) {
#if defined(__AVX512BW__)
  return std::bit_cast<Shorts>(
      _mm512_maddubs_epi16(std::bit_cast<__m512i>(bytes), _mm512_set1_epi32(read<int32_t>(x))));
#else
  return std::bit_cast<Shorts>(
      _mm256_maddubs_epi16(std::bit_cast<__m256i>(bytes), _mm256_set1_epi32(read<int32_t>(x))));
#endif
}
#endif

using AllLanes = std::integral_constant<int, kLanes>;

template <typename T>
inline Floats load(const T* x, AllLanes) {
  return load(x);
}

template <typename T>
inline Floats load(const T* x, int n) {
  T row[kLanes] = {};
  std::memcpy(row, x, n * sizeof(T));
  return load(row);
}

template <typename T>
inline void store(T* to, Floats x, AllLanes) {
  store(to, x);
}

template <typename T>
inline void store(T* to, Floats x, int n) {
  T row[kLanes];
  store(row, x);
  std::memcpy(to, row, n * sizeof(T));
}

// Calls `body(i, n)` for the vectors of a row; `n` is `AllLanes` except for the last, which may have fewer.
template <typename Body>
inline void for_vectors(int64_t width, Body&& body) {
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) body(i, AllLanes());
  if (i < width) body(i, static_cast<int>(width - i));
}

constexpr float kToInteger = 12582912.0f;  // 1.5 · 2²³: adding it rounds |x| < 2²² to an integer, ties to even

// Rounds to an integer, ties to even; |x| < 2²². Never fused with the computation of `x`, as an addition might be.
inline Floats round(Floats x) {
#if defined(__AVX512F__)
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
  return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__aarch64__)
  return std::bit_cast<Floats>(vrndnq_f32(std::bit_cast<float32x4_t>(x)));
#else
  return x + kToInteger - kToInteger;
#endif
}

// `x` times 2 to the power of the integer in `shifted` (kToInteger plus an integer from -127, which gives 0, to 127).
inline Floats times_power(Floats x, Floats shifted) {
  const Words exponent = (std::bit_cast<Words>(shifted) - std::bit_cast<uint32_t>(kToInteger) + 127) << 23;
  return x * std::bit_cast<Floats>(exponent);
}

// 2ˣ to 2 units in the last place; 0 below 2⁻¹²⁶·⁵; NaN propagates. The polynomials here are those of Cephes (S.
// Moshier).
inline Floats exp2(Floats x) {
  x = x < -127.0f ? broadcast(-127.0f) : x;
  x = x > 127.0f ? broadcast(127.0f) : x;
  const Floats shifted = x + kToInteger;
  const Floats r = x - (shifted - kToInteger);
  Floats y = r * 1.535336188319500e-4f + 1.339887440266574e-3f;
  y = y * r + 9.618437357674640e-3f;
  y = y * r + 5.550332471162809e-2f;
  y = y * r + 2.402264791363012e-1f;
  y = y * r + 6.931472028550421e-1f;
  return times_power(y * r + 1.0f, shifted);
}

// eˣ to 2 units in the last place; 0 below e⁻⁸⁷·⁶, at most e⁸⁸; NaN propagates.
inline Floats exp(Floats x) {
  x = x < -88.0f ? broadcast(-88.0f) : x;
  x = x > 88.0f ? broadcast(88.0f) : x;
  const Floats shifted = x * 1.44269504088896341f + kToInteger;
  const Floats n = shifted - kToInteger;
  const Floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
  Floats y = r * 1.9875691500e-4f + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  return times_power(y * r * r + r + 1.0f, shifted);
}

// To 3 units in the last place; NaN propagates.
inline Floats tanh(Floats x) {
  const Floats square = x * x;
  Floats y = square * -5.70498872745e-3f + 2.06390887954e-2f;
  y = y * square - 5.37397155531e-2f;
  y = y * square + 1.33314422036e-1f;
  y = y * square - 3.33332819422e-1f;
  const Floats far = 1.0f - 2.0f / (exp(x + x) + 1.0f);
  return square < 0.390625f ? y * square * x + x : far;
}

}  // namespace quire
