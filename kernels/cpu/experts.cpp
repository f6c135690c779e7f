// Mixtures of experts: the routing of tokens to experts, and the weighted sum of the experts' results.
//
// Tokens are sorted by expert, and each expert's rows are multiplied by its tiles (see packed_tiles.h); experts without
// rows cost nothing. The gates and ups of all experts come first: a tile holds 16 of each, so that the activation is
// applied while the sums are in registers. The tiles of all experts are divided among threads by their work. Then come
// the down projections, where a thread computes the same tiles of every expert: it alone adds up its features of a
// token, in the order of experts. So a token's result depends neither on other tokens nor on the number of threads.
//
// If adapters change the experts, the products and the sums are operations of their own, with the same results.

#include "activation.h"
#include "packed_tiles.h"

namespace quire {
namespace {

// Finds the indices of the `count` highest of `size` scores, in descending order; ties go to the lower index.
void find_highest(const float* scores, int64_t size, int64_t count, int64_t* best) {
  for (int64_t i = 0, found = 0; i < size; ++i) {
    if (found == count && !(scores[i] > scores[best[count - 1]])) continue;
    int64_t at = found < count ? found++ : count - 1;
    for (; at > 0 && scores[i] > scores[best[at - 1]]; --at) best[at] = best[at - 1];
    best[at] = i;
  }
}

// The score of a group of experts: that of its best expert, or the sum of its two best.
float group_score(const float* scores, int64_t size, bool is_sum_of_two) {
  float first = -INFINITY, second = -INFINITY;
  for (int64_t i = 0; i < size; ++i) {
    second = std::max(second, std::min(first, scores[i]));
    first = std::max(first, scores[i]);
  }
  return is_sum_of_two ? first + second : first;
}

enum class Scoring { kSoftmax, kSigmoid, kTopKSoftmax };

Scoring parse_scoring(std::string_view name) {
  if (name == "softmax") return Scoring::kSoftmax;
  if (name == "sigmoid") return Scoring::kSigmoid;
  if (name == "topk_softmax") return Scoring::kTopKSoftmax;
  STD_TORCH_CHECK(false, "unknown scoring ", name);
}

void softmax(float* x, int64_t size) {
  float top = x[0], total = 0.0f;
  for (int64_t i = 1; i < size; ++i) top = std::max(top, x[i]);
  for (int64_t i = 0; i < size; ++i) total += x[i] = std::exp(x[i] - top);
  for (int64_t i = 0; i < size; ++i) x[i] /= total;
}

// logits: float32 [tokens, experts]. Returns weights float32 and numbers int64, [tokens, top_k] each.
std::tuple<Tensor, Tensor> route(const Tensor& logits, int64_t top_k, std::string_view scoring, bool renormalize,
                                 double scale, int64_t groups, int64_t top_groups, std::string_view group_scoring,
                                 double ineligible, const std::optional<Tensor>& bias) {
  const int64_t tokens = logits.size(0), experts = logits.size(1), group = experts / groups;
  STD_TORCH_CHECK(logits.scalar_type() == ScalarType::Float && logits.dim() == 2,
                  "logits must be float32 [tokens, experts]");
  STD_TORCH_CHECK(!bias ||
                  (bias->scalar_type() == ScalarType::Float && bias->is_contiguous() && bias->numel() == experts));
  STD_TORCH_CHECK(experts % groups == 0 && top_groups <= groups && top_k <= top_groups * group,
                  "top_k and top_groups do not match the number of experts");
  const Scoring kind = parse_scoring(scoring);
  const bool is_sum_of_two = group_scoring == "top2_sum";
  STD_TORCH_CHECK(groups == 1 || !is_sum_of_two || group > 1, "top2_sum needs at least two experts per group");
  // Logits have the same order as their softmax, where different logits may round to equal scores.
  const bool in_order = groups == 1 || (!is_sum_of_two && ineligible == -std::numeric_limits<double>::infinity());
  const bool by_logits = kind == Scoring::kSoftmax && !bias && in_order;
  const Tensor rows = as_contiguous(logits);
  Tensor weights = empty({tokens, top_k}, rows.scalar_type());
  Tensor ids = empty({tokens, top_k}, ScalarType::Long);
  parallel_for(0, tokens, grain(experts * top_k), [&](int64_t begin, int64_t end) {
    std::vector<float> scores(experts), choice(experts), group_scores(groups);
    std::vector<int64_t> best_groups(top_groups);
    std::vector<bool> is_eligible(groups);
    for (int64_t token = begin; token < end; ++token) {
      const float* row = rows.const_data_ptr<float>() + token * experts;
      float* weight = weights.mutable_data_ptr<float>() + token * top_k;
      int64_t* id = ids.mutable_data_ptr<int64_t>() + token * top_k;
      std::copy(row, row + experts, scores.begin());
      if (kind == Scoring::kSoftmax) softmax(scores.data(), experts);
      if (kind == Scoring::kSigmoid) {
        for (float& score : scores) score = 1.0f / (1.0f + std::exp(-score));
      }
      const float* from = by_logits ? row : scores.data();
      std::copy(from, from + experts, choice.begin());
      if (bias) {
        for (int64_t i = 0; i < experts; ++i) choice[i] += bias->const_data_ptr<float>()[i];
      }
      if (groups > 1) {
        for (int64_t i = 0; i < groups; ++i) group_scores[i] = group_score(&choice[i * group], group, is_sum_of_two);
        find_highest(group_scores.data(), groups, top_groups, best_groups.data());
        std::fill(is_eligible.begin(), is_eligible.end(), false);
        for (const int64_t best : best_groups) is_eligible[best] = true;
        for (int64_t i = 0; i < experts; ++i) {
          if (!is_eligible[i / group]) choice[i] = static_cast<float>(ineligible);
        }
      }
      find_highest(choice.data(), experts, top_k, id);
      for (int64_t i = 0; i < top_k; ++i) weight[i] = scores[id[i]];
      if (kind == Scoring::kTopKSoftmax) softmax(weight, top_k);
      float total = 1e-20f;  // as in DeepSeek: avoids division by zero
      for (int64_t i = 0; i < top_k; ++i) total += weight[i];
      const float factor = static_cast<float>(scale) / (renormalize ? total : 1.0f);
      for (int64_t i = 0; i < top_k; ++i) weight[i] *= factor;
    }
  });
  return {weights, ids};
}

// A token that is routed to an expert, and its number among these pairs.
struct Assignment {
  int64_t token, pair;
};

// The assignments of an expert that has any.
struct ExpertRange {
  int64_t expert, first, count;
};

// All assignments to experts below `experts`, sorted by expert and then by token; and the range of each expert.
// `top_k` successive ids are those of a token.
std::tuple<std::vector<Assignment>, std::vector<ExpertRange>> sort_by_expert(const Tensor& ids, int64_t top_k,
                                                                             int64_t experts) {
  const int64_t* const id = ids.const_data_ptr<int64_t>();
  const auto is_here = [&](int64_t i) { return id[i] >= 0 && id[i] < experts; };
  std::vector<int64_t> place(experts + 1);
  for (int64_t i = 0; i < ids.numel(); ++i) {
    if (is_here(i)) ++place[id[i] + 1];
  }
  std::vector<ExpertRange> expert_ranges;
  for (int64_t expert = 0; expert < experts; ++expert) {
    const int64_t count = place[expert + 1];
    if (count) expert_ranges.push_back({expert, place[expert], count});
    place[expert + 1] += place[expert];
  }
  std::vector<Assignment> assignments(place[experts]);
  for (int64_t i = 0; i < ids.numel(); ++i) {
    if (is_here(i)) assignments[place[id[i]]++] = {i / top_k, i};
  }
  return {std::move(assignments), std::move(expert_ranges)};
}

// One matrix per expert: packed tiles [experts, tiles, steps, …]; scales and biases float32 [experts, tiles * 32].
struct Matrices {
  const char* data;
  const float *scales, *biases;
  int64_t experts, tiles, steps, tile_bytes;

