// Parallel loops: like at::parallel_for, but without waiting for threads that have not started.
//
// OpenMP assigns each thread its share in advance and ends with a barrier, so an operation takes as long as the thread
// that the system schedules last: on a busy machine, a hundred times as long. Here the range is split into pieces that
// threads claim dynamically. The caller claims pieces too (all of them if no other thread is scheduled in time) and
// waits only for pieces in progress.

#pragma once

#include <type_traits>

#include "common.h"

namespace quire {

// Calls `work(body, piece)` for the pieces 0 to pieces - 1, on any thread, and rethrows an exception. One loop at a
// time is shared: a concurrent or nested loop runs on its own thread only.
QUIRE_EXPORT void share(int64_t pieces, int threads, void (*work)(const void* body, int64_t piece), const void* body);

constexpr int64_t kPieces = 2;  // per thread: more cost as much as they gain

// Calls `body(begin, end)` for ranges of at least `least` that together cover the whole.
template <typename Body>
void parallel_for(int64_t begin, int64_t end, int64_t least, const Body& body) {
  const int64_t size = end - begin, threads = num_threads();
  if (size <= 0) return;
  const int64_t pieces = std::min(threads * kPieces, size / std::max<int64_t>(1, least));
  if (pieces <= 1 || threads == 1) return body(begin, end);
  const auto piece = [&](int64_t number) { body(begin + number * size / pieces, begin + (number + 1) * size / pieces); };
  share(pieces, static_cast<int>(threads),
        [](const void* each, int64_t number) { (*static_cast<const decltype(piece)*>(each))(number); }, &piece);
}

}  // namespace quire
