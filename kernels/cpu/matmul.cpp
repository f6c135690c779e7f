// The matmul of a linear layer, by packed tiles of every form. Its operation for codes is in coded.cpp.

#include "activation.h"
#include "packed_tiles.h"

namespace quire {
namespace {

// Stores values, plus the bias, to the rows of `out`.
template <typename T>
auto store_rows(Tensor& out, const std::optional<Tensor>& bias) {
  const int64_t features = out.size(1);
  const T* biases = bias ? bias->const_data_ptr<T>() : nullptr;
  return [=, to = out.mutable_data_ptr<T>()](int64_t tile, int64_t row, const TileSums& values) {
    const int64_t first = tile * kTile, count = features - first;
    const auto store_vector = [&](int64_t i, auto n) {
      const Floats value = values[i / kLanes];
      store(to + row * features + first + i, biases ? value + load(biases + first + i, n) : value, n);
    };
    if (count < kTile) return for_vectors(count, store_vector);
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) store_vector(v * kLanes, AllLanes());
  };
}

// The same for tiles of 16 gates and their ups. Calls `store_pair(row, feature, gates, ups, n)` for their vectors.
template <typename T, typename StorePair>
auto store_gates_and_ups(int64_t features, const std::optional<Tensor>& bias, StorePair store_pair) {
  const T* biases = bias ? bias->const_data_ptr<T>() : nullptr;
  return [=](int64_t tile, int64_t row, const TileSums& values) {
    const auto value = [&](int64_t i) {
      const Floats value = values[i / kLanes];
      return biases ? value + load(biases + tile * kTile + i) : value;
    };
    const int64_t first = tile * kHalf;
    for_vectors(std::min<int64_t>(kHalf, features - first), [&](int64_t i, auto n) {
      store_pair(row, first + i, value(i), value(i + kHalf), n);
    });
  };
}

}  // namespace

Tensor packed_linear(const TileForm& form, const Tensor& x, const Tensor& weight, const float* scales,
                     const std::optional<Tensor>& bias, int64_t features, std::string_view activation) {
  const int64_t width = activation.empty() ? kTile : kHalf, tiles = weight.size(0), steps = weight.size(1);
  const int64_t biases = activation.empty() ? features : tiles * kTile, tile_bytes = steps * form.step_bytes();
  STD_TORCH_CHECK(x.dim() == 2 && form.steps(x.size(1)) == steps, "x does not match the weight");
  STD_TORCH_CHECK(weight.is_contiguous() && (features + width - 1) / width == tiles,
                  "the number of tiles does not match the features");
  STD_TORCH_CHECK(!bias || (bias->scalar_type() == x.scalar_type() && bias->is_contiguous() && bias->numel() == biases),
                  "the bias has the wrong type or size");
  const Tensor from = as_contiguous(x);
  const auto* const data = static_cast<const char*>(weight.const_data_ptr());
  const bool is_separate = activation == "separate";  // gates and then ups
  const ScalarType type = is_separate ? ScalarType::Float : x.scalar_type();
  Tensor out = empty({x.size(0), is_separate ? 2 * features : features}, type);
  const Rows rows(form, from.const_data_ptr(), x.scalar_type(), x.size(0), x.size(1));
  const auto multiply = [&](auto finish) {
    const int64_t work = (x.size(0) + kReadingRows) * x.size(1) * kTile;  // of a tile
    parallel_for(0, tiles, std::max<int64_t>(1, kThreadWork / std::max<int64_t>(1, work)),
                 [&](int64_t begin, int64_t end) {
      const auto get_rows = [&](int64_t first, int64_t) { return rows.row(first); };
      const auto get_piece = [&](int64_t tile, int64_t at, int64_t bytes) {
        const char* const here = data + tile * tile_bytes + at;
        return Piece{here, here + bytes};  // tiles are contiguous, and a prefetch never faults
      };
      multiply_tiles(form, scales, x.size(0), rows.stride, steps, begin, end, get_rows, get_piece, finish);
    });
  };
  for_type(x.scalar_type(), [&]<typename T>() {
    if (activation.empty()) return multiply(store_rows<T>(out, bias));
    if (is_separate) {
      return multiply(store_gates_and_ups<T>(features, bias, [=, to = out.mutable_data_ptr<float>()](
                                                 int64_t row, int64_t feature, Floats gates, Floats ups, auto n) {
        store(to + 2 * row * features + feature, gates, n);
        store(to + (2 * row + 1) * features + feature, ups, n);
      }));
    }
    multiply(store_gates_and_ups<T>(features, bias, [=, to = out.mutable_data_ptr<T>(), gated = find_gated(activation)](
                                        int64_t row, int64_t feature, Floats gates, Floats ups, auto n) {
      store(to + row * features + feature, gated(gates, ups), n);
    }));
  });
  return out;
}

namespace {

// weight: [tiles, in, 32] float32 or float16, or [tiles, in / 2, 32, 2] bfloat16: the type of x, which is that of the
// result, or a narrower one than its float32.
Tensor tiled_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, int64_t features,
                    std::string_view activation) {
  const auto form = tiled_form(x.scalar_type(), weight.scalar_type());
  return packed_linear(*form, x, weight, nullptr, bias, features, activation);
}

// weight: bytes [tiles, in / 4, 32, 4] with 128 added; scales: float32 [tiles * 32]. If all rows are rounded with one
// scale and zero point, `rounding` is these, float32 [2], and `excess` int32 [tiles * 32].
Tensor int8_linear(const Tensor& x, const Tensor& weight, const Tensor& scales, const std::optional<Tensor>& bias,
                   int64_t features, std::string_view activation, const std::optional<Tensor>& rounding,
                   const std::optional<Tensor>& excess) {
  STD_TORCH_CHECK(scales.is_contiguous() && scales.scalar_type() == ScalarType::Float &&
                  scales.numel() == weight.size(0) * kTile);
  STD_TORCH_CHECK(x.size(1) <= kMostBytes, "more than 65,536 inputs are not supported: sums may overflow 32 bits");
  std::optional<StaticRounding> one;
  if (rounding) {
    STD_TORCH_CHECK(rounding->scalar_type() == ScalarType::Float && rounding->is_contiguous() && rounding->numel() == 2 &&
                        excess && excess->scalar_type() == ScalarType::Int && excess->is_contiguous() &&
                        excess->numel() == scales.numel(),
                    "the rounding of rows needs float32 [2], and int32 [tiles * 32]");
    const float* const both = rounding->const_data_ptr<float>();
    one = {both[0], both[1], excess->const_data_ptr<int32_t>()};
  }
  return packed_linear(*int8_form(one), x, weight, scales.const_data_ptr<float>(), bias, features, activation);
}

// weight: bytes [tiles, groups, bytes of a group], as `Int4Groups` describes them.
Tensor int4_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, int64_t features,
                   std::string_view activation) {
  return packed_linear(*int4_form(weight.size(2)), x, weight, nullptr, bias, features, activation);
}

}  // namespace

QUIRE_OPERATION(tiled_linear, "(Tensor x, Tensor weight, Tensor? bias, int features, str activation) -> Tensor")
QUIRE_OPERATION(int4_linear, "(Tensor x, Tensor weight, Tensor? bias, int features, str activation) -> Tensor")
QUIRE_OPERATION(int8_linear,
                "(Tensor x, Tensor weight, Tensor scales, Tensor? bias, int features, str activation, "
                "Tensor? rounding, Tensor? excess) -> Tensor")

}  // namespace quire
