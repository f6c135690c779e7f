// The loops of a form of weights (see packed_tiles.h), written once for all forms.

#pragma once

#include <array>
#include <utility>

#include "packed_tiles.h"

namespace quire {

// A form of weights, and of the rows that they are multiplied by. A step has `Inputs` inputs, `Bytes` for each feature,
// and `XBytes` of a row. Members may be replaced by those of `Form`, which has
//   add(sum, weights, x): adds the products of a vector of features,
//   is_ready(type, inputs): whether rows of this type need no conversion,
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

  // Whether values are not the sums. Those of features from `feature` on are value(sum, scales, feature, tail of the row).
  static constexpr bool kFinishes = false;
};

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

template <typename Form>
class FormOf final : public TileForm {
 public:
  explicit FormOf(const Form& form) : form_(form) {}

  int64_t steps(int64_t inputs) const override { return form_.steps(inputs); }
  int64_t step_bytes() const override { return form_.step_bytes(); }
  int64_t row_step_bytes() const override { return form_.x_bytes(); }
  int64_t tail_bytes() const override { return Form::kTail; }

  bool is_ready(ScalarType type, int64_t inputs) const override { return form_.is_ready(type, inputs); }

  void fill(const void* x, ScalarType type, int64_t inputs, char* to, int64_t stride) const override {
    for_type(type, [&]<typename T>() { form_.fill(static_cast<const T*>(x), inputs, to, stride); });
  }

  bool widens(int64_t rows) const override { return kWidens && rows > Form::kRows; }

  int64_t most_steps(bool widens) const override {
    int64_t bytes = form_.step_bytes();
    if constexpr (kWidens) {
      if (widens) bytes = form_.wide().step_bytes() * wide_steps();
    }
    return std::max<int64_t>(1, kPieceBytes / bytes);
  }

  void multiply(const char* x, int64_t rows, int64_t stride, Piece piece, int64_t steps, TileSums* sums, bool is_first,
                bool widens) const override {
    auto* const own = reinterpret_cast<Sums<Form>*>(sums);
    const int64_t bytes = steps * form_.step_bytes();
    if (!kWidens || !widens) return multiply_block(form_, x, rows, stride, piece, bytes, steps, own, is_first);
    if constexpr (kWidens) {
      alignas(64) char buffer[kPieceBytes + kHeadBytes];
      form_.widen(piece.at, steps, buffer);
      multiply_block(form_.wide(), x, rows, stride, {buffer, piece.next}, bytes, steps * wide_steps(), own, is_first);
    }
  }

  void finish(TileSums* sums, const char* x, int64_t rows, int64_t stride, const float* scales,
              int64_t feature) const override {
    if constexpr (Form::kFinishes) {
      for (int64_t row = 0; row < rows; ++row) {
        for (int v = 0; v < kVectors; ++v) {
          const auto sum = read<typename Form::Sum>(&sums[row][v]);
          const Floats value = form_.value(sum, scales, feature + v * kLanes, x + (row + 1) * stride - Form::kTail);
          std::memcpy(&sums[row][v], &value, sizeof(value));
        }
      }
    }
  }

 private:
  static constexpr bool kWidens = !std::is_same_v<Form, typename Form::Wide>;

  int64_t wide_steps() const { return form_.inputs() / form_.wide().inputs(); }  // of a step

  Form form_;
};

template <typename Form>
std::unique_ptr<TileForm> make_form(const Form& form) {
  return std::make_unique<FormOf<Form>>(form);
}

}  // namespace quire
