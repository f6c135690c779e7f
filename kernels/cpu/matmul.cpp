// The matmul of a linear layer, for weights in float32, bfloat16, 8-bit integers, and narrow types that are widened;
// and the quantization and packing of weights into tiles, done once.

#include "activation.h"
#include "coded.h"

namespace quire {
namespace {

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

// The product of rows of T by packed tiles; `scales` of the features are null if the form has none. With an activation, a
// tile (and the bias) is 16 gates and their ups, and `features` counts the gated features.
template <typename Form, typename T>
Tensor linear(Form form, const Tensor& x, const Tensor& weight, const float* scales, const std::optional<Tensor>& bias,
              int64_t features, std::string_view activation) {
  const int64_t width = activation.empty() ? kTile : kHalf, tiles = weight.size(0), steps = weight.size(1);
  const int64_t biases = activation.empty() ? features : tiles * kTile, tile_bytes = steps * form.step_bytes();
  STD_TORCH_CHECK(x.dim() == 2 && form.steps(x.size(1)) == steps, "x does not match the weight");
  STD_TORCH_CHECK(weight.is_contiguous() && (features + width - 1) / width == tiles,
                  "the number of tiles does not match the features");
  STD_TORCH_CHECK(!bias || (bias->scalar_type() == x.scalar_type() && bias->is_contiguous() && bias->numel() == biases),
                  "the bias has the wrong type or size");
  const Tensor from = as_contiguous(x);
  const auto* const data = static_cast<const char*>(weight.const_data_ptr());
  Tensor out = empty({x.size(0), features}, x.scalar_type());
  const Rows<Form> rows(form, from.const_data_ptr<T>(), x.size(0), x.size(1));
  const auto value = [&](int64_t row, int64_t feature, auto sum) { return rows.value(row, sum, scales, feature); };
  with_finish<T>(activation, out, bias, value, [&](auto finish) {
    const int64_t work = (x.size(0) + kReadingRows) * x.size(1) * kTile;  // of a tile
    parallel_for(0, tiles, std::max<int64_t>(1, kThreadWork / std::max<int64_t>(1, work)),
                 [&](int64_t begin, int64_t end) {
      const auto get_rows = [&](int64_t first, int64_t) { return rows.data + first * rows.stride; };
      const auto get_piece = [&](int64_t tile, int64_t at, int64_t bytes) {
        const char* const here = data + tile * tile_bytes + at;
        return Piece{here, here + bytes};  // tiles are contiguous, and a prefetch never faults
      };
      multiply_tiles(form, x.size(0), rows.stride, steps, begin, end, get_rows, get_piece, finish);
    });
  });
  return out;
}

// weight: [tiles, in, 32] float32 or float16, or [tiles, in / 2, 32, 2] bfloat16: the type of x, which is that of the
// result, or a narrower one than its float32.
Tensor tiled_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, int64_t features,
                    std::string_view activation) {
  Tensor out;
  for_tiled(x.scalar_type(), weight.scalar_type(), [&]<typename Form, typename T>() {
    out = linear<Form, T>({}, x, weight, nullptr, bias, features, activation);
  });
  return out;
}

// weight: bytes [tiles, in / 4, 32, 4] with 128 added; scales: float32 [tiles * 32]. If all rows are rounded with one
// scale and zero point, `rounding` is these, float32 [2], and `excess` int32 [tiles * 32].
Tensor int8_linear(const Tensor& x, const Tensor& weight, const Tensor& scales, const std::optional<Tensor>& bias,
                   int64_t features, std::string_view activation, const std::optional<Tensor>& rounding,
                   const std::optional<Tensor>& excess) {
  STD_TORCH_CHECK(scales.is_contiguous() && scales.scalar_type() == ScalarType::Float &&
                  scales.numel() == weight.size(0) * kTile);
  STD_TORCH_CHECK(x.size(1) <= kMostBytes, "more than 65,536 inputs are not supported: sums may overflow 32 bits");
  Byte form;
  if (rounding) {
    STD_TORCH_CHECK(rounding->scalar_type() == ScalarType::Float && rounding->is_contiguous() && rounding->numel() == 2 &&
                        excess && excess->scalar_type() == ScalarType::Int && excess->is_contiguous() &&
                        excess->numel() == scales.numel(),
                    "the rounding of rows needs float32 [2], and int32 [tiles * 32]");
    const float* const both = rounding->const_data_ptr<float>();
    form.rounding = {both[0], both[1], excess->const_data_ptr<int32_t>()};
  }
  Tensor out;
  for_type(x.scalar_type(), [&]<typename T>() {
    out = linear<Byte, T>(form, x, weight, scales.const_data_ptr<float>(), bias, features, activation);
  });
  return out;
}

// weight: bytes [tiles, groups, bytes of a group], as `Int4` describes them.
Tensor int4_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, int64_t features,
                   std::string_view activation) {
  Tensor out;
  for_type(x.scalar_type(), [&]<typename T>() {
    out = linear<Int4, T>(Int4::of_step(weight.size(2)), x, weight, nullptr, bias, features, activation);
  });
  return out;
}

