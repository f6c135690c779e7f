// The multiplication by weights in few bits, which takes longer to compile than all around it.

#include "coded.h"

namespace quire {

template <typename Values>
void CodedIntegers<Values>::widen(const char* step, int64_t steps, char* to) const {
  for (const char* const end = step + steps * step_bytes(); step < end; step += step_bytes()) {
    std::memcpy(to, step, head_bytes());
    to += head_bytes();
    for (const char* words = step + head_bytes(); words < step + step_bytes(); words += kTile * 4) {
      for (int v = 0; v < kVectors; ++v) {
        const auto unpacked = values.unpack(read<Words>(words + v * kLanes * 4));
#pragma GCC unroll 4
        for (int k = 0; k < kPairs; ++k) {
          store(to + (k * kTile + v * kLanes) * 4, std::bit_cast<Words>(values.pair(unpacked, k)));
        }
      }
      to += kPairs * kTile * 4;
    }
  }
}

template <typename Values>
void CodedFloats<Values>::widen(const char* step, int64_t steps, char* to) const {
  with_factors([&](auto f) {
    constexpr int F = decltype(f)::value;
    auto* wide = reinterpret_cast<float*>(to);
    for (const char* const end = step + steps * step_bytes(); step < end; step += step_bytes(), wide += group * kTile) {
      for (int v = 0; v < kVectors; ++v) {
        const auto [scale, offset] = read_factors<F>(step, v);
        const char* words = step + head_bytes() + v * kLanes * 4;
        for (int64_t i = 0; i < group; i += kCodes, words += kTile * 4) {
          const auto unpacked = values.unpack(read<Words>(words));
#pragma GCC unroll 8
          for (int k = 0; k < kCodes; ++k) {
            store(wide + (i + k) * kTile + v * kLanes, weight<F>(values.value(unpacked, k), scale, offset));
          }
        }
      }
    }
  });
}

QUIRE_ALL_CODED()

}  // namespace quire
