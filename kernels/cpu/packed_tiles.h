// Multiplication of rows by weights in packed tiles: the core of every matmul here.
//
// A tile holds 32 output features: weights are [tiles][steps][32]. A step is what one operation reads of each feature
// and of a row of x: a word of 32 bits (a float32, two bfloat16, or four bytes), a float16, or a group of 4-bit weights
// with its scales. A thread computes whole tiles. It splits a tile into pieces, which stay in the L1 cache while all
// rows of x are multiplied by them, several at a time with their sums in registers. Meanwhile the next piece is
// prefetched into the L2 cache. Each weight is thus read from memory once, and a row's sums are added in an order that
// does not depend on the other rows. Narrow weights are widened in registers or, for many rows, once per piece in the
// L1 cache, which gives the same sums.

#pragma once

#include <array>
#include <limits>
#include <memory>
#include <optional>
#include <utility>

#include "vec.h"

namespace quire {

constexpr int kTile = 32;
constexpr int kHalf = kTile / 2;            // gates, or ups, in a tile that has both
constexpr int64_t kPieceBytes = 32 << 10;
constexpr int64_t kHeadBytes = 2 * kTile * 4;  // at most, of a step, by which one that is widened may exceed a piece
constexpr int64_t kBlockBytes = 256 << 10;  // of x, to fit the L2 cache
constexpr int64_t kMinBlockRows = 96;       // least rows of x that a piece is read for
constexpr int kVectors = kTile / kLanes;
constexpr int kFewVectors = kLanes == 4 && kRegisters == 32 ? 4 : 2;  // at a time, for more than two rows
constexpr float kSteps = 127.0f;            // of 8 bits, up and down
constexpr int kOffset = 128;                // added to 8-bit weights to make them unsigned
constexpr int64_t kMostBytes = 1 << 16;  // inputs of 8 bits whose sums fit into 32 bits
constexpr int64_t kThreadWork = 1 << 19;    // least multiplications worth waking a thread for
constexpr int64_t kReadingRows = 16;        // reading a tile from memory takes as long as multiplying this many rows

// The largest magnitude of a row.
template <typename T>
float largest(const T* x, int64_t count) {
  Floats top = {};
  for_vectors(count, [&](int64_t i, auto n) {
    const Floats part = load(x + i, n);
    top = max(top, max(part, -part));
  });
  return max(top);
}

// The sum of the magnitudes of a row, times `factor`.
template <typename T>
float sum_of_sizes(const T* x, int64_t count, float factor) {
  Floats total = {};
  for_vectors(count, [&](int64_t i, auto n) {
    const Floats part = load(x + i, n) * factor;
    total += max(part, -part);
  });
  return sum(total);
}

// Quantizes a row to integers, in steps of `scale`. Returns their sum: exact, as it has less than 24 bits, or NaN.
template <typename T, typename Integer>
float quantize(const T* x, int64_t count, float scale, Integer* to) {
  const float inverse = scale >= std::numeric_limits<float>::min() ? 1.0f / scale : 0.0f;
  Floats total = {};
  for_vectors(count, [&](int64_t i, auto n) {
    const Floats steps = round(load(x + i, n) * inverse);
    total += steps;
    store(to + i, steps, n);
  });
  return sum(total);
}

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

// A form of weights, and of the rows that they are multiplied by. A step has `Inputs` inputs, `Bytes` for each feature,
// and `XBytes` of a row. Members may be replaced by those of `Form`, which has
//   add(sum, weights, x): adds the products of a vector of features,
//   is_ready<T>(inputs): whether rows of T need no conversion,
//   fill(x, inputs, to, stride): converts a row,
//   wide(), widen(from, steps, to): the form `Wide` and a piece of it, if that is another one, of the same rows and sums.
template <typename Form, typename S, int Inputs, int Bytes, int XBytes>
struct Steps {
  using Sum = S;
  using Wide = Form;
  static constexpr int kInputs = Inputs;
  // At a time: their sums leave some registers for a piece.
  static constexpr int kRows = kLanes == 16 ? 12 : kFewVectors == 4 ? 5 : 6;
  static constexpr int64_t kTail = 0;  // bytes of a row after its steps

  static constexpr int64_t inputs() { return Inputs; }
  static constexpr int64_t steps(int64_t inputs) { return (inputs + Inputs - 1) / Inputs; }
  static constexpr int64_t step_bytes() { return kTile * Bytes; }
  static constexpr int64_t x_bytes() { return XBytes; }
  static constexpr int64_t vector_bytes() { return kLanes * Bytes; }

  // Adds the products of R rows, `stride` bytes apart, and of V vectors of a step, from `first` on.
  template <int R, int V>
  static void add_all(Sum (&sums)[R][V], const char* step, int first, const char* x, int64_t stride) {
    const char* const weights = step + first * vector_bytes();
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sums[r][v] = Form::add(sums[r][v], weights + v * vector_bytes(), x + r * stride);
    }
  }