// weight: bytes [tiles, steps, bytes of a step], as `Coded` describes them; scales: float32 [tiles * 32].
Tensor coded_linear(const Tensor& x, const Tensor& weight, const Tensor& scales, const std::optional<Tensor>& bias,
                    int64_t features, std::string_view values, const Tensor& table, int64_t group, int64_t factors,
                    std::string_view activation) {
  STD_TORCH_CHECK(scales.is_contiguous() && scales.scalar_type() == ScalarType::Float &&
                  scales.numel() == weight.size(0) * kTile);
  Tensor out;
  with_values(values, table, [&]<typename Values>(Values each) {
    for_type(x.scalar_type(), [&]<typename T>() {
      const CodedFor<Values, T> form(each, group, factors, weight.size(2));
      out = linear<CodedFor<Values, T>, T>(form, x, weight, scales.const_data_ptr<float>(), bias, features, activation);
    });
  });
  return out;
}

// The rows of a contiguous weight `[out, in]` in the order of tiles: 32 consecutive rows or, if the weight is gates
// followed by ups, 16 of each.
class WeightRows {
 public:
  WeightRows(const Tensor& weight, bool gated)
      : ins(weight.size(1)), row_bytes(ins * weight.element_size()),
        data_(static_cast<const uint8_t*>(weight.const_data_ptr())), features_(weight.size(0) / (gated ? 2 : 1)), gated_(gated) {
    STD_TORCH_CHECK(!gated || weight.size(0) % 2 == 0, "the numbers of gates and ups must be equal, got ",
                    weight.size(0), " in total");
  }

  const int64_t ins, row_bytes;

  int64_t tiles() const { return gated_ ? (features_ + kHalf - 1) / kHalf : (features_ + kTile - 1) / kTile; }

  // Null after the last row.
  template <typename T>
  const T* row(int64_t tile, int64_t place) const {
    const int64_t feature = gated_ ? tile * kHalf + place % kHalf : tile * kTile + place;
    const int64_t first = gated_ && place >= kHalf ? features_ : 0;
    return feature < features_ ? reinterpret_cast<const T*>(data_ + (first + feature) * row_bytes) : nullptr;
  }

  // All of a tile.
  template <typename T = uint8_t>
  std::array<const T*, kTile> rows(int64_t tile) const {
    std::array<const T*, kTile> rows;
    for (int place = 0; place < kTile; ++place) rows[place] = row<T>(tile, place);
    return rows;
  }

 private:
  const uint8_t* data_;
  int64_t features_;
  bool gated_;
};

// The word that the bytes at `from` make up: they are its own or, of four bits each, fill half of it, the first lowest.
template <typename Word, int kBits>
Word word_of(const uint8_t* from) {
  if constexpr (kBits == 8) {
    return read<Word>(from);
  } else {
    uint64_t word = read<uint64_t>(from);
    word = (word | word >> 4) & 0x00FF00FF00FF00FF;
    word = (word | word >> 8) & 0x0000FFFF0000FFFF;
    return static_cast<Word>(word | word >> 16);
  }
}

