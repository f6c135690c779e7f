// Collectives of the ranks on one host, over shared memory that all of them map: a header per rank, then two buffers,
// used alternately, with one slot per rank.
//
// Every rank makes the same calls in the same order, so all ranks agree on how often each rank has *published*. A rank
// writes only to its own header and slots. The reader of a slot waits for the count of its rank. A buffer is reused two
// chunks later, and only after every rank has published in the chunk between, which it does after reading the buffer.
//
// A rank publishes before it waits, so it waits only for ranks that have published less. Each rank counts the time for
// which it waits for others that compute: until they publish, not until it notices, as that depends on itself. The first
// collective of a step does not count, as ranks need not start a step at the same time, nor do broadcasts, for which the
// first rank may have more to do than the others.

#include "threads.h"

#ifdef __linux__

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstddef>
#include <cstring>
#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace quire {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kMaxRanks = 64;
constexpr int64_t kLine = 128;  // two cache lines: they are fetched in pairs
// One pass, in which every rank reads everything, saves a wait. It is faster up to this many elements to read.
constexpr int64_t kOnePass = 1 << 14;
// Least bytes for one thread.
constexpr int64_t kThreadBytes = 1 << 17;
// Elements summed at a time.
constexpr int64_t kBlock = 512;
// Spins before yielding the core, which costs little if no other thread wants it, and lets the awaited rank run if it
// shares the core; and how long to do so before sleeping.
constexpr int kSpins = 16;
constexpr std::chrono::microseconds kYield{200};

// Zero before the first call.
struct Header {
  // Read by all ranks.
  alignas(kLine) std::atomic<uint32_t> published;
  std::atomic<uint32_t> sleepers;  // ranks that sleep until `published` changes
  int64_t published_at[2];         // when the last even and the last odd count were published, in nanoseconds
  // Used by its own rank only.
  alignas(kLine) uint32_t safe;  // the count that all ranks must reach before the next chunk is written
  uint32_t buffer;
  uint32_t has_met;  // whether this rank has met the others in the present step; set to 0 when a step starts
  int64_t waited;    // nanoseconds
  int64_t spent;     // nanoseconds in collectives
};
static_assert(std::atomic<uint32_t>::is_always_lock_free);
static_assert(sizeof(Header) == 2 * kLine && offsetof(Header, has_met) == kLine + 8);  // as in shared.py
static_assert(offsetof(Header, waited) == kLine + 16 && offsetof(Header, spent) == kLine + 24);

int64_t nanoseconds(Clock::time_point time) { return std::chrono::nanoseconds(time.time_since_epoch()).count(); }

