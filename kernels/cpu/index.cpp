// The selection of sparse attention (see `reference.select_tokens` and `reference.select_blocks`).
//
// A *tile* is up to kTileQueries queries of one request, an *item* a tile and up to kStepKeys keys, and the unit of
// work of a thread: it packs the keys (packed_kv.h) and computes the scores of all queries of the tile. Queries are
// processed as many at a time as their scores fit into kScores numbers, or one. A score is summed in the order of the
// features and heads, so that it depends on its query and key alone.
//
// A *unit* is what has a score: a token, or a block of them with a score for each head. A query sees the units up to its
// own; the last `local` of them are chosen without a score. A key may be that of several tokens, and is seen with the
// last of them.

#include <functional>
#include <limits>
#include <memory>

#include "packed_kv.h"

namespace quire {
namespace {

constexpr int64_t kTileQueries = 32;
constexpr int64_t kStepKeys = 256;
constexpr int64_t kScores = 1 << 22;

struct Tile {
  int64_t request, token, queries, before;  // `token`: the first, whose position is `before`
  int64_t units;                          // that have a score for its last query
  int64_t scores;                         // the offset of the first query's

  int64_t stride() const { return vectors(units) * kLanes; }
};

struct Item {
  int64_t tile, begin;  // the first key
};

struct Problem {
  View query, cache, tables;
  const View* weights;  // of the heads' scores; null: each head has its own score
  Places places;
  int64_t heads, head_dim, top_k;  // `top_k`: of units
  int64_t size, local;             // keys of a unit
  int64_t tokens;                  // of a key
  std::vector<Tile> tiles;
  std::vector<Item> items;
  std::unique_ptr<float[]> scores;

  int64_t rows() const { return weights ? 1 : heads; }  // of a query's scores

  int64_t seen(int64_t position) const { return (position + 1) / tokens; }  // keys

  // For a query that sees so many keys: the units, and those with a score.
  int64_t units(int64_t seen) const { return (seen - 1 + size) / size; }
  int64_t scored(int64_t seen) const { return std::max<int64_t>(0, units(seen) - local); }

  int64_t step() const { return kStepKeys / size * size; }  // keys of an item

  float* of(const Tile& tile, int64_t query, int64_t row) const {
    return scores.get() + tile.scores + (query * rows() + row) * tile.stride();
  }

  const int64_t* table(int64_t request) const { return tables.data<const int64_t>() + request * tables.stride(0); }

