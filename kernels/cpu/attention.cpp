// Attention over the paged KV cache, after FlashAttention-2 (Dao 2023) and its split over keys for decodes.
//
// A *tile* is up to kTileRows rows (queries × the heads that share a KV head) of one request. An *item* is a tile and a
// range of keys, and the unit of work of a thread. It processes the keys in steps: packs them into words (packed_kv.h),
// with keys transposed, which stay in the cache while all rows of the tile are computed, kBlockRows at a time
// (`attend_gathered`). For a tile of at most kDirectRows rows, as decodes have, packing does not pay off: it computes
// directly from the cache, kDirectKeys at a time (`attend_directly`). The lengths of items depend on the request alone,
// so neither threads nor other requests change a result. If a tile has several items, each stores its unnormalized
// sums, largest score and weight, which `merge` combines.
//
// Sparse attention is a decode for each query, with a table of slots instead of blocks.
//
// With a window, items start at the first key that the tile's first query attends to. Soft-capping, ALiBi and biases
// change scores before the softmax (`adjust`). A sink is a key without a value, which a tile's first item counts in
// advance.
//
// With keys and values in 4 bits (int4_kv.h), an item is a range of whole blocks, before that of the tile's last query.
// A tile's last item then has the blocks of its queries, from the recent ones.
//
// Scores are exponents of 2: they are multiplied by `scale · log2 e`.

#include <algorithm>
#include <atomic>
#include <numeric>

#include "attention_codes.h"
#include "attention_rows.h"

