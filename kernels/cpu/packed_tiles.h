// Multiplication of rows by weights in packed tiles: the core of every matmul here.
//
// A tile holds 32 output features: weights are [tiles][words][32]. A word is what one instruction reads of a row of x
// and of each feature: a float32, two bfloat16, or four bytes, always 32 bits. A thread computes whole tiles. It splits
// a tile into pieces, kDepth words deep. A piece stays in the L1 cache while all rows of x are multiplied by it,
// several at a time with their sums in registers. Meanwhile the next piece is prefetched into the L2 cache. Each weight
// is thus read from memory once, and a row's sums are added in an order that does not depend on the other rows.

#pragma once

#include <array>
#include <utility>

#include "vec.h"

namespace quire {

constexpr int kTile = 32;
constexpr int kHalf = kTile / 2;            // gates, or ups, in a tile that has both
constexpr int64_t kDepth = 256;             // kDepth x kTile words are 32 KiB
constexpr int64_t kPieceBytes = kDepth * kTile * 4;
constexpr int64_t kBlockBytes = 256 << 10;  // of x, to fit the L2 cache
constexpr int64_t kMinBlockRows = 96;       // least rows of x that a piece is read for
constexpr int kVectors = kTile / kLanes;
constexpr float kSteps = 127.0f;            // of 8 bits, up and down
constexpr int kOffset = 128;                // added to 8-bit weights to make them unsigned
constexpr int64_t kThreadWork = 1 << 19;    // least multiplications worth waking a thread for
constexpr int64_t kReadingRows = 16;        // reading a tile from memory takes as long as multiplying this many rows

// Weights and x of float32.
struct Float {
  using Sum = Floats;
  static constexpr int kRows = kLanes == 16 ? 12 : 6;  // at a time: their sums leave some registers for a piece

  static Sum add(Sum sum, const char* weights, const char* x) {
    return sum + load(reinterpret_cast<const float*>(weights)) * read<float>(x);
  }
};

// Weights and x of bfloat16, two inputs per word; products are summed in float32.
struct BFloat16Pair {
  using Sum = Floats;
  static constexpr int kRows = kLanes == 16 ? 12 : 4;

  static Sum add(Sum sum, const char* weights, const char* x) {
#ifdef __AVX512BF16__
    return _mm512_dpbf16_ps(sum, read<__m512bh>(weights), std::bit_cast<__m512bh>(_mm512_set1_epi32(read<int32_t>(x))));
#else
    const Words pairs = read<Words>(weights), pair = repeat(x);
    sum += std::bit_cast<Floats>(pairs << 16) * std::bit_cast<Floats>(pair << 16);
    return sum + std::bit_cast<Floats>(pairs & 0xFFFF0000) * std::bit_cast<Floats>(pair & 0xFFFF0000);
#endif
  }
};

// Bytes, four inputs per word: weights with kOffset added, and signed x of magnitude at most 127. Sums are exact.
struct Quad {
  using Sum = Ints;
  static constexpr int kRows = kLanes == 16 ? 12 : 6;

#if defined(__AVX512VNNI__)
  // The instruction can only broadcast the signed operand.
  static constexpr int kExcess = kOffset;  // what the sums include for each weight in excess
  static Sum add(Sum sum, const char* weights, const char* x) {
    return std::bit_cast<Sum>(_mm512_dpbusd_epi32(std::bit_cast<__m512i>(sum), read<__m512i>(weights),
                                                  _mm512_set1_epi32(read<int32_t>(x))));
  }
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
  static constexpr int kExcess = kOffset;
  static Sum add(Sum sum, const char* weights, const char* x) {
    return std::bit_cast<Sum>(_mm256_dpbusd_avx_epi32(std::bit_cast<__m256i>(sum), read<__m256i>(weights),
                                                      _mm256_set1_epi32(read<int32_t>(x))));
  }
#elif defined(__AVX2__) && !defined(__AVX512F__)
  // The instruction sums two products in 16 bits with saturation. A weight's magnitude (at most 128) times x with the
  // sign of the weight (at most 127) always fits; an unsigned weight times x might not.
  static constexpr int kExcess = 0;
  static Sum add(Sum sum, const char* weights, const char* x) {
    const __m256i weight = _mm256_xor_si256(read<__m256i>(weights), _mm256_set1_epi8(static_cast<char>(kOffset)));
    const __m256i signed_x = _mm256_sign_epi8(_mm256_set1_epi32(read<int32_t>(x)), weight);
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(weight), signed_x);
    return sum + std::bit_cast<Sum>(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
#else
  // Bytes widened to 16 bits, every other one at a time.
  static constexpr int kExcess = kOffset;
  static Sum add(Sum sum, const char* weights, const char* x) {
    const Words bytes = read<Words>(weights);
    const Shorts of_x = std::bit_cast<Shorts>(repeat(x));
    sum += sum_of_pairs(std::bit_cast<Shorts>(bytes & 0x00FF00FF), of_x << 8 >> 8);
    return sum + sum_of_pairs(std::bit_cast<Shorts>(bytes >> 8 & 0x00FF00FF), of_x >> 8);
  }
#endif
};

// A thread's sums of a block of rows for one tile.
template <typename Word>
using Sums = typename Word::Sum[kVectors];

// Multiplies R rows of x by a piece and adds to `sums`, or overwrites them for the tile's first piece. Meanwhile
// prefetches `lines` cache lines per word, starting at `next`.
template <typename Word, int R>
void multiply(const char* x, int64_t stride, const char* piece, int64_t words, Sums<Word>* sums, bool is_first,
              const char* next, int lines) {
  constexpr int V = R <= 2 ? kVectors : 2;  // vectors of a tile at a time
  for (int first = 0; first < kVectors; first += V, lines = 0) {
    typename Word::Sum acc[R][V];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) acc[r][v] = is_first ? typename Word::Sum{} : sums[r][first + v];
    }
    for (int64_t k = 0; k < words; ++k) {
      for (int line = 0; line < lines; ++line) __builtin_prefetch(next + (k * lines + line) * 64, 0, 2);
      const char* weights = piece + (k * kTile + first * kLanes) * 4;
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) acc[r][v] = Word::add(acc[r][v], weights + v * kLanes * 4, x + r * stride + k * 4);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sums[r][first + v] = acc[r][v];
    }
  }
}

