"""`LLMEngine`: requests step by step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, Self

from quire.engine.config.engine_config import ModelConfig
from quire.engine.protocol.errors import InvalidParameter
from quire.engine.protocol.sampling_params import SamplingParams
from quire.server.config.engine_args import EngineArgs
from quire.server.llm.async_llm import AsyncLLM
from quire.server.llm.lora_request import LoRARequest
from quire.server.llm.metrics_reader import Metric, read_metrics
from quire.server.llm.own_loop import OwnLoop
from quire.server.llm.prompts import PromptLike
from quire.server.serving.llm_outputs import RequestOutput


class LLMEngine(OwnLoop):
    """vLLM's synchronous engine: add requests, then call `LLMEngine.step` while there are unfinished ones.

    Only one thread may use it. Raises `EngineUnavailable` if loading fails.
    """

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._unfinished: dict[str, AsyncIterator[RequestOutput]] = {}
        self._next: dict[str, asyncio.Future[RequestOutput]] = {}
        """Wait for the next result of each request."""
        super().__init__(llm)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **options: Any) -> Self:
        """Load the model of `EngineArgs`; `options` as in `AsyncLLM.from_engine_args`."""
        made = cls.__new__(cls)
        LLMEngine.__init__(made, AsyncLLM.from_engine_args(engine_args, **options))
        return made

    @property
    def model_config(self) -> ModelConfig:
        """The model's configuration, such as `max_model_len` and `architecture`."""
        return self._frontend.config.model

    def get_tokenizer(self) -> Any:
        """Return the model's tokenizer as an object of transformers, which gives the same ids; with its chat template.

        It is a copy: changes to it do not affect the engine.
        """
        return self._wait(self._llm.get_tokenizer())

    def get_metrics(self) -> list[Metric]:
        """Return the metrics that vLLM has, too, under its names, as they are now: `Gauge`, `Counter`, `Vector` and
        `Histogram`.
        """
        return read_metrics(self._frontend.metrics.exposition())

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """Start recording the operations of all ranks, for `LLMEngine.stop_profile` (see `AsyncLLM.start_profile`)."""
        self._wait(self._llm.start_profile(profile_prefix))

    def stop_profile(self) -> str:
        """Stop recording, and return the path of the trace (see `AsyncLLM.stop_profile`)."""
        return self._wait(self._llm.stop_profile())

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Let no later request use what the prefix cache has now; returns True (see `AsyncLLM.reset_prefix_cache`)."""
        return self._wait(self._llm.reset_prefix_cache(reset_running_requests, reset_connector))

    def add_request(
        self,
        request_id: str,
        prompt: PromptLike,
        params: SamplingParams | None = None,
        priority: int = 0,
        *,
        lora_request: LoRARequest | None = None,
        **unsupported: Any,
    ) -> None:
        """Start a request; the arguments are the same as for `AsyncLLM.generate`.

        Raises `InvalidParameter`, also if `LLMEngine.step` has more to return of one with this id, and
        `EngineUnavailable`.
        """
        if request_id in self._unfinished:
            raise InvalidParameter(
                f"a request with the id {request_id} is already running, or `step` has more to return of it",
                "request_id",
            )
        self._unfinished[request_id] = self._wait(
            self._llm.add_request(request_id, prompt, params, priority, lora_request=lora_request, **unsupported)
        )

    def step(self) -> list[RequestOutput]:
        """Wait until requests have new output, and return theirs so far; the last one of a request is `finished`.

        Raises `RequestFailed` and `EngineUnavailable` for a request that has failed; the others go on.
        """
        return self._wait(self._step()) if self._unfinished else []

    async def _step(self) -> list[RequestOutput]:
        for request_id, results in self._unfinished.items():
            if request_id not in self._next:
                self._next[request_id] = asyncio.ensure_future(anext(results))
        await asyncio.wait(self._next.values(), return_when=asyncio.FIRST_COMPLETED)
        outputs: list[RequestOutput] = []
        for request_id in [request_id for request_id, task in self._next.items() if task.done()]:
            error = self._next[request_id].exception()
            if error is not None and outputs:
                break  # the next step raises it
            output = self._next.pop(request_id)
            if error is not None or output.result().finished:
                del self._unfinished[request_id]
            outputs.append(output.result())
        return outputs

    def has_unfinished_requests(self) -> bool:
        """Return whether `LLMEngine.step` has more to return."""
        return bool(self._unfinished)

    def get_num_unfinished_requests(self) -> int:
        """Return the number of requests of which `LLMEngine.step` has more to return."""
        return len(self._unfinished)

    def abort_request(self, request_ids: str | Sequence[str]) -> None:
        """Abort requests, of which `LLMEngine.step` returns nothing more; ignores unknown ids."""
        self._wait(self._abort([request_ids] if isinstance(request_ids, str) else request_ids))

    async def _abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if self._unfinished.pop(request_id, None) is not None:
                if (task := self._next.pop(request_id, None)) is not None:
                    task.cancel()
                await self._llm.abort(request_id)
