// Weights in few bits, as checkpoints are published: the form of `CodedTiles` in kernels/quantized.py.
//
// A step is a group of inputs: its factors, [factors][32], then words of codes, [words][32]. A weight is value, value *
// scale, or (value + offset) * scale, if there are 0, 1 or 2 factors; sums are multiplied by a scale of each feature.
//
// Codes become integers of 16 bits, which are multiplied by rows of such integers: sums of a group are exact, and
// rounding a row, with a scale for each group, changes a product by about 1e-4 of its size at most. Codes of Float8
// become float32, or bfloat16 for rows of bfloat16 where these are multiplied in pairs. A product does not depend on
// whether a piece is widened.

#include "tile_form.h"

namespace quire {
namespace {

constexpr int64_t kMaxGroup = 256;

// What precedes the numbers of a group of a row.
struct GroupHead {
  float scale;   // of sums of products
  float total;   // of the row, which offsets are multiplied by
  int32_t base;  // to be added to sums of products
};

// What a word's codes stand for. All have
//   kBits: of a code,
//   kNumberBytes: of a number of a row,
//   kParts: each of which is multiplied by a word of a row's numbers,
//   unit: what sums of products are multiples of,
//   unpack(word): is done once for all parts,
//   part(unpacked, k), add(total, part, x): part `k`; adds its products,
//   finish(total, head): the sums of a group, to be scaled,
//   fill(x, count, group, to): converts a group of a row,
//   Wide, widen(part, to): the values of widened pieces, given the unit; stores a part for them.

// Puts number k of each 2 * kParts beside number k + kParts.
template <int kParts, typename T>
void pair_numbers(const T* numbers, int64_t count, char* to) {
  auto* pairs = reinterpret_cast<T*>(to);
  for (const T* word = numbers; word < numbers + count; word += 2 * kParts) {
    for (int k = 0; k < kParts; ++k, pairs += 2) {
      pairs[0] = word[k];
      pairs[1] = word[k + kParts];
    }
  }
}

// Values are unit * (integer + base). A part is the integers of codes k and k + kParts, 16 bits each.
struct Pairs;
template <int Bits>
struct Integers {
  using Wide = Pairs;
  using Total = Ints;
  static constexpr int kBits = Bits, kNumberBytes = 2, kParts = 16 / kBits;

  static Ints add(Ints total, Shorts part, const char* x) {
    return add_pairs(total, part, std::bit_cast<Shorts>(repeat(x)));
  }

  static Floats finish(Ints total, const GroupHead& head) { return __builtin_convertvector(total + head.base, Floats); }

  static void widen(Shorts part, char* to) { store(to, std::bit_cast<Words>(part)); }

 protected:
  // `most` is the largest magnitude of integer + base. Sums of the row's products fit 32 bits.
  template <typename T>
  static GroupHead fill_pairs(const T* x, int64_t count, int64_t group, char* to, int32_t base, float most) {
    float scale = largest(x, count) / 32767.0f;
    if (most * static_cast<float>(group) > 0x1p16f) scale = std::max(scale, sum_of_sizes(x, count, most * 0x1.01p-31f));
    int16_t integers[kMaxGroup];
    const float total = quantize(x, count, scale, integers);
    std::fill(integers + count, integers + group, 0);
    pair_numbers<kParts>(integers, group, to);
    if (total != total) return {total, total, 0};  // NaN propagates
    return {scale, total * scale, base * static_cast<int32_t>(total)};
  }
};

// Parts that have been widened.
struct Pairs : Integers<16> {
  using Wide = void;
  using Unpacked = Shorts;
  float unit;
  explicit Pairs(float unit) : unit(unit) {}
  static Shorts unpack(Words word) { return std::bit_cast<Shorts>(word); }
  static Shorts part(Shorts word, int) { return word; }
};

struct SignedBytes : Integers<8> {
  using Unpacked = Words;
  static constexpr float unit = 1.0f;
  static Words unpack(Words word) { return word; }
  static Shorts part(Words word, int k) { return std::bit_cast<Shorts>(k ? word : word << 8) >> 8; }

  template <typename T>
  static GroupHead fill(const T* x, int64_t count, int64_t group, char* to) {
    return fill_pairs(x, count, group, to, 0, 128.0f);
  }
};

struct UnsignedBytes : Integers<8> {
  using Unpacked = Words;
  static constexpr float unit = 1.0f;
  static Words unpack(Words word) { return word; }
  static Shorts part(Words word, int k) { return std::bit_cast<Shorts>(word >> (8 * k) & 0x00FF00FFu); }