  // The value of the sums from `feature` on, given the scales of all features and the tail of their row.
  static Floats value(Sum sum, const float*, int64_t, const char*) { return sum; }
};

// Rows of float32, padded with zeros to whole steps.
template <typename Form, int Inputs, int Bytes>
struct FloatSteps : Steps<Form, Floats, Inputs, Bytes, Inputs * 4> {
  template <typename T>
  static bool is_ready(int64_t inputs) {
    return std::is_same_v<T, float> && inputs % Inputs == 0;
  }

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
    return _mm512_dpbf16_ps(sum, read<__m512bh>(weights), std::bit_cast<__m512bh>(_mm512_set1_epi32(read<int32_t>(x))));
  }

  template <typename T>
  static bool is_ready(int64_t inputs) {
    return std::is_same_v<T, BFloat16> && inputs % kInputs == 0;
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

// How all rows are rounded to bytes, if each does not have its own scale.
struct StaticRounding {
  float scale, zero;
  const int32_t* excess;  // what sums of each feature include because of `zero`
};

// Weights of bytes with kOffset added, four inputs per word, and rows of bytes, whose scale follows. Sums are exact.
template <typename Form, int XBytes>
struct ByteSteps : Steps<Form, Ints, 4, 4, XBytes> {
  std::optional<StaticRounding> rounding;  // without it, magnitudes are at most 127

  struct Tail {
    float scale;
    int32_t excess;  // what the row's sums include because of kOffset
  };
  static constexpr int64_t kTail = sizeof(Tail);

  template <typename T>
  static bool is_ready(int64_t) {
    return false;
  }

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

// 4-bit weights in groups of `group` inputs, which are a multiple of 32. A step is a group: scales and zeros, float32
// [32] each; then words of eight inputs, the first four in the low halves of the bytes. A weight is half * scale + zero.
// A group of a row is a scale; the zeros' factor; and bytes of magnitude at most 127.
struct Int4 : Steps<Int4, Floats, 1, 4, 1> {
  int64_t group;

  // They have sums of the group, too.
  static constexpr int kRows = kLanes == 16 ? 8 : kFewVectors == 4 ? 4 : 6;
  static constexpr int64_t kScales = 2 * kTile * 4, kRowScales = 8;

  explicit Int4(int64_t group) : group(group) {
    STD_TORCH_CHECK(group > 0 && group % 32 == 0, "groups of ", group, " 4-bit weights are not supported");
  }
  static Int4 of_step(int64_t bytes) { return Int4((bytes - kScales) / kHalf); }

  int64_t steps(int64_t inputs) const { return inputs % group == 0 ? inputs / group : 0; }
  int64_t step_bytes() const { return kScales + group * kHalf; }
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

  template <typename T>
  static bool is_ready(int64_t) {
    return false;
  }

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

// The form of tiles of W, and of rows of T.
template <typename W, typename T>
using Tiled = std::conditional_t<
    std::is_same_v<W, float>, Float,
    std::conditional_t<std::is_same_v<W, Half>, Float16,
                       std::conditional_t<std::is_same_v<T, float>, BFloat16Floats, BFloat16Pairs>>>;

// Calls `body<Form, T>()` for rows and tiles of these types: the same or, for rows of float32, a narrower one of tiles.
template <typename Body>
void for_tiled(ScalarType rows, ScalarType tiles, Body&& body) {
  for_type(tiles, [&]<typename W>() {
    if (rows == tiles) return body.template operator()<Tiled<W, W>, W>();
    STD_TORCH_CHECK(rows == ScalarType::Float, "rows of ", rows, " are not multiplied by weights of ", tiles);
    body.template operator()<Tiled<W, float>, float>();
  });
}

// A thread's sums of a block of rows for one tile.
template <typename Form>
using Sums = typename Form::Sum[kVectors];

// Multiplies R rows of x by a piece and adds to `sums`, or overwrites them for the tile's first piece. Meanwhile
// prefetches `lines` cache lines per step, starting at `next`.
template <typename Form, int R>
void multiply(Form form, const char* x, int64_t stride, const char* piece, int64_t steps, Sums<Form>* sums,
              bool is_first, const char* next, int lines) {
  constexpr int V = R <= 2 ? kVectors : kFewVectors;
  for (int first = 0; first < kVectors; first += V, lines = 0) {
    typename Form::Sum acc[R][V];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) acc[r][v] = is_first ? typename Form::Sum{} : sums[r][first + v];
    }
    const char *step = piece, *row = x;
    for (int64_t k = 0; k < steps; ++k, step += form.step_bytes(), row += form.x_bytes()) {
      for (int line = 0; line < lines; ++line, next += 64) __builtin_prefetch(next, 0, 2);
      form.add_all(acc, step, first, row, stride);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sums[r][first + v] = acc[r][v];
    }
  }
}

template <typename Form, int... R>
constexpr auto multiplies(std::integer_sequence<int, R...>) {
  return std::array{multiply<Form, R + 1>...};
}

// A piece of a tile, and the address of the next piece to prefetch, or null.
struct Piece {
  const char *at, *next;
};

// Multiplies a block of rows by a piece; see `multiply`. `next_bytes` are to be prefetched.
template <typename Form>
void multiply_block(Form form, const char* x, int64_t rows, int64_t stride, Piece piece, int64_t next_bytes,
                    int64_t steps, Sums<Form>* sums, bool is_first) {
  static constexpr auto kMultiply = multiplies<Form>(std::make_integer_sequence<int, Form::kRows>());
  constexpr int64_t kPrefetchParts = 2;
  const int64_t parts = (rows + Form::kRows - 1) / Form::kRows,
                line_steps = 64 * steps * std::min(parts, kPrefetchParts);
  const int64_t lines = piece.next ? (next_bytes + line_steps - 1) / line_steps : 0;
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t row = part * rows / parts, few = (part + 1) * rows / parts - row;
    kMultiply[few - 1](form, x + row * stride, stride, piece.at, steps, sums + row, is_first,
                       piece.next + part * lines * steps * 64, part < kPrefetchParts ? lines : 0);
  }
}