  Place row(const int64_t* table, int64_t position) const {
    const int64_t block_size = cache.size(3);
    const char* first = cache.data<const char>() + table[position / block_size] * cache.stride(1) * cache.element_size();
    return places.row(first, position % block_size);
  }
};

// Packs keys into `to` `[head_dim / per_word, kStepKeys]`, padded with the last key to whole vectors.
template <typename Form, typename C>
void pack_keys(const Problem& p, const int64_t* table, int64_t begin, int64_t count, float* to) {
  for (int64_t first = 0; first < count; first += kLanes) {
    KvRow<C> row[kLanes];
    for (int i = 0; i < kLanes; ++i) row[i] = p.row(table, begin + std::min(first + i, count - 1));
    for_vectors(p.head_dim / Form::kPerWord, [&](int64_t d, auto n) {
      Floats block[kLanes];
      transpose([&](int i) { return Form::load(row[i], d, n); }, block);
      for (int i = 0; i < n; ++i) store(to + (d + i) * kStepKeys + first, block[i]);
    });
  }
}

// The largest number of each `size` of `count` products, NaN being the lowest.
void store_maxima(const float* products, int64_t count, int64_t size, float* to) {
  constexpr float kLowest = -std::numeric_limits<float>::infinity();
  for (int64_t first = 0; first < count; first += size) {
    Floats most = Floats{} + kLowest;
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) most = max(load(products + first + i), most);
    float largest = reduce(most, [](auto a, auto b) { return a > b ? a : b; });
    for (; i < size; ++i) largest = products[first + i] > largest ? products[first + i] : largest;
    *to++ = largest;
  }
}

template <typename Form, typename C, typename T>
void compute_scores(const Problem& p, const Item& item) {
  const Tile& tile = p.tiles[item.tile];
  const int64_t count = std::min(p.step(), tile.units * p.size - item.begin), columns = vectors(count);
  const int64_t words = p.head_dim / Form::kPerWord, first = item.begin / p.size;
  static thread_local std::vector<float> memory;
  memory.resize(p.head_dim * (kStepKeys + p.heads) + kBlockRows * kStepKeys);
  float *keys = memory.data(), *queries = keys + p.head_dim * kStepKeys, *products = queries + p.heads * p.head_dim;
  pack_keys<Form, C>(p, p.table(tile.request), item.begin, count, keys);
  for (int64_t query = 0; query < tile.queries; ++query) {
    const int64_t token = tile.token + query;
    for (int64_t head = 0; head < p.heads; ++head) {
      const T* from = p.query.data<const T>() + token * p.query.stride(0) + head * p.query.stride(1);
      for_vectors(p.head_dim,
                  [&](int64_t d, auto n) { store(queries + head * p.head_dim + d, load(from + d, n), n); });
    }
    Form::pack(queries, p.heads * p.head_dim, queries);
    Floats sums[kStepKeys / kLanes] = {};
    for (int64_t head = 0; head < p.heads; head += kBlockRows) {
      const int64_t some = std::min<int64_t>(kBlockRows, p.heads - head);
      multiply<Form>(some, columns, queries + head * words, words, keys, kStepKeys, products, kStepKeys, words, nullptr);
      for (int64_t i = 0; i < some; ++i) {
        if (!p.weights) {
          store_maxima(products + i * kStepKeys, count, p.size, p.of(tile, query, head + i) + first);
          continue;
        }
        const float weight = p.weights->data<const float>()[token * p.weights->stride(0) + head + i];
        for (int64_t column = 0; column < columns; ++column) {
          sums[column] += max(load(products + i * kStepKeys + column * kLanes), Floats{}) * weight;
        }
      }
    }
    if (!p.weights) continue;
    float* scores = p.of(tile, query, 0) + first;
    for (int64_t column = 0; column < columns; ++column) store(scores + column * kLanes, sums[column]);
  }
}

// Calls `body<Form, C, T>()` for the form of words and the element types of cache and query.
template <typename Body>
void for_form(const Problem& p, Body&& body) {
  for_type(p.query.scalar_type(), [&]<typename T>() {
    for_kv_type(p.cache.scalar_type(), [&]<typename C>() {
#ifdef __AVX512BF16__
      if constexpr (std::is_same_v<C, BFloat16> && std::is_same_v<T, BFloat16>) {
        if (p.head_dim % (2 * kLanes) == 0) return body.template operator()<Pairs, C, T>();
      }
#endif
      body.template operator()<Numbers, C, T>();
    });
  });
}

// Writes the units that a query chooses which sees `seen` keys, in order: all, or those with the highest `scores` and
// the last ones. `write(unit)` returns what is written.
template <typename Write>
void choose(const Problem& p, float* scores, int64_t seen, int64_t* to, Write&& write) {
  const int64_t units = p.units(seen), count = p.scored(seen), top_k = p.top_k - p.local;
  int64_t* const end = to + p.top_k;
  int64_t next = 0;
  if (units > p.top_k) {
    for (int64_t i = 0; i < count; ++i) {
      if (scores[i] != scores[i]) scores[i] = -std::numeric_limits<float>::infinity();
    }
    static thread_local std::vector<float> sorted;
    sorted.assign(scores, scores + count);
    std::nth_element(sorted.begin(), sorted.begin() + std::max<int64_t>(top_k, 1) - 1, sorted.end(),
                     std::greater<float>());
    const float least = sorted[std::max<int64_t>(top_k, 1) - 1];
    int64_t equal = std::count(sorted.begin(), sorted.begin() + top_k, least);  // that are chosen, the first ones
    for (; next < count; ++next) {
      if (top_k && (scores[next] > least || (scores[next] == least && equal-- > 0))) *to++ = write(next);
    }
  }
  for (; next < units; ++next) *to++ = write(next);
  std::fill(to, end, write(0));
}

// Chooses for all queries: `write(request, unit)` as for `choose`, to `out` `[tokens, rows, top_k]`.
template <typename Write>
void select(Problem& p, const Tensor& sequence_lengths, const Tensor& query_starts, int64_t* out, Write&& write) {
  const Tensor lengths = as_contiguous(sequence_lengths), starts = as_contiguous(query_starts);
  const int64_t *length = lengths.const_data_ptr<int64_t>(), *start = starts.const_data_ptr<int64_t>();
  int64_t needed = 0, capacity = 0;
  const auto put = [&](int64_t request, int64_t token, int64_t row, float* scores, int64_t seen) {
    choose(p, scores, seen, out + (token * p.rows() + row) * p.top_k,
           [&](int64_t unit) { return write(request, unit); });
  };
  const auto finish = [&] {  // the tiles so far
    if (needed > capacity) p.scores = std::make_unique_for_overwrite<float[]>(capacity = needed);
    parallel_for(0, std::ssize(p.items), 1, [&](int64_t begin, int64_t end) {
      for_form(p, [&]<typename Form, typename C, typename T>() {
        for (int64_t i = begin; i < end; ++i) compute_scores<Form, C, T>(p, p.items[i]);
      });
    });
    std::vector<std::pair<int64_t, int64_t>> places;  // tile and query
    for (int64_t tile = 0; tile < std::ssize(p.tiles); ++tile) {
      for (int64_t query = 0; query < p.tiles[tile].queries; ++query) places.push_back({tile, query});
    }
    const int64_t work = p.tiles.empty() ? 1 : 4 * p.tiles[0].units * p.rows();
    parallel_for(0, std::ssize(places), grain(work), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const auto [number, query] = places[i];
        const Tile& tile = p.tiles[number];
        for (int64_t row = 0; row < p.rows(); ++row) {
          put(tile.request, tile.token + query, row, p.of(tile, query, row), p.seen(tile.before + query));
        }
      }
    });
    p.tiles.clear(), p.items.clear(), needed = 0;
  };
  for (int64_t request = 0; request < lengths.size(0); ++request) {
    for (int64_t token = start[request]; token < start[request + 1];) {
      const int64_t position = length[request] - start[request + 1] + token, seen = p.seen(position);
      if (p.units(seen) <= p.top_k) {
        for (int64_t row = 0; row < p.rows(); ++row) put(request, token, row, nullptr, seen);
        ++token;
        continue;
      }
      const int64_t row = (p.scored(seen + kTileQueries) + kLanes) * p.rows();
      if (needed && needed + row > kScores) finish();
      const int64_t fits = std::max<int64_t>(1, (kScores - needed) / row);
      const int64_t queries = std::min({kTileQueries, start[request + 1] - token, fits});
      Tile tile{request, token, queries, position, p.scored(p.seen(position + queries - 1)), needed};
      needed += queries * p.rows() * tile.stride();
      for (int64_t begin = 0; begin < tile.units * p.size; begin += p.step()) {
        p.items.push_back({std::ssize(p.tiles), begin});
      }
      p.tiles.push_back(tile);
      token += queries;
    }
  }
  if (!p.tiles.empty()) finish();
}