namespace quire {
namespace {

// Prepares the rows of an item's tile, before its first keys.
void start(const Problem& p, const Item& item, Scratch& scratch) {
  const Tile& tile = p.tiles[item.tile];
  const int64_t rows = p.rows(tile);
  scratch.fit(std::max(rows, kTileRows), p.keys, p.head_dim, p.padded);
  for_type(p.query.scalar_type(), [&]<typename T>() { load_queries<T>(p, tile, scratch.queries); });
  for_form(p, [&]<typename Form, typename>() { Form::pack(scratch.queries, rows * p.head_dim, scratch.queries); });
  std::fill_n(scratch.sums, rows * p.padded, 0.0f);
  const bool has_sink = p.sinks && item.split == 0;
  p.for_rows(tile, [&](int64_t row, int64_t query, int64_t head) {
    const int64_t token = p.token(tile) + query;
    const int64_t position = p.position(tile) + query;
    Row& to = scratch.rows[row] = {Floats{has_sink ? 1.0f : 0.0f}, kLowest, p.slopes ? p.slopes[head] : 0.0f,
                                   position, p.begin(position), p.end(tile, query), nullptr};
    if (has_sink) to.largest = std::max(p.sinks[token * p.sinks_stride + head] * kLog2E, kLowest);
    if (p.biases) {
      const int64_t offset = token * p.biases->stride(0) + head * p.biases->stride(1);
      to.biases = p.biases->data<const char>() + offset * p.biases->element_size();
    }
  });
}

// Attends to the rows of the cache. `following`: the next item of this thread, if any.
void attend_rows(Problem& p, const Item& item, const Item* following, Scratch& scratch) {
  const Tile& tile = p.tiles[item.tile];
  const int64_t rows = p.rows(tile);
  const bool is_direct = rows <= kDirectRows && p.head_dim % kLanes == 0;
  KeyRange range(p);
  const int64_t keys = item.end - item.begin, most = is_direct ? kDirectKeys : p.keys;
  const int64_t steps = std::max<int64_t>(1, (keys + most - 1) / most);  // there may be no keys
  const int64_t step = is_direct ? vectors((keys + steps - 1) / steps) * kLanes : p.keys;
  find_rows(p, tile, item.begin, std::min(step, keys), range.rows);
  for (int64_t key = item.begin; key < item.end; key += step, std::swap(range.rows, range.next)) {
    range.first = key;
    range.count = std::min(step, item.end - key);
    const Item* next = key + step < item.end ? &item : following;
    const int64_t begin = next == &item ? key + step : next ? next->begin : 0;
    range.num_next = next ? std::min(step, next->end - begin) : 0;
    if (next) find_rows(p, p.tiles[next->tile], begin, range.num_next, range.next);
    for_form(p, [&]<typename Form, typename C>() {
      if (is_direct) {
        static constexpr auto kDirect = direct<Form, C>(std::make_integer_sequence<int, kDirectRows>());
        kDirect[rows - 1](p, scratch, range);
      } else {
        gather<Form, C>(p, range, scratch.keys, scratch.values);
        attend_gathered<Form>(p, scratch, range, rows);
      }
    });
  }
}

// Attends to blocks in 4 bits and, with a tile's last item, to the queries' own blocks.
void attend_blocks(Problem& p, const Item& item, Scratch& scratch) {
  const Int4Layout& layout = p.pages->layout;
  const View& pages = p.pages->cache;
  const Tile& tile = p.tiles[item.tile];
  const int64_t rows = p.rows(tile), size = layout.block_size;
  const int64_t* table = p.tables.data<const int64_t>() + tile.request * p.tables.stride(0);
  const uint8_t* head = pages.data<const uint8_t>() + tile.head * pages.stride(2);
  const bool is_direct = rows <= kDirectRows && p.head_dim % (2 * kLanes) == 0 &&
                         (size == kLanes || layout.key_bytes % kLanes == 0);
  const int64_t most = is_direct ? kDirectKeys : p.keys, step = most / size * size;
  KeyRange range(p);
  Int4Block blocks[kDirectKeys / 2];
  for (int64_t row = 0; row < rows; ++row) scratch.rows[row].end = scratch.rows[row].position / size * size;
  for (int64_t key = item.begin; key < item.end; key += step) {
    range.first = key, range.count = std::min(step, item.end - key);
    const int64_t count = range.count / size;
    for (int64_t i = 0; i < count; ++i) blocks[i] = Int4Block(head + table[key / size + i] * pages.stride(1), layout);
    if (is_direct) {
      static constexpr auto kDirect = direct_codes(std::make_integer_sequence<int, kDirectRows>());
      kDirect[rows - 1](p, scratch, range, blocks);
    } else {
      gather_codes(p, blocks, count, scratch);
      attend_gathered<Numbers>(p, scratch, range, rows);
    }
  }
  if (item.split + 1 < tile.splits) return;
  for (int64_t row = 0; row < rows; ++row) {
    Row& own = scratch.rows[row];
    own.begin = std::max(own.begin, own.end), own.end = own.position + 1;
  }
  const int64_t position = p.position(tile), end = position + tile.queries, bytes = p.cache.element_size();
  const char* recent = p.cache.data<const char>() + tile.head * p.cache.stride(2) * bytes;
  range.num_next = 0;
  for (int64_t key = position / size * size; key < end; key += most) {
    range.first = key, range.count = std::min(most, end - key);
    for (int64_t i = 0; i < range.count; ++i) {
      const int64_t query = std::max<int64_t>(0, (key + i) / size * size - position);  // the first one of the block
      const int64_t block = std::max<int64_t>(0, p.pages->recent_slots[p.token(tile) + query]) / size;
      range.rows[i] = p.places.row(recent + block * p.cache.stride(1) * bytes, (key + i) % size);
    }
    for_form(p, [&]<typename Form, typename C>() {
      if (is_direct) {
        static constexpr auto kDirect = direct<Form, C>(std::make_integer_sequence<int, kDirectRows>());
        kDirect[rows - 1](p, scratch, range);
      } else {
        gather<Form, C>(p, range, scratch.keys, scratch.values);
        attend_gathered<Form>(p, scratch, range, rows);
      }
    });
  }
}

// `following`: as of `attend_rows`.
void attend(Problem& p, const Item& item, const Item* following, Scratch& scratch) {
  const Tile& tile = p.tiles[item.tile];
  const int64_t rows = p.rows(tile);
  start(p, item, scratch);
  if (p.pages) attend_blocks(p, item, scratch);
  else attend_rows(p, item, following, scratch);
  if (tile.splits == 1) {
    for_type(p.query.scalar_type(), [&]<typename T>() {
      p.for_rows(tile, [&](int64_t row, int64_t query, int64_t head) {
        const Row& of = scratch.rows[row];
        store_row<T>(p, tile, query, head, scratch.sums + row * p.padded, of.largest, sum(of.weight));
      });
    });
    return;
  }
  float* partial = p.partials.get() + tile.partial + item.split * p.partial_size(tile);
  partial = std::copy_n(scratch.sums, rows * p.padded, partial);
  for (int64_t row = 0; row < rows; ++row) {
    partial[row] = scratch.rows[row].largest;
    partial[rows + row] = sum(scratch.rows[row].weight);
  }
}

template <typename T>
void merge(Problem& p, const Tile& tile) {
  const int64_t rows = p.rows(tile), size = p.partial_size(tile);
  float* first = p.partials.get() + tile.partial;
  p.for_rows(tile, [&](int64_t row, int64_t query, int64_t head) {
    const int64_t to_largest = rows * p.padded + row, to_weight = to_largest + rows;
    float largest = kLowest, weight = 0.0f;
    for (int64_t split = 0; split < tile.splits; ++split) largest = std::max(largest, first[split * size + to_largest]);
    float* sums = first + row * p.padded;
    for (int64_t split = 0; split < tile.splits; ++split) {
      const float* part = first + split * size;
      const float factor = exp2(broadcast(part[to_largest] - largest))[0];
      weight += part[to_weight] * factor;
      for (int64_t d = 0; d < p.padded; d += kLanes) {
        const Floats x = load(part + row * p.padded + d) * factor;
        store(sums + d, split ? load(sums + d) + x : x);
      }
    }
    store_row<T>(p, tile, query, head, sums, largest, weight);
  });
}

// Orders tiles from a request's last to its first: the longest items come first, so that threads finish together.
int64_t plan(Problem& p, int64_t begin_request, int64_t end_request, int64_t kv_heads) {
  int64_t work = 0, partials = 0;
  const int64_t width = std::max<int64_t>(1, kTileRows / p.group);
  for (int64_t request = begin_request; request < end_request; ++request) {
    const int64_t count = p.starts[request + 1] - p.starts[request];
    const int64_t tiles = (count + width - 1) / width * kv_heads;
    if (count == 0) continue;
    for (int64_t first = (count - 1) / width * width; first >= 0; first -= width) {
      for (int64_t head = 0; head < kv_heads; ++head) {
        Tile tile{request, head, first, std::min(width, count - first), 1, partials};
        int64_t begin = p.begin(p.position(tile)), end = p.end(tile, tile.queries - 1), rows = p.rows(tile);
        int64_t length = std::max(rows <= kFewRows || count == 1 ? kSplitFewRows : kSplitManyRows,
                                  (end - begin) * tiles / kPlenty);
        if (p.pages) {  // whole blocks, before that of the last query
          const int64_t size = p.pages->layout.block_size;
          end = (end - 1) / size * size, begin = std::min(begin / size * size, end);
          length = (length + size - 1) / size * size;
        }
        tile.splits = std::max<int64_t>(1, (end - begin + length - 1) / length);
        if (tile.splits > 1) partials += tile.splits * p.partial_size(tile);
        work += rows * (end - begin) * p.head_dim;
        const int64_t number = static_cast<int64_t>(p.tiles.size());
        for (int64_t split = 0; split < tile.splits; ++split) {
          const int64_t from = begin + split * length;
          p.items.push_back({number, split, from, std::min(end, from + length)});
        }
        p.tiles.push_back(tile);
      }
    }
  }
  if (partials) p.partials = std::make_unique_for_overwrite<float[]>(partials);
  return work;
}

// Computes the requests from `first` to `last`.
void compute(Problem& p, int64_t first, int64_t last) {
  for_form(p, [&]<typename Form, typename>() {
    p.keys = std::clamp(kPackedKvWords / (2 * p.padded / Form::kPerWord) / kLanes * kLanes, kLeastKeys, kMostKeys);
  });
  if (p.pages) p.keys = std::max(p.keys, vectors(p.pages->layout.block_size) * kLanes);
  const int64_t work = plan(p, first, last, p.cache.size(2));
  const int64_t threads =
      std::min<int64_t>({num_threads(), 1 + work / kThreadWork, static_cast<int64_t>(p.items.size())});
  std::atomic<size_t> next = 0;
  parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    static thread_local Scratch scratch;
    for (size_t item = next++, following; item < p.items.size(); item = following) {
      const bool is_plenty = next + threads < p.items.size();  // else another thread may be free sooner
      following = is_plenty ? next++ : p.items.size();
      attend(p, p.items[item], following < p.items.size() ? &p.items[following] : nullptr, scratch);
      if (!is_plenty) following = next++;
    }
  });
  if (!p.partials) return;
  parallel_for(0, p.tiles.size(), grain(p.padded * p.group), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (p.tiles[i].splits > 1) for_type(p.query.scalar_type(), [&]<typename T>() { merge<T>(p, p.tiles[i]); });
    }
  });
}