// Writes the words of a tile, a cache line of each of its 32 rows of `bytes` bytes at a time, padded with zeros. Word
// `first + i` of all rows stands at `addresses(first)(i)`.
template <typename Word, int kBits = 8, typename Addresses>
void fill_tile(const std::array<const uint8_t*, kTile>& rows, int64_t bytes, int64_t words, Addresses addresses) {
  constexpr int64_t kLine = 64, kFrom = sizeof(Word) * 8 / kBits, kWords = kLine / kFrom;
  for (int64_t first = 0; first < words; first += kWords) {
    const int64_t count = std::min(kWords, words - first), rest = bytes - first * kFrom;
    const auto address = addresses(first);
    for (int64_t place = 0; place < kTile; ++place) {
      const auto write = [&](const uint8_t* from, int64_t number) __attribute__((always_inline)) {
        for (int64_t i = 0; i < number; ++i) {
          const Word word = word_of<Word, kBits>(from + i * kFrom);
          std::memcpy(address(i) + place * sizeof(Word), &word, sizeof(Word));
        }
      };
      const uint8_t* const row = rows[place];
      if (row != nullptr && rest >= kLine) {
        write(row + first * kFrom, kWords);
      } else {
        uint8_t padded[kLine] = {};
        if (row != nullptr && rest > 0) std::copy_n(row + first * kFrom, std::min(rest, kLine), padded);
        write(padded, count);
      }
    }
  }
}

// The addresses of a tile's words if nothing else stands between them.
template <typename Word>
auto one_by_one(void* tile) {
  return [at = static_cast<char*>(tile)](int64_t first) {
    return [=](int64_t i) { return at + (first + i) * kTile * sizeof(Word); };
  };
}

template <typename Word>
void pack(const WeightRows& weight, Tensor& out) {
  const int64_t words = out.size(1);
  auto* const to = static_cast<Word*>(out.mutable_data_ptr());
  parallel_for(0, out.size(0), grain(words * kTile), [&](int64_t begin, int64_t end) {
    for (int64_t tile = begin; tile < end; ++tile) {
      fill_tile<Word>(weight.rows(tile), weight.row_bytes, words, one_by_one<Word>(to + tile * words * kTile));
    }
  });
}

// Packs `[out, in]` as [tiles, words, 32, per_word], padded with zeros.
Tensor pack_tiles(const Tensor& weight, int64_t per_word, bool gated) {
  const Tensor from = as_contiguous(weight);
  const WeightRows rows(from, gated);
  const int64_t size = weight.element_size();
  STD_TORCH_CHECK(size <= 4 && (per_word == 1 || (per_word > 1 && per_word * size == 4)), "tiles of ",
                  weight.scalar_type(), " with ", per_word, " per word are not supported");
  Tensor out = empty({rows.tiles(), (rows.ins + per_word - 1) / per_word, kTile, per_word}, weight.scalar_type());
  switch (per_word * size) {
    case 1:
      pack<uint8_t>(rows, out);
      break;
    case 2:
      pack<uint16_t>(rows, out);
      break;
    default:
      pack<uint32_t>(rows, out);
  }
  return out;
}

// Quantizes a row to integers from -kSteps to kSteps; returns the scale.
template <typename T>
float quantize_row(const T* x, int64_t count, int8_t* to) {
  const float scale = largest(x, count) / kSteps;
  quantize(x, count, scale, to);
  return scale;
}

// Quantizes a group to integers from 0 to 15; `factors` are the scale and the zero.
template <typename T>
void quantize_group(const T* x, int64_t count, int8_t* to, float* factors) {
  Floats low = broadcast(x[0]), high = low;
  for (int64_t i = 0; i < count; i += kLanes) {
    const Floats part = load(x + i);
    low = min(low, part), high = max(high, part);
  }
  const float zero = -max(-low), scale = (max(high) - zero) / 15.0f, inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
  for (int64_t i = 0; i < count; i += kLanes) {
    store(to + i, min(max(round((load(x + i) - zero) * inverse), Floats{}), broadcast(15.0f)));
  }
  factors[0] = scale, factors[1] = zero;
}

