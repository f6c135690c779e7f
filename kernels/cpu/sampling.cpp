// Sampling: the arg max of a row of logits, or a draw with Gumbel noise from the tokens that min_p, top_k and top_p
// keep; and the bitmask of allowed tokens.
//
// Nothing is sorted. Vectorized quickselect finds the k-th largest logit, and the last one that top_p keeps. Noise is a
// hash of (seed, position, id) (see `quire.kernels.noise`). As -log(-log(1 - u)) ≤ -log u, an id whose u exceeds
// exp(logit - best so far) cannot win, so few ids need logarithms.

#include <limits>

#include "vec.h"

namespace quire {
namespace {

constexpr float kGreedyBelow = 1e-5f;
constexpr float kNothing = -std::numeric_limits<float>::infinity();

uint64_t mix64(uint64_t x) {
  x += 0x9E3779B97F4A7C15;
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9;
  x = (x ^ x >> 27) * 0x94D049BB133111EB;
  return x ^ x >> 31;
}

uint64_t noise_key(int64_t seed, int64_t position) {
  return mix64(mix64(static_cast<uint64_t>(seed)) + static_cast<uint64_t>(position) * 0x9E3779B97F4A7C15);
}

// The same bits as `uniform_noise`.
Floats uniform(uint64_t key, Words ids) {
  Words bits = ids ^ static_cast<uint32_t>(key);
  bits = (bits ^ bits >> 16) * 0x7FEB352D ^ static_cast<uint32_t>(key >> 32);
  bits = (bits ^ bits >> 15) * 0x846CA68B;
  bits = (bits ^ bits >> 16) & 0x7FFFFFFF;
  const Floats number = __builtin_convertvector(std::bit_cast<Ints>(bits), Floats);
  return min((number + 0.5f) * 0x1p-31f, broadcast(1 - 0x1p-24f));
}

// A row of logits divided by the temperature, padded with -inf.
struct Logits {
  const float* row;
  int64_t width;
  Floats temperature;

