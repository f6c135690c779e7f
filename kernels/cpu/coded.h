// Weights in few bits, as checkpoints are published: the form of `CodedTiles` in kernels/quantized.py.
//
// A step is a group of inputs: its factors, [factors][32], then words of codes, [words][32]. A weight is value, value *
// scale, or (value + offset) * scale, if there are 0, 1 or 2 factors; sums are multiplied by a scale of each feature.
//
// Codes that stand for integers (or for halves, which are doubled) are multiplied by rows of 16-bit integers, which have
// a scale for each group: sums of a group are exact, and rounding a row changes a product by about 1e-4 of its size at most.
// Other codes become float32 in registers. Neither depends on whether a piece is widened.

#pragma once

#include <string_view>

#include "packed_tiles.h"

namespace quire {

// What a word's codes stand for. All have
//   kBits: of a code,
//   unpack(word): is done once for all codes of a word.
// Integers have
//   unit, base: the value is unit * (integer + base),
//   pair(unpacked, k): the integers of codes k and k + half of a word's, 16 bits each.
// Floats have
//   unit(): what they are multiples of; they are divided by it,
//   value(unpacked, k): the value of code k.

struct SignedBytes {
  static constexpr int kBits = 8;
  static constexpr float unit = 1.0f;
  static constexpr int32_t base = 0;
  static Words unpack(Words word) { return word; }
  static Shorts pair(Words word, int k) { return std::bit_cast<Shorts>(k ? word : word << 8) >> 8; }
};

struct UnsignedBytes {
  static constexpr int kBits = 8;
  static constexpr float unit = 1.0f;
  static constexpr int32_t base = 0;
  static Words unpack(Words word) { return word; }
  static Shorts pair(Words word, int k) { return std::bit_cast<Shorts>(word >> (8 * k) & 0x00FF00FFu); }
};

// 4 bits, for 16 consecutive integers.
struct Nibbles {
  static constexpr int kBits = 4;
  static constexpr float unit = 1.0f;
  int32_t base;

  explicit Nibbles(const float* values) : base(static_cast<int32_t>(values[0])) {}

  static bool fits(const float* values) {
    bool all = values[0] == std::nearbyint(values[0]) && std::abs(values[0]) < 256;
    for (int i = 1; i < 16; ++i) all = all && values[i] == values[0] + i;
    return all;
  }

  static Words unpack(Words word) { return word; }
  static Shorts pair(Words word, int k) { return std::bit_cast<Shorts>(word >> (4 * k) & 0x000F000Fu); }
};

// 4 bits, for 16 halves of integers between -128 and 127, which are looked up as bytes.
struct ByteTable {
  static constexpr int kBits = 4;
  static constexpr int32_t base = 0;
  struct Unpacked {
    Words even, odd;  // bytes
  };
  float unit;
  alignas(4 * kLanes) std::array<int8_t, 4 * kLanes> bytes;

  explicit ByteTable(const float* values) : unit(multiples(values, 1.0f) ? 1.0f : 0.5f) {
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<int8_t>(values[i % 16] / unit);
  }

  static bool multiples(const float* values, float unit) {
    return std::all_of(values, values + 16, [unit](float x) {
      return std::abs(x / unit) <= 127 && x / unit == std::nearbyint(x / unit);
    });
  }
  static bool fits(const float* values) { return multiples(values, 1.0f) || multiples(values, 0.5f); }

  Words find(Words codes) const {
#if defined(__AVX512BW__)
    return std::bit_cast<Words>(_mm512_shuffle_epi8(read<__m512i>(bytes.data()), std::bit_cast<__m512i>(codes)));
#elif defined(__AVX2__) && !defined(__AVX512F__)
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

  static Shorts pair(Unpacked word, int k) { return SignedBytes::pair(k % 2 ? word.odd : word.even, k / 2); }
};

// Pairs that have been unpacked.
struct Pairs {
  static constexpr int kBits = 16;
  float unit;
  int32_t base;
  static Shorts unpack(Words word) { return std::bit_cast<Shorts>(word); }
  static Shorts pair(Shorts word, int) { return word; }
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

// Calls `body` with the values of that name; `table` are 16 or 256.
template <typename Body>
void with_values(std::string_view name, const Tensor& table, Body&& body) {
  STD_TORCH_CHECK(table.scalar_type() == ScalarType::Float && table.is_contiguous() &&
                      (table.numel() == 16 || table.numel() == 256),
                  "a table has 16 or 256 values of float32");
  const float* const values = table.const_data_ptr<float>();
  if (table.numel() == 16) {
    if (Nibbles::fits(values)) return body(Nibbles(values));
    if (ByteTable::fits(values)) return body(ByteTable(values));
    return body(Table(values));
  }
  if (name == "int8") return body(SignedBytes());
  if (name == "uint8") return body(UnsignedBytes());
  if (name == "fp8") return body(Float8());
  STD_TORCH_CHECK(false, "no CPU kernel for values of ", name);
}

// The layout of a step, and its factors.
struct Groups {
  int64_t bits, group, factors, factor_bytes;

