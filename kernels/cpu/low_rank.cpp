// The low-rank changes of a linear layer by adapters: out += x Aᵀ Bᵀ, where each row has matrices of its own adapter.
//
// Rows are grouped by adapter, and a change is what one adapter does to one part of the layer. First come the products
// of all changes with A, whose rows have the inputs one after another: a sum has a vector of partial sums, and the
// vectors of several sums are added up together. Then come the products with B, whose rows have the features one after
// another. Both are divided among threads by blocks of rows and of rank rows or features: many rows of one adapter are
// shared as many adapters of one row are, and A and B are read once for all rows of a block. An element is computed by
// one thread, in an order that depends neither on other rows nor on other adapters.

#include <array>

#include "activation.h"
#include "packed_tiles.h"

namespace quire {
namespace {

constexpr int64_t kRowsAtOnce = 48, kRanksAtOnce = 16, kFeaturesAtOnce = 256;  // of a block
constexpr int kSums = 4;                            // rank rows that are multiplied by the same rows at a time
constexpr int kInputRows = kRegisters == 32 ? 4 : 2;  // which are these many
constexpr int kOutputRows = kLanes == 16 ? 12 : kRegisters == 32 ? 8 : 6;  // rows that are multiplied by B at a time
constexpr int kPair = 2 * kLanes;                   // features whose sums are in two vectors

#ifdef __AVX512BF16__
constexpr bool kPairs = true;  // of bfloat16 are multiplied at once
#else
constexpr bool kPairs = false;
#endif

using AllOfPair = std::integral_constant<int, kPair>;

// Products of float32: of rows of `X` by matrices of `W`.
template <typename X, typename W>
struct FloatProducts {
  using Input = X;
  using Weight = W;
  using Inner = float;  // of the result of A
  using Vector = Floats;
  static constexpr int kInputs = kLanes;  // of a vector
  static constexpr int kRanks = 1;        // rank rows of B that are multiplied at once

  template <typename T, typename N>
  static Floats inputs(const T* x, N n) {
    return load(x, n);
  }
  static Floats add(Floats sum, Floats a, Floats x) { return sum + a * x; }

  static std::array<Floats, 2> features(const W* b, const W*, AllOfPair) { return {load(b), load(b + kLanes)}; }
  static std::array<Floats, 2> features(const W* b, const W*, int n) {
    return {load(b, std::min(n, kLanes)), load(b + kLanes, std::max(n - kLanes, 0))};
  }
  static Floats add(Floats sum, Floats b, const float* inner) { return sum + b * *inner; }
};

#ifdef __AVX512BF16__
// Products of pairs of bfloat16: of two inputs, and of two rank rows.
struct PairProducts {
  using Input = BFloat16;
  using Weight = BFloat16;
  using Inner = BFloat16;
  using Vector = Words;
  static constexpr int kInputs = kPair;
  static constexpr int kRanks = 2;

  static Words inputs(const BFloat16* x, std::integral_constant<int, kInputs>) { return read<Words>(x); }
  static Words inputs(const BFloat16* x, int n) {
    Words some = {};
    std::memcpy(&some, x, n * sizeof(BFloat16));
    return some;
  }
  static Floats add(Floats sum, Words a, Words x) {
    return _mm512_dpbf16_ps(sum, std::bit_cast<__m512bh>(a), std::bit_cast<__m512bh>(x));
  }

