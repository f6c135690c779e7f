// The forms of weights in float32, float16, bfloat16, bytes and 4 bits.

#include "tile_form.h"

namespace quire {
namespace {

// Rounds a row to integers from -128 to 127, in steps of `scale` from `zero`, as its publisher does. Returns their sum, as
// `quantize` does.
template <typename T>
float quantize_from(const T* x, int64_t count, float scale, float zero, int8_t* to) {
  const Floats low = broadcast(-128.0f), high = broadcast(127.0f);
  Floats total = {};
  for_vectors(count, [&](int64_t i, auto n) {
    const Floats steps = round(max(low, min(high, load(x + i, n) / scale + zero)));  // NaN stays
    total += steps - zero;  // lanes beyond the row add 0
    store(to + i, steps, n);
  });
  return sum(total) + zero * static_cast<float>(count);
}

// Rows of float32, padded with zeros to whole steps.
template <typename Form, int Inputs, int Bytes>
struct FloatSteps : Steps<Form, Floats, Inputs, Bytes, Inputs * 4> {
  static bool is_ready(ScalarType type, int64_t inputs) { return type == ScalarType::Float && inputs % Inputs == 0; }

  template <typename T>
  static void fill(const T* x, int64_t inputs, char* to, int64_t stride) {
    auto* row = reinterpret_cast<float*>(to);
    for_vectors(inputs, [&](int64_t i, auto n) { store(row + i, load(x + i, n), n); });
    std::fill(row + inputs, row + stride / 4, 0.0f);
  }
};

// Weights of float32.
struct Float : FloatSteps<Float, 1, 4> {
  static Floats add(Floats sum, const char* weights, const char* x) {
    return sum + load(reinterpret_cast<const float*>(weights)) * read<float>(x);
  }
};

// Weights of float16, and rows of float32. Sums are those of `Float` to the last bit.
struct Float16 : FloatSteps<Float16, 1, 2> {
  using Wide = Float;
  static Wide wide() { return {}; }

  static Floats add(Floats sum, const char* weights, const char* x) {
    return sum + load(reinterpret_cast<const Half*>(weights)) * read<float>(x);
  }

  static void widen(const char* from, int64_t steps, char* to) {
    for (int64_t i = 0; i < steps * kTile; i += kLanes) {
      store(reinterpret_cast<float*>(to) + i, load(reinterpret_cast<const Half*>(from) + i));
    }
  }
};

// Weights of bfloat16, two inputs per word, and rows of float32. Sums are those of `Float` to the last bit.
struct BFloat16Floats : FloatSteps<BFloat16Floats, 2, 4> {
  using Wide = Float;
  static Wide wide() { return {}; }

  static Floats first(Words pairs) { return std::bit_cast<Floats>(pairs << 16); }
  static Floats second(Words pairs) { return std::bit_cast<Floats>(pairs & 0xFFFF0000); }

  static Floats add(Floats sum, const char* weights, const char* x) {
    const Words pairs = read<Words>(weights);
    sum += first(pairs) * read<float>(x);
    return sum + second(pairs) * read<float>(x + 4);
  }

  static void widen(const char* from, int64_t steps, char* to) {
    auto* wide = reinterpret_cast<float*>(to);
    for (int64_t k = 0; k < steps; ++k, wide += 2 * kTile) {
      for (int i = 0; i < kTile; i += kLanes) {
        const Words pairs = read<Words>(from + (k * kTile + i) * 4);
        store(wide + i, first(pairs));
        store(wide + kTile + i, second(pairs));
      }
    }
  }
};

#ifdef __AVX512BF16__
// Weights and rows of bfloat16, two inputs per word; products are summed in float32.
struct BFloat16Pairs : Steps<BFloat16Pairs, Floats, 2, 4, 4> {
  static Floats add(Floats sum, const char* weights, const char* x) {
    return add_bfloat16_pairs(sum, read<Words>(weights), x);
  }

  static bool is_ready(ScalarType type, int64_t inputs) {
    return type == ScalarType::BFloat16 && inputs % kInputs == 0;
  }

  template <typename T>
  static void fill(const T* x, int64_t inputs, char* to, int64_t stride) {
    auto* row = reinterpret_cast<BFloat16*>(to);
    for_vectors(inputs, [&](int64_t i, auto n) { store(row + i, load(x + i, n), n); });
    std::fill(row + inputs, row + stride / 2, 0.0f);
  }
};
#else
using BFloat16Pairs = BFloat16Floats;
#endif

// Weights of bytes with kOffset added, four inputs per word, and rows of bytes, whose scale follows. Sums are exact.
template <typename Form, int XBytes>
struct ByteSteps : Steps<Form, Ints, 4, 4, XBytes> {
  std::optional<StaticRounding> rounding;  // without it, magnitudes are at most 127
  static constexpr bool kFinishes = true;

