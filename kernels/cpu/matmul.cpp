// The matmul of a linear layer, for weights in float32, bfloat16, 8-bit integers, and narrow types that are widened;
// and the quantization and packing of weights into tiles, done once.

#include "activation.h"
#include "packed_tiles.h"

namespace quire {
namespace {

// Multiplies `rows` rows of `words` words, `stride` bytes apart, by `tiles` tiles. `get_piece` and `finish` are as for
// `multiply_tiles`.
template <typename Word, typename GetPiece, typename Finish>
void matmul(const char* x, int64_t rows, int64_t stride, int64_t words, int64_t tiles, GetPiece get_piece,
            Finish finish) {
  const int64_t least = std::max<int64_t>(1, kThreadWork / std::max<int64_t>(1, (rows + kReadingRows) * words * kTile));
  parallel_for(0, tiles, least, [&](int64_t begin, int64_t end) {
    const auto get_rows = [&](int64_t first, int64_t) { return x + first * stride; };
    multiply_tiles<Word>(rows, stride, words, begin, end, get_rows, get_piece, finish);
  });
}

// Pieces of weights that need no conversion.
auto packed(const Tensor& weight, int64_t words) {
  return [at = static_cast<const char*>(weight.const_data_ptr()), words](int64_t tile, int64_t begin, int64_t depth,
                                                                         char*) {
    const char* here = at + (tile * words + begin) * kTile * 4;
    return Piece{here, here + depth * kTile * 4};  // tiles are contiguous, and a prefetch never faults
  };
}

// Stores `scaled(row, i, sum)` of the sums, plus the bias, to the rows of `out`.
template <typename T, typename Scaled>
auto store_rows(Tensor& out, const std::optional<Tensor>& bias, Scaled scaled) {
  const int64_t features = out.size(1);
  const T* biases = bias ? bias->const_data_ptr<T>() : nullptr;
  return [=, to = out.mutable_data_ptr<T>()](int64_t tile, int64_t row, const auto& sums) {
    const int64_t first = tile * kTile;
    for_vectors(std::min<int64_t>(kTile, features - first), [&](int64_t i, auto n) {
      const Floats result = scaled(row, first + i, sums[i / kLanes]);
      store(to + row * features + first + i, biases ? result + load(biases + first + i, n) : result, n);
    });
  };
}

// The same for tiles of 16 gates and their ups, which give rows of half as many features.
template <typename T, typename Scaled>
auto store_gated_rows(Tensor& out, const std::optional<Tensor>& bias, Scaled scaled, Gated gated) {
  const int64_t features = out.size(1);
  const T* biases = bias ? bias->const_data_ptr<T>() : nullptr;
  return [=, to = out.mutable_data_ptr<T>()](int64_t tile, int64_t row, const auto& sums) {
    const auto value = [&](int64_t i) {
      const Floats result = scaled(row, tile * kTile + i, sums[i / kLanes]);
      return biases ? result + load(biases + tile * kTile + i) : result;
    };
    const int64_t first = tile * kHalf;
    for_vectors(std::min<int64_t>(kHalf, features - first), [&](int64_t i, auto n) {
      store(to + row * features + first + i, gated(value(i), value(i + kHalf)), n);
    });
  };
}

// Calls `body` with the function that stores rows of `out`, gated by the activation unless its name is empty.
template <typename T, typename Scaled, typename Body>
void with_finish(std::string_view activation, Tensor& out, const std::optional<Tensor>& bias, Scaled scaled,
                 Body&& body) {
  if (activation.empty()) return body(store_rows<T>(out, bias, scaled));
  body(store_gated_rows<T>(out, bias, scaled, find_gated(activation)));
}

Tensor result(const Tensor& x, int64_t words, int per_word, const Tensor& weight, int64_t features,
              const std::optional<Tensor>& bias, ScalarType type, bool is_gated = false) {
  const int64_t width = is_gated ? kHalf : kTile, tiles = weight.size(0);
  STD_TORCH_CHECK(x.dim() == 2 && (x.size(1) + per_word - 1) / per_word == words, "x does not match the weight");
  STD_TORCH_CHECK(weight.is_contiguous() && (features + width - 1) / width == tiles,
                  "the number of tiles does not match the features");
  const int64_t biases = is_gated ? tiles * kTile : features;
  STD_TORCH_CHECK(!bias || (bias->scalar_type() == type && bias->is_contiguous() && bias->numel() == biases),
                  "the bias has the wrong type or size");
  return empty({x.size(0), features}, type);
}

// weight: [tiles, in, 32] float32 or [tiles, in / 2, 32, 2] bfloat16, the type of x and of the result. With an
// activation, a tile (and the bias) is 16 gates and their ups, and `features` counts the gated features.
Tensor tiled_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, int64_t features,
                    std::string_view activation) {
  STD_TORCH_CHECK(x.scalar_type() == weight.scalar_type());
  const int64_t words = weight.size(1);
  const Tensor rows = as_contiguous(x);
  const auto run = [&]<typename Word, typename T, int kPerWord>() {
    STD_TORCH_CHECK(x.size(1) % kPerWord == 0, "rows of x must be whole words");
    Tensor out = result(x, words, kPerWord, weight, features, bias, x.scalar_type(), !activation.empty());
    with_finish<T>(activation, out, bias, identity, [&](auto finish) {
      matmul<Word>(bytes_of(rows), x.size(0), words * 4, words, weight.size(0), packed(weight, words), finish);
    });
    return out;
  };
  if (x.scalar_type() == ScalarType::Float) return run.template operator()<Float, float, 1>();
  if (x.scalar_type() == ScalarType::BFloat16) return run.template operator()<BFloat16Pair, BFloat16, 2>();
  STD_TORCH_CHECK(false, "tiles of ", x.scalar_type(), " are not supported on this processor");
}

// x: float32; weight: [tiles, in, 32] bfloat16 or float16. The result and the bias are of `type`.
Tensor widened_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, int64_t features,
                      ScalarType type) {
  const Tensor rows = as_contiguous(x);
  const int64_t inputs = weight.size(1);
  Tensor out = result(x, inputs, 1, weight, features, bias, type);
  for_type(weight.scalar_type(), [&]<typename W>() {
    const W* data = weight.const_data_ptr<W>();
    const auto get_piece = [=](int64_t tile, int64_t begin, int64_t depth, char* buffer) {
      const W* from = data + (tile * inputs + begin) * kTile;
      auto* wide = reinterpret_cast<float*>(buffer);
      for (int64_t i = 0; i < depth * kTile; i += kLanes) store(wide + i, load(from + i));
      return Piece{buffer, nullptr};
    };
    for_type(type, [&]<typename T>() {
      matmul<Float>(bytes_of(rows), x.size(0), inputs * 4, inputs, weight.size(0), get_piece,
                    store_rows<T>(out, bias, identity));
    });
  });
  return out;
}

