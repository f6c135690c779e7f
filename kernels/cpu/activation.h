// The activations of feed-forward layers, with the names in `quire.kernels.reference`.

#pragma once

#include <string_view>

#include "vec.h"

namespace quire {

// x Φ(x) (Hendrycks & Gimpel 2016), Φ by formula 7.1.26 of Abramowitz & Stegun: within 1e-7 · |x|.
inline Floats gelu(Floats x) {
  const Floats z = max(x, -x) * 0.707106781f;
  const Floats t = 1.0f / (z * 0.3275911f + 1.0f);
  Floats y = t * 1.061405429f - 1.453152027f;
  y = y * t + 1.421413741f;
  y = y * t - 0.284496736f;
  y = y * t + 0.254829592f;
  const Floats tail = y * t * exp(-z * z) * 0.5f;
  return x * (x < 0.0f ? tail : 1.0f - tail);
}

// Gelu with 0.5 + 0.5 tanh(√(2/π) (x + 0.044715 x³)) for Φ: a logistic function of twice that.
inline Floats gelu_tanh(Floats x) { return x / (1.0f + exp(x * (x * x * -0.0713548163f - 1.59576912f))); }

// Gelu with the logistic function of 1.702 x for Φ.
inline Floats quick_gelu(Floats x) { return x / (1.0f + exp(x * -1.702f)); }

inline Floats silu(Floats x) { return x / (1.0f + exp(-x)); }

inline Floats relu(Floats x) { return x < 0.0f ? Floats{} : x; }

inline Floats relu2(Floats x) { return relu(x) * relu(x); }

// The gated activation of gpt-oss. NaN propagates.
inline Floats swiglu_oai(Floats gate, Floats up) {
  const Floats limit = broadcast(7.0f);
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : up < -limit ? -limit : up;
  return gate / (1.0f + exp(gate * -1.702f)) * (up + 1.0f);
}

// A gated activation that is limited to `kLimit`, and ups in both directions (Step 3.5). NaN propagates.
template <int kLimit>
Floats limited_silu(Floats gate, Floats up) {
  const Floats limit = broadcast(kLimit), inner = silu(gate);
  up = up > limit ? limit : up < -limit ? -limit : up;
  return (inner > limit ? limit : inner) * up;
}

// The gated activation of DeepSeek-V4. NaN propagates.
inline Floats silu_clamped(Floats gate, Floats up) {
  const Floats limit = broadcast(10.0f);
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : up < -limit ? -limit : up;
  return silu(gate) * up;
}

using Gated = Floats (*)(Floats gate, Floats up);

// The gated activation of that name.
QUIRE_EXPORT Gated find_gated(std::string_view name);

}  // namespace quire