  template <typename T>
  static GroupHead fill(const T* x, int64_t count, int64_t group, char* to) {
    return fill_pairs(x, count, group, to, 0, 255.0f);
  }
};

// 4 bits, for 16 consecutive integers.
struct Nibbles : Integers<4> {
  using Unpacked = Words;
  static constexpr float unit = 1.0f;
  int32_t base;

  explicit Nibbles(const float* values) : base(static_cast<int32_t>(values[0])) {}

  static bool fits(const float* values) {
    bool all = values[0] == std::nearbyint(values[0]) && std::abs(values[0]) < 128;
    for (int i = 1; i < 16; ++i) all = all && values[i] == values[0] + i;
    return all;
  }

  static Words unpack(Words word) { return word; }
  static Shorts part(Words word, int k) { return std::bit_cast<Shorts>(word >> (4 * k) & 0x000F000Fu); }

  template <typename T>
  GroupHead fill(const T* x, int64_t count, int64_t group, char* to) const {
    return fill_pairs(x, count, group, to, base, 143.0f);
  }
};

// 16 bytes, repeated.
struct ByteTable {
  alignas(4 * kLanes) std::array<uint8_t, 4 * kLanes> bytes;

  // Looks up each byte of `codes`, which are below 16.
  Words find(Words codes) const {
#if defined(__AVX512BW__)
    return std::bit_cast<Words>(_mm512_shuffle_epi8(read<__m512i>(bytes.data()), std::bit_cast<__m512i>(codes)));
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return std::bit_cast<Words>(_mm256_shuffle_epi8(read<__m256i>(bytes.data()), std::bit_cast<__m256i>(codes)));
#elif defined(__aarch64__)
    return std::bit_cast<Words>(vqtbl1q_u8(read<uint8x16_t>(bytes.data()), std::bit_cast<uint8x16_t>(codes)));
#else
    auto found = std::bit_cast<std::array<uint8_t, 4 * kLanes>>(codes);
    for (uint8_t& each : found) each = bytes[each];
    return std::bit_cast<Words>(found);
#endif
  }
};

// 4 bits, for 16 halves of integers between -128 and 127.
struct SmallTable : Integers<4> {
  struct Unpacked {
    Words even, odd;  // bytes
  };
  float unit;
  ByteTable table;

  explicit SmallTable(const float* values) : unit(multiples(values, 1.0f) ? 1.0f : 0.5f) {
    for (size_t i = 0; i < table.bytes.size(); ++i) table.bytes[i] = static_cast<int8_t>(values[i % 16] / unit);
  }

  static bool multiples(const float* values, float unit) {
    return std::all_of(values, values + 16, [unit](float x) {
      return std::abs(x / unit) <= 127 && x / unit == std::nearbyint(x / unit);
    });
  }
  static bool fits(const float* values) { return multiples(values, 1.0f) || multiples(values, 0.5f); }

  Unpacked unpack(Words word) const { return {table.find(word & 0x0F0F0F0Fu), table.find(word >> 4 & 0x0F0F0F0Fu)}; }

  static Shorts part(Unpacked word, int k) { return SignedBytes::part(k % 2 ? word.odd : word.even, k / 2); }

  template <typename T>
  static GroupHead fill(const T* x, int64_t count, int64_t group, char* to) {
    return fill_pairs(x, count, group, to, 0, 127.0f);
  }
};

// 4 bits, for any 16 values, which are rounded to 1/4032 of the largest: this is exact for fp4, whose values are
// multiples of 1/192, and changes nf4 by 1e-4 of its size.
struct Table : Integers<4> {
  static constexpr float kSteps = 4032.0f;
  float unit;

  static float step(const float* values) {
    return std::abs(*std::max_element(values, values + 16, [](float a, float b) { return std::abs(a) < std::abs(b); })) /
           kSteps;
  }
  int16_t integer(float value) const { return static_cast<int16_t>(std::nearbyint(value / unit)); }

  template <typename T>
  static GroupHead fill(const T* x, int64_t count, int64_t group, char* to) {
    return fill_pairs(x, count, group, to, 0, kSteps);
  }

#if defined(__AVX512BW__)
  using Unpacked = Words;
  Shorts integers;  // twice

  explicit Table(const float* values) : unit(step(values)) {
    for (int i = 0; i < 2 * kLanes; ++i) integers[i] = integer(values[i % 16]);
  }

  static Words unpack(Words word) { return word; }