  // The features of two rank rows, in turns.
  template <typename N>
  static std::array<Words, 2> features(const BFloat16* first, const BFloat16* second, N n) {
    using Numbers = uint16_t __attribute__((vector_size(4 * kLanes)));
    const auto a = std::bit_cast<Numbers>(inputs(first, n)), b = std::bit_cast<Numbers>(inputs(second, n));
    return [&]<int... I>(std::integer_sequence<int, I...>) {
      return std::array{std::bit_cast<Words>(__builtin_shufflevector(a, b, (I / 2 + I % 2 * kPair)...)),
                        std::bit_cast<Words>(__builtin_shufflevector(a, b, (kLanes + I / 2 + I % 2 * kPair)...))};
    }(std::make_integer_sequence<int, kPair>());
  }
  static Floats add(Floats sum, Words b, const BFloat16* inner) {
    return add_bfloat16_pairs(sum, b, reinterpret_cast<const char*>(inner));
  }
};
#endif

// Calls `body<Products>()` for rows and matrices of these types.
template <typename Body>
void for_products(ScalarType rows, ScalarType weights, Body&& body) {
  STD_TORCH_CHECK(rows == weights || rows == ScalarType::Float, "rows of ", rows,
                  " are not multiplied by low-rank matrices of ", weights);
#ifdef __AVX512BF16__
  if (rows == ScalarType::BFloat16) return body.template operator()<PairProducts>();
#endif
  for_type(weights, [&]<typename W>() {
    if (rows == ScalarType::Float) return body.template operator()<FloatProducts<float, W>>();
    if constexpr (std::is_same_v<W, Half> || !kPairs) body.template operator()<FloatProducts<W, W>>();
  });
}

// Adds the lanes of two vectors in halves of groups of 2 * `Half` lanes: the results of `x`, then those of `y`.
template <int Half>
Floats add_halves(Floats x, Floats y) {
  return [&]<int... I>(std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(x, y, (I / Half * 2 * Half + I % Half)...) +
           __builtin_shufflevector(x, y, (I / Half * 2 * Half + Half + I % Half)...);
  }(std::make_integer_sequence<int, kLanes>());
}

// The sums of the lanes of as many vectors, which it overwrites.
template <int Half = kLanes / 2>
Floats sum_each(Floats (&x)[kLanes]) {
#pragma GCC unroll 8
  for (int i = 0; i < Half; ++i) x[i] = add_halves<Half>(x[2 * i], x[2 * i + 1]);
  if constexpr (Half > 1) return sum_each<Half / 2>(x);
  else return x[0];
}

// Adds the products of a vector of inputs.
template <typename Products, int N, int R, typename Count>
inline void add_inputs(Floats (&sums)[N][R], const typename Products::Weight* a, int64_t stride,
                       const typename Products::Input* const (&x)[N], int64_t i, Count n) {
  typename Products::Vector weights[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    weights[r] = Products::inputs(a + r * stride + i, n);
    __builtin_prefetch(a + (r + R) * stride + i);  // of the next rank rows
  }
#pragma GCC unroll 4
  for (int k = 0; k < N; ++k) {
    const auto inputs = Products::inputs(x[k] + i, n);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) sums[k][r] = Products::add(sums[k][r], weights[r], inputs);
  }
}

// Multiplies N rows by R rank rows, each `width` inputs wide. `per_row` rows with successive numbers have the inputs of
// one row of x. Stores a row's products at `to`, `to_stride` apart.
template <typename Products, int N, int R>
void multiply_a(const typename Products::Weight* a, const typename Products::Input* x, int64_t x_stride,
                const int64_t* rows, int64_t per_row, int64_t width, typename Products::Inner* to,
                int64_t to_stride) {
  using Input = typename Products::Input;
  const Input* at[N];
  Floats sums[N][R];
#pragma GCC unroll 4
  for (int k = 0; k < N; ++k) {
    at[k] = x + rows[k] / per_row * x_stride;
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) sums[k][r] = Floats{};
  }
  int64_t i = 0;
  for (; i + Products::kInputs <= width; i += Products::kInputs) {
    add_inputs<Products>(sums, a, width, at, i, std::integral_constant<int, Products::kInputs>());
  }
  if (i < width) add_inputs<Products>(sums, a, width, at, i, static_cast<int>(width - i));
#pragma GCC unroll 4
  for (int first = 0; first < N * R; first += kLanes) {
    Floats some[kLanes];
#pragma GCC unroll 16
    for (int j = 0; j < kLanes; ++j) some[j] = first + j < N * R ? sums[(first + j) / R][(first + j) % R] : Floats{};
    float totals[kLanes];
    store(totals, sum_each(some));
    for (int j = 0; j < std::min(kLanes, N * R - first); ++j) {
      to[(first + j) / R * to_stride + (first + j) % R] = totals[j];
    }
  }
}