  Matrices(const Tensor& weight, const std::optional<Tensor>& scale, const std::optional<Tensor>& bias)
      : data(static_cast<const char*>(weight.const_data_ptr())), scales(features(scale, weight)),
        biases(features(bias, weight)), experts(weight.size(0)), tiles(weight.size(1)), steps(weight.size(2)),
        tile_bytes(weight.stride(1) * weight.element_size()) {
    STD_TORCH_CHECK(weight.is_contiguous(), "the weight is not in packed tiles");
  }

  static const float* features(const std::optional<Tensor>& x, const Tensor& weight) {
    if (!x) return nullptr;
    STD_TORCH_CHECK(x->scalar_type() == ScalarType::Float && x->is_contiguous() && x->dim() == 2 &&
                        x->size(0) == weight.size(0) && x->size(1) == weight.size(1) * kTile,
                    "scales and biases must be float32 [experts, tiles * 32]");
    return x->const_data_ptr<float>();
  }

  // Whether they are for rows of `inputs` inputs.
  bool match(const TileForm& form, int64_t inputs) const {
    return form.steps(inputs) == steps && steps * form.step_bytes() == tile_bytes;
  }

  const char* tile(int64_t expert, int64_t number) const { return data + (expert * tiles + number) * tile_bytes; }

  // The pieces of an expert's tiles up to `end`; after the last one, `after` is prefetched.
  auto pieces(int64_t expert, int64_t end, const char* after) const {
    return [=, this](int64_t number, int64_t at, int64_t bytes) {
      const char* const here = tile(expert, number) + at;
      return Piece{here, number + 1 == end && at + bytes == tile_bytes ? after : here + bytes};
    };
  }