  struct Tail {
    float scale;
    int32_t excess;  // what the row's sums include because of kOffset
  };
  static constexpr int64_t kTail = sizeof(Tail);

  static bool is_ready(ScalarType, int64_t) { return false; }

  template <typename T>
  void fill(const T* x, int64_t inputs, char* to, int64_t stride) const {
    auto* bytes = reinterpret_cast<int8_t*>(to);
    const float scale = rounding ? rounding->scale : largest(x, inputs) / kSteps;
    const float total = rounding ? quantize_from(x, inputs, scale, rounding->zero, bytes) : quantize(x, inputs, scale, bytes);
    const int64_t words = Form::steps(inputs);
    std::fill(bytes + inputs, bytes + words * 4, 0);
    Form::spread(to, words);
    const bool is_number = total == total;  // NaN propagates
    const int32_t offset = kDotsSigned ? 0 : kOffset;
    const Tail tail{is_number ? scale : total, is_number ? offset * static_cast<int32_t>(total) : 0};
    std::memcpy(to + stride - kTail, &tail, kTail);
  }

  Floats value(Ints sum, const float* scales, int64_t feature, const char* tail) const {
    const auto [scale, excess] = read<Tail>(tail);
    sum -= excess;
    if (rounding) sum -= read<Ints>(rounding->excess + feature);
    return __builtin_convertvector(sum, Floats) * load(scales + feature) * scale;
  }
};

#ifdef QUIRE_DOT_BYTES
struct Byte : ByteSteps<Byte, 4> {
  static Ints add(Ints sum, const char* weights, const char* x) {
    return dot_bytes(sum, read<Words>(weights) ^ (kDotsSigned ? kOffset * 0x01010101u : 0), x);
  }

  static void spread(char*, int64_t) {}
};
#else
// Pairs of 16 bits.
struct WideByte : Steps<WideByte, Ints, 2, 4, 4> {
  static Ints add(Ints sum, const char* weights, const char* x) {
    return sum + sum_of_pairs(read<Shorts>(weights), std::bit_cast<Shorts>(repeat(x)));
  }
};

// The instruction that multiplies bytes would saturate, so they are widened to 16 bits: the first and the third byte of
// each word, then the others. The bytes of rows are widened in advance.
struct Byte : ByteSteps<Byte, 8> {
  using Wide = WideByte;
  static Wide wide() { return {}; }

  static Words even(Words bytes) { return bytes & 0x00FF00FF; }
  static Words odd(Words bytes) { return even(bytes >> 8); }

  static Ints add(Ints sum, const char* weights, const char* x) {
    const Words bytes = read<Words>(weights);
    sum += sum_of_pairs(std::bit_cast<Shorts>(even(bytes)), std::bit_cast<Shorts>(repeat(x)));
    return sum + sum_of_pairs(std::bit_cast<Shorts>(odd(bytes)), std::bit_cast<Shorts>(repeat(x + 4)));
  }

  static void widen(const char* from, int64_t steps, char* to) {
    for (int64_t k = 0; k < steps; ++k, to += kTile * 8) {
      for (int i = 0; i < kTile; i += kLanes) {
        const Words bytes = read<Words>(from + (k * kTile + i) * 4);
        store(to + i * 4, even(bytes));
        store(to + (kTile + i) * 4, odd(bytes));
      }
    }
  }

  static void spread(char* row, int64_t words) {
    // From the last word to the first, as there is room for twice as many bytes.
    int64_t word = words;
    for (; word % kLanes; --word) {
      const auto bytes = read<std::array<int8_t, 4>>(row + (word - 1) * 4);
      const std::array<int16_t, 4> wide{bytes[0], bytes[2], bytes[1], bytes[3]};
      std::memcpy(row + (word - 1) * 8, &wide, sizeof(wide));
    }
    while ((word -= kLanes) >= 0) {
      const Shorts bytes = read<Shorts>(row + word * 4);
      const auto [low, high] = interleave(std::bit_cast<Words>(bytes << 8 >> 8), std::bit_cast<Words>(bytes >> 8));
      store(row + word * 8, low);
      store(row + word * 8 + kLanes * 4, high);
    }
  }
};
#endif

// 4-bit weights. A group of a row is a scale; the zeros' factor; and bytes of magnitude at most 127.
struct Int4 : Int4Groups, Steps<Int4, Floats, 1, 4, 1> {
  using Int4Groups::step_bytes, Int4Groups::steps;