// Rows of results, and what these are multiplied by in the end and what is then added, from some feature on. The latter
// two may be null.
template <typename Out>
struct Results {
  Out* const* rows;
  const float *scale, *bias;

  // Adds the sums of row `k` to a vector of features.
  template <typename N>
  void add(int k, int64_t i, Floats sums, N n) const {
    Out* const to = rows[k] + i;
    Floats value = load(to, n) + sums;
    if (scale) value *= load(scale + i, n);
    if (scale && bias) asm("" : "+m"(value));  // else the compiler would fuse both for some numbers of rows only
    if (bias) value += load(bias + i, n);
    store(to, value, n);
  }
};

// Multiplies N rows of `ranks` numbers, `stride` apart, by rank rows of B, `b_stride` apart, for the features of 2 * P
// vectors from `i` on, or the first `n` of them. Prefetches the features that are `ahead`.
template <typename Products, int N, int P, typename Out, typename Count>
inline void multiply_features(const typename Products::Weight* b, int64_t b_stride, int64_t ranks,
                              const typename Products::Inner* inner, int64_t stride, int64_t ahead,
                              const Results<Out>& out, int64_t i, Count n) {
  using Weight = typename Products::Weight;
  constexpr int kLine = 64 / sizeof(Weight);
  Floats sums[N][2 * P];
#pragma GCC unroll 16
  for (int k = 0; k < N; ++k) {
#pragma GCC unroll 4
    for (int v = 0; v < 2 * P; ++v) sums[k][v] = Floats{};
#pragma GCC unroll 4
    for (int line = 0; line < P * kPair; line += 64 / sizeof(Out)) {
      __builtin_prefetch(out.rows[k] + i + P * kPair + line);
    }
  }
  b += i;
  for (int64_t j = 0; j < ranks; j += Products::kRanks, b += Products::kRanks * b_stride, inner += Products::kRanks) {
    const Weight* const second = b + (j + 1 < ranks ? b_stride : 0);  // after the last one, the factor is 0
#pragma GCC unroll 2
    for (int p = 0; p < P; ++p) {
#pragma GCC unroll 4
      for (int line = p * kPair; line < (p + 1) * kPair; line += kLine) {
        __builtin_prefetch(b + line + ahead);
        if constexpr (Products::kRanks == 2) __builtin_prefetch(second + line + ahead);
      }
      const auto features = Products::features(b + p * kPair, second + p * kPair, n);
#pragma GCC unroll 16
      for (int k = 0; k < N; ++k) {
        sums[k][2 * p] = Products::add(sums[k][2 * p], features[0], inner + k * stride);
        sums[k][2 * p + 1] = Products::add(sums[k][2 * p + 1], features[1], inner + k * stride);
      }
    }
  }
#pragma GCC unroll 16
  for (int k = 0; k < N; ++k) {
#pragma GCC unroll 4
    for (int v = 0; v < 2 * P; ++v) {
      if constexpr (std::is_same_v<Count, AllOfPair>) out.add(k, i + v * kLanes, sums[k][v], AllLanes());
      else out.add(k, i + v * kLanes, sums[k][v], std::clamp(n - v * kLanes, 0, kLanes));
    }
  }
}

// The same for `width` features.
template <typename Products, int N, typename Out>
void multiply_b(const typename Products::Weight* b, int64_t b_stride, int64_t ranks,
                const typename Products::Inner* inner, int64_t stride, int64_t ahead, const Results<Out>& out,
                int64_t width) {
  constexpr int P = N <= 2 ? 2 : 1;
  int64_t i = 0;
  for (; i + P * kPair <= width; i += P * kPair) {
    multiply_features<Products, N, P>(b, b_stride, ranks, inner, stride, ahead, out, i, AllOfPair());
  }
  for (; i < width; i += kPair) {
    const int n = static_cast<int>(std::min<int64_t>(kPair, width - i));
    multiply_features<Products, N, 1>(b, b_stride, ranks, inner, stride, ahead, out, i, n);
  }
}

