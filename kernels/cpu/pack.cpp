// The quantization and packing of weights into tiles, done once.

#include <array>

#include "packed_tiles.h"

namespace quire {
namespace {

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

// Quantizes a row of this type to integers from -kSteps to kSteps; returns the scale.
float quantize_row(ScalarType type, const void* from, int64_t count, int8_t* to) {
  float scale = 0.0f;
  for_type(type, [&]<typename T>() {
    const T* const x = static_cast<const T*>(from);
    scale = largest(x, count) / kSteps;
    quantize(x, count, scale, to);
  });
  return scale;
}

// Quantizes a group of numbers of this type to integers from 0 to 15; `factors` are the scale and the zero.
void quantize_group(ScalarType type, const void* from, int64_t count, int8_t* to, float* factors) {
  for_type(type, [&]<typename T>() {
    const T* const x = static_cast<const T*>(from);
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
  });
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
  parallel_for(0, count, grain(words * kTile), [&](int64_t begin, int64_t end) {
    std::vector<uint8_t> bytes(kTile * ins);
    for (int64_t tile = begin; tile < end; ++tile) {
      std::array<const uint8_t*, kTile> rows;
      for (int place = 0; place < kTile; ++place) {
        const uint8_t* const x = source.row<uint8_t>(tile, place);
        uint8_t* const row = bytes.data() + place * ins;
        auto* const to = reinterpret_cast<int8_t*>(row);
        rows[place] = x == nullptr ? nullptr : row;
        row_scales[tile * kTile + place] = x == nullptr ? 0.0f : quantize_row(weight.scalar_type(), x, ins, to);
      }
      uint8_t* const tile_bytes = to + tile * words * kTile * 4;
      fill_tile<uint32_t>(rows, ins, words, one_by_one<uint32_t>(tile_bytes));
      // Adds kOffset.
      for (int64_t i = 0; i < words * kTile * 4; ++i) tile_bytes[i] ^= kOffset;
    }
  });
  return {out, scales};
}

// Quantizes `[out, in]` to tiles of 4-bit weights in groups of `group` inputs: bytes [tiles, groups, bytes of a group], as
// `Int4Groups` describes them. A group's minimum is its zero, and its maximum 15 steps more.
Tensor pack_int4_tiles(const Tensor& weight, int64_t group, bool gated) {
  const Tensor from = as_contiguous(weight);
  const WeightRows source(from, gated);
  const Int4Groups form(group);
  STD_TORCH_CHECK(source.ins % group == 0, "inputs must be whole groups of ", group);
  const int64_t count = source.tiles(), groups = form.steps(source.ins), step = form.step_bytes();
  const int64_t group_bytes = group * weight.element_size();
  Tensor out = empty({count, groups, step}, ScalarType::Byte);
  auto* const to = out.mutable_data_ptr<uint8_t>();
  parallel_for(0, count, grain(source.ins * kTile), [&](int64_t begin, int64_t end) {
    std::vector<int8_t> halves(group);
    for (int64_t tile = begin; tile < end; ++tile) {
      for (int64_t place = 0; place < kTile; ++place) {
        const uint8_t* const x = source.row<uint8_t>(tile, place);
        for (int64_t i = 0; i < groups; ++i) {
          uint8_t* const at = to + (tile * groups + i) * step;
          float factors[2] = {};
          if (x == nullptr) std::fill(halves.begin(), halves.end(), 0);
          else quantize_group(weight.scalar_type(), x + i * group_bytes, group, halves.data(), factors);
          for (int side = 0; side < 2; ++side) std::memcpy(at + (side * kTile + place) * 4, &factors[side], 4);
          uint8_t* const words = at + Int4Groups::kScales + place * 4;
          for (int64_t k = 0; k < group; ++k) {
            uint8_t& both = words[k / 8 * kTile * 4 + k % 4];
            both = k % 8 < 4 ? halves[k] : both | halves[k] << 4;
          }
        }
      }
    }
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
  parallel_for(0, outs, grain(ins), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const void* const x = static_cast<const char*>(from.const_data_ptr()) + row * ins * from.element_size();
      int8_t* const to = out.mutable_data_ptr<int8_t>() + row * ins;
      scales.mutable_data_ptr<float>()[row] = quantize_row(weight.scalar_type(), x, ins, to);
    }
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

}  // namespace quire