  // An expert's scales, or null.
  const float* expert_scales(int64_t expert) const { return scales ? scales + expert * tiles * kTile : nullptr; }

  // A tile's values of lanes from `i` on, plus the bias.
  Floats add_bias(int64_t expert, int64_t number, int i, Floats value) const {
    return biases ? value + load(biases + (expert * tiles + number) * kTile + i) : value;
  }
};

// The rows of `count` assignments, contiguous.
const char* gather(const char* x, int64_t stride, const Assignment* assignments, int64_t count) {
  if (count == 1) return x + assignments->token * stride;
  static thread_local std::vector<char> memory;
  memory.resize(std::max<size_t>(memory.size(), count * stride));
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(memory.data() + i * stride, x + assignments[i].token * stride, stride);
  }
  return memory.data();
}

// Multiplies the rows of all assignments by the tiles of their experts; `finish(expert, tile, assignment, values)`
// receives the values of an assignment's row, on several threads.
template <typename Finish>
void multiply_rows(const TileForm& form, const std::vector<Assignment>& assignments,
                   const std::vector<ExpertRange>& expert_ranges, const Rows& rows, const Matrices& matrices,
                   const Finish& finish) {
  const int64_t tiles = matrices.tiles;
  int64_t work = 0;  // of all tiles, in rows
  for (const ExpertRange& e : expert_ranges) work += tiles * (e.count + kReadingRows);
  const int64_t least = std::max<int64_t>(1, kThreadWork / (matrices.tile_bytes));
  parallel_for(0, work, least, [&](int64_t begin, int64_t end) {
    int64_t start = 0;
    for (size_t i = 0; i < expert_ranges.size(); ++i) {
      const ExpertRange& e = expert_ranges[i];
      const int64_t each = e.count + kReadingRows;
      // A tile belongs to the thread in whose share it begins.
      const auto tile_at = [&](int64_t at) { return std::clamp<int64_t>((at - start + each - 1) / each, 0, tiles); };
      const int64_t first = tile_at(begin), last = tile_at(end);
      start += tiles * each;
      if (first == last) continue;
      const char* after = i + 1 < expert_ranges.size() ? matrices.tile(expert_ranges[i + 1].expert, 0) : nullptr;
      const auto get_rows = [&](int64_t row, int64_t count) {
        return gather(rows.row(0), rows.stride, &assignments[e.first + row], count);
      };
      multiply_tiles(form, matrices.expert_scales(e.expert), e.count, rows.stride, matrices.steps, first, last,
                     get_rows, matrices.pieces(e.expert, tiles, after),
                     [&](int64_t tile, int64_t row, const TileSums& values) {
        finish(e.expert, tile, e.first + row, values);
      });
    }
  });
}

template <typename T>
struct Mixture {
  const TileForm &form, &down_form;
  const std::vector<Assignment>& assignments;
  const std::vector<ExpertRange>& expert_ranges;
  const float* const weights;  // of the pairs