  Shorts part(Words word, int k) const {
    return std::bit_cast<Shorts>(
        _mm512_permutexvar_epi16(std::bit_cast<__m512i>(word >> (4 * k)), std::bit_cast<__m512i>(integers)));
  }
#else
  struct Unpacked {
    Words low[2], high[2];  // bytes of integers of even and odd codes
  };
  ByteTable low, high;

  explicit Table(const float* values) : unit(step(values)) {
    for (size_t i = 0; i < low.bytes.size(); ++i) {
      const int16_t each = integer(values[i % 16]);
      low.bytes[i] = each & 0xFF, high.bytes[i] = each >> 8 & 0xFF;
    }
  }

  Unpacked unpack(Words word) const {
    const Words even = word & 0x0F0F0F0Fu, odd = word >> 4 & 0x0F0F0F0Fu;
    return {{low.find(even), low.find(odd)}, {high.find(even), high.find(odd)}};
  }

  static Shorts part(const Unpacked& word, int k) {
    const Words low = word.low[k % 2], high = word.high[k % 2];
    const Words both = k / 2 ? (low >> 8 & 0x00FF00FFu) | (high & 0xFF00FF00u)
                             : (low & 0x00FF00FFu) | (high << 8 & 0xFF00FF00u);
    return std::bit_cast<Shorts>(both);
  }
#endif
};

// Float32 that have been widened.
struct WideFloats {
  using Wide = void;
  using Total = Floats;
  using Unpacked = Floats;
  static constexpr int kBits = 32, kNumberBytes = 4, kParts = 1;
  static constexpr float kScale = 0x1p100f;
  float unit;
  explicit WideFloats(float unit) : unit(unit / kScale) {}
  static Floats unpack(Words word) { return std::bit_cast<Floats>(word); }
  static Floats part(Floats word, int) { return word; }
  static Floats add(Floats total, Floats part, const char* x) { return total + part * read<float>(x); }
  static Floats finish(Floats total, const GroupHead&) { return total; }
};

// Float8 of the kind e4m3fn (OCP 8-bit Floating Point Specification), but for NaN, which becomes 480. A part is 2⁻¹²⁰
// of the value of code k: sign, exponent and mantissa are moved to those of a float32. The largest number of a group of
// a row is between 2¹²⁰ and 2¹²¹, so that products lose nothing.
struct Float8 {
  using Wide = WideFloats;
  using Total = Floats;
  struct Unpacked {
    Words even, odd;  // bfloat16
  };
  static constexpr int kBits = 8, kNumberBytes = 4, kParts = 4;
  static constexpr float unit = 1.0f;

  static Words halves(Words word) {
    return std::bit_cast<Words>(std::bit_cast<Shorts>(word) >> 4) & 0x87F087F0u;
  }
  static Unpacked unpack(Words word) { return {halves(word << 8), halves(word)}; }

  static Floats part(Unpacked word, int k) {
    const Words both = k % 2 ? word.odd : word.even;
    return std::bit_cast<Floats>(k / 2 ? both & 0xFFFF0000u : both << 16);
  }

  static Floats add(Floats total, Floats part, const char* x) { return WideFloats::add(total, part, x); }
  static Floats finish(Floats total, const GroupHead&) { return total; }

  // They become normal numbers, which all processors multiply at full speed.
  static void widen(Floats part, char* to) { store(to, std::bit_cast<Words>(part * WideFloats::kScale)); }

  template <typename T>
  static GroupHead fill(const T* x, int64_t count, int64_t group, char* to) {
    const auto power = std::bit_cast<float>(std::bit_cast<uint32_t>(largest(x, count)) & 0x7F800000u);
    const float scale = std::max(power, 0x1p-6f), factor = 0x1p120f / scale;
    auto* numbers = reinterpret_cast<float*>(to);
    Floats total = {};
    for_vectors(count, [&](int64_t i, auto n) {
      const Floats each = load(x + i, n);
      total += each;
      store(numbers + i, each * factor, n);
    });
    std::fill(numbers + count, numbers + group, 0.0f);
    return {scale, sum(total), 0};
  }
};

#ifdef __AVX512BF16__
// The same for rows of bfloat16. A part is codes k and k + 2 as bfloat16.
struct Float8Pairs {
  using Wide = void;
  using Total = Floats;
  struct Unpacked {
    Words even, odd;
  };
  static constexpr int kBits = 8, kNumberBytes = 2, kParts = 2;
  static constexpr float unit = 1.0f;
  Shorts subnormal;