// Quantizes `[out, in]` to tiles of bytes with 128 added, and scales [tiles * 32]. Each tile is quantized and packed
// while it is in the cache.
std::tuple<Tensor, Tensor> pack_int8_tiles(const Tensor& weight, bool gated) {
  const Tensor from = as_contiguous(weight);
  const WeightRows source(from, gated);
  const int64_t ins = source.ins, words = (ins + 3) / 4, count = source.tiles();
  Tensor out = empty({count, words, kTile, 4}, ScalarType::Byte);
  Tensor scales = empty({count * kTile}, ScalarType::Float);
  auto* to = out.mutable_data_ptr<uint8_t>();
  auto* row_scales = scales.mutable_data_ptr<float>();
  for_type(weight.scalar_type(), [&]<typename T>() {
    parallel_for(0, count, grain(words * kTile), [&](int64_t begin, int64_t end) {
      std::vector<uint8_t> bytes(kTile * ins);
      for (int64_t tile = begin; tile < end; ++tile) {
        std::array<const uint8_t*, kTile> rows;
        for (int place = 0; place < kTile; ++place) {
          const T* x = source.row<T>(tile, place);
          uint8_t* const row = bytes.data() + place * ins;
          rows[place] = x == nullptr ? nullptr : row;
          row_scales[tile * kTile + place] = x == nullptr ? 0.0f : quantize_row(x, ins, reinterpret_cast<int8_t*>(row));
        }
        uint8_t* const tile_bytes = to + tile * words * kTile * 4;
        fill_tile<uint32_t>(rows, ins, words, one_by_one<uint32_t>(tile_bytes));
        // Adds kOffset.
        for (int64_t i = 0; i < words * kTile * 4; ++i) tile_bytes[i] ^= kOffset;
      }
    });
  });
  return {out, scales};
}

// Quantizes `[out, in]` to tiles of 4-bit weights in groups of `group` inputs: bytes [tiles, groups, bytes of a group], as
// `Int4` describes them. A group's minimum is its zero, and its maximum 15 steps more.
Tensor pack_int4_tiles(const Tensor& weight, int64_t group, bool gated) {
  const Tensor from = as_contiguous(weight);
  const WeightRows source(from, gated);
  const Int4 form(group);
  STD_TORCH_CHECK(source.ins % group == 0, "inputs must be whole groups of ", group);
  const int64_t count = source.tiles(), groups = form.steps(source.ins), step = form.step_bytes();
  Tensor out = empty({count, groups, step}, ScalarType::Byte);
  auto* const to = out.mutable_data_ptr<uint8_t>();
  for_type(weight.scalar_type(), [&]<typename T>() {
    parallel_for(0, count, grain(source.ins * kTile), [&](int64_t begin, int64_t end) {
      std::vector<int8_t> halves(group);
      for (int64_t tile = begin; tile < end; ++tile) {
        for (int64_t place = 0; place < kTile; ++place) {
          const T* x = source.row<T>(tile, place);
          for (int64_t i = 0; i < groups; ++i) {
            uint8_t* const at = to + (tile * groups + i) * step;
            float factors[2] = {};
            if (x == nullptr) std::fill(halves.begin(), halves.end(), 0);
            else quantize_group(x + i * group, group, halves.data(), factors);
            for (int side = 0; side < 2; ++side) std::memcpy(at + (side * kTile + place) * 4, &factors[side], 4);
            uint8_t* const words = at + Int4::kScales + place * 4;
            for (int64_t k = 0; k < group; ++k) {
              uint8_t& both = words[k / 8 * kTile * 4 + k % 4];
              both = k % 8 < 4 ? halves[k] : both | halves[k] << 4;
            }
          }
        }
      }
    });
  });
  return out;
}

// Writes the factors of 32 rows for a step, zeros where there is no row.
template <typename T>
void fill_factors(const std::array<const float*, kTile>& rows, int64_t step, T* to) {
  float factors[kTile];
  for (int place = 0; place < kTile; ++place) factors[place] = rows[place] == nullptr ? 0.0f : rows[place][step];
  for (int i = 0; i < kTile; i += kLanes) store(to + i, load(factors + i));
}

