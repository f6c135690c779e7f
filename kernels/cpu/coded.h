// Weights in few bits, as checkpoints are published: the form of `CodedTiles` in kernels/quantized.py.
//
// A step is a group of inputs: its factors, [factors][32], then words of codes, [words][32]. Codes become float32 in
// registers, and weights are rounded to float32 before they are multiplied by a row, whether or not a piece is widened.

#pragma once

#include <string_view>

#include "packed_tiles.h"

namespace quire {

// What a word's codes stand for. Values have
//   kBits: of a code,
//   unit(): what they are multiples of; they are divided by it,
//   unpack(word): is done once for all codes of a word,
//   value(unpacked, k): the value of code k.

// Integers whose highest bit is that of a lane, so that no bits of other codes remain below.
inline Floats from_top(Words bits) { return __builtin_convertvector(std::bit_cast<Ints>(bits), Floats); }

struct SignedBytes {
  static constexpr int kBits = 8;
  static constexpr float unit() { return 0x1p-24f; }
  static Words unpack(Words word) { return word; }
  static Floats value(Words word, int k) { return from_top(word << (24 - 8 * k) & 0xFF000000u); }
};

struct UnsignedBytes {
  static constexpr int kBits = 8;
  static constexpr float unit() { return 1.0f; }
  static Words unpack(Words word) { return word; }
  static Floats value(Words word, int k) { return from_top(word >> (8 * k) & 0xFFu); }
};

// Float8 of the kind e4m3fn (OCP 8-bit Floating Point Specification), but for NaN, which becomes 480: sign, exponent and
// mantissa are moved to those of a float32, whose exponent is lower by 120.
struct Float8 {
  static constexpr int kBits = 8;
  static constexpr float unit() { return 0x1p120f; }
  static Words unpack(Words word) { return word; }
  static Floats value(Words word, int k) {
    const Ints top = std::bit_cast<Ints>(word << (24 - 8 * k)) >> 4;
    return std::bit_cast<Floats>(std::bit_cast<Words>(top) & 0x87F00000u);
  }
};

// 4 bits, for any 16 values.
struct Table {
  static constexpr int kBits = 4;
  static constexpr float unit() { return 1.0f; }
  static Words unpack(Words word) { return word; }

#if defined(__AVX512F__)
  Floats values;

  explicit Table(const float* values) : values(load(values)) {}

  Floats value(Words word, int k) const {
    return _mm512_permutexvar_ps(std::bit_cast<__m512i>(word >> (4 * k)), values);
  }
#elif defined(__AVX2__)
  Floats low, high;

  explicit Table(const float* values) : low(load(values)), high(load(values + 8)) {}

  Floats value(Words word, int k) const {
    const auto codes = std::bit_cast<__m256i>(word >> (4 * k));
    const auto is_high = std::bit_cast<Floats>(word << (28 - 4 * k));
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, codes), _mm256_permutevar8x32_ps(high, codes), is_high);
  }
#else
  std::array<float, 16> values;

  explicit Table(const float* from) { std::copy_n(from, 16, values.begin()); }

  Floats value(Words word, int k) const {
    Floats out;
    for (int i = 0; i < kLanes; ++i) out[i] = values[word[i] >> (4 * k) & 15];
    return out;
  }
#endif
};

// 4 bits, for 16 multiples of 1/2 below 64, which are looked up as bytes: faster than a table of floats but with AVX-512.
struct ByteTable {
  static constexpr int kBits = 4;
  static constexpr float unit() { return 0x1p-25f; }
  struct Unpacked {
    Words even, odd;  // bytes
  };
  alignas(4 * kLanes) std::array<int8_t, 4 * kLanes> bytes;

  explicit ByteTable(const float* values) {
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<int8_t>(values[i % 16] * 2);
  }

  static bool fits(const float* values) {
    return std::all_of(values, values + 16,
                       [](float x) { return std::abs(x) < 64 && x * 2 == std::nearbyint(x * 2); });
  }

  Words find(Words codes) const {
#if defined(__AVX2__) && !defined(__AVX512F__)
    return std::bit_cast<Words>(_mm256_shuffle_epi8(read<__m256i>(bytes.data()), std::bit_cast<__m256i>(codes)));
#elif defined(__aarch64__)
    return std::bit_cast<Words>(vqtbl1q_u8(read<uint8x16_t>(bytes.data()), std::bit_cast<uint8x16_t>(codes)));
#else
    auto found = std::bit_cast<std::array<uint8_t, 4 * kLanes>>(codes);
    for (uint8_t& each : found) each = static_cast<uint8_t>(bytes[each]);
    return std::bit_cast<Words>(found);
#endif
  }

  Unpacked unpack(Words word) const { return {find(word & 0x0F0F0F0Fu), find(word >> 4 & 0x0F0F0F0Fu)}; }

  static Floats value(Unpacked word, int k) { return SignedBytes::value(k % 2 ? word.odd : word.even, k / 2); }
};

// Calls `body` with the values of that name; `table` are 16 or 256.
template <typename Body>
void with_values(std::string_view name, const Tensor& table, Body&& body) {
  STD_TORCH_CHECK(table.scalar_type() == ScalarType::Float && table.is_contiguous() &&
                      (table.numel() == 16 || table.numel() == 256),
                  "a table has 16 or 256 values of float32");
  const float* const values = table.const_data_ptr<float>();
  if (table.numel() == 16) {
#if !defined(__AVX512F__)
    if (ByteTable::fits(values)) return body(ByteTable(values));
#endif
    return body(Table(values));
  }
  if (name == "int8") return body(SignedBytes());
  if (name == "uint8") return body(UnsignedBytes());
  if (name == "fp8") return body(Float8());
  STD_TORCH_CHECK(false, "no CPU kernel for values of ", name);
}

