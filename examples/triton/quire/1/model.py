"""A model of Triton's Python backend around `AsyncLLM`: it streams the text for a prompt.

    pip install /path/to/quire # into the environment of `python3`, which the backend uses; Triton 24.10 needs NumPy 1
    tritonserver --model-repository examples/triton --disable-auto-complete-config
    curl localhost:8000/v2/models/quire/generate_stream \\
        -d '{"text_input": "Quire is", "stream": true, "parameters": {"temperature": 0, "max_tokens": 20}}'

Requests are the same as for Triton's vLLM backend, with the inputs and the output that config.pbtxt names. That file
also has the model and the options of the engine, and declares that the model is decoupled: the requests run together,
and each has any number of responses.
"""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import msgspec
import numpy as np
import triton_python_backend_utils as pb_utils

from quire import AsyncLLM, SamplingParams


class TritonPythonModel:
    """The class that Triton calls, from one thread; the engine's event loop has its own."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the model; an error gives the reason why the model is not ready."""
        options = json.loads(json.loads(args["model_config"])["parameters"]["engine_args"]["string_value"])
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._llm = AsyncLLM(**options)
        asyncio.run_coroutine_threadsafe(self._llm.start(), self._loop).result()

    def execute(self, requests: list[Any]) -> None:
        """Start the requests, which respond as tokens come; they join the engine's running batch."""
        for request in requests:
            asyncio.run_coroutine_threadsafe(self._answer(request), self._loop)

    async def _answer(self, request: Any) -> None:
        sender = request.get_response_sender()
        try:
            prompt = _value(request, "text_input", b"").decode()
            params = _sampling_params(_value(request, "sampling_parameters", None) or request.parameters())
            streams, sent = _value(request, "stream", False), 0
            before = "" if _value(request, "exclude_input_in_output", streams) else prompt
            async for result in self._llm.generate(prompt, params):
                if sender.is_cancelled():  # the client has left; the end of the loop aborts the request
                    break
                text = before + result.outputs[0].text
                if streams or result.finished:
                    output = pb_utils.Tensor("text_output", np.array([text[sent:].encode()], dtype=np.object_))
                    sender.send(pb_utils.InferenceResponse([output]))
                    sent = len(text)
        except Exception as error:
            sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error))))
        finally:
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def finalize(self) -> None:
        """Abort what runs, and stop the engine."""
        asyncio.run_coroutine_threadsafe(self._llm.shutdown(), self._loop).result()


def _sampling_params(text: str | bytes) -> SamplingParams:
    """Read the fields from JSON; numbers may be strings, as NVIDIA's client sends them."""
    given = json.loads(text or "{}")
    if unknown := given.keys() - set(SamplingParams.__struct_fields__):
        raise ValueError(f"unknown sampling parameters: {', '.join(sorted(unknown))}")
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    return msgspec.convert(given, SamplingParams, strict=False)


def _value(request: Any, name: str, default: Any) -> Any:
    """The value of an input, which may be left out."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return default if tensor is None else tensor.as_numpy().item()