  Float8Pairs() {
    for (int i = 0; i < 2 * kLanes; ++i) {
      subnormal[i] = static_cast<int16_t>(std::bit_cast<uint32_t>(static_cast<float>(i % 8) * 0x1p-9f) >> 16);
    }
  }

  // Those of the low bytes of each 16 bits. Multiplications take subnormal bfloat16 for 0, so that exponents must be right.
  Words halves(Words word) const {
    const auto bits = std::bit_cast<__m512i>((word << 4) & 0x07F007F0u);
    const __mmask32 is_subnormal = _mm512_testn_epi16_mask(bits, _mm512_set1_epi16(0x0780));
    const __m512i normal = _mm512_add_epi16(bits, _mm512_set1_epi16(120 << 7));
    const auto size = _mm512_mask_permutexvar_epi16(normal, is_subnormal, std::bit_cast<__m512i>(word),
                                                    std::bit_cast<__m512i>(subnormal));
    return std::bit_cast<Words>(size) | (word << 8 & 0x80008000u);
  }
  Unpacked unpack(Words word) const { return {halves(word), halves(word >> 8)}; }

  static Words part(Unpacked word, int k) { return k ? word.odd : word.even; }

  static Floats add(Floats total, Words part, const char* x) {
    return add_bfloat16_pairs(total, part, x);
  }
  static Floats finish(Floats total, const GroupHead&) { return total; }

  template <typename T>
  static GroupHead fill(const T* x, int64_t count, int64_t group, char* to) {
    BFloat16 numbers[kMaxGroup];
    Floats total = {};
    for_vectors(count, [&](int64_t i, auto n) {
      const Floats each = load(x + i, n);
      total += each;
      store(numbers + i, each, n);
    });
    std::fill(numbers + count, numbers + group, 0.0f);
    pair_numbers<kParts>(numbers, group, to);
    return {1.0f, sum(total), 0};
  }
};
#endif

// The layout of a step, and its factors.
struct Groups {
  int64_t bits, group, factors, factor_bytes;

  // `bytes` are those of a step, which tell whether factors are float16 or float32.
  Groups(int64_t bits, int64_t group, int64_t factors, int64_t bytes)
      : bits(bits), group(group), factors(factors),
        factor_bytes(factors > 0 ? (bytes - kTile * group * bits / 8) / (factors * kTile) : 4) {
    STD_TORCH_CHECK(group > 0 && group % 8 == 0 && group <= kMaxGroup && factors >= 0 &&
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

// Whether pieces are widened for many rows. With 16 lanes, unpacking fits between the multiplications of 8 rows.
constexpr bool kWidensCodes = kLanes < 16;

// A group of a row is its head, then a word of numbers for each part of a word of codes.
template <typename Values>
struct Coded : Groups, Steps<Coded<Values>, Floats, 1, 4, 4> {
  using Groups::inputs, Groups::step_bytes, Groups::steps;
  static constexpr bool kFinishes = true;
  using Unpacked = typename Values::Unpacked;
  static constexpr bool kWidens = kWidensCodes && !std::is_void_v<typename Values::Wide>;
  using Wide = std::conditional_t<kWidens, Coded<typename Values::Wide>, Coded>;
  static constexpr int kParts = Values::kParts;
  // At a time. They have sums of the group, too.
  static constexpr int kRows = kLanes == 16 ? 8 : kWidens || kFewVectors == 4 ? 4 : 6;

  Values values;

  Coded(const Values& values, int64_t group, int64_t factors, int64_t bytes)
      : Groups(Values::kBits, group, factors, bytes), values(values) {}

  Coded(const Values& values, const Groups& of) : Groups(of), values(values) { bits = Values::kBits; }

  Wide wide() const {
    if constexpr (kWidens) return {typename Values::Wide(values.unit), *this};
    else return *this;
  }

  int64_t x_bytes() const { return sizeof(GroupHead) + group * Values::kNumberBytes; }

  // Inlined, so that sums stay in registers.
  template <int R, int V>
  [[gnu::always_inline]] void add_all(Floats (&sums)[R][V], const char* step, int first, const char* x,
                                      int64_t stride) const {
    typename Values::Total totals[R][V] = {};
    const char *words = step + head_bytes() + first * kLanes * 4, *const end = step + step_bytes();
    const char* row = x + sizeof(GroupHead);
    for (; words < end; words += kTile * 4, row += kParts * 4) {
      Unpacked unpacked[V];
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) unpacked[v] = values.unpack(read<Words>(words + v * kLanes * 4));
#pragma GCC unroll 4
      for (int k = 0; k < kParts; ++k) {
        decltype(values.part(unpacked[0], k)) parts[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) parts[v] = values.part(unpacked[v], k);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
          for (int v = 0; v < V; ++v) totals[r][v] = Values::add(totals[r][v], parts[v], row + r * stride + k * 4);
        }
      }
    }
    with_factors([&](auto f) __attribute__((always_inline)) {
      constexpr int F = decltype(f)::value;
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        const Floats scale = F > 0 ? read_factor(step, 0, first + v) : broadcast(1.0f), in_units = scale * values.unit;
        const Floats offset = F > 1 ? read_factor(step, 1, first + v) * scale : Floats{};
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
          const auto head = read<GroupHead>(x + r * stride);
          sums[r][v] += Values::finish(totals[r][v], head) * (in_units * head.scale);
          if constexpr (F > 1) sums[r][v] += offset * head.total;
        }
      }
    });
  }