Tensor select_tokens(const Tensor& query, const Tensor& weights, const Tensor& cache, const Tensor& block_tables,
                     const Tensor& sequence_lengths, const Tensor& query_starts, int64_t top_k,
                     int64_t tokens_per_key) {
  const int64_t tokens = query.size(0), heads = query.size(1), head_dim = query.size(2), block_size = cache.size(3);
  STD_TORCH_CHECK(cache.size(2) == 1 && block_tables.stride(1) == 1 && query.stride(2) == 1 && top_k > 0 &&
                  tokens_per_key > 0);
  STD_TORCH_CHECK(weights.size(0) == tokens && weights.size(1) == heads && weights.stride(1) == 1 &&
                      weights.scalar_type() == ScalarType::Float,
                  "weights must be float32 [tokens, heads]");
  Tensor out = empty({tokens, top_k}, ScalarType::Long);
  const View factors(weights);
  Problem p{View(query), View(cache), View(block_tables), &factors, Places(cache, head_dim), heads, head_dim, top_k,
            1,           0,           tokens_per_key,     {},       {},     nullptr};
  select(p, sequence_lengths, query_starts, out.mutable_data_ptr<int64_t>(), [&](int64_t request, int64_t position) {
    return p.table(request)[position / block_size] * block_size + position % block_size;
  });
  return out;
}

Tensor select_blocks(const Tensor& query, const Tensor& cache, const Tensor& block_tables,
                     const Tensor& sequence_lengths, const Tensor& query_starts, int64_t size, int64_t count,
                     int64_t local) {
  const int64_t tokens = query.size(0), heads = query.size(1), head_dim = query.size(2);
  STD_TORCH_CHECK(cache.size(2) == 1 && block_tables.stride(1) == 1 && query.stride(2) == 1);
  STD_TORCH_CHECK(0 < size && size <= kStepKeys && 0 < local && local <= count, "no such blocks");
  Tensor out = empty({tokens, heads, count}, ScalarType::Long);
  Problem p{View(query), View(cache), View(block_tables), nullptr, Places(cache, head_dim), heads, head_dim, count,
            size,        local,       1,                  {},      {},     nullptr};
  select(p, sequence_lengths, query_starts, out.mutable_data_ptr<int64_t>(),
         [](int64_t, int64_t block) { return block; });
  return out;
}

}  // namespace

QUIRE_OPERATION(select_tokens,
                "(Tensor query, Tensor weights, Tensor cache, Tensor block_tables, Tensor sequence_lengths, "
                "Tensor query_starts, int top_k, int tokens_per_key) -> Tensor")

QUIRE_OPERATION(select_blocks,
                "(Tensor query, Tensor cache, Tensor block_tables, Tensor sequence_lengths, Tensor query_starts, "
                "int size, int count, int local) -> Tensor")

}  // namespace quire