// x: float32; weight: [tiles, in, 16] bytes, feature j in the low half of byte j and feature j + 16 in the high half;
// scales and zeros: float32 [tiles, groups, 32]. A weight is half * scale + zero. The result and the bias
// are of `type`.
Tensor int4_linear(const Tensor& x, const Tensor& weight, const Tensor& scales, const Tensor& zeros,
                   const std::optional<Tensor>& bias, int64_t features, ScalarType type) {
  STD_TORCH_CHECK(scales.is_contiguous() && zeros.is_contiguous() && scales.sizes() == zeros.sizes() &&
                      scales.size(0) == weight.size(0) && scales.size(2) == kTile && x.size(1) % scales.size(1) == 0,
                  "scales and zeros must be [tiles, groups, 32]");
  const Tensor rows = as_contiguous(x);
  const int64_t inputs = weight.size(1), groups = scales.size(1), group = inputs / groups;
  const uint8_t* data = weight.const_data_ptr<uint8_t>();
  const auto get_piece = [=, all_scales = scales.const_data_ptr<float>(), all_zeros = zeros.const_data_ptr<float>()](
                        int64_t tile, int64_t begin, int64_t depth, char* buffer) {
    auto* wide = reinterpret_cast<float*>(buffer);
    for (int64_t k = 0; k < depth; ++k) {
      const uint8_t* from = data + (tile * inputs + begin + k) * (kTile / 2);
      const int64_t place = (tile * groups + (begin + k) / group) * kTile;
      const float *scale = all_scales + place, *zero = all_zeros + place;
#pragma omp simd
      for (int j = 0; j < kTile / 2; ++j) {
        wide[k * kTile + j] = static_cast<float>(from[j] & 15) * scale[j] + zero[j];
        wide[k * kTile + j + 16] = static_cast<float>(from[j] >> 4) * scale[j + 16] + zero[j + 16];
      }
    }
    return Piece{buffer, nullptr};
  };
  Tensor out = result(x, inputs, 1, weight, features, bias, type);
  for_type(type, [&]<typename T>() {
    matmul<Float>(bytes_of(rows), x.size(0), inputs * 4, inputs, weight.size(0), get_piece,
                  store_rows<T>(out, bias, identity));
  });
  return out;
}

// The rows of a contiguous weight `[out, in]` in the order of tiles: 32 consecutive rows or, if the weight is gates
// followed by ups, 16 of each.
class WeightRows {
 public:
  WeightRows(const Tensor& weight, bool gated)
      : ins(weight.size(1)), data_(static_cast<const char*>(weight.const_data_ptr())),
        stride_(ins * weight.element_size()), features_(weight.size(0) / (gated ? 2 : 1)), gated_(gated) {
    STD_TORCH_CHECK(!gated || weight.size(0) % 2 == 0, "the numbers of gates and ups must be equal, got ",
                    weight.size(0), " in total");
  }