  void widen(const char* step, int64_t steps, char* to) const {
    for (const char* const end = step + steps * step_bytes(); step < end; step += step_bytes()) {
      std::memcpy(to, step, head_bytes());
      to += head_bytes();
      for (const char* words = step + head_bytes(); words < step + step_bytes(); words += kTile * 4) {
        for (int v = 0; v < kVectors; ++v) {
          const auto unpacked = values.unpack(read<Words>(words + v * kLanes * 4));
#pragma GCC unroll 4
          for (int k = 0; k < kParts; ++k) {
            Values::widen(values.part(unpacked, k), to + (k * kTile + v * kLanes) * 4);
          }
        }
        to += kParts * kTile * 4;
      }
    }
  }

  static bool is_ready(ScalarType, int64_t) { return false; }

  template <typename T>
  void fill(const T* x, int64_t inputs, char* to, int64_t) const {
    for (int64_t i = 0; i < inputs; i += group, to += x_bytes()) {
      const int64_t count = std::min(group, inputs - i);
      const GroupHead head = values.fill(x + i, count, group, to + sizeof(GroupHead));
      std::memcpy(to, &head, sizeof(head));
    }
  }

  static Floats value(Floats sum, const float* scales, int64_t feature, const char*) {
    return sum * load(scales + feature);
  }
};

}  // namespace

std::unique_ptr<TileForm> coded_form(std::string_view name, const Tensor& table, int64_t group, int64_t factors,
                                     int64_t bytes, ScalarType rows) {
  STD_TORCH_CHECK(table.scalar_type() == ScalarType::Float && table.is_contiguous() &&
                      (table.numel() == 16 || table.numel() == 256),
                  "a table has 16 or 256 values of float32");
  const auto form = [&]<typename Values>(const Values& values) {
    return make_form(Coded<Values>(values, group, factors, bytes));
  };
  const float* const values = table.const_data_ptr<float>();
  if (table.numel() == 16) {
    if (Nibbles::fits(values)) return form(Nibbles(values));
    if (SmallTable::fits(values)) return form(SmallTable(values));
    return form(Table(values));
  }
  if (name == "int8") return form(SignedBytes());
  if (name == "uint8") return form(UnsignedBytes());
  STD_TORCH_CHECK(name == "fp8", "no CPU kernel for values of ", name);
#ifdef __AVX512BF16__
  if (rows == ScalarType::BFloat16) return form(Float8Pairs());
#endif
  return form(Float8());
}

namespace {

// weight: bytes [tiles, steps, bytes of a step], as `Coded` describes them; scales: float32 [tiles * 32].
Tensor coded_linear(const Tensor& x, const Tensor& weight, const Tensor& scales, const std::optional<Tensor>& bias,
                    int64_t features, std::string_view values, const Tensor& table, int64_t group, int64_t factors,
                    std::string_view activation) {
  STD_TORCH_CHECK(scales.is_contiguous() && scales.scalar_type() == ScalarType::Float &&
                  scales.numel() == weight.size(0) * kTile);
  const auto form = coded_form(values, table, group, factors, weight.size(2), x.scalar_type());
  return packed_linear(*form, x, weight, scales.const_data_ptr<float>(), bias, features, activation);
}

}  // namespace

QUIRE_OPERATION(coded_linear,
                "(Tensor x, Tensor weight, Tensor scales, Tensor? bias, int features, str values, Tensor table, "
                "int group, int factors, str activation) -> Tensor")

}  // namespace quire