void check_logs(const std::optional<Tensor>& logs, int64_t tokens, int64_t heads) {
  STD_TORCH_CHECK(!logs || (logs->numel() == tokens * heads && logs->is_contiguous() &&
                            logs->scalar_type() == ScalarType::Float),
                  "logs must be float32 [tokens, heads]");
}

Tensor attend_all(const Tensor& query, const Tensor& cache, const Tensor& block_tables,
                  const Tensor& sequence_lengths, const Tensor& query_starts, double scale, int64_t window,
                  double softcap, const std::optional<Tensor>& sinks, const std::optional<Tensor>& slopes,
                  const std::optional<Tensor>& biases, const std::optional<Tensor>& ends,
                  std::optional<Tensor> logs,
                  const std::optional<Int4Pages>& pages) {
  const int64_t tokens = query.size(0), heads = query.size(1), head_dim = query.size(2), kv_heads = cache.size(2);
  STD_TORCH_CHECK(heads % kv_heads == 0 && block_tables.stride(1) == 1);
  STD_TORCH_CHECK(!slopes || (slopes->numel() == heads && slopes->is_contiguous()), "slopes must be [heads]");
  const bool has_own_sinks = sinks && sinks->dim() == 2;
  STD_TORCH_CHECK(!sinks || (sinks->numel() == (has_own_sinks ? tokens : 1) * heads && sinks->is_contiguous()),
                  "sinks must be [heads] or [tokens, heads]");
  STD_TORCH_CHECK(!biases || (biases->dim() == 3 && biases->size(0) == tokens && biases->size(1) == heads &&
                              biases->stride(2) == 1 && biases->scalar_type() == query.scalar_type()),
                  "biases must be [tokens, heads, keys], of the type of the query");
  STD_TORCH_CHECK(!ends || (ends->numel() == tokens && ends->is_contiguous()), "ends must be [tokens]");
  STD_TORCH_CHECK(!logs || ends, "logs need ends");
  check_logs(logs, tokens, heads);
  const Tensor rows = query.stride(2) == 1 ? query : as_contiguous(query);
  const Tensor lengths = as_contiguous(sequence_lengths), starts = as_contiguous(query_starts);
  Tensor out = empty(query.sizes(), query.scalar_type());
  Problem p{View(rows),
            View(cache),
            View(block_tables),
            View(out),
            lengths.const_data_ptr<int64_t>(),
            starts.const_data_ptr<int64_t>(),
            static_cast<float>(scale) * kLog2E,
            static_cast<float>(softcap),
            window ? window : kNoWindow,
            sinks ? sinks->const_data_ptr<float>() : nullptr,
            slopes ? slopes->const_data_ptr<float>() : nullptr,
            has_own_sinks ? heads : 0,
            biases ? std::optional(View(*biases)) : std::nullopt,
            ends ? ends->const_data_ptr<int64_t>() : nullptr,
            logs ? logs->mutable_data_ptr<float>() : nullptr,
            false,
            Places(cache, head_dim),
            heads / kv_heads,
            head_dim,
            vectors(head_dim) * kLanes,
            0,
            {},
            {},
            nullptr,
            pages};
  compute(p, 0, lengths.size(0));
  return out;
}

