// The multiplication by weights in few bits, which takes longer to compile than all around it.

#include "coded.h"

namespace quire {

template <typename Values>
void Coded<Values>::widen(const char* step, int64_t steps, char* to) const {
  if constexpr (kWidens) {
    for (const char* const end = step + steps * step_bytes(); step < end; step += step_bytes()) {
      std::memcpy(to, step, head_bytes());
      to += head_bytes();
      for (const char* words = step + head_bytes(); words < step + step_bytes(); words += kTile * 4) {
        for (int v = 0; v < kVectors; ++v) {
          const auto unpacked = values.unpack(read<Words>(words + v * kLanes * 4));
#pragma GCC unroll 4
          for (int k = 0; k < kParts; ++k) {
            Values::widen(values.part(unpacked, k), to + (k * kTile + v * kLanes) * 4);
          }
        }
        to += kParts * kTile * 4;
      }
    }
  }
}

QUIRE_ALL_CODED()

}  // namespace quire
