"""A hybrid model under a crowd that comes and goes: everything is given back, and memory stays flat."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

import psutil
import pytest

from quire.engine.core.engine_core import EngineCoreIO, Inbound
from quire.engine.protocol.engine_core import (
    AbortRequests,
    EngineCoreOutputs,
    EngineCoreRequest,
    Probe,
    ProbeReply,
    ToServer,
)
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.protocol.supervision import Shutdown
from tests.fakes.core_with_ranks import CheckedCore
from tests.fakes.families import write
from tests.fakes.model_logits import configure
from tests.fakes.outputs import each
from tests.fakes.threads import ThreadExecutor

COUNT, AT_ONCE = 1200, 24
LENGTHS = (1, 3, 17, 40, 64, 90, 150)
MOST_TOKENS = 24


class Crowd(EngineCoreIO):
    """Clients: as one request ends the next begins, and some are aborted, in the queue or after some tokens."""

    def __init__(self, rng: random.Random, prompts: list[list[int]]) -> None:
        self.inbox: SimpleQueue[Inbound] = SimpleQueue()
        self.num_clients = 1
        self.prompts = [rng.randrange(len(prompts)) for _ in range(COUNT)]
        self.requests = [
            EngineCoreRequest(
                0,
                str(number),
                prompts[which],
                SamplingParams(temperature=0.0, max_tokens=rng.randrange(1, MOST_TOKENS), ignore_eos=True),
            )
            for number, which in enumerate(self.prompts)
        ]
        self.patience = [rng.choice((0, 1, 5)) if rng.random() < 0.3 else MOST_TOKENS for _ in range(COUNT)]
        """Tokens after which a request is aborted."""
        self.tokens: list[list[int]] = [[] for _ in range(COUNT)]
        self.ends: list[str | None] = [None] * COUNT
        self.resident: list[int] = []
        """Bytes after each 100 requests."""
        self._next = self._ended = 0
        for _ in range(AT_ONCE):
            self._begin()

    def _begin(self) -> None:
        if self._next == COUNT:
            return
        self.inbox.put(self.requests[self._next])
        if self.patience[self._next] == 0:
            self.inbox.put(AbortRequests([str(self._next)]))
        self._next += 1

    def send(self, client: int, message: ToServer) -> None:
        match message:
            case ProbeReply(call_id):
                self.inbox.put(Shutdown() if call_id else Probe(0, 1))
            case EngineCoreOutputs():
                for output in each(message):
                    number = int(output.request_id)
                    assert self.ends[number] is None, "one terminal message"
                    before = len(self.tokens[number])
                    self.tokens[number] += output.token_ids
                    self.ends[number] = output.finish_reason
                    if output.finish_reason is not None:
                        self._end()
                    elif before < self.patience[number] <= len(self.tokens[number]):
                        self.inbox.put(AbortRequests([output.request_id]))

    def _end(self) -> None:
        self._ended += 1
        self._begin()
        if self._ended % 100 == 0:
            self.resident.append(psutil.Process().memory_info().rss)
        if self._ended == COUNT:
            self.inbox.put(Probe(0, 0))


@pytest.mark.slow
def test_a_crowd_with_aborts_leaves_nothing_behind(tmp_path: Path) -> None:
    write("Qwen3-Next", tmp_path)
    config = configure(tmp_path, max_model_len=256, max_num_seqs=16)
    cache = replace(config.cache, num_blocks=40 * config.cache.blocks_per_page)
    scheduler = replace(config.scheduler, max_num_batched_tokens=64, dynamic_chunking=False)
    config = replace(config, cache=cache, scheduler=scheduler)
    rng = random.Random(2)
    prompts = [[rng.randrange(3, 130) for _ in range(length)] for length in LENGTHS for _ in range(4)]
    prompts += [[*prompt, 5, 6, 7] for prompt in prompts[::3]]
    crowd, executor = Crowd(rng, prompts), ThreadExecutor(config)
    try:
        core = CheckedCore(config, executor, crowd)  # checks the books after every step
        core.run()
    finally:
        executor.close()
    stats = core.scheduler.snapshot()
    assert not core.scheduler.requests
    assert core.scheduler.kv.num_free_blocks == cache.num_blocks
    core.scheduler.check_integrity()
    reasons = Counter(crowd.ends)
    assert reasons.keys() == {"length", "abort"}
    assert reasons["abort"] > 100
    assert stats.preemptions > 0
    assert stats.prefix_hit_tokens > 0
    longest: dict[int, list[int]] = {}
    for which, tokens in zip(crowd.prompts, crowd.tokens, strict=True):
        other = longest.setdefault(which, tokens)
        common = min(len(tokens), len(other))
        assert tokens[:common] == other[:common], "the answer does not depend on the company"
        longest[which] = max(tokens, other, key=len)
    settled = crowd.resident[3:]
    assert max(settled) - min(settled) < 8 << 20, [size >> 20 for size in crowd.resident]