// What an adapter does to a part of the layer.
struct Change {
  int64_t slot, part;
  int64_t first, ranks;       // rank rows
  int64_t begin, count;       // rows, by their order
  int64_t feature, features;  // of the part
  int64_t inner;              // where the results of A start
};

int64_t parts(int64_t size, int64_t most) { return (size + most - 1) / most; }

struct Range {
  int64_t begin, end;

  Range(int64_t begin, int64_t end) : begin(begin), end(end) {}

  // One of `count` nearly equal parts of 0 to `size`, which begins with a multiple of `grain`.
  Range(int64_t number, int64_t count, int64_t size, int64_t grain = 1)
      : begin(number * parts(size, grain) / count * grain),
        end(std::min(size, (number + 1) * parts(size, grain) / count * grain)) {}
  int64_t size() const { return end - begin; }
};

// Calls `body(change, rows, columns)` for all blocks of rows and of columns, on several threads. A change has
// `columns_of(change)` columns; a block has up to `most`, and begins with a multiple of `grain`. A row and a column
// take `depth_of(change)` multiplications.
template <typename Columns, typename Depth, typename Body>
void for_blocks(const std::vector<Change>& changes, int64_t most, int64_t grain, Columns columns_of, Depth depth_of,
                Body body) {
  const auto blocks_of = [&](const Change& change) {
    return parts(change.count, kRowsAtOnce) * parts(columns_of(change), most);
  };
  int64_t blocks = 0, work = 0;
  for (const Change& change : changes) {
    blocks += blocks_of(change);
    work += (change.count + kReadingRows) * columns_of(change) * depth_of(change);
  }
  if (blocks == 0) return;
  parallel_for(0, blocks, std::max<int64_t>(1, kThreadWork / std::max<int64_t>(1, work / blocks)),
               [&](int64_t begin, int64_t end) {
    for (const Change& change : changes) {
      const int64_t own = blocks_of(change), columns = columns_of(change), column_parts = parts(columns, most);
      for (int64_t block = std::max<int64_t>(0, begin); block < std::min(own, end); ++block) {
        body(change, Range(block / column_parts, own / column_parts, change.count),
             Range(block % column_parts, column_parts, columns, grain));
      }
      begin -= own, end -= own;
    }
  });
}

// Calls `body<N>(first)` for rows of a range, N of up to `Most` at a time.
template <int Most, typename Body>
void for_rows(Range rows, Body body) {
  static constexpr auto kBodies = []<int... N>(std::integer_sequence<int, N...>) {
    return std::array{+[](Body& each, int64_t first) { each.template operator()<N + 1>(first); }...};
  }(std::make_integer_sequence<int, Most>());
  const int64_t count = parts(rows.size(), Most);
  for (int64_t number = 0; number < count; ++number) {
    const Range some(number, count, rows.size());
    kBodies[some.size() - 1](body, rows.begin + some.begin);
  }
}

// The pool of a layer, and the rows of a step: see kernels/low_rank.py.
struct Adapters {
  const Tensor &a, &b, &slots, &bounds, &vectors;
  const std::optional<Tensor>&scale, &bias;
  const Tensor &order, &starts;

  int64_t features() const { return bounds.const_data_ptr<int64_t>()[slots.size(1)]; }
  int64_t vectors_of(int64_t slot) const { return scale || bias ? vectors.const_data_ptr<int64_t>()[slot] : -1; }
  const int64_t* numbers(const Change& change) const { return order.const_data_ptr<int64_t>() + change.begin; }

  static bool ascend_from_0(const Tensor& numbers) {
    const auto* const first = numbers.const_data_ptr<int64_t>();
    return *first == 0 && std::is_sorted(first, first + numbers.numel());
  }

