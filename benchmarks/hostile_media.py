"""Damaged images, videos and PDFs, at random, through confined decoders: nothing may die but the process of an item.

.venv/bin/python benchmarks/hostile_media.py [--seconds N] [--seed N] [--keep FOLDER]

Takes the files of `tests/integration/server/media/test_hostile_files.py`, changes, removes, repeats or swaps some of
their bytes, and has them decoded. Prints what they got, the longest time, and the memory of the process that forks for
each item, before and after. Fails if that process died. `--keep` keeps the files that needed too much time or memory,
or that killed their process.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil

from quire.server.media.decoders import Decoders
from quire.server.media.decoding import Decoded, DecodeOrder
from quire.server.media.types import MediaSettings

sys.path.append(str(Path(__file__).resolve().parent.parent))
from tests.fakes.processors import write_processor
from tests.integration.server.media.test_hostile_files import ATTACKS, MAX_BYTES, MAX_PIXELS, TOO_MUCH, at

MAX_FILE_BYTES = 200_000
WORDS = (bytes(4), b"\xff" * 4, b"\x7f\xff\xff\xff", b"\xff\xff\xff\x7f", b"\x80\0\0\0")


def changed(data: bytes, rng: random.Random) -> bytes:
    """A file that differs in a few places."""
    file = bytearray(data)
    for _ in range(rng.choice((1, 2, 5, 20))):
        at, length = rng.randrange(len(file)), rng.randrange(1, 200)
        match rng.randrange(10):
            case 0 | 1 | 2 | 3 | 4 | 5:
                file[at] = rng.choice((0, 127, 128, 255, rng.randrange(256)))
            case 6 | 7:
                file[at : at + 4] = rng.choice(WORDS)
            case 8:
                file[at:at] = file[rng.randrange(len(file)) :][:length]
            case _:
                del file[at : at + length]
        if len(file) < 8:
            break
    return bytes(file)


async def decode(arguments: argparse.Namespace, folder: Path) -> None:
    """Decode files until the time is over."""
    rng, results, longest = random.Random(arguments.seed), Counter[tuple[str, str]](), 0.0
    seeds = [each for each in ATTACKS.values() if 8 < len(each.data) < MAX_FILE_BYTES]
    decoders = Decoders(MediaSettings(model=str(folder)))
    await decoders.ready()
    process = psutil.Process().children()[-1]
    before, end = process.memory_info().rss, time.monotonic() + arguments.seconds
    while (start := time.monotonic()) < end:
        seed = rng.choice(seeds)
        data, target = changed(seed.data, rng), os.memfd_create("result")
        order = DecodeOrder(seed.kind, {}, 5, MAX_PIXELS, MAX_BYTES, seed.page)
        found = await decoders.decode(data, order, at(target))
        os.close(target)
        longest = max(longest, time.monotonic() - start)
        reason = "decoded" if isinstance(found, Decoded) else "".join(c for c in found.reason if not c.isdigit())[:70]
        kind = seed.kind if seed.page is None else "document"
        results[kind, reason] += 1
        if arguments.keep and TOO_MUCH in reason:
            Path(arguments.keep, f"{results.total()}.{kind}").write_bytes(data)
    for (what, reason), count in results.most_common():
        print(f"{count:9,} {what}: {reason}")
    after = process.memory_info().rss  # fails if it died
    print(f"{results.total():9,} files; longest {longest:.1f} s; memory {before >> 20} MiB, then {after >> 20} MiB")
    decoders.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", metavar="FOLDER")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(decode(arguments, write_processor("qwen2_vl", Path(folder))))


if __name__ == "__main__":
    main()