template <typename Word, int... R>
constexpr auto multiplies(std::integer_sequence<int, R...>) {
  return std::array{multiply<Word, R + 1>...};
}

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

// The words of a piece of a tile, and the address of the next piece to prefetch, or null.
struct Piece {
  const char *at, *next;
};

// Multiplies `rows` rows of `words` words, `stride` bytes apart, by the tiles from `begin` to `end`, on this thread.
// `get_rows(first, count)` returns the address of rows; `get_piece(tile, begin, depth, buffer)` returns a `Piece`,
// which it may write to the buffer; `finish(tile, row, sums)` receives the 32 sums of a row.
template <typename Word, typename GetRows, typename GetPiece, typename Finish>
void multiply_tiles(int64_t rows, int64_t stride, int64_t words, int64_t begin, int64_t end, GetRows get_rows,
                    GetPiece get_piece, Finish finish) {
  static constexpr auto kMultiply = multiplies<Word>(std::make_integer_sequence<int, Word::kRows>());
  constexpr int64_t kPieceLines = 2;  // cache lines per word
  const int64_t most = std::max(kMinBlockRows, kBlockBytes / std::max<int64_t>(1, stride));
  const int64_t blocks = std::max<int64_t>(1, (rows + most - 1) / most), block = (rows + blocks - 1) / blocks;
  const int64_t pieces = (words + kDepth - 1) / kDepth, most_words = (words + pieces - 1) / pieces;  // equal
  alignas(64) char buffer[kPieceBytes];
  static thread_local std::vector<Floats> memory;
  memory.resize(std::max<size_t>(memory.size(), block * kVectors));
  auto* const sums = reinterpret_cast<Sums<Word>*>(memory.data());
  for (int64_t first = 0; first < rows; first += block) {
    const int64_t count = std::min(block, rows - first), parts = (count + Word::kRows - 1) / Word::kRows;
    const char* const x = get_rows(first, count);
    for (int64_t tile = begin; tile < end; ++tile) {
      for (int64_t k = 0; k < words; k += most_words) {
        const int64_t depth = std::min(most_words, words - k);
        const Piece piece = get_piece(tile, k, depth, buffer);
        for (int64_t part = 0; part < parts; ++part) {
          const int64_t row = part * count / parts, few = (part + 1) * count / parts - row;
          const int lines = piece.next && part < kPieceLines ? (parts == 1 ? 2 : 1) : 0;
          kMultiply[few - 1](x + row * stride + k * 4, stride, piece.at, depth, sums + row, k == 0,
                             piece.next + part * depth * 64, lines);
        }
      }
      for (int64_t row = 0; row < count; ++row) finish(tile, first + row, sums[row]);
    }
  }
}

constexpr auto identity = [](int64_t, int64_t, Floats sum) { return sum; };

inline const char* bytes_of(const Tensor& x) { return static_cast<const char*>(x.const_data_ptr()); }

// Rows of x as bytes, zero-padded to whole words: a row is about `scale` times its bytes, whose sum is `sum`.
struct Quantized {
  std::vector<int8_t> bytes;
  std::vector<float> scales;
  std::vector<int32_t> sums;

  template <typename T>
  void fill(const T* x, int64_t rows, int64_t inputs, int64_t stride) {
    bytes.resize(std::max<size_t>(bytes.size(), rows * stride));
    scales.resize(std::max<size_t>(scales.size(), rows));
    sums.resize(scales.size());
    parallel_for(0, rows, grain(inputs), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const T* from = x + row * inputs;
        int8_t* to = bytes.data() + row * stride;
        const float scale = largest(from, inputs) / kSteps;
        const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
        Floats total = {};
        for_vectors(inputs, [&](int64_t i, auto n) {
          const Floats steps = round(load(from + i, n) * inverse);
          total += steps;  // exact: integers of less than 24 bits
          store(to + i, steps, n);
        });
        std::fill(to + inputs, to + stride, 0);
        const float all = sum(total);
        scales[row] = all == all ? scale : all;  // NaN propagates
        sums[row] = all == all ? static_cast<int32_t>(all) : 0;
      }
    });
  }
};

}  // namespace quire
