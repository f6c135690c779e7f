// The multiplication by weights in few bits, which takes longer to compile than all around it.

#include "coded.h"

namespace quire {

template <typename Values>
void Coded<Values>::widen(const char* step, int64_t steps, char* to) const {
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

QUIRE_CODED(, SignedBytes)
QUIRE_CODED(, UnsignedBytes)
QUIRE_CODED(, Float8)
QUIRE_CODED(, Table)
#if !defined(__AVX512F__)
QUIRE_CODED(, ByteTable)
#endif

}  // namespace quire