  const int64_t ins;

  int64_t tiles() const { return gated_ ? (features_ + kHalf - 1) / kHalf : (features_ + kTile - 1) / kTile; }

  // Null after the last row.
  template <typename T>
  const T* row(int64_t tile, int64_t place) const {
    const int64_t feature = gated_ ? tile * kHalf + place % kHalf : tile * kTile + place;
    const int64_t first = gated_ && place >= kHalf ? features_ : 0;
    return feature < features_ ? reinterpret_cast<const T*>(data_ + (first + feature) * stride_) : nullptr;
  }

 private:
  const char* data_;
  int64_t stride_, features_;
  bool gated_;
};

// Writes a tile [words, 32, per_word] of 32 rows of `ins` numbers, a cache line at a time, padded with zeros.
template <int kPerWord, typename Unit>
void fill_tile(const std::array<const Unit*, kTile>& rows, int64_t ins, int64_t words, Unit* tile) {
  constexpr int64_t kLine = 64 / sizeof(Unit) / kPerWord;  // words
  const int64_t whole = ins / kPerWord;
  const bool is_full = std::all_of(rows.begin(), rows.end(), [](const Unit* row) { return row != nullptr; });
  if (!is_full || whole < words) std::fill_n(tile, words * kTile * kPerWord, Unit{});
  for (int64_t first = 0; first < words; first += kLine) {
    for (int64_t row = 0; row < kTile; ++row) {
      const Unit* x = rows[row];
      if (x == nullptr) continue;
      for (int64_t word = first; word < std::min(first + kLine, whole); ++word) {
        std::memcpy(tile + (word * kTile + row) * kPerWord, x + word * kPerWord, sizeof(Unit) * kPerWord);
      }
      if (first + kLine >= words) std::copy(x + whole * kPerWord, x + ins, tile + (whole * kTile + row) * kPerWord);
    }
  }
}

template <int kPerWord, typename Unit>
void pack(const WeightRows& weight, Tensor& out) {
  const int64_t words = out.size(1);
  Unit* to = static_cast<Unit*>(out.mutable_data_ptr());
  parallel_for(0, out.size(0), grain(words * kTile), [&](int64_t begin, int64_t end) {
    for (int64_t tile = begin; tile < end; ++tile) {
      std::array<const Unit*, kTile> rows;
      for (int place = 0; place < kTile; ++place) rows[place] = weight.row<Unit>(tile, place);
      fill_tile<kPerWord>(rows, weight.ins, words, to + tile * words * kTile * kPerWord);
    }
  });
}

// Packs `[out, in]` as [tiles, words, 32, per_word], padded with zeros.
Tensor pack_tiles(const Tensor& weight, int64_t per_word, bool gated) {
  const Tensor from = as_contiguous(weight);
  const WeightRows rows(from, gated);
  const int64_t size = weight.element_size();
  STD_TORCH_CHECK(size <= 4 && (per_word == 1 || (per_word == 2 && size == 2)), "tiles of ", weight.scalar_type(),
                  " with ", per_word, " per word are not supported");
  Tensor out = empty({rows.tiles(), (rows.ins + per_word - 1) / per_word, kTile, per_word}, weight.scalar_type());
  if (per_word == 2) {
    pack<2, uint16_t>(rows, out);
  } else if (size == 1) {
    pack<1, uint8_t>(rows, out);
  } else if (size == 2) {
    pack<1, uint16_t>(rows, out);
  } else {
    pack<1, uint32_t>(rows, out);
  }
  return out;
}

// Quantizes a row to integers from -steps to steps; returns the scale.
template <typename T>
float quantize_row(const T* x, int64_t count, float steps, int8_t* to) {
  const float scale = largest(x, count) / steps;
  const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
  for_vectors(count, [&](int64_t i, auto n) { store(to + i, round(load(x + i, n) * inverse), n); });
  return scale;
}

