// Loops shared by threads: as at::parallel_for, but nobody waits for a thread that has not begun.
//
// OpenMP gives each thread its share beforehand and ends with a barrier, so that an operation takes as long as the
// thread that the system lets run last: on a busy machine, a hundred times as long. Here the range is cut into pieces,
// which the threads take as they come. The caller takes pieces too, all of them where the others are late, and waits
// only for pieces that are under way.

#pragma once

#include <type_traits>

#include "common.h"

namespace quire {

// Calls `work(body, piece)` for the pieces from 0 on, each by some thread; what it throws comes out. One loop at a time
// is shared: another that comes meanwhile, or from within, runs on its own thread.
void share(int64_t pieces, int threads, void (*work)(const void* body, int64_t piece), const void* body);

constexpr int64_t kPieces = 2;  // for each thread: more cost what they bring

// Calls `body(begin, end)` for ranges of at least `least` that make up the whole.
template <typename Body>
void parallel_for(int64_t begin, int64_t end, int64_t least, const Body& body) {
  const int64_t size = end - begin, threads = at::get_num_threads();
  if (size <= 0) return;
  const int64_t pieces = std::min(threads * kPieces, size / std::max<int64_t>(1, least));
  if (pieces <= 1 || threads == 1) return body(begin, end);
  const auto piece = [&](int64_t number) { body(begin + number * size / pieces, begin + (number + 1) * size / pieces); };
  share(pieces, static_cast<int>(threads),
        [](const void* each, int64_t number) { (*static_cast<const decltype(piece)*>(each))(number); }, &piece);
}

}  // namespace quire
