"""One run against one server: find out which requests it accepts, warm it up, measure."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from tqdm import tqdm

from quire.engine.protocol.errors import ConfigError
from quire.server.cli.bench import dataset, drafts
from quire.server.cli.bench.client import BenchClient, BenchRefused, reason
from quire.server.cli.bench.dataset import DatasetOptions, Sample
from quire.server.cli.bench.load import LoadClock, SendTimes, arrival_times, drive
from quire.server.cli.bench.options import ServeOptions
from quire.server.cli.bench.stream import RequestRecord

_FEW_WORDS, _MANY_WORDS = 16, 256
"""Lengths of two texts that show how a server without support for token ids counts tokens."""
_RETRY_SECONDS = 0.2

Make = Callable[[DatasetOptions, int], list[Sample]]
"""Creates samples; the number is added to the seed."""


@dataclass(frozen=True)
class BenchResult:
    """A finished run."""

    model: str
    begun: float
    cpu_seconds: float
    """Processor time of this process, the client."""
    records: list[RequestRecord]
    drafts: dict[str, Any]
    """See `drafts.summarize`; empty if the server made none."""


class BenchRun:
    """A run of `measure`; raises `ConfigError` if the server does not respond as expected."""

    def __init__(self, options: ServeOptions, wanted: DatasetOptions, clock: LoadClock) -> None:
        self._options = options
        self._wanted = wanted
        self._extra = options.extra_fields()
        self._clock = clock

    async def measure(self) -> BenchResult:
        """Send all requests and return their records."""
        options = self._options
        key = options.api_key or os.environ.get("OPENAI_API_KEY")
        with BenchClient(options.url, key, self._clock) as self._client:
            make = await self._wait_until_ready()
            warmups = make(dataclasses.replace(self._wanted, num_prompts=options.num_warmups), dataset.WARMUP_SEED)
            await self._load(warmups, [0.0] * len(warmups), is_shown=False)
            samples = make(self._wanted, 0)
            arrivals = arrival_times(len(samples), options.request_rate, options.burstiness, options.seed)
            print(f"{self._model} at {options.url}{options.path}: {len(samples)} requests {options.load()}", flush=True)
            gc.collect()
            gc.freeze()  # garbage collections during the run need not visit the prompts
            before = await self._draft_counters()
            cpu, begun = time.process_time(), self._clock.now()
            records = await self._load(samples, arrivals, is_shown=not options.disable_tqdm)
            cpu = time.process_time() - cpu
            gc.unfreeze()
            made = drafts.summarize(before, await self._draft_counters())
            return BenchResult(self._model, begun, cpu, records, made)

    async def _draft_counters(self) -> Counter[str]:
        """Empty if the server has no metrics."""
        try:
            return drafts.read((await self._client.get("/metrics")).decode())
        except (OSError, BenchRefused, ValueError):
            return Counter()

    async def _load(self, samples: list[Sample], arrivals: list[float], *, is_shown: bool) -> list[RequestRecord]:
        requests = [self._request(sample) for sample in samples]
        with tqdm(total=len(samples), desc="requests", disable=not is_shown, smoothing=0) as bar:

            async def send(index: int, moments: SendTimes) -> RequestRecord:
                record = await self._client.stream(requests[index], moments, samples[index].prompt_len)
                bar.update()
                return record

            return await drive(send, arrivals, self._options.max_concurrency, self._clock)

    async def _wait_until_ready(self) -> Make:
        """Find out the model and the form of prompts, waiting up to --ready-check-timeout-sec."""
        give_up = time.monotonic() + self._options.ready_check_timeout_sec
        while True:
            try:
                self._model = self._options.model or await self._fetch_model_name()
                return await self._request_method()
            except ConfigError:
                if time.monotonic() >= give_up:
                    raise
            await asyncio.sleep(_RETRY_SECONDS)

    async def _fetch_model_name(self) -> str:
        url = f"{self._options.url}/v1/models"
        try:
            answer = json.loads(await self._client.get("/v1/models"))
            name: str = answer["data"][0]["id"]
        except (OSError, BenchRefused) as error:
            is_locked = isinstance(error, BenchRefused) and error.status in (401, 403)
            remedy = "--api-key" if is_locked else "is the server running? --base-url, --host, --port"
            raise ConfigError(f"cannot read {url}: {reason(error)} ({remedy})") from None
        except (ValueError, LookupError, TypeError):
            raise ConfigError(f"{url} lists no models; choose one with --model") from None
        return name

    async def _request_method(self) -> Make:
        """Use token ids as prompts if the server accepts them, otherwise text of about the right length."""
        options = self._options
        if not options.is_chat:
            record = await self._try(Sample([options.random_vocab_size - 1], 1, 1))
            if record.ok:
                vocab_size = options.random_vocab_size
                return lambda wanted, more: dataset.token_samples(wanted, vocab_size, options.seed + more)
            refusal = record.error
        counts = []
        for words in (_FEW_WORDS, _MANY_WORDS):
            record = await self._try(Sample(dataset.text_of(words), words, 1))
            if not record.ok:
                raise ConfigError(f"{options.url}{options.path} failed the first request: {record.error}")
            counts.append((words, record.prompt_len))
        if not options.is_chat:
            print(f"using text prompts of approximate length, as token ids were rejected ({refusal})", file=sys.stderr)
        words_for = dataset.words_per_token(*counts)
        return lambda wanted, more: dataset.text_samples(wanted, words_for, options.seed + more)

    async def _try(self, sample: Sample) -> RequestRecord:
        now = self._clock.now()
        return await self._client.stream(self._request(sample), SendTimes(now, now, now), sample.prompt_len)

    def _request(self, sample: Sample) -> bytes:
        options = self._options
        body: dict[str, Any] = {"model": self._model, "max_tokens": sample.output_len, "stream": True}
        body["stream_options"] = {"include_usage": True}
        if options.is_chat:
            body["messages"] = [{"role": "user", "content": sample.prompt}]
        else:
            body["prompt"] = sample.prompt
        if options.ignore_eos:
            body["ignore_eos"] = True
        if options.temperature is not None:
            body["temperature"] = options.temperature
        return self._client.prepare(options.path, msgspec.json.encode(body | self._extra))
