// Multiplication of rows by weights in packed tiles: the core of every matmul here.
//
// A tile holds 32 output features: weights are [tiles][steps][32]. A step is what one operation reads of each feature
// and of a row of x: a word of 32 bits (a float32, two bfloat16, or four bytes), a float16, or a group of 4-bit weights
// with its scales. A thread computes whole tiles. It splits a tile into pieces, which stay in the L1 cache while all
// rows of x are multiplied by them, several at a time with their sums in registers. Meanwhile the next piece is
// prefetched into the L2 cache. Each weight is thus read from memory once, and a row's sums are added in an order that
// does not depend on the other rows. Narrow weights are widened in registers or, for many rows, once per piece in the
// L1 cache, which gives the same sums.
//
// What depends on the form of the weights is behind `TileForm`, and is called once for a piece: so each form's loops are
// compiled once, in tile_forms.cpp and coded.cpp, and the operations do not multiply with the number of forms.

#pragma once

#include <limits>
#include <memory>
#include <optional>
#include <string_view>

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

// How all rows are rounded to bytes, if each does not have its own scale.
struct StaticRounding {
  float scale, zero;
  const int32_t* excess;  // what sums of each feature include because of `zero`
};

// The layout of 4-bit weights in groups of `group` inputs, which are a multiple of 32. A step is a group: scales and
// zeros, float32 [32] each; then words of eight inputs, the first four in the low halves of the bytes. A weight is half *
// scale + zero.
struct Int4Groups {
  int64_t group;

  static constexpr int64_t kScales = 2 * kTile * 4;

  explicit Int4Groups(int64_t group) : group(group) {
    STD_TORCH_CHECK(group > 0 && group % 32 == 0, "groups of ", group, " 4-bit weights are not supported");
  }

  int64_t steps(int64_t inputs) const { return inputs % group == 0 ? inputs / group : 0; }
  int64_t step_bytes() const { return kScales + group * kHalf; }
};

// A piece of a tile, and the address of the next piece to prefetch, or null.
struct Piece {
  const char *at, *next;
};

// A thread's sums of a row for one tile, of floats or integers.
using TileSums = Floats[kVectors];

// A form of weights, and of the rows that they are multiplied by.
class TileForm {
 public:
  virtual ~TileForm() = default;

  // The steps of a row of so many inputs; 0 if there is no such row.
  virtual int64_t steps(int64_t inputs) const = 0;

  // The bytes of a step in a tile and in a row, and of what follows a row's steps.
  virtual int64_t step_bytes() const = 0;
  virtual int64_t row_step_bytes() const = 0;
  virtual int64_t tail_bytes() const = 0;

  // Whether rows of this type need no conversion.
  virtual bool is_ready(ScalarType type, int64_t inputs) const = 0;

  // Converts a row of this type to the `stride` bytes at `to`.
  virtual void fill(const void* x, ScalarType type, int64_t inputs, char* to, int64_t stride) const = 0;

  // Whether pieces are widened for so many rows, and the most steps of a piece.
  virtual bool widens(int64_t rows) const = 0;
  virtual int64_t most_steps(bool widens) const = 0;

  // Multiplies rows, `stride` bytes apart, by a piece of `steps` steps, and adds to `sums`, or overwrites them for the
  // tile's first piece. Meanwhile prefetches as many bytes at `piece.next`.
  virtual void multiply(const char* x, int64_t rows, int64_t stride, Piece piece, int64_t steps, TileSums* sums,
                        bool is_first, bool widens) const = 0;

  // Turns the sums of rows into their values, float32: those of features from `feature` on, given the scales of all
  // features, which are null if the form has none.
  virtual void finish(TileSums* sums, const char* x, int64_t rows, int64_t stride, const float* scales,
                      int64_t feature) const = 0;
};

// Tiles as for `tiled_linear`: rows and tiles are of the same type or, for rows of float32, tiles of a narrower one.
QUIRE_EXPORT std::unique_ptr<TileForm> tiled_form(ScalarType rows, ScalarType tiles);

// Tiles as for `int8_linear`.
QUIRE_EXPORT std::unique_ptr<TileForm> int8_form(const std::optional<StaticRounding>& rounding = {});

// Tiles as for `int4_linear`, of steps of so many bytes.
QUIRE_EXPORT std::unique_ptr<TileForm> int4_form(int64_t step_bytes);

// Tiles as for `coded_linear`, of steps of `bytes` bytes, for rows of this type. `table` are the 16 or 256 values of that
// name.
std::unique_ptr<TileForm> coded_form(std::string_view name, const Tensor& table, int64_t group, int64_t factors,
                                     int64_t bytes, ScalarType rows);

// Rows of x, contiguous and of this type, converted to the form's.
class Rows {
 public:
  QUIRE_EXPORT Rows(const TileForm& form, const void* x, ScalarType type, int64_t rows, int64_t inputs);

  const int64_t stride;  // in bytes

  const char* row(int64_t number) const { return data_ + number * stride; }

 private:
  const char* data_;
  std::unique_ptr<char[]> memory_;
};

// Multiplies `rows` rows of `steps` steps, `stride` bytes apart, by the tiles from `begin` to `end`, on this thread.
// `get_rows(first, count)` returns the address of rows; `get_piece(tile, at, bytes)` returns the `Piece` of `bytes` bytes
// that starts at byte `at` of a tile; `finish(tile, row, values)` receives the 32 values of a row. `scales` are those of
// the features of all tiles, or null.
template <typename GetRows, typename GetPiece, typename Finish>
void multiply_tiles(const TileForm& form, const float* scales, int64_t rows, int64_t stride, int64_t steps,
                    int64_t begin, int64_t end, GetRows get_rows, GetPiece get_piece, Finish finish) {
  const int64_t most = std::max(kMinBlockRows, kBlockBytes / std::max<int64_t>(1, stride));
  const int64_t blocks = std::max<int64_t>(1, (rows + most - 1) / most), block = (rows + blocks - 1) / blocks;
  const int64_t step_bytes = form.step_bytes(), row_step_bytes = form.row_step_bytes();
  const bool widens = form.widens(block);
  const int64_t depth = form.most_steps(widens);
  const int64_t pieces = (steps + depth - 1) / depth, most_steps = (steps + pieces - 1) / pieces;  // equal
  static thread_local std::vector<Floats> memory;
  memory.resize(std::max<size_t>(memory.size(), block * kVectors));
  auto* const sums = reinterpret_cast<TileSums*>(memory.data());
  for (int64_t first = 0; first < rows; first += block) {
    const int64_t count = std::min(block, rows - first);
    const char* const x = get_rows(first, count);
    for (int64_t tile = begin; tile < end; ++tile) {
      for (int64_t k = 0; k < steps; k += most_steps) {
        const int64_t some = std::min(most_steps, steps - k);
        const Piece piece = get_piece(tile, k * step_bytes, some * step_bytes);
        form.multiply(x + k * row_step_bytes, count, stride, piece, some, sums, k == 0, widens);
      }
      form.finish(sums, x, count, stride, scales, tile * kTile);
      for (int64_t row = 0; row < count; ++row) finish(tile, first + row, sums[row]);
    }
  }
}

// The product of x by packed tiles; `scales` of the features are null if the form has none. With an activation, a tile
// (and the bias) is 16 gates and their ups, and `features` counts the gated features. With "separate" in its place, the
// result is gates and then ups, float32.
QUIRE_EXPORT Tensor packed_linear(const TileForm& form, const Tensor& x, const Tensor& weight, const float* scales,
                                  const std::optional<Tensor>& bias, int64_t features, std::string_view activation);

}  // namespace quire