// Multiplies `rows` rows of `steps` steps, `stride` bytes apart, by the tiles from `begin` to `end`, on this thread.
// `get_rows(first, count)` returns the address of rows; `get_piece(tile, at, bytes)` returns the `Piece` of `bytes` bytes
// that starts at byte `at` of a tile; `finish(tile, row, sums)` receives the 32 sums of a row.
template <typename Form, typename GetRows, typename GetPiece, typename Finish>
void multiply_tiles(Form form, int64_t rows, int64_t stride, int64_t steps, int64_t begin, int64_t end,
                    GetRows get_rows, GetPiece get_piece, Finish finish) {
  using Wide = typename Form::Wide;
  constexpr bool kWidens = !std::is_same_v<Form, Wide>;
  const int64_t most = std::max(kMinBlockRows, kBlockBytes / std::max<int64_t>(1, stride));
  const int64_t blocks = std::max<int64_t>(1, (rows + most - 1) / most), block = (rows + blocks - 1) / blocks;
  const int64_t step_bytes = form.step_bytes();
  const bool widens = kWidens && block > Form::kRows;
  int64_t depth = std::max<int64_t>(1, kPieceBytes / step_bytes), wide_steps = 1;
  if constexpr (kWidens) {
    wide_steps = form.inputs() / form.wide().inputs();  // of a step
    if (widens) depth = std::max<int64_t>(1, kPieceBytes / (form.wide().step_bytes() * wide_steps));
  }
  const int64_t pieces = (steps + depth - 1) / depth, most_steps = (steps + pieces - 1) / pieces;  // equal
  alignas(64) char buffer[kWidens ? kPieceBytes + kHeadBytes : 1];
  static thread_local std::vector<Floats> memory;
  memory.resize(std::max<size_t>(memory.size(), block * kVectors));
  auto* const sums = reinterpret_cast<Sums<Form>*>(memory.data());
  for (int64_t first = 0; first < rows; first += block) {
    const int64_t count = std::min(block, rows - first);
    const char* const x = get_rows(first, count);
    for (int64_t tile = begin; tile < end; ++tile) {
      for (int64_t k = 0; k < steps; k += most_steps) {
        const int64_t some = std::min(most_steps, steps - k), bytes = some * step_bytes;
        const Piece piece = get_piece(tile, k * step_bytes, bytes);
        const char* const part = x + k * form.x_bytes();
        if (widens) {
          if constexpr (kWidens) {
            form.widen(piece.at, some, buffer);
            multiply_block(form.wide(), part, count, stride, {buffer, piece.next}, bytes, some * wide_steps, sums, k == 0);
          }
        } else {
          multiply_block(form, part, count, stride, piece, bytes, some, sums, k == 0);
        }
      }
      for (int64_t row = 0; row < count; ++row) finish(tile, first + row, sums[row]);
    }
  }
}

// Rows of x, converted to the form's.
template <typename Form>
struct Rows {
  Form form;
  int64_t stride;  // in bytes
  const char* data;

  template <typename T>
  Rows(Form form, const T* x, int64_t rows, int64_t inputs)
      : form(form), stride(form.steps(inputs) * form.x_bytes() + Form::kTail), data(reinterpret_cast<const char*>(x)) {
    if (form.template is_ready<T>(inputs)) return;
    memory_ = std::make_unique_for_overwrite<char[]>(rows * stride);
    data = memory_.get();
    parallel_for(0, rows, grain(inputs), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        form.fill(x + row * inputs, inputs, memory_.get() + row * stride, stride);
      }
    });
  }

  // The value of a row's sums from `feature` on; `scales` of all features are null if the form has none.
  Floats value(int64_t row, typename Form::Sum sum, const float* scales, int64_t feature) const {
    return form.value(sum, scales, feature, data + (row + 1) * stride - Form::kTail);
  }

 private:
  std::unique_ptr<char[]> memory_;
};

}  // namespace quire
