"""OpenVINO GenAI's continuous batching behind `/v1/completions`, for benchmarks/compare.py.

OpenVINO GenAI is a library without a server. This server provides only the needs of the comparison: prompts as token
ids, greedy decoding to the requested length, and streaming. It runs in OpenVINO's environment and otherwise needs only
the standard library.

    VENV/bin/python benchmarks/openvino_server.py MODEL --port 8000 --threads 2
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import itertools
import json
import threading
from typing import Any

genai: Any = importlib.import_module("openvino_genai")
openvino: Any = importlib.import_module("openvino")
numpy: Any = importlib.import_module("numpy")


class Engine:
    """Runs the pipeline in a separate thread, which steps while there are requests."""

    def __init__(self, model: str, properties: dict[str, Any], cache_gib: int, batched_tokens: int | None) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = cache_gib
        if batched_tokens is not None:
            scheduler.max_num_batched_tokens = batched_tokens
        self._pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        self.tokenizer = self._pipeline.get_tokenizer()
        self._requests: dict[int, tuple[Any, asyncio.Queue[Any]]] = {}
        self._new: list[tuple[int, list[int], Any, asyncio.Queue[Any]]] = []
        self._condition = threading.Condition()
        self._ids = itertools.count()
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, prompt: list[int], config: Any) -> asyncio.Queue[Any]:
        """Start a request; its queue receives lists of tokens with their logprobs, then None."""
        queue: asyncio.Queue[Any] = asyncio.Queue()
        with self._condition:
            self._new.append((next(self._ids), prompt, config, queue))
            self._condition.notify()
        return queue

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._new and not self._pipeline.has_non_finished_requests():
                    self._condition.wait()
                new, self._new = self._new, []
            for number, prompt, config, queue in new:
                tensor = openvino.Tensor(numpy.array([prompt], dtype=numpy.int64))
                self._requests[number] = self._pipeline.add_request(number, tensor, config), queue
            self._pipeline.step()
            self._loop.call_soon_threadsafe(self._deliver, self._collect())

    def _collect(self) -> list[tuple[asyncio.Queue[Any], Any]]:
        news: list[tuple[asyncio.Queue[Any], Any]] = []
        for number, (handle, queue) in list(self._requests.items()):
            finished = False
            while handle.can_read():
                for output in handle.read().values():
                    news.append((queue, (list(output.generated_ids), list(output.generated_log_probs))))
                    finished = finished or output.finish_reason.name != "NONE"
            if finished:
                del self._requests[number]
                news.append((queue, None))
        return news

    @staticmethod
    def _deliver(news: list[tuple[asyncio.Queue[Any], Any]]) -> None:
        for queue, item in news:
            queue.put_nowait(item)


async def serve(options: argparse.Namespace) -> None:
    properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": options.threads}
    properties |= dict(pair.split("=", 1) for pair in options.property)
    engine = Engine(options.model, properties, options.cache_gib, options.max_num_batched_tokens)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            if head.startswith("GET"):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                return
            length = next(
                int(line.split(":")[1]) for line in head.split("\r\n") if line.lower().startswith("content-l")
            )
            body = json.loads(await reader.readexactly(length))
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
            await answer(engine, body, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", options.port, limit=2**22)
    await server.serve_forever()


async def answer(engine: Engine, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    """Stream one completion, each piece with the ids and logprobs of its tokens."""
    config = genai.GenerationConfig()
    config.max_new_tokens = body["max_tokens"]
    config.ignore_eos = True
    config.echo = bool(body.get("echo"))
    config.logprobs = int(body.get("logprobs") or 0)
    queue = engine.submit(body["prompt"], config)
    count = 0
    while (item := await queue.get()) is not None:
        token_ids, logprobs = item
        count += len(token_ids)
        text = engine.tokenizer.decode(token_ids)
        choice = {"index": 0, "text": text, "token_ids": token_ids, "token_logprobs": logprobs}
        writer.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
    usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
    writer.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode())
    await writer.drain()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--cache-gib", type=int, default=1)
    parser.add_argument("--max-num-batched-tokens", type=int, help="default: OpenVINO's")
    parser.add_argument(
        "--property", action="append", default=[], metavar="NAME=VALUE", help="threads of the CPU plugin"
    )
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