  // out: [assignments, 16 * tiles], `gated` applied to gates and ups; without gates [assignments, 32 * tiles].
  void gate_up(const Rows& rows, const Matrices& matrices, Gated gated, bool has_gates, T* out) const {
    const int64_t part = has_gates ? kHalf : kTile, width = matrices.tiles * part;
    multiply_rows(form, assignments, expert_ranges, rows, matrices,
                  [&](int64_t expert, int64_t tile, int64_t assignment, const TileSums& values) {
      const auto value = [&](int j) { return matrices.add_bias(expert, tile, j, values[j / kLanes]); };
      T* to = out + assignment * width + tile * part;
      for (int j = 0; j < part; j += kLanes) {
        store(to + j, gated(value(j), has_gates ? value(j + kHalf) : broadcast(1.0f)));
      }
    });
  }

  // total: [tokens, hidden], the weighted sums of the experts' rows.
  void down(const Rows& rows, const Matrices& matrices, int64_t tokens, int64_t hidden, float* total,
            T* out) const {
    int64_t work = 0;
    for (const ExpertRange& e : expert_ranges) work += e.count + kReadingRows;
    const int64_t least = std::max<int64_t>(1, kThreadWork / std::max<int64_t>(1, work * matrices.tile_bytes));
    parallel_for(0, matrices.tiles, least, [&](int64_t begin, int64_t end) {
      const int64_t feature = begin * kTile, width = std::min(end * kTile, hidden) - feature;
      for (int64_t token = 0; token < tokens; ++token) std::fill_n(total + token * hidden + feature, width, 0.0f);
      for (size_t i = 0; i < expert_ranges.size(); ++i) {
        const ExpertRange& e = expert_ranges[i];
        const char* after = i + 1 < expert_ranges.size() ? matrices.tile(expert_ranges[i + 1].expert, begin) : nullptr;
        const auto get_rows = [&](int64_t row, int64_t) { return rows.row(e.first + row); };
        multiply_tiles(down_form, matrices.expert_scales(e.expert), e.count, rows.stride, matrices.steps, begin, end,
                       get_rows, matrices.pieces(e.expert, end, after),
                       [&](int64_t tile, int64_t row, const TileSums& values) {
          const auto [token, pair] = assignments[e.first + row];
          float* const to = total + token * hidden + tile * kTile;
          const float weight = weights[pair];
          for_vectors(std::min<int64_t>(kTile, hidden - tile * kTile), [&](int64_t j, auto n) {
            const Floats value = matrices.add_bias(e.expert, tile, j, values[j / kLanes]);
            store(to + j, load(to + j, n) + weight * value, n);
          });
        });
      }
      if constexpr (!std::is_same_v<T, float>) {
        for (int64_t token = 0; token < tokens; ++token) {
          const int64_t at = token * hidden + feature;
          for_vectors(width, [&](int64_t j, auto n) { store(out + at + j, load(total + at + j, n), n); });
        }
      }
    });
  }
};

// x: [tokens, hidden]; weights float32 and ids int64, [tokens, top_k]: ids of experts on other ranks add nothing.
// gate_up: 16 gates then 16 ups per tile; down: of `inner` inputs, 16 for each tile of gate_up. Without gates, gate_up has
// 32 ups per tile, and down as many inputs.
Tensor mix_experts(const Tensor& x, const Tensor& weights, const Tensor& ids, const TileForm& form,
                   const Matrices& first, const TileForm& down_form, const Matrices& second,
                   std::string_view activation, bool has_gates) {
  const int64_t tokens = x.size(0), hidden = x.size(1), inner = first.tiles * (has_gates ? kHalf : kTile);
  const ScalarType type = x.scalar_type();
  STD_TORCH_CHECK(ids.sizes() == weights.sizes() && ids.size(0) == tokens && ids.scalar_type() == ScalarType::Long &&
                      weights.scalar_type() == ScalarType::Float,
                  "weights must be float32 and ids int64, both [tokens, top_k]");
  STD_TORCH_CHECK(first.match(form, hidden) && second.match(down_form, inner) && first.experts == second.experts &&
                      (hidden + kTile - 1) / kTile == second.tiles,
                  "the shapes of x, gate_up and down do not match");
  const Tensor from = as_contiguous(x);
  const Tensor factors = as_contiguous(weights);
  const auto [assignments, expert_ranges] = sort_by_expert(as_contiguous(ids), ids.size(1), first.experts);
  const auto count = static_cast<int64_t>(assignments.size());
  Tensor out = empty(x.sizes(), type);
  Tensor between = empty({count, inner}, type);
  Tensor total = type == ScalarType::Float ? out : empty(x.sizes(), ScalarType::Float);
  const Gated gated = find_gated(activation);
  for_type(type, [&]<typename T>() {
    const Mixture<T> mixture{form, down_form, assignments, expert_ranges, factors.const_data_ptr<float>()};
    T* const middle = between.mutable_data_ptr<T>();
    mixture.gate_up(Rows(form, from.const_data_ptr(), type, tokens, hidden), first, gated, has_gates, middle);
    mixture.down(Rows(down_form, middle, type, count, inner), second, tokens, hidden, total.mutable_data_ptr<float>(),
                 out.mutable_data_ptr<T>());
  });
  return out;
}

// The products of each pair's row by its expert: float32 [pairs, features], or gates and then ups; those of experts on
// other ranks are 0. As many successive ids have the inputs of each row of x.
Tensor multiply_pairs(const Tensor& x, const Tensor& ids, const TileForm& form, const Matrices& matrices,
                      int64_t features, bool has_gates) {
  const int64_t inputs = x.size(1), pairs = ids.numel(), per_row = pairs / std::max<int64_t>(1, x.size(0));
  const int64_t part = has_gates ? kHalf : kTile, width = has_gates ? 2 * features : features;
  STD_TORCH_CHECK(ids.scalar_type() == ScalarType::Long && per_row * x.size(0) == pairs &&
                      matrices.match(form, inputs) && (features + part - 1) / part == matrices.tiles,
                  "the shapes of x, ids and the weight do not match");
  const Tensor from = as_contiguous(x);
  const auto [assignments, expert_ranges] =
      sort_by_expert(as_contiguous(ids), std::max<int64_t>(1, per_row), matrices.experts);
  Tensor out = empty({pairs, width}, ScalarType::Float);
  float* const to = out.mutable_data_ptr<float>();
  if (static_cast<int64_t>(assignments.size()) < pairs) std::fill_n(to, pairs * width, 0.0f);
  multiply_rows(form, assignments, expert_ranges,
                Rows(form, from.const_data_ptr(), x.scalar_type(), x.size(0), inputs), matrices,
                [&](int64_t expert, int64_t tile, int64_t assignment, const TileSums& values) {
    float* const row = to + assignments[assignment].pair * width;
    const int64_t feature = tile * part, count = std::min(part, features - feature);
    for (int side = 0; side < (has_gates ? 2 : 1); ++side) {
      for_vectors(count, [&](int64_t j, auto n) {
        const int lane = static_cast<int>(j + side * part);
        store(row + side * features + feature + j, matrices.add_bias(expert, tile, lane, values[lane / kLanes]), n);
      });
    }
  });
  return out;
}

// Stores the weighted sums of each token's rows in out, [tokens, hidden], in the order of experts. rows: float32
// [pairs, hidden].
void sum_pairs(const Tensor& out, const Tensor& rows, const Tensor& weights, const Tensor& ids, int64_t experts) {
  const int64_t tokens = out.size(0), hidden = out.size(1), top_k = ids.size(1);
  STD_TORCH_CHECK(out.is_contiguous() && rows.is_contiguous() && rows.scalar_type() == ScalarType::Float &&
                      rows.dim() == 2 && rows.size(0) == tokens * top_k && rows.size(1) == hidden &&
                      ids.size(0) == tokens && ids.sizes() == weights.sizes() &&
                      ids.scalar_type() == ScalarType::Long && weights.scalar_type() == ScalarType::Float,
                  "the shapes of rows, weights and ids do not match");
  const Tensor numbers = as_contiguous(ids), factors = as_contiguous(weights);
  for_type(out.scalar_type(), [&]<typename T>() {
    parallel_for(0, tokens, grain(hidden * top_k), [&](int64_t begin, int64_t end) {
      std::vector<int64_t> pairs;
      for (int64_t token = begin; token < end; ++token) {
        const int64_t* const id = numbers.const_data_ptr<int64_t>();
        pairs.clear();
        for (int64_t i = token * top_k; i < (token + 1) * top_k; ++i) {
          if (id[i] >= 0 && id[i] < experts) pairs.push_back(i);
        }
        std::stable_sort(pairs.begin(), pairs.end(), [&](int64_t a, int64_t b) { return id[a] < id[b]; });
        constexpr int64_t kSome = 512;  // features, whose sums stay in the L1 cache
        for (int64_t first = 0; first < hidden; first += kSome) {
          const int64_t width = std::min(kSome, hidden - first);
          alignas(64) float total[kSome] = {};
          for (const int64_t pair : pairs) {
            const float factor = factors.const_data_ptr<float>()[pair];
            const float* const row = rows.const_data_ptr<float>() + pair * hidden + first;
            for_vectors(width, [&](int64_t j, auto n) { store(total + j, load(total + j, n) + factor * load(row + j, n), n); });
          }
          T* const to = out.mutable_data_ptr<T>() + token * hidden + first;
          for_vectors(width, [&](int64_t j, auto n) { store(to + j, load(total + j, n), n); });
        }
      }
    });
  });
}

// The form of tiles as for `tiled_linear`, as for `int8_linear` if they have scales, or as for `int4_linear`.
std::unique_ptr<TileForm> form_of(const Tensor& tiles, bool has_scales, ScalarType rows) {
  if (has_scales) return int8_form();
  return tiles.scalar_type() == ScalarType::Byte ? int4_form(tiles.size(3)) : tiled_form(rows, tiles.scalar_type());
}

// The experts' weights are tiles as for `tiled_linear`, as for `int8_linear` if they have scales, or as for `int4_linear`.
// Scales and biases: float32 [experts, tiles * 32].
Tensor packed_experts(const Tensor& x, const Tensor& weights, const Tensor& ids, const Tensor& gate_up,
                      const std::optional<Tensor>& gate_up_scales, const std::optional<Tensor>& gate_up_bias,
                      const Tensor& down, const std::optional<Tensor>& down_scales,
                      const std::optional<Tensor>& down_bias, std::string_view activation, bool gated) {
  const Matrices first(gate_up, gate_up_scales, gate_up_bias), second(down, down_scales, down_bias);
  STD_TORCH_CHECK(gate_up.scalar_type() == down.scalar_type());
  const auto form = [&](const Tensor& tiles) {
    return form_of(tiles, first.scales && second.scales, x.scalar_type());
  };
  if (first.scales) {
    STD_TORCH_CHECK(std::max(x.size(1), first.tiles * (gated ? kHalf : kTile)) <= kMostBytes,
                    "more than 65,536 inputs are not supported: sums may overflow 32 bits");
  }
  return mix_experts(x, weights, ids, *form(gate_up), first, *form(down), second, activation, gated);
}

// One matrix of each expert, of tiles as for `packed_experts`.
Tensor multiply_packed_pairs(const Tensor& x, const Tensor& ids, int64_t features, bool gated, const Tensor& weight,
                             const std::optional<Tensor>& scales, const std::optional<Tensor>& bias) {
  const Matrices matrices(weight, scales, bias);
  STD_TORCH_CHECK(!scales || x.size(1) <= kMostBytes,
                  "more than 65,536 inputs are not supported: sums may overflow 32 bits");
  return multiply_pairs(x, ids, *form_of(weight, scales.has_value(), x.scalar_type()), matrices, features, gated);
}

// The same of tiles as for `coded_experts`.
Tensor multiply_coded_pairs(const Tensor& x, const Tensor& ids, int64_t features, bool gated, const Tensor& weight,
                            const Tensor& scales, const std::optional<Tensor>& bias, std::string_view values,
                            const Tensor& table, int64_t group, int64_t factors) {
  const Matrices matrices(weight, scales, bias);
  const auto form = coded_form(values, table, group, factors, weight.size(3), x.scalar_type());
  return multiply_pairs(x, ids, *form, matrices, features, gated);
}

// The experts' weights are tiles as for `coded_linear`; scales and biases as for `packed_experts`.
Tensor coded_experts(const Tensor& x, const Tensor& weights, const Tensor& ids, const Tensor& gate_up,
                     const Tensor& gate_up_scales, const std::optional<Tensor>& gate_up_bias, const Tensor& down,
                     const Tensor& down_scales, const std::optional<Tensor>& down_bias, std::string_view activation,
                     std::string_view values, const Tensor& table, int64_t gate_up_group, int64_t gate_up_factors,
                     int64_t down_group, int64_t down_factors, bool gated) {
  const Matrices first(gate_up, gate_up_scales, gate_up_bias), second(down, down_scales, down_bias);
  const auto form = [&](const Tensor& tiles, int64_t group, int64_t factors) {
    return coded_form(values, table, group, factors, tiles.size(3), x.scalar_type());
  };
  return mix_experts(x, weights, ids, *form(gate_up, gate_up_group, gate_up_factors), first,
                     *form(down, down_group, down_factors), second, activation, gated);
}

}  // namespace