  // For `rows` rows.
  void check(const Tensor& x, int64_t rows) const {
    STD_TORCH_CHECK(x.dim() == 2 && a.dim() == 2 && b.dim() == 2 && a.is_contiguous() && b.is_contiguous() &&
                        a.size(1) == x.size(1) && a.size(0) == b.size(0) && a.scalar_type() == b.scalar_type(),
                    "the rank rows do not match x");
    for (const Tensor* each : {&slots, &bounds, &vectors, &order, &starts}) {
      STD_TORCH_CHECK(each->scalar_type() == ScalarType::Long && each->is_contiguous(), "slots and rows must be int64");
    }
    STD_TORCH_CHECK(slots.dim() == 3 && slots.size(2) == 2 && bounds.numel() == slots.size(1) + 1 &&
                        vectors.numel() == slots.size(0) && starts.numel() == slots.size(0) + 2 && order.numel() == rows &&
                        ascend_from_0(bounds),
                    "the slots, parts or rows do not match");
    for (const auto* each : {&scale, &bias}) {
      STD_TORCH_CHECK(!*each || ((*each)->scalar_type() == ScalarType::Float && (*each)->is_contiguous() &&
                                 (*each)->dim() == 2 && (*each)->size(1) == features()),
                      "scale and bias must be float32 [vector rows, out]");
    }
  }

  // The changes of `rows` rows. Numbers in the tensors are checked: they address memory.
  std::vector<Change> changes(int64_t rows, int64_t ranks_at_once) const {
    const int64_t num_slots = slots.size(0), num_parts = slots.size(1);
    const int64_t *spans = slots.const_data_ptr<int64_t>(), *of_parts = bounds.const_data_ptr<int64_t>(),
                  *number = order.const_data_ptr<int64_t>(), *start = starts.const_data_ptr<int64_t>();
    const int64_t end = start[num_slots + 1];
    STD_TORCH_CHECK(ascend_from_0(starts) && end <= rows, "the starts of rows do not match their order");
    STD_TORCH_CHECK(end == rows, "row ", number[end], " has a slot that does not exist");
    std::vector<bool> is_listed(rows);
    for (int64_t i = 0; i < rows; ++i) {
      STD_TORCH_CHECK(number[i] >= 0 && number[i] < rows, "row ", number[i], " does not exist");
      STD_TORCH_CHECK(!is_listed[number[i]], "row ", number[i], " is listed twice");
      is_listed[number[i]] = true;
    }
    std::vector<Change> found;
    int64_t inner = 0;
    for (int64_t slot = 0; slot < num_slots; ++slot) {
      const int64_t begin = start[slot], count = start[slot + 1] - begin;
      if (count == 0) continue;
      STD_TORCH_CHECK(std::is_sorted(number + begin, number + begin + count),
                      "the rows of a slot are not in ascending order");
      const int64_t vector = vectors_of(slot);
      STD_TORCH_CHECK((!scale || vector < scale->size(0)) && (!bias || vector < bias->size(0)), "the scale or bias of slot ",
                      slot, " is not in the pool");
      for (int64_t part = 0; part < num_parts; ++part) {
        const int64_t first = spans[(slot * num_parts + part) * 2], ranks = spans[(slot * num_parts + part) * 2 + 1];
        const int64_t feature = of_parts[part], width = of_parts[part + 1] - feature;
        STD_TORCH_CHECK(first >= 0 && ranks >= 0 && ranks <= a.size(0) - first && width <= b.size(1),
                        "the rank rows of slot ", slot, " are not in the pool");
        if (ranks == 0 && vector < 0) continue;
        found.push_back({slot, part, first, ranks, begin, count, feature, width, inner});
        inner += count * parts(ranks, ranks_at_once) * ranks_at_once;
      }
    }
    return found;
  }
};

// The products of a step's rows with A.
template <typename Products>
class LowRankProducts {
 public:
  using Input = typename Products::Input;
  using Weight = typename Products::Weight;
  using Inner = typename Products::Inner;