  Floats load(int64_t i, auto n) const {
    Floats x = quire::load(row + i, n);
    if (n < kLanes) x = lane_numbers() < static_cast<int32_t>(n) ? x : broadcast(kNothing);
    return x / temperature;
  }
};

bool any(Ints lanes) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask(reinterpret_cast<__m512i>(lanes), reinterpret_cast<__m512i>(lanes)) != 0;
#elif defined(__AVX2__)
  return !_mm256_testz_si256(reinterpret_cast<__m256i>(lanes), reinterpret_cast<__m256i>(lanes));
#elif defined(__aarch64__)
  return vmaxvq_u32(reinterpret_cast<uint32x4_t>(lanes)) != 0;
#else
  int32_t found = 0;
  for (int i = 0; i < kLanes; ++i) found |= lanes[i];
  return found != 0;
#endif
}

// Writes the lanes of `x` that `lanes` selects (by -1) contiguously, and returns their end. May overwrite up to a
// vector from there.
float* append(float* to, Floats x, Ints lanes) {
#if defined(__AVX512F__)
  const __mmask16 mask = _mm512_test_epi32_mask(reinterpret_cast<__m512i>(lanes), reinterpret_cast<__m512i>(lanes));
  _mm512_storeu_ps(to, _mm512_maskz_compress_ps(mask, x));
  return to + std::popcount(static_cast<uint32_t>(mask));
#else
  for (int i = 0; i < kLanes; ++i) {
    *to = x[i];
    to -= lanes[i];
  }
  return to;
#endif
}

int64_t arg_max(const float* row, int64_t width) {
  Floats best = broadcast(kNothing);
  Ints places = {};
  for_vectors(width, [&](int64_t i, auto n) {
    Floats x = load(row + i, n);
    if (n < kLanes) x = lane_numbers() < static_cast<int32_t>(n) ? x : broadcast(kNothing);
    const Ints better = x > best;
    best = better ? x : best;
    places = better ? lane_numbers() + static_cast<int32_t>(i) : places;
  });
  const float top = max(best);
  int32_t place = std::numeric_limits<int32_t>::max();
  for (int i = 0; i < kLanes; ++i) {
    if (best[i] == top) place = std::min(place, places[i]);
  }
  return place < width ? place : 0;  // a row of NaN has no maximum
}

// The weights of entries in `last_kept`: one each, or their probability up to a factor.
struct Count {
  static Floats of(Floats) { return broadcast(1.0f); }
};

struct Mass {
  static inline thread_local float largest;
  static Floats of(Floats x) { return exp(x - largest); }
};

// The sum of the weights of `count` entries; the memory must extend a vector beyond their end.
template <typename Weight>
double total(const float* entries, int64_t count) {
  double all = 0.0;
  for (int64_t begin = 0; begin < count; begin += 64 * kLanes) {  // sums of short ranges in float32
    Floats part = {};
    for_vectors(std::min<int64_t>(64 * kLanes, count - begin), [&](int64_t i, auto n) {
      const Floats weight = Weight::of(load(entries + begin + i, n));
      part += n < kLanes ? (lane_numbers() < static_cast<int32_t>(n) ? weight : Floats{}) : weight;
    });
    all += sum(part);
  }
  return all;
}

// The last of the entries, in descending order, before which the weights sum to less than `target`; the smallest if all
// of them do. Reorders the entries; `other` must have the same size, and both must extend a vector beyond it.
template <typename Weight>
float last_kept(float* entries, int64_t count, double target, float* other) {
  for (double above = 0.0;;) {
    float sample[9];
    for (int i = 0; i < 9; ++i) sample[i] = entries[(count - 1) * i / 8];
    std::nth_element(sample, sample + 4, sample + 9);
    const float pivot = sample[4];
    float* high = other;
    int64_t equal = 0;
    for_vectors(count, [&](int64_t i, auto n) {
      const Floats x = load(entries + i, n);
      Ints higher = x > pivot, same = x == pivot;
      if (n < kLanes) {
        const Ints valid = lane_numbers() < static_cast<int32_t>(n);
        higher &= valid;
        same &= valid;
      }
      high = append(high, x, higher);
      if (any(same)) {
        for (int lane = 0; lane < kLanes; ++lane) equal -= same[lane];
      }
    });
    const double higher = total<Weight>(other, high - other);
    if (high > other && above + higher >= target) {
      count = high - other;
      std::swap(entries, other);
      continue;
    }
    above += higher + static_cast<double>(equal) * Weight::of(broadcast(pivot))[0];
    if (above >= target || (high - other) + equal == count) return pivot;
    float* low = other;
    for_vectors(count, [&](int64_t i, auto n) {
      const Floats x = load(entries + i, n);
      Ints lower = x < pivot;
      if (n < kLanes) lower &= lane_numbers() < static_cast<int32_t>(n);
      low = append(low, x, lower);
    });
    count = low - other;
    std::swap(entries, other);
  }
}

// The smallest logit that min_p, then top_k, then top_p keep. `memory` holds three rows, each with a vector more.
float threshold(const Logits& logits, int64_t top_k, float top_p, float min_p, float* memory) {
  const int64_t room = (vectors(logits.width) + 1) * kLanes;
  float *row = memory, *entries = memory + room, *other = memory + 2 * room;
  Floats tops = broadcast(kNothing);
  for_vectors(logits.width, [&](int64_t i, auto n) {
    const Floats x = logits.load(i, n);
    tops = max(x, tops);
    store(row + i, x);
  });
  const float largest = max(tops);
  float least = min_p > 0.0f ? largest + std::log(min_p) : -std::numeric_limits<float>::max();
  const bool cut = top_k > 0 && top_k < logits.width;
  if ((!cut && top_p >= 1.0f) || !(largest > kNothing)) return least;
  const auto collect = [&](const float* from, int64_t width, float* to) {
    float* end = to;
    for_vectors(width, [&](int64_t i, auto n) {
      const Floats x = load(from + i, n);
      Ints kept = x >= least;
      if (n < kLanes) kept &= lane_numbers() < static_cast<int32_t>(n);
      if (any(kept)) end = append(end, x, kept);
    });
    return end - to;
  };
  Mass::largest = largest;
  int64_t count = collect(row, logits.width, entries);
  double mass = 0.0;
  if (cut && count > top_k) {
    least = last_kept<Count>(entries, count, static_cast<double>(top_k), other);
    if (top_p >= 1.0f) return least;
    count = collect(row, logits.width, entries);
    mass = -static_cast<double>(count - top_k) * Mass::of(broadcast(least))[0];  // ties beyond the k-th
  } else if (top_p >= 1.0f) {
    return least;
  }
  mass += total<Mass>(entries, count);
  // All entries below this weight together are less than what top_p excludes.
  const double negligible = 0.5 * (1.0 - top_p) * mass / static_cast<double>(count);
  const float before = least;
  least = std::max(least, largest + static_cast<float>(std::log(std::max(negligible, 1e-30))));
  if (least > before) {
    count = collect(entries, count, other);
    std::swap(entries, other);
  }
  return last_kept<Mass>(entries, count, top_p * mass, other);
}

int64_t draw(const Logits& logits, uint64_t key, float least) {
  float best = kNothing;
  int64_t token = 0;
  for_vectors(logits.width, [&](int64_t i, auto n) {
    const Floats x = logits.load(i, n);
    const Ints kept = x >= least;
    if (!any(kept)) return;
    const Floats u = uniform(key, std::bit_cast<Words>(lane_numbers() + static_cast<int32_t>(i)));
    const Ints can_win = kept & (u <= exp(x - best) * 1.0001f);
    if (!any(can_win)) return;
    for (int lane = 0; lane < kLanes; ++lane) {
      if (!can_win[lane]) continue;
      const float value = x[lane] - std::log(-std::log1p(-u[lane]));
      if (value > best) best = value, token = i + lane;
    }
  });
  return token;
}

Tensor sample(const Tensor& logits, const Tensor& temperature, const Tensor& top_k, const Tensor& top_p,
              const Tensor& min_p, const Tensor& seeds, const Tensor& positions) {
  const int64_t rows = logits.size(0), width = logits.size(1);
  STD_TORCH_CHECK(logits.scalar_type() == ScalarType::Float && logits.stride(1) == 1 && width > 0);
  const auto controls = [&](const Tensor& x) {
    STD_TORCH_CHECK(x.is_contiguous() && x.numel() == rows);
    return x;
  };
  const float *temperatures = controls(temperature).const_data_ptr<float>(),
              *top_ps = controls(top_p).const_data_ptr<float>(), *min_ps = controls(min_p).const_data_ptr<float>();
  const int64_t *top_ks = controls(top_k).const_data_ptr<int64_t>(), *seed = controls(seeds).const_data_ptr<int64_t>(),
                *position = controls(positions).const_data_ptr<int64_t>();
  Tensor tokens = empty({rows}, ScalarType::Long);
  int64_t* to = tokens.mutable_data_ptr<int64_t>();
  parallel_for(0, rows, grain(width), [&](int64_t begin, int64_t end) {
    static thread_local std::vector<float> memory;
    for (int64_t i = begin; i < end; ++i) {
      const float* row = logits.const_data_ptr<float>() + i * logits.stride(0);
      if (!(temperatures[i] >= kGreedyBelow)) {
        to[i] = arg_max(row, width);
        continue;
      }
      const Logits scaled{row, width, broadcast(temperatures[i])};
      float least = -std::numeric_limits<float>::max();
      if (min_ps[i] > 0.0f || top_ks[i] > 0 || top_ps[i] < 1.0f) {
        memory.resize(std::max<size_t>(memory.size(), 3 * (vectors(width) + 1) * kLanes));
        least = threshold(scaled, top_ks[i], top_ps[i], min_ps[i], memory.data());
      }
      to[i] = draw(scaled, noise_key(seed[i], position[i]), least);
    }
  });
  return tokens;
}

void apply_bitmask(const Tensor& logits, const Tensor& rows, const Tensor& masks) {
  const int64_t count = rows.numel(), width = logits.size(1), words = masks.size(1);
  STD_TORCH_CHECK(logits.scalar_type() == ScalarType::Float && logits.stride(1) == 1 && words * 32 >= width);
  STD_TORCH_CHECK(rows.is_contiguous() && masks.is_contiguous() && masks.size(0) == count);
  const int64_t* row = rows.const_data_ptr<int64_t>();
  const auto* from = reinterpret_cast<const uint32_t*>(masks.const_data_ptr<int32_t>());
  parallel_for(0, count, grain(width), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      STD_TORCH_CHECK(row[i] >= 0 && row[i] < logits.size(0));
      float* x = logits.mutable_data_ptr<float>() + row[i] * logits.stride(0);
      for (int64_t word = 0; word * 32 < width; ++word) {
        const uint32_t bits = from[i * words + word];
        if (bits == ~uint32_t{0}) continue;
        const int64_t first = word * 32, lanes = std::min<int64_t>(32, width - first);
        for (int64_t j = 0; j < lanes; ++j) x[first + j] = bits >> j & 1 ? x[first + j] : kNothing;
      }
    }
  });
}

