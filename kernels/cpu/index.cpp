// The selection of sparse attention (see `reference.select_tokens`).
//
// A *tile* is up to kTileQueries queries of one request, an *item* a tile and up to kStepKeys keys, and the unit of
// work of a thread: it packs the keys (packed_kv.h) and computes the scores of all queries of the tile. Queries are
// processed as many at a time as their scores fit into kScores numbers, or one. A score is summed in the order of the
// features and heads, so that it depends on its query and key alone.

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
  int64_t request, token, queries, keys;  // `token`: the first; `keys` that its last query sees
  int64_t scores;                         // the offset of the first query's, each of which has `stride()`

  int64_t stride() const { return vectors(keys) * kLanes; }
};

struct Item {
  int64_t tile, begin;  // the first key
};

struct Problem {
  View query, weights, cache, tables;
  Places places;
  int64_t heads, head_dim, top_k;
  std::vector<Tile> tiles;
  std::vector<Item> items;
  std::unique_ptr<float[]> scores;

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

template <typename Form, typename C, typename T>
void compute_scores(const Problem& p, const Item& item) {
  const Tile& tile = p.tiles[item.tile];
  const int64_t count = std::min(kStepKeys, tile.keys - item.begin), columns = vectors(count);
  const int64_t words = p.head_dim / Form::kPerWord;
  static thread_local std::vector<float> memory;
  memory.resize(p.head_dim * (kStepKeys + p.heads) + kBlockRows * kStepKeys);
  float *keys = memory.data(), *queries = keys + p.head_dim * kStepKeys, *products = queries + p.heads * p.head_dim;
  pack_keys<Form, C>(p, p.table(tile.request), item.begin, count, keys);
  for (int64_t query = 0; query < tile.queries; ++query) {
    const int64_t token = tile.token + query;
    const float* weights = p.weights.data<const float>() + token * p.weights.stride(0);
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
        for (int64_t column = 0; column < columns; ++column) {
          sums[column] += max(load(products + i * kStepKeys + column * kLanes), Floats{}) * weights[head + i];
        }
      }
    }
    float* scores = p.scores.get() + tile.scores + query * tile.stride() + item.begin;
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

// Writes the slots of the first `count` tokens, or of those with the highest of so many `scores`.
void choose(const Problem& p, const int64_t* table, float* scores, int64_t count, int64_t* to) {
  const int64_t block_size = p.cache.size(3);
  const auto add = [&](int64_t position) {
    *to++ = table[position / block_size] * block_size + position % block_size;
  };
  int64_t* const end = to + p.top_k;
  if (count <= p.top_k) {
    for (int64_t i = 0; i < count; ++i) add(i);
  } else {
    for (int64_t i = 0; i < count; ++i) {
      if (scores[i] != scores[i]) scores[i] = -std::numeric_limits<float>::infinity();
    }
    static thread_local std::vector<float> sorted;
    sorted.assign(scores, scores + count);
    std::nth_element(sorted.begin(), sorted.begin() + p.top_k - 1, sorted.end(), std::greater<float>());
    const float least = sorted[p.top_k - 1];
    int64_t equal = std::count(sorted.begin(), sorted.begin() + p.top_k, least);  // that are chosen, the first ones
    for (int64_t i = 0; i < count; ++i) {
      if (scores[i] > least || (scores[i] == least && equal-- > 0)) add(i);
    }
  }
  std::fill(to, end, table[0] * block_size);
}

Tensor select_tokens(const Tensor& query, const Tensor& weights, const Tensor& cache, const Tensor& block_tables,
                     const Tensor& sequence_lengths, const Tensor& query_starts, int64_t top_k) {
  const int64_t tokens = query.size(0), heads = query.size(1), head_dim = query.size(2);
  STD_TORCH_CHECK(cache.size(2) == 1 && block_tables.stride(1) == 1 && query.stride(2) == 1 && top_k > 0);
  STD_TORCH_CHECK(weights.size(0) == tokens && weights.size(1) == heads && weights.stride(1) == 1 &&
                      weights.scalar_type() == ScalarType::Float,
                  "weights must be float32 [tokens, heads]");
  const Tensor lengths = as_contiguous(sequence_lengths), starts = as_contiguous(query_starts);
  const int64_t *length = lengths.const_data_ptr<int64_t>(), *start = starts.const_data_ptr<int64_t>();
  Tensor out = empty({tokens, top_k}, ScalarType::Long);
  int64_t* const slots = out.mutable_data_ptr<int64_t>();
  Problem p{View(query), View(weights), View(cache), View(block_tables), Places(cache, head_dim), heads, head_dim, top_k,
            {},          {},            nullptr};
  int64_t needed = 0, capacity = 0;
  const auto finish = [&] {  // the tiles so far
    if (needed > capacity) p.scores = std::make_unique_for_overwrite<float[]>(capacity = needed);
    parallel_for(0, std::ssize(p.items), 1, [&](int64_t begin, int64_t end) {
      for_form(p, [&]<typename Form, typename C, typename T>() {
        for (int64_t i = begin; i < end; ++i) compute_scores<Form, C, T>(p, p.items[i]);
      });
    });
    int64_t queries = 0;
    std::vector<std::pair<int64_t, int64_t>> places;  // tile and query
    for (int64_t tile = 0; tile < std::ssize(p.tiles); ++tile) {
      for (int64_t query = 0; query < p.tiles[tile].queries; ++query, ++queries) places.push_back({tile, query});
    }
    parallel_for(0, queries, grain(p.tiles.empty() ? 1 : 4 * p.tiles[0].keys), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const auto [number, query] = places[i];
        const Tile& tile = p.tiles[number];
        choose(p, p.table(tile.request), p.scores.get() + tile.scores + query * tile.stride(),
               tile.keys - tile.queries + 1 + query, slots + (tile.token + query) * top_k);
      }
    });
    p.tiles.clear(), p.items.clear(), needed = 0;
  };
  for (int64_t request = 0; request < lengths.size(0); ++request) {
    for (int64_t token = start[request]; token < start[request + 1];) {
      const int64_t seen = length[request] - start[request + 1] + token + 1;  // keys of this query
      if (seen <= top_k) {
        choose(p, p.table(request), nullptr, seen, slots + token++ * top_k);
        continue;
      }
      const int64_t row = seen + kTileQueries + kLanes;
      if (needed && needed + row > kScores) finish();
      const int64_t fits = std::max<int64_t>(1, (kScores - needed) / row);
      const int64_t queries = std::min({kTileQueries, start[request + 1] - token, fits});
      Tile tile{request, token, queries, seen + queries - 1, needed};
      needed += queries * tile.stride();
      for (int64_t begin = 0; begin < tile.keys; begin += kStepKeys) p.items.push_back({std::ssize(p.tiles), begin});
      p.tiles.push_back(tile);
      token += queries;
    }
  }
  if (!p.tiles.empty()) finish();
  return out;
}

}  // namespace

QUIRE_OPERATION(select_tokens,
                "(Tensor query, Tensor weights, Tensor cache, Tensor block_tables, Tensor sequence_lengths, "
                "Tensor query_starts, int top_k) -> Tensor")

}  // namespace quire