  LowRankProducts(const Adapters& adapters, const Tensor& x, int64_t per_row = 1)
      : changes(adapters.changes(x.size(0) * per_row, Products::kRanks)), adapters_(adapters), widest_(adapters.b.size(1)),
        b_(static_cast<const Weight*>(adapters.b.const_data_ptr())),
        scales_(adapters.scale ? adapters.scale->const_data_ptr<float>() : nullptr),
        biases_(adapters.bias ? adapters.bias->const_data_ptr<float>() : nullptr) {
    if (changes.empty()) return;
    const int64_t width = x.size(1), x_stride = x.stride(0);
    inner_ = std::make_unique_for_overwrite<Inner[]>(changes.back().inner +
                                                     changes.back().count * stride(changes.back()));
    const auto* const inputs = static_cast<const Input*>(x.const_data_ptr());
    const auto* const a = static_cast<const Weight*>(adapters.a.const_data_ptr());
    for_blocks(changes, kRanksAtOnce, kSums, ranks_of, [&](const Change&) { return width; },
               [&](const Change& change, Range rows, Range ranks) {
      for_rows<kInputRows>(rows, [&]<int N>(int64_t row) {
        Inner* const to = inner_.get() + change.inner + row * stride(change);
        const int64_t* const own = adapters.numbers(change) + row;
        int64_t rank = ranks.begin;
        for (; rank + kSums <= ranks.end; rank += kSums) {
          multiply_a<Products, N, kSums>(a + (change.first + rank) * width, inputs, x_stride, own, per_row, width,
                                         to + rank, stride(change));
        }
        for (; rank < ranks.end; ++rank) {
          multiply_a<Products, N, 1>(a + (change.first + rank) * width, inputs, x_stride, own, per_row, width, to + rank,
                                     stride(change));
        }
        if (ranks.end == change.ranks && stride(change) > change.ranks) {
          for (int k = 0; k < N; ++k) to[k * stride(change) + change.ranks] = 0.0f;
        }
      });
    });
  }

  const std::vector<Change> changes;

  static int64_t ranks_of(const Change& change) { return change.ranks; }

  // Adds the products with B to some rows of a change, for some features of its part, and prefetches those that are
  // `ahead`. `get_row(number)` returns the address of the first of these features in a row.
  template <typename Out, typename GetRow>
  void add(const Change& change, Range rows, Range features, int64_t ahead, GetRow get_row) const {
    const int64_t vector = adapters_.vectors_of(change.slot);
    const int64_t place = vector * adapters_.features() + change.feature + features.begin;
    const int64_t* const numbers = adapters_.numbers(change);
    for_rows<kOutputRows>(rows, [&]<int N>(int64_t row) {
      Out* to[N];
      for (int k = 0; k < N; ++k) to[k] = get_row(numbers[row + k]);
      const Results<Out> results{to, scales_ && vector >= 0 ? scales_ + place : nullptr,
                                 biases_ && vector >= 0 ? biases_ + place : nullptr};
      multiply_b<Products, N>(b_ + change.first * widest_ + features.begin, widest_, change.ranks,
                              inner_.get() + change.inner + row * stride(change), stride(change), ahead, results,
                              features.size());
    });
  }

 private:
  static int64_t stride(const Change& change) { return parts(change.ranks, Products::kRanks) * Products::kRanks; }

  const Adapters& adapters_;
  const int64_t widest_;
  const Weight* const b_;
  const float *const scales_, *const biases_;
  std::unique_ptr<Inner[]> inner_;
};

