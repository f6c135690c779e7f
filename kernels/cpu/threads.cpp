#include "threads.h"

#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

namespace quire {
namespace {

constexpr int kPieceBits = 20, kThreadBits = 10;
constexpr int kSpins = 4000;  // spins before a thread sleeps: longer than the gap between operations

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// The current loop in one word: incrementing it claims a piece. The loop cannot end before a claimed piece is done, so
// the other fields of the loop do not change meanwhile.
struct Ticket {
  uint64_t bits;

  static Ticket of(uint64_t loop, int threads, int64_t pieces) {
    const uint64_t shared = uint64_t(threads) << kPieceBits | uint64_t(pieces);
    return {loop << (2 * kPieceBits + kThreadBits) | shared << kPieceBits};
  }
  int64_t next() const { return bits & ((1 << kPieceBits) - 1); }
  int64_t pieces() const { return bits >> kPieceBits & ((1 << kPieceBits) - 1); }
  int threads() const { return bits >> (2 * kPieceBits) & ((1 << kThreadBits) - 1); }
};

class Pool {
 public:
  void run(int64_t pieces, int threads, void (*work)(const void*, int64_t), const void* body) {
    if (is_running_.test_and_set(std::memory_order_acquire)) {
      for (int64_t piece = 0; piece < pieces; ++piece) work(body, piece);
      return;
    }
    for (; workers_ < threads - 1; ++workers_) std::thread(&Pool::work, this, workers_ + 1).detach();
    work_ = work, body_ = body;
    done_.store(0, std::memory_order_relaxed);
    ticket_.store(Ticket::of(++loops_, threads, pieces).bits);
    if (sleeping_.load() > 0) {
      started_.store(static_cast<uint32_t>(loops_));
      started_.notify_all();
    }
    while (run_piece(0)) {
    }
    for (int spin = 0; done_.load(std::memory_order_acquire) < pieces; ++spin) {
      spin < kSpins ? pause() : std::this_thread::yield();
    }
    const std::exception_ptr error = std::exchange(error_, nullptr);
    is_running_.clear(std::memory_order_release);
    if (error) std::rethrow_exception(error);
  }

 private:
  // Runs the next piece, if there is one for this thread.
  bool run_piece(int thread) {
    Ticket ticket{ticket_.load()};
    do {
      if (ticket.next() >= ticket.pieces() || thread >= ticket.threads()) return false;
    } while (!ticket_.compare_exchange_weak(ticket.bits, ticket.bits + 1));
    try {
      work_(body_, ticket.next());
    } catch (...) {
      const std::lock_guard<std::mutex> one(failing_);
      error_ = std::current_exception();
    }
    done_.fetch_add(1, std::memory_order_acq_rel);
    return true;
  }

  void work(int thread) {
    for (;;) {
      for (int spin = 0; spin < kSpins; ++spin) {
        if (run_piece(thread)) spin = 0;
        pause();
      }
      const uint32_t seen = started_.load();
      sleeping_.fetch_add(1);
      if (!run_piece(thread)) started_.wait(seen);
      sleeping_.fetch_sub(1);
    }
  }

  std::atomic_flag is_running_;
  std::mutex failing_;
  std::atomic<uint64_t> ticket_{0};
  std::atomic<int64_t> done_{0};
  std::atomic<uint32_t> started_{0};
  std::atomic<int> sleeping_{0};
  void (*work_)(const void*, int64_t) = nullptr;
  const void* body_ = nullptr;
  std::exception_ptr error_;
  uint64_t loops_ = 0;
  int workers_ = 0;
};

}  // namespace

void share(int64_t pieces, int threads, void (*work)(const void*, int64_t), const void* body) {
  static Pool* const pool = new Pool;  // never destroyed: its threads run to the end of the process
  pool->run(pieces, threads, work, body);
}

}  // namespace quire