  // `bytes` are those of a step, which tell whether factors are float16 or float32.
  Groups(int64_t bits, int64_t group, int64_t factors, int64_t bytes)
      : bits(bits), group(group), factors(factors),
        factor_bytes(factors > 0 ? (bytes - kTile * group * bits / 8) / (factors * kTile) : 4) {
    STD_TORCH_CHECK(group > 0 && group % 8 == 0 && group <= kPieceBytes / Float::step_bytes() && factors >= 0 &&
                        factors <= 2,
                    "groups of ", group, " codes with ", factors, " factors are not supported");
    STD_TORCH_CHECK((factor_bytes == 2 || factor_bytes == 4) && bytes == step_bytes(),
                    "the weight does not match its group and factors");
  }

  int64_t inputs() const { return group; }
  int64_t steps(int64_t inputs) const { return (inputs + group - 1) / group; }
  int64_t head_bytes() const { return factors * kTile * factor_bytes; }
  int64_t step_bytes() const { return head_bytes() + kTile * group * bits / 8; }

  // A factor of a vector of features: the scale is number 0, the offset 1.
  Floats read_factor(const char* step, int number, int vector) const {
    const int64_t at = number * kTile + vector * kLanes;
    return factor_bytes == 2 ? load(reinterpret_cast<const Half*>(step) + at)
                             : load(reinterpret_cast<const float*>(step) + at);
  }

  // Calls `body` with the number of factors as a constant.
  template <typename Body>
  [[gnu::always_inline]] void with_factors(Body&& body) const {
    if (factors == 0) return body(std::integral_constant<int, 0>());
    if (factors == 1) return body(std::integral_constant<int, 1>());
    body(std::integral_constant<int, 2>());
  }
};

// A group of a row is `Head`, then 16-bit integers, in the order of the pairs of `Values`.
template <typename Values>
struct CodedIntegers : Groups, Steps<CodedIntegers<Values>, Floats, 1, 4, 2> {
  using Wide = CodedIntegers<Pairs>;
  using Groups::inputs, Groups::step_bytes, Groups::steps;
  struct Head {
    float scale;
    int32_t total;  // of the integers
  };
  static constexpr bool kIsWide = std::is_same_v<Values, Pairs>;
  // At a time. They have sums of the group, too.
  static constexpr int kRows = !kIsWide ? 4 : kLanes == 16 ? 8 : kFewVectors == 4 ? 4 : 6;
  static constexpr int kPairs = kIsWide ? 1 : 16 / Values::kBits;  // of a word
  static constexpr float kLargest = 32767.0f;  // so that the sums of 256 products by bytes fit 32 bits

  Values values;

  CodedIntegers(Values values, int64_t group, int64_t factors, int64_t bytes)
      : Groups(Values::kBits, group, factors, bytes), values(values) {}

  CodedIntegers(Values values, const Groups& of) : Groups(of), values(values) { bits = Values::kBits; }

  Wide wide() const { return {Pairs{values.unit, values.base}, *this}; }

  int64_t x_bytes() const { return sizeof(Head) + group * 2; }