// out: [rows, features] of the type of x or float32; x: [rows, in], or as many rows of out have the inputs of each. a: [rank rows, in]; b: [rank rows, features of the
// widest part], of one type. slots: int64 [num_slots, parts, 2]; bounds: int64 [parts + 1]. vectors: int64
// [num_slots]. scale, bias: float32 [vector rows, features]. order: int64 [rows]; starts: int64 [num_slots + 2].
void add_low_rank(const Tensor& out, const Tensor& x, const Tensor& a, const Tensor& b, const Tensor& slots,
                  const Tensor& bounds, const Tensor& vectors, const std::optional<Tensor>& scale,
                  const std::optional<Tensor>& bias, const Tensor& order, const Tensor& starts) {
  const Adapters adapters{a, b, slots, bounds, vectors, scale, bias, order, starts};
  STD_TORCH_CHECK(out.dim() == 2 && x.dim() == 2, "x and out must have rows");
  const int64_t per_row = out.size(0) / std::max<int64_t>(1, x.size(0));
  adapters.check(x, out.size(0));
  STD_TORCH_CHECK(x.size(0) * per_row == out.size(0) && out.stride(1) == 1 && out.size(1) == adapters.features() &&
                      (out.scalar_type() == x.scalar_type() || out.scalar_type() == ScalarType::Float),
                  "x and out must have the same rows, and out the type of x or float32, and the features of all parts");
  const Tensor from = x.stride(1) == 1 ? x : as_contiguous(x);
  const int64_t out_stride = out.stride(0);
  for_products(x.scalar_type(), a.scalar_type(), [&]<typename Products>() {
    const LowRankProducts<Products> products(adapters, from, per_row);
    const auto add_all = [&]<typename Out>() {
      Out* const to = out.mutable_data_ptr<Out>();
      for_blocks(products.changes, kFeaturesAtOnce, kPair, [](const Change& change) { return change.features; },
                 products.ranks_of, [&](const Change& change, Range rows, Range features) {
        products.template add<Out>(change, rows, features, kFeaturesAtOnce, [&](int64_t row) {
          return to + row * out_stride + change.feature + features.begin;
        });
      });
    };
    using Input = typename Products::Input;
    if (out.scalar_type() == ScalarType::Float) add_all.template operator()<float>();
    else if constexpr (!std::is_same_v<Input, float>) add_all.template operator()<Input>();
  });
}