void pause() {
#ifdef __x86_64__
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// One collective.
class Group {
 public:
  Group(const Tensor& memory, int64_t rank, int64_t size, double timeout)
      : base_(memory.mutable_data_ptr<uint8_t>()), rank_(rank), size_(size), timeout_(timeout) {
    STD_TORCH_CHECK(size <= kMaxRanks && rank >= 0 && rank < size, "invalid rank ", rank, " of ", size);
    const int64_t headers = size * static_cast<int64_t>(sizeof(Header));
    slot_bytes_ = (memory.numel() - headers) / (2 * size) / kLine * kLine;
    STD_TORCH_CHECK(slot_bytes_ >= size * kLine, "the segment is too small");
    slots_ = base_ + headers;
  }
  Group(const Group&) = delete;
  ~Group() { own().spent += nanoseconds(Clock::now()) - nanoseconds(started_); }

  int64_t rank() const { return rank_; }
  int64_t size() const { return size_; }
  int64_t slot_bytes() const { return slot_bytes_; }

  // Starts the next chunk, in which this rank may then write its slot.
  void begin(bool is_broadcast = false) {
    counts_ = !is_broadcast && own().has_met;
    if (!is_broadcast) own().has_met = 1;
    await_all(own().safe);
    own().buffer ^= 1;
    buffer_ = slots_ + own().buffer * size_ * slot_bytes_;
    first_ = true;
  }

  uint8_t* slot(int64_t rank) const { return buffer_ + rank * slot_bytes_; }

  // Lets other ranks read what this rank has written; returns the count to await.
  uint32_t publish() {
    Header& header = own();
    const uint32_t count = header.published.load(std::memory_order_relaxed) + 1;
    // No rank is two counts ahead of another one that reads this.
    if (counts_) header.published_at[count % 2] = nanoseconds(Clock::now());
    // Either a rank that is about to sleep sees the count, or this rank sees the sleeper.
    header.published.store(count, std::memory_order_seq_cst);
    if (header.sleepers.load(std::memory_order_seq_cst) != 0) futex(header, FUTEX_WAKE, INT_MAX, nullptr);
    if (first_) header.safe = count;
    first_ = false;
    return count;
  }

  // Waits until `rank` has published `count`.
  void await(int64_t rank, uint32_t count) {
    Header& other = header(rank);
    if (reached(other, count)) return;
    const Clock::time_point start = Clock::now();
    if (!spin(other, count, start)) sleep(other, rank, count, start);
    if (counts_) own().waited += std::max<int64_t>(0, other.published_at[count % 2] - nanoseconds(start));
  }

  void await_all(uint32_t count) {
    for (int64_t step = 1; step < size_; ++step) await((rank_ + step) % size_, count);
  }

 private:
  Header& header(int64_t rank) const { return reinterpret_cast<Header*>(base_)[rank]; }
  Header& own() const { return header(rank_); }

  static bool reached(const Header& other, uint32_t count) {
    return static_cast<int32_t>(other.published.load(std::memory_order_acquire) - count) >= 0;
  }

  // Returns whether `count` was reached soon enough not to sleep.
  static bool spin(const Header& other, uint32_t count, Clock::time_point start) {
    do {
      for (int i = 0; i < kSpins; ++i) {
        if (reached(other, count)) return true;
        pause();
      }
      sched_yield();
    } while (Clock::now() < start + kYield);
    return false;
  }

  static void futex(Header& other, int operation, uint32_t value, const timespec* timeout) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&other.published), operation, value, timeout, nullptr, 0);
  }

  void sleep(Header& other, int64_t rank, uint32_t count, Clock::time_point start) {
    const Clock::time_point end = start + std::chrono::duration_cast<Clock::duration>(timeout_);
    bool is_late = false;
    other.sleepers.fetch_add(1, std::memory_order_seq_cst);
    for (;;) {
      const uint32_t seen = other.published.load(std::memory_order_seq_cst);
      if (static_cast<int32_t>(seen - count) >= 0) break;
      const auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(end - Clock::now()).count();
      is_late = left <= 0;
      if (is_late) break;
      const timespec wait{static_cast<time_t>(left / 1000000000), static_cast<long>(left % 1000000000)};
      futex(other, FUTEX_WAIT, seen, &wait);
    }
    other.sleepers.fetch_sub(1, std::memory_order_seq_cst);
    STD_TORCH_CHECK(!is_late, "rank ", rank, " of ", size_, " did not join a collective within ", timeout_.count(),
                    " s");
  }

  uint8_t* base_;
  uint8_t* slots_;
  uint8_t* buffer_ = nullptr;
  int64_t rank_, size_, slot_bytes_;
  std::chrono::duration<double> timeout_;
  Clock::time_point started_ = Clock::now();
  bool first_ = false, counts_ = false;
};

void copy(void* to, const void* from, int64_t bytes) {
  parallel_for(0, bytes, kThreadBytes, [&](int64_t begin, int64_t end) {
    std::memcpy(static_cast<uint8_t*>(to) + begin, static_cast<const uint8_t*>(from) + begin, end - begin);
  });
}

// Stores the sum of `parts`, in float32 and in order, to `out`, which may be one of the parts.
template <typename T>
void sum(const T* const* parts, int64_t count, T* out, int64_t length) {
  parallel_for(0, length, kThreadBytes / sizeof(T), [&](int64_t begin, int64_t end) {
    float total[kBlock];
    for (int64_t start = begin; start < end; start += kBlock) {
      const int64_t here = std::min(kBlock, end - start);
      for (int64_t i = 0; i < here; ++i) total[i] = static_cast<float>(parts[0][start + i]);
      for (int64_t part = 1; part < count; ++part) {
        const T* more = parts[part] + start;
        for (int64_t i = 0; i < here; ++i) total[i] += static_cast<float>(more[i]);
      }
      for (int64_t i = 0; i < here; ++i) out[start + i] = static_cast<T>(total[i]);
    }
  });
}

template <typename T>
void reduce_in_one_pass(Group& group, T* x, int64_t length) {
  const T* parts[kMaxRanks];
  group.begin();
  copy(group.slot(group.rank()), x, length * sizeof(T));
  group.await_all(group.publish());
  for (int64_t rank = 0; rank < group.size(); ++rank) {
    parts[rank] = rank == group.rank() ? x : reinterpret_cast<const T*>(group.slot(rank));
  }
  sum(parts, group.size(), x, length);
}