// Rows are float32, padded with zeros to whole groups. Weights are values, values * scale, or (values + offset) * scale,
// if there are 0, 1 or 2 factors; sums are multiplied by a scale of each feature.
template <typename Values>
struct Coded : Steps<Coded<Values>, Floats, 1, 4, 4> {
  using Wide = Float;
  static constexpr int kRows = 4;
  static constexpr int kCodes = 32 / Values::kBits;  // of a word

  Values values;
  int64_t group, factors, factor_bytes;

  // `bytes` are those of a step, which tell whether factors are float16 or float32.
  Coded(Values values, int64_t group, int64_t factors, int64_t bytes)
      : values(values), group(group), factors(factors),
        factor_bytes(factors > 0 ? (bytes - group / kCodes * kTile * 4) / (factors * kTile) : 4) {
    STD_TORCH_CHECK(group > 0 && group % kCodes == 0 && group <= kPieceBytes / Float::step_bytes() && factors >= 0 &&
                        factors <= 2,
                    "groups of ", group, " codes with ", factors, " factors are not supported");
    STD_TORCH_CHECK((factor_bytes == 2 || factor_bytes == 4) && bytes == step_bytes(),
                    "the weight does not match its group and factors");
  }

  int64_t inputs() const { return group; }
  int64_t steps(int64_t inputs) const { return (inputs + group - 1) / group; }
  int64_t head_bytes() const { return factors * kTile * factor_bytes; }
  int64_t step_bytes() const { return head_bytes() + group / kCodes * kTile * 4; }
  int64_t x_bytes() const { return group * 4; }

  // The scale and the offset of a vector of features; the latter is a weight's, not a value's.
  template <int F>
  std::pair<Floats, Floats> read_factors(const char* step, int vector) const {
    const auto read_factor = [&](int64_t number) {
      const int64_t at = number * kTile + vector * kLanes;
      return factor_bytes == 2 ? load(reinterpret_cast<const Half*>(step) + at)
                               : load(reinterpret_cast<const float*>(step) + at);
    };
    const Floats scale = F > 0 ? read_factor(0) : broadcast(1.0f);
    return {scale * values.unit(), F > 1 ? read_factor(1) * scale : Floats{}};
  }

  template <int F>
  static Floats weight(Floats value, Floats scale, Floats offset) {
    if constexpr (F == 0 && Values::unit() == 1.0f) return value;
    if constexpr (F < 2) return value * scale;
    else return value * scale + offset;
  }

  // Calls `body` with the number of factors as a constant.
  template <typename Body>
  [[gnu::always_inline]] void with_factors(Body&& body) const {
    if (factors == 0) return body(std::integral_constant<int, 0>());
    if (factors == 1) return body(std::integral_constant<int, 1>());
    body(std::integral_constant<int, 2>());
  }

  // Inlined, so that sums stay in registers.
  template <int R, int V>
  [[gnu::always_inline]] void add_all(Floats (&sums)[R][V], const char* step, int first, const char* x,
                                      int64_t stride) const {
    with_factors([&](auto f) __attribute__((always_inline)) {
      constexpr int F = decltype(f)::value;
      Floats scale[V], offset[V];
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) std::tie(scale[v], offset[v]) = read_factors<F>(step, first + v);
      const char *words = step + head_bytes() + first * kLanes * 4, *const end = step + step_bytes();
      for (; words < end; words += kTile * 4, x += kCodes * 4) {
        decltype(values.unpack(Words{})) unpacked[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) unpacked[v] = values.unpack(read<Words>(words + v * kLanes * 4));
#pragma GCC unroll 8
        for (int k = 0; k < kCodes; ++k) {
#pragma GCC unroll 8
          for (int v = 0; v < V; ++v) {
            const Floats each = weight<F>(values.value(unpacked[v], k), scale[v], offset[v]);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) sums[r][v] += each * read<float>(x + r * stride + k * 4);
          }
        }
      }
    });
  }

  void widen(const char* step, int64_t steps, char* to) const;

  template <typename T>
  bool is_ready(int64_t inputs) const {
    return std::is_same_v<T, float> && inputs % group == 0;
  }

  template <typename T>
  static void fill(const T* x, int64_t inputs, char* to, int64_t stride) {
    Float::fill(x, inputs, to, stride);
  }

  static Floats value(Floats sum, const float* scales, int64_t feature, const char*) {
    return sum * load(scales + feature);
  }
};

// These are compiled once, in coded.cpp.
#define QUIRE_CODED(declare, Values)                                                                            \
  declare template void Coded<Values>::widen(const char*, int64_t, char*) const;                                \
  declare template void multiply_block(Coded<Values>, const char*, int64_t, int64_t, Piece, int64_t, int64_t, \
                                       Sums<Coded<Values>>*, bool);

QUIRE_CODED(extern, SignedBytes)
QUIRE_CODED(extern, UnsignedBytes)
QUIRE_CODED(extern, Float8)
QUIRE_CODED(extern, Table)
#if !defined(__AVX512F__)
QUIRE_CODED(extern, ByteTable)
#endif

}  // namespace quire