Tensor uniform_noise(const Tensor& seeds, const Tensor& positions, const Tensor& ids) {
  const Tensor seed = as_contiguous(seeds), position = as_contiguous(positions), id = as_contiguous(ids);
  const int64_t rows = seed.numel(), width = id.numel();
  const int32_t* from = id.const_data_ptr<int32_t>();
  Tensor out = empty({rows, width}, ScalarType::Float);
  float* to = out.mutable_data_ptr<float>();
  parallel_for(0, rows, grain(width), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const uint64_t key = noise_key(seed.const_data_ptr<int64_t>()[row], position.const_data_ptr<int64_t>()[row]);
      for_vectors(width, [&](int64_t i, auto n) {
        const Floats bits = load(reinterpret_cast<const float*>(from + i), n);
        store(to + row * width + i, uniform(key, std::bit_cast<Words>(bits)), n);
      });
    }
  });
  return out;
}

}  // namespace

QUIRE_OPERATION(
    sample,
    "(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seeds, Tensor positions) "
    "-> Tensor")
QUIRE_OPERATION(apply_bitmask, "(Tensor(a!) logits, Tensor rows, Tensor masks) -> ()")
QUIRE_OPERATION(uniform_noise, "(Tensor seeds, Tensor positions, Tensor ids) -> Tensor")

}  // namespace quire