// Each rank sums its share of the chunk into its own slot, at a place that no other rank reads before that.
template <typename T>
void reduce_in_two_passes(Group& group, T* x, int64_t length) {
  const T* parts[kMaxRanks];
  const int64_t line = kLine / sizeof(T);
  const int64_t share = (length + group.size() * line - 1) / (group.size() * line) * line;
  const auto start_of = [&](int64_t rank) { return std::min(length, rank * share); };
  const int64_t start = start_of(group.rank()), end = start_of(group.rank() + 1);
  group.begin();
  T* own_slot = reinterpret_cast<T*>(group.slot(group.rank()));
  copy(own_slot, x, start * sizeof(T));
  copy(own_slot + end, x + end, (length - end) * sizeof(T));
  group.await_all(group.publish());
  for (int64_t rank = 0; rank < group.size(); ++rank) {
    parts[rank] = (rank == group.rank() ? x : reinterpret_cast<const T*>(group.slot(rank))) + start;
  }
  sum(parts, group.size(), x + start, end - start);
  copy(own_slot + start, x + start, (end - start) * sizeof(T));
  const uint32_t summed = group.publish();
  for (int64_t step = 1; step < group.size(); ++step) {
    const int64_t rank = (group.rank() + step) % group.size();
    group.await(rank, summed);
    const int64_t from = start_of(rank), to = start_of(rank + 1);
    copy(x + from, reinterpret_cast<const T*>(group.slot(rank)) + from, (to - from) * sizeof(T));
  }
}

void shared_all_reduce(const Tensor& memory, int64_t rank, int64_t size, double timeout, Tensor x) {
  Group group(memory, rank, size, timeout);
  STD_TORCH_CHECK(x.is_contiguous());
  for_type(x.scalar_type(), [&]<typename T>() {
    T* data = x.mutable_data_ptr<T>();
    const int64_t length = x.numel(), bytes = sizeof(T);
    if (length * (size - 1) <= kOnePass && length * bytes <= group.slot_bytes()) {
      if (length > 0) reduce_in_one_pass(group, data, length);
      return;
    }
    const int64_t chunk = group.slot_bytes() / bytes;
    for (int64_t start = 0; start < length; start += chunk) {
      reduce_in_two_passes(group, data + start, std::min(chunk, length - start));
    }
  });
}

Tensor shared_all_gather(const Tensor& memory, int64_t rank, int64_t size, double timeout, const Tensor& x) {
  Group group(memory, rank, size, timeout);
  STD_TORCH_CHECK(x.is_contiguous() && x.dim() > 0);
  std::vector<int64_t> shape = x.sizes().vec();
  const int64_t row = shape.back() * x.element_size(), bytes = x.numel() * static_cast<int64_t>(x.element_size());
  shape.back() *= size;
  Tensor out = empty(shape, x.scalar_type());
  const auto* from = static_cast<const uint8_t*>(x.const_data_ptr());
  auto* to = static_cast<uint8_t*>(out.mutable_data_ptr());
  for (int64_t begin = 0; begin < bytes; begin += group.slot_bytes()) {
    const int64_t end = std::min(begin + group.slot_bytes(), bytes);
    group.begin();
    copy(group.slot(rank), from + begin, end - begin);
    const uint32_t count = group.publish();
    for (int64_t step = 0; step < size; ++step) {
      const int64_t other = (rank + step) % size;
      if (other != rank) group.await(other, count);
      const uint8_t* part = other == rank ? from + begin : group.slot(other);
      // Pieces of rows; the first and the last may be incomplete.
      for (int64_t at = begin; at < end;) {
        const int64_t column = at % row, length = std::min(row - column, end - at);
        std::memcpy(to + (at / row * size + other) * row + column, part + (at - begin), length);
        at += length;
      }
    }
  }
  return out;
}

void shared_broadcast(const Tensor& memory, int64_t rank, int64_t size, double timeout, Tensor x) {
  Group group(memory, rank, size, timeout);
  STD_TORCH_CHECK(x.is_contiguous());
  const int64_t bytes = x.numel() * static_cast<int64_t>(x.element_size());
  auto* data = static_cast<uint8_t*>(x.mutable_data_ptr());
  for (int64_t begin = 0; begin < bytes; begin += group.slot_bytes()) {
    const int64_t length = std::min(group.slot_bytes(), bytes - begin);
    group.begin(/*is_broadcast=*/true);
    if (rank == 0) copy(group.slot(0), data + begin, length);
    const uint32_t count = group.publish();
    if (rank == 0) continue;
    group.await(0, count);
    copy(data + begin, group.slot(0), length);
  }
}

}  // namespace

QUIRE_OPERATION(shared_all_reduce, "(Tensor memory, int rank, int size, float timeout, Tensor(a!) x) -> ()")
QUIRE_OPERATION(shared_all_gather, "(Tensor memory, int rank, int size, float timeout, Tensor x) -> Tensor")
QUIRE_OPERATION(shared_broadcast, "(Tensor memory, int rank, int size, float timeout, Tensor(a!) x) -> ()")

}  // namespace quire

#endif  // __linux__