Tensor paged_attention(const Tensor& query, const Tensor& cache, const Tensor& block_tables,
                       const Tensor& sequence_lengths, const Tensor& query_starts, double scale, int64_t window,
                       double softcap, const std::optional<Tensor>& sinks, const std::optional<Tensor>& slopes,
                       const std::optional<Tensor>& biases, const std::optional<Tensor>& ends,
                       std::optional<Tensor> logs) {
  return attend_all(query, cache, block_tables, sequence_lengths, query_starts, scale, window, softcap, sinks, slopes,
                    biases, ends, logs, std::nullopt);
}

// See `quire.kernels.int4_kv`.
Tensor int4_attention(const Tensor& query, const Tensor& cache, const Tensor& block_tables,
                      const Tensor& sequence_lengths, const Tensor& query_starts, double scale, const Tensor& recent,
                      const Tensor& recent_slots, int64_t window, double softcap, const std::optional<Tensor>& sinks,
                      const std::optional<Tensor>& slopes, const std::optional<Tensor>& biases) {
  const Int4Layout layout = Int4Layout::of(cache);
  const Tensor own = as_contiguous(recent_slots);
  STD_TORCH_CHECK(layout.head_dim == query.size(2) && layout.block_size == recent.size(3) &&
                      layout.block_size <= kDirectKeys && cache.size(2) == recent.size(2) &&
                      own.numel() == query.size(0),
                  "the cache, the recent blocks and the queries do not match");
  return attend_all(query, recent, block_tables, sequence_lengths, query_starts, scale, window, softcap, sinks, slopes,
                    biases, std::nullopt, std::nullopt, Int4Pages{View(cache), layout, own.const_data_ptr<int64_t>()});
}