  // They have sums of the group, too.
  static constexpr int kRows = kLanes == 16 ? 8 : kFewVectors == 4 ? 4 : 6;
  static constexpr int64_t kRowScales = 8;

  explicit Int4(int64_t step_bytes) : Int4Groups((step_bytes - kScales) / kHalf) {}

  int64_t x_bytes() const { return kRowScales + group; }

  static Words low(Words bytes) { return bytes & 0x0F0F0F0F; }
  static Words high(Words bytes) { return low(bytes >> 4); }

  template <int R, int V>
  void add_all(Floats (&sums)[R][V], const char* step, int first, const char* x, int64_t stride) const {
    const char* const weights = step + first * vector_bytes();
    Ints totals[R][V] = {};
    for (int64_t i = 0; i < group; i += 32) {
      add_part(totals, weights + kScales + i * kHalf, x + kRowScales + i, stride);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const float scale = read<float>(x + r * stride), offset = read<float>(x + r * stride + 4);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        const char* const scales = weights + v * vector_bytes();
        sums[r][v] += __builtin_convertvector(totals[r][v], Floats) * (read<Floats>(scales) * scale);
        sums[r][v] += read<Floats>(scales + kTile * 4) * offset;
      }
    }
  }

  // Adds the products of 32 inputs: four words.
  template <int R, int V>
  static void add_part(Ints (&sums)[R][V], const char* weights, const char* x, int64_t stride) {
#ifdef QUIRE_PAIRS_OF_BYTES
    // The sum of 8 pairs of products fits into 16 bits.
    Shorts parts[R][V] = {};
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i, weights += kTile * 4, x += 8) {
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        Words bytes[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) {
          const Words both = read<Words>(weights + v * vector_bytes());
          bytes[v] = half ? high(both) : low(both);
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
          for (int v = 0; v < V; ++v) {
            parts[r][v] += pairs_of_bytes(bytes[v], x + r * stride + half * 4);
            asm("" : "+v"(parts[r][v]));  // keeps the order, which fits the registers
          }
        }
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sums[r][v] += sum_of_pairs(parts[r][v], Shorts{} + 1);
    }
#else
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i, weights += kTile * 4, x += 8) {
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        const Words bytes = read<Words>(weights + v * vector_bytes());
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
          sums[r][v] = dot_bytes(sums[r][v], low(bytes), x + r * stride);
          sums[r][v] = dot_bytes(sums[r][v], high(bytes), x + r * stride + 4);
        }
      }
    }
#endif
  }

  static bool is_ready(ScalarType, int64_t) { return false; }

  template <typename T>
  void fill(const T* x, int64_t inputs, char* to, int64_t) const {
    for (int64_t i = 0; i < inputs; i += group, to += x_bytes()) {
      float scale = largest(x + i, group) / kSteps;
      const float total = quantize(x + i, group, scale, reinterpret_cast<int8_t*>(to + kRowScales));
      const float factors[] = {scale, total * scale};
      std::memcpy(to, factors, sizeof(factors));
    }
  }
};

}  // namespace

std::unique_ptr<TileForm> tiled_form(ScalarType rows, ScalarType tiles) {
  STD_TORCH_CHECK(rows == tiles || rows == ScalarType::Float, "rows of ", rows, " are not multiplied by weights of ", tiles);
  switch (tiles) {
    case ScalarType::Float:
      return make_form(Float());
    case ScalarType::Half:
      return make_form(Float16());
    case ScalarType::BFloat16:
      if (rows == ScalarType::Float) return make_form(BFloat16Floats());
      return make_form(BFloat16Pairs());
    default:
      STD_TORCH_CHECK(false, "no CPU kernel for elements of type ", tiles);
  }
}

std::unique_ptr<TileForm> int8_form(const std::optional<StaticRounding>& rounding) {
  Byte form;
  form.rounding = rounding;
  return make_form(form);
}

std::unique_ptr<TileForm> int4_form(int64_t step_bytes) { return make_form(Int4(step_bytes)); }

Rows::Rows(const TileForm& form, const void* x, ScalarType type, int64_t rows, int64_t inputs)
    : stride(form.steps(inputs) * form.row_step_bytes() + form.tail_bytes()), data_(static_cast<const char*>(x)) {
  if (form.is_ready(type, inputs)) return;
  memory_ = std::make_unique_for_overwrite<char[]>(rows * stride);
  const char* const from = std::exchange(data_, memory_.get());
  int64_t row_bytes = 0;
  for_type(type, [&]<typename T>() { row_bytes = inputs * sizeof(T); });
  parallel_for(0, rows, grain(inputs), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      form.fill(from + row * row_bytes, type, inputs, memory_.get() + row * stride, stride);
    }
  });
}

}  // namespace quire