  // Inlined, so that sums stay in registers.
  template <int R, int V>
  [[gnu::always_inline]] void add_all(Floats (&sums)[R][V], const char* step, int first, const char* x,
                                      int64_t stride) const {
    Ints totals[R][V] = {};
    const char *words = step + head_bytes() + first * kLanes * 4, *const end = step + step_bytes();
    const char* row = x + sizeof(Head);
    for (; words < end; words += kTile * 4, row += kPairs * 4) {
      decltype(values.unpack(Words{})) unpacked[V];
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) unpacked[v] = values.unpack(read<Words>(words + v * kLanes * 4));
#pragma GCC unroll 4
      for (int k = 0; k < kPairs; ++k) {
        Shorts pairs[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) pairs[v] = values.pair(unpacked[v], k);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
          const auto inputs = std::bit_cast<Shorts>(repeat(row + r * stride + k * 4));
#pragma GCC unroll 8
          for (int v = 0; v < V; ++v) totals[r][v] = add_pairs(totals[r][v], pairs[v], inputs);
        }
      }
    }
    with_factors([&](auto f) __attribute__((always_inline)) {
      constexpr int F = decltype(f)::value;
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        const Floats scale = F > 0 ? read_factor(step, 0, first + v) : broadcast(1.0f);
        const Floats offset = F > 1 ? read_factor(step, 1, first + v) * scale : Floats{};
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
          const auto [x_scale, total] = read<Head>(x + r * stride);
          const Floats exact = __builtin_convertvector(totals[r][v] + values.base * total, Floats);
          sums[r][v] += exact * (scale * (values.unit * x_scale));
          if constexpr (F > 1) sums[r][v] += offset * (static_cast<float>(total) * x_scale);
        }
      }
    });
  }

  void widen(const char* step, int64_t steps, char* to) const;

  template <typename T>
  static bool is_ready(int64_t) {
    return false;
  }

  template <typename T>
  void fill(const T* x, int64_t inputs, char* to, int64_t) const {
    constexpr int kCodes = 2 * kPairs;
    for (int64_t i = 0; i < inputs; i += group, to += x_bytes()) {
      const int64_t count = std::min(group, inputs - i);
      const float scale = largest(x + i, count) / kLargest;
      int16_t integers[kPieceBytes / Float::step_bytes()];
      const float total = quantize(x + i, count, scale, integers);
      std::fill(integers + count, integers + group, 0);
      const Head head{total == total ? scale : total, total == total ? static_cast<int32_t>(total) : 0};  // NaN propagates
      std::memcpy(to, &head, sizeof(head));
      auto* ordered = reinterpret_cast<int16_t*>(to + sizeof(head));
      for (const int16_t* word = integers; word < integers + group; word += kCodes) {
        for (int k = 0; k < kPairs; ++k, ordered += 2) {
          ordered[0] = word[k];
          ordered[1] = word[k + kPairs];
        }
      }
    }
  }

  static Floats value(Floats sum, const float* scales, int64_t feature, const char*) {
    return sum * load(scales + feature);
  }
};

// Rows are float32, padded with zeros to whole groups. Weights are rounded to float32 before they are multiplied.
template <typename Values>
struct CodedFloats : Groups, Steps<CodedFloats<Values>, Floats, 1, 4, 4> {
  using Wide = Float;
  using Groups::inputs, Groups::step_bytes, Groups::steps;
  static constexpr int kRows = 4;
  static constexpr int kCodes = 32 / Values::kBits;  // of a word

  Values values;

  CodedFloats(Values values, int64_t group, int64_t factors, int64_t bytes)
      : Groups(Values::kBits, group, factors, bytes), values(values) {}

  static Wide wide() { return {}; }

  int64_t x_bytes() const { return group * 4; }

  // The scale and the offset of a vector of features; the latter is a weight's, not a value's.
  template <int F>
  std::pair<Floats, Floats> read_factors(const char* step, int vector) const {
    const Floats scale = F > 0 ? read_factor(step, 0, vector) : broadcast(1.0f);
    return {scale * values.unit(), F > 1 ? read_factor(step, 1, vector) * scale : Floats{}};
  }

  template <int F>
  static Floats weight(Floats value, Floats scale, Floats offset) {
    if constexpr (F == 0 && Values::unit() == 1.0f) return value;
    if constexpr (F < 2) return value * scale;
    else return value * scale + offset;
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

// The form of weights of these values.
template <typename Values>
using Coded = std::conditional_t<requires(Values values) { values.base; }, CodedIntegers<Values>, CodedFloats<Values>>;

// These are compiled once, in coded.cpp.
#define QUIRE_MULTIPLY(declare, Values)                                                                         \
  declare template void multiply_block(Coded<Values>, const char*, int64_t, int64_t, Piece, int64_t, int64_t, \
                                       Sums<Coded<Values>>*, bool);
#define QUIRE_CODED(declare, Values)                                             \
  declare template void Coded<Values>::widen(const char*, int64_t, char*) const; \
  QUIRE_MULTIPLY(declare, Values)
#define QUIRE_ALL_CODED(declare)       \
  QUIRE_CODED(declare, SignedBytes)    \
  QUIRE_CODED(declare, UnsignedBytes)  \
  QUIRE_CODED(declare, Nibbles)        \
  QUIRE_CODED(declare, ByteTable)      \
  QUIRE_CODED(declare, Float8)         \
  QUIRE_CODED(declare, Table)          \
  QUIRE_MULTIPLY(declare, Pairs)

QUIRE_ALL_CODED(extern)

}  // namespace quire