QUIRE_OPERATION(route,
                "(Tensor logits, int top_k, str scoring, bool renormalize, float scale, int groups, int top_groups, "
                "str group_score, float ineligible, Tensor? correction_bias) -> (Tensor, Tensor)")
QUIRE_OPERATION(packed_experts,
                "(Tensor x, Tensor weights, Tensor ids, Tensor gate_up, Tensor? gate_up_scales, Tensor? "
                "gate_up_bias, Tensor down, Tensor? down_scales, Tensor? down_bias, str activation, bool gated) -> Tensor")
QUIRE_OPERATION(multiply_packed_pairs,
                "(Tensor x, Tensor ids, int features, bool gated, Tensor weight, Tensor? scales, Tensor? bias) -> Tensor")
QUIRE_OPERATION(multiply_coded_pairs,
                "(Tensor x, Tensor ids, int features, bool gated, Tensor weight, Tensor scales, Tensor? bias, "
                "str values, Tensor table, int group, int factors) -> Tensor")
QUIRE_OPERATION(sum_pairs, "(Tensor(a!) out, Tensor rows, Tensor weights, Tensor ids, int experts) -> ()")
QUIRE_OPERATION(coded_experts,
                "(Tensor x, Tensor weights, Tensor ids, Tensor gate_up, Tensor gate_up_scales, Tensor? gate_up_bias, "
                "Tensor down, Tensor down_scales, Tensor? down_bias, str activation, str values, Tensor table, "
                "int gate_up_group, int gate_up_factors, int down_group, int down_factors, bool gated) -> Tensor")

}  // namespace quire