// See `reference.sparse_attention`.
Tensor sparse_attention(const Tensor& query, const Tensor& cache, const Tensor& slots, const Tensor& counts,
                        double scale, const std::optional<Tensor>& sinks, std::optional<Tensor> logs) {
  const int64_t tokens = query.size(0), heads = query.size(1), head_dim = query.size(2), kv_heads = cache.size(2);
  STD_TORCH_CHECK(heads % kv_heads == 0 && slots.size(0) == tokens && slots.stride(1) == 1);
  STD_TORCH_CHECK(!sinks || (sinks->numel() == heads && sinks->is_contiguous()), "sinks must be [heads]");
  check_logs(logs, tokens, heads);
  const Tensor rows = query.stride(2) == 1 ? query : as_contiguous(query), lengths = as_contiguous(counts);
  Tensor out = empty(query.sizes(), query.scalar_type());
  std::vector<int64_t> starts(tokens + 1);
  std::iota(starts.begin(), starts.end(), 0);
  const int64_t padded = vectors(head_dim) * kLanes;
  const int64_t partials = (slots.size(1) / kSplitFewRows + 1) * heads * (padded + 2);
  const int64_t most = std::max<int64_t>(1, kSparsePartials / partials);
  for (int64_t first = 0; first < tokens; first += most) {
    Problem p{View(rows),
              View(cache),
              View(slots),
              View(out),
              lengths.const_data_ptr<int64_t>(),
              starts.data(),
              static_cast<float>(scale) * kLog2E,
              0.0f,
              kNoWindow,
              sinks ? sinks->const_data_ptr<float>() : nullptr,
              nullptr,
              0,
              std::nullopt,
              nullptr,
              logs ? logs->mutable_data_ptr<float>() : nullptr,
              true,
              Places(cache, head_dim),
              heads / kv_heads,
              head_dim,
              padded,
              0,
              {},
              {},
              nullptr};
    compute(p, first, std::min(tokens, first + most));
  }
  return out;
}

}  // namespace

QUIRE_OPERATION(
    int4_attention,
    "(Tensor query, Tensor cache, Tensor block_tables, Tensor sequence_lengths, Tensor query_starts, float scale, "
    "Tensor recent, Tensor recent_slots, int window=0, float softcap=0.0, Tensor? sinks=None, Tensor? slopes=None, "
    "Tensor? biases=None) -> Tensor")

QUIRE_OPERATION(sparse_attention,
                "(Tensor query, Tensor cache, Tensor slots, Tensor counts, float scale, Tensor? sinks=None, "
                "Tensor(a!)? logs=None) -> Tensor")

QUIRE_OPERATION(
    paged_attention,
    "(Tensor query, Tensor cache, Tensor block_tables, Tensor sequence_lengths, Tensor query_starts, float scale, "
    "int window=0, float softcap=0.0, Tensor? sinks=None, Tensor? slopes=None, Tensor? biases=None, Tensor? ends=None, "
    "Tensor(a!)? logs=None) -> Tensor")

}  // namespace quire