// The gated product of a linear layer whose gates and ups, its two parts, adapters change: what their float32 sums,
// `add_low_rank` and the activation give, without a result of all features in between. The weight is tiles as for
// `tiled_linear`, as for `int8_linear` if there are scales, or as for `int4_linear`; the others are as above.
Tensor gated_low_rank(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& scales,
                      const std::optional<Tensor>& bias, int64_t features, std::string_view activation,
                      const Tensor& a, const Tensor& b, const Tensor& slots, const Tensor& bounds,
                      const Tensor& vectors, const std::optional<Tensor>& scale, const std::optional<Tensor>& added,
                      const Tensor& order, const Tensor& starts) {
  const Adapters adapters{a, b, slots, bounds, vectors, scale, added, order, starts};
  adapters.check(x, x.size(0));
  const int64_t count = x.size(0), tiles = weight.size(0), steps = weight.size(1);
  const bool is_int4 = !scales && weight.scalar_type() == ScalarType::Byte;
  const auto form = scales    ? int8_form()
                    : is_int4 ? int4_form(weight.size(2))
                              : tiled_form(x.scalar_type(), weight.scalar_type());
  STD_TORCH_CHECK(form->steps(x.size(1)) == steps && weight.is_contiguous() && parts(features, kHalf) == tiles &&
                      slots.size(1) == 2 && bounds.const_data_ptr<int64_t>()[1] == features &&
                      adapters.features() == 2 * features,
                  "x, the weight and the two parts do not match");
  STD_TORCH_CHECK(!scales || (scales->scalar_type() == ScalarType::Float && scales->is_contiguous() &&
                              scales->numel() == tiles * kTile && x.size(1) <= kMostBytes),
                  "the scales do not match the weight, or inputs are too many");
  STD_TORCH_CHECK(!bias || (bias->scalar_type() == x.scalar_type() && bias->is_contiguous() &&
                            bias->numel() == tiles * kTile),
                  "the bias has the wrong type or size");
  const Tensor from = as_contiguous(x);
  const auto* const data = static_cast<const char*>(weight.const_data_ptr());
  const float* const feature_scales = scales ? scales->const_data_ptr<float>() : nullptr;
  const int64_t tile_bytes = steps * form->step_bytes(), work = (count + kReadingRows) * x.size(1) * kTile;
  const Gated gated = find_gated(activation);
  Tensor out = empty({count, features}, x.scalar_type());
  const Rows rows(*form, from.const_data_ptr(), x.scalar_type(), count, x.size(1));
  for_products(x.scalar_type(), a.scalar_type(), [&]<typename Products>() {
    using T = typename Products::Input;
    const LowRankProducts<Products> products(adapters, from);
    const T* const biases = bias ? bias->const_data_ptr<T>() : nullptr;
    T* const to = out.mutable_data_ptr<T>();
    constexpr int64_t kSomeTiles = kFeaturesAtOnce / kHalf;
    parallel_for(0, tiles, std::max<int64_t>(1, kThreadWork / std::max<int64_t>(1, work)),
                 [&](int64_t begin, int64_t end) {
      static thread_local std::vector<Floats> memory;  // of gates, and then ups, of a block of rows and of features
      memory.resize(2 * kFeaturesAtOnce / kLanes * kMinBlockRows);
      auto* const both = reinterpret_cast<float*>(memory.data());
      const auto place = [&](int64_t row, int64_t part) { return both + (row * 2 + part) * kFeaturesAtOnce; };
      const int64_t blocks = parts(count, kMinBlockRows);
      for (int64_t block = 0; block < blocks; ++block) {
        const Range own(block, blocks, count);
        for (int64_t first = begin; first < end; first += kSomeTiles) {
          const int64_t last = std::min(end, first + kSomeTiles), feature = first * kHalf;
          const int64_t width = std::min(features, last * kHalf) - feature;
          const auto get_piece = [&](int64_t tile, int64_t at, int64_t bytes) {
            const char* const here = data + tile * tile_bytes + at;
            return Piece{here, here + bytes};
          };
          multiply_tiles(*form, feature_scales, own.size(), rows.stride, steps, first, last,
                         [&](int64_t row, int64_t) { return rows.row(own.begin + row); }, get_piece,
                         [&](int64_t tile, int64_t row, const TileSums& values) {
            for (int i = 0; i < kTile; i += kLanes) {
              const Floats value = values[i / kLanes];
              store(place(row, i / kHalf) + tile * kHalf - feature + i % kHalf,
                    biases ? value + load(biases + tile * kTile + i) : value);
            }
          });
          for (size_t each = 0; each < products.changes.size(); ++each) {
            const Change& change = products.changes[each];
            // The next features to be read are those of the next change.
            const bool is_last = each + 1 == products.changes.size();
            const Change& next = products.changes[is_last ? 0 : each + 1];
            const int64_t ahead = (next.first - change.first) * adapters.b.size(1) + (is_last ? width : 0);
            const int64_t* const numbers = adapters.numbers(change);
            const int64_t* const stop = numbers + change.count;
            const Range some(std::lower_bound(numbers, stop, own.begin) - numbers,
                             std::lower_bound(numbers, stop, own.end) - numbers);
            products.template add<float>(change, some, Range(feature, feature + width), ahead,
                                         [&](int64_t row) { return place(row - own.begin, change.part); });
          }
          for (int64_t row = 0; row < own.size(); ++row) {
            for_vectors(width, [&](int64_t i, auto n) {
              store(to + (own.begin + row) * features + feature + i,
                    gated(load(place(row, 0) + i, n), load(place(row, 1) + i, n)), n);
            });
          }
        }
      }
    });
  });
  return out;
}

}  // namespace

QUIRE_OPERATION(add_low_rank,
                "(Tensor(a!) out, Tensor x, Tensor a, Tensor b, Tensor slots, Tensor bounds, Tensor vectors, "
                "Tensor? scale, Tensor? bias, Tensor order, Tensor starts) -> ()")
QUIRE_OPERATION(gated_low_rank,
                "(Tensor x, Tensor weight, Tensor? scales, Tensor? bias, int features, str activation, Tensor a, "
                "Tensor b, Tensor slots, Tensor bounds, Tensor vectors, Tensor? scale, Tensor? added, Tensor order, "
                "Tensor starts) -> Tensor")

}  // namespace quire