// Packs codes `[out, in]` and their factors `[out, steps]`, as `Coded` describes them: bytes [tiles, steps, bytes of a
// step]. Factors are float32 if `wide`, else float16.
Tensor pack_coded_tiles(const Tensor& codes, const std::optional<Tensor>& scales, const std::optional<Tensor>& offsets,
                        int64_t group, int64_t bits, bool wide, bool gated) {
  STD_TORCH_CHECK((bits == 4 || bits == 8) && group > 0 && group % 8 == 0, "groups of ", group, " codes of ", bits,
                  " bits are not supported");
  STD_TORCH_CHECK(codes.scalar_type() == ScalarType::Byte && codes.dim() == 2, "codes are bytes [out, in]");
  const Tensor from = as_contiguous(codes);
  const WeightRows source(from, gated);
  const int64_t tiles = source.tiles(), steps = (source.ins + group - 1) / group;
  std::vector<Tensor> factors;
  for (const std::optional<Tensor>& each : {scales, offsets}) {
    if (!each) continue;
    STD_TORCH_CHECK(each->scalar_type() == ScalarType::Float && each->dim() == 2 && each->size(0) == codes.size(0) &&
                        each->size(1) == steps,
                    "the factors do not match the codes");
    factors.push_back(as_contiguous(*each));
  }
  const auto step_words = static_cast<uint32_t>(group * bits / 32);
  const int64_t factor_bytes = wide ? 4 : 2, head = std::ssize(factors) * kTile * factor_bytes;
  const int64_t step_bytes = head + step_words * kTile * 4;
  Tensor out = empty({tiles, steps, step_bytes}, ScalarType::Byte);
  auto* const to = reinterpret_cast<char*>(out.mutable_data_ptr<uint8_t>());
  parallel_for(0, tiles, grain(source.ins * kTile), [&](int64_t begin, int64_t end) {
    for (int64_t tile = begin; tile < end; ++tile) {
      char* const at = to + tile * steps * step_bytes;
      for (int64_t number = 0; number < std::ssize(factors); ++number) {
        const auto rows = WeightRows(factors[number], gated).rows<float>(tile);
        for (int64_t step = 0; step < steps; ++step) {
          char* const here = at + step * step_bytes + number * kTile * factor_bytes;
          if (wide) fill_factors(rows, step, reinterpret_cast<float*>(here));
          else fill_factors(rows, step, reinterpret_cast<Half*>(here));
        }
      }
      const auto addresses = [&](uint32_t first) {
        std::array<char*, 16> line;  // divisions are slow
        for (uint32_t i = 0, word = first; i < line.size(); ++i, ++word) {
          line[i] = at + (word / step_words + 1) * head + word * int64_t{kTile * 4};
        }
        return [line](int64_t i) { return line[i]; };
      };
      const auto rows = source.rows(tile);
      if (bits == 4) fill_tile<uint32_t, 4>(rows, source.ins, steps * step_words, addresses);
      else fill_tile<uint32_t>(rows, source.ins, steps * step_words, addresses);
    }
  });
  return out;
}

// Quantizes `[out, in]` to int8 from -127 to 127, with a scale per output feature.
std::tuple<Tensor, Tensor> quantize_weight(const Tensor& weight) {
  const Tensor from = as_contiguous(weight);
  const int64_t outs = weight.size(0), ins = weight.size(1);
  Tensor out = empty(weight.sizes(), ScalarType::Char);
  Tensor scales = empty({outs}, ScalarType::Float);
  for_type(weight.scalar_type(), [&]<typename T>() {
    parallel_for(0, outs, grain(ins), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const T* x = from.const_data_ptr<T>() + row * ins;
        int8_t* to = out.mutable_data_ptr<int8_t>() + row * ins;
        scales.mutable_data_ptr<float>()[row] = quantize_row(x, ins, to);
      }
    });
  });
  return {out, scales};
}

}  // namespace

QUIRE_OPERATION(pack_tiles, "(Tensor weight, int per_word, bool gated) -> Tensor")
QUIRE_OPERATION(pack_int8_tiles, "(Tensor weight, bool gated) -> (Tensor, Tensor)")
QUIRE_OPERATION(pack_int4_tiles, "(Tensor weight, int group, bool gated) -> Tensor")
QUIRE_OPERATION(pack_coded_tiles,
                "(Tensor codes, Tensor? scales, Tensor? offsets, int group, int bits, bool wide, bool gated) -> Tensor")
QUIRE_OPERATION(quantize_weight, "(Tensor weight) -> (Tensor, Tensor)")
QUIRE_OPERATION(tiled_linear, "(Tensor x, Tensor weight, Tensor? bias, int features, str activation) -> Tensor")
QUIRE_OPERATION(int4_linear, "(Tensor x, Tensor weight, Tensor? bias, int features, str activation) -> Tensor")
QUIRE_OPERATION(coded_linear,
                "(Tensor x, Tensor weight, Tensor scales, Tensor? bias, int features, str values, Tensor table, "
                "int group, int factors, str activation) -> Tensor")
QUIRE_OPERATION(int8_linear,
                "(Tensor x, Tensor weight, Tensor scales, Tensor? bias, int features, str activation, "
                "Tensor? rounding, Tensor? excess) -> Tensor")

}  // namespace quire