// Quantizes `[out, in]` to tiles of bytes with 128 added, and scales [tiles * 32]. Each tile is quantized and packed
// while it is in the cache.
std::tuple<Tensor, Tensor> pack_int8_tiles(const Tensor& weight, bool gated) {
  const Tensor from = as_contiguous(weight);
  const WeightRows source(from, gated);
  const int64_t ins = source.ins, words = (ins + 3) / 4, count = source.tiles();
  Tensor out = empty({count, words, kTile, 4}, ScalarType::Byte);
  Tensor scales = empty({count * kTile}, ScalarType::Float);
  auto* to = reinterpret_cast<int8_t*>(out.mutable_data_ptr<uint8_t>());
  auto* row_scales = scales.mutable_data_ptr<float>();
  for_type(weight.scalar_type(), [&]<typename T>() {
    parallel_for(0, count, grain(words * kTile), [&](int64_t begin, int64_t end) {
      std::vector<int8_t> bytes(kTile * ins);
      for (int64_t tile = begin; tile < end; ++tile) {
        std::array<const int8_t*, kTile> rows;
        for (int place = 0; place < kTile; ++place) {
          const T* x = source.row<T>(tile, place);
          int8_t* row = bytes.data() + place * ins;
          rows[place] = x == nullptr ? nullptr : row;
          row_scales[tile * kTile + place] = x == nullptr ? 0.0f : quantize_row(x, ins, kSteps, row);
        }
        int8_t* const tile_bytes = to + tile * words * kTile * 4;
        fill_tile<4>(rows, ins, words, tile_bytes);
        // Adds kOffset.
        for (int64_t i = 0; i < words * kTile * 4; ++i) tile_bytes[i] ^= static_cast<int8_t>(kOffset);
      }
    });
  });
  return {out, scales};
}

// Quantizes `[out, in]` to int8 from -steps to steps, with a scale per output feature.
std::tuple<Tensor, Tensor> quantize_weight(const Tensor& weight, int64_t steps) {
  const Tensor from = as_contiguous(weight);
  const int64_t outs = weight.size(0), ins = weight.size(1);
  Tensor out = empty(weight.sizes(), ScalarType::Char);
  Tensor scales = empty({outs}, ScalarType::Float);
  for_type(weight.scalar_type(), [&]<typename T>() {
    parallel_for(0, outs, grain(ins), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const T* x = from.const_data_ptr<T>() + row * ins;
        int8_t* to = out.mutable_data_ptr<int8_t>() + row * ins;
        scales.mutable_data_ptr<float>()[row] = quantize_row(x, ins, static_cast<float>(steps), to);
      }
    });
  });
  return {out, scales};
}

// weight: bytes [tiles, in / 4, 32, 4] with 128 added; scales: float32 [tiles * 32].
Tensor int8_linear(const Tensor& x, const Tensor& weight, const Tensor& scales, const std::optional<Tensor>& bias,
                   int64_t features, std::string_view activation) {
  STD_TORCH_CHECK(scales.is_contiguous() && scales.scalar_type() == ScalarType::Float &&
                  scales.numel() == weight.size(0) * kTile);
  STD_TORCH_CHECK(x.size(1) <= (1 << 16), "more than 65,536 inputs are not supported: sums may overflow 32 bits");
  const Tensor rows = as_contiguous(x);
  const int64_t words = weight.size(1);
  Tensor out = result(x, words, 4, weight, features, bias, x.scalar_type(), !activation.empty());
  static thread_local Quantized kept;  // grows, and is reused by the thread
  Quantized& quantized = kept;
  const float* feature_scales = scales.const_data_ptr<float>();
  for_type(x.scalar_type(), [&]<typename T>() {
    quantized.fill(rows.const_data_ptr<T>(), x.size(0), x.size(1), words * 4);
    const auto scaled = [&](int64_t row, int64_t feature, Ints sum) {
      const Ints exact = sum - Quad::kExcess * quantized.sums[row];
      return __builtin_convertvector(exact, Floats) * load(feature_scales + feature) * quantized.scales[row];
    };
    with_finish<T>(activation, out, bias, scaled, [&](auto finish) {
      matmul<Quad>(reinterpret_cast<const char*>(quantized.bytes.data()), x.size(0), words * 4, words, weight.size(0),
                   packed(weight, words), finish);
    });
  });
  return out;
}

}  // namespace

QUIRE_OPERATION(pack_tiles, "(Tensor weight, int per_word, bool gated) -> Tensor")
QUIRE_OPERATION(pack_int8_tiles, "(Tensor weight, bool gated) -> (Tensor, Tensor)")
QUIRE_OPERATION(quantize_weight, "(Tensor weight, int steps) -> (Tensor, Tensor)")
QUIRE_OPERATION(tiled_linear, "(Tensor x, Tensor weight, Tensor? bias, int features, str activation) -> Tensor")
QUIRE_OPERATION(widened_linear, "(Tensor x, Tensor weight, Tensor? bias, int features, ScalarType type) -> Tensor")
QUIRE_OPERATION(
    int4_linear,
    "(Tensor x, Tensor weight, Tensor scales, Tensor zeros, Tensor? bias, int features, ScalarType type) -> Tensor")
QUIRE_OPERATION(int8_linear,
                "(Tensor x, Tensor weight, Tensor scales, Tensor? bias, int features, str activation) -> Tensor")

}  // namespace quire
