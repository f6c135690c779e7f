"""Decoding with and without speculation by n-grams, alternating in one run.

.venv/bin/python benchmarks/speculation.py

The model has the shape of Qwen2.5-0.5B with a vocabulary of 32,000 and does all of its work, but its weights are made
so that each token is followed by a given one. Its answers are therefore known, and can be copies of the prompt:

- copy: the answer is the prompt's text, of which one token in `--edit-every` is another in the prompt, as when code is
  edited or a source is quoted;
- new: no two tokens of the answer have followed each other before;
- misleading: any two tokens of the answer have followed each other in the prompt, but were followed by another one;
- repeated: as new, but an earlier request has got the same answer.

With `--peer llama.cpp=FOLDER` or `--peer vllm=FOLDER` (see peers.py), these servers answer the same prompts in the same
rounds, without drafts and with drafts from their own lookup: llama.cpp with weights in 8 bits (q8_0), vLLM in bfloat16.

The load draft is another: the bundled demo model, in float32, answers questions, one after another, and its draft model
(scripts/train_demo_model.py --draft) guesses.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import torch
from load import Address, post
from machine import cpu_name
from peers import LlamaCpp, Peer, Server, Vllm, find
from safetensors.torch import save_file
from shapes import SHAPES, VOCABULARY, write_pair_tokenizer
from transformers import Qwen2Config

from quire import LLM, SamplingParams
from quire.engine.config.options import DEMO_MODEL

PRECISIONS: dict[str, dict[str, Any]] = {
    "int8": {"dtype": "float32", "quantization": "int8"},
    "bfloat16": {"dtype": "bfloat16"},
}
QUESTIONS = [
    "What is the meaning of the name Quire?",
    "How can I get a model up and running?",
    "Is the HTTP API compatible with the one of OpenAI?",
    "Can Grafana show the state of my server?",
    "Can you describe how PP splits the layers?",
    "How can I make the pipeline stages uneven?",
    "How is a worker node added to the cluster?",
    "What helps against too many preemptions?",
    "My client gets a 404, why?",
    "Which parameter controls how random the answers are?",
    "What happens in the decode phase?",
    "Who decides to which replica my request goes?",
]
"""Questions in wordings that the demo model has not been trained on."""
PEERS: dict[str, type[Peer]] = {"llama.cpp": LlamaCpp, "vllm": Vllm}
LLAMA_CPP_LOOKUP = ["--spec-type", "ngram-simple"]
VLLM_LOOKUP = ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 4}']
SMALL = 1e-3
"""Scale of the layers' additions to the embedding of a token, which alone decides the next one."""


def make_model(folder: Path, layers: int) -> list[int]:
    """Write a checkpoint whose every token is followed by a given one; returns these, by token."""
    shape, rng = SHAPES["qwen2.5-0.5b"], random.Random(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=shape.hidden,
        num_hidden_layers=layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.intermediate,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        eos_token_id=0,
        architectures=["Qwen2ForCausalLM"],
    )
    config.save_pretrained(folder)
    write_pair_tokenizer(folder, VOCABULARY)
    cycle = list(range(1, VOCABULARY))
    rng.shuffle(cycle)
    following = list(range(VOCABULARY))
    for token, after in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
        following[token] = after
    torch.manual_seed(0)
    embeddings = torch.randn(VOCABULARY, shape.hidden)
    head = torch.empty_like(embeddings)
    head[torch.tensor(following)] = embeddings
    tensors = {
        "model.embed_tokens.weight": embeddings,
        "lm_head.weight": head,
        "model.norm.weight": torch.ones(shape.hidden),
    }
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    for number in range(layers):
        name = f"model.layers.{number}."
        sizes = {"self_attn.q_proj": query, "self_attn.k_proj": key, "self_attn.v_proj": key}
        for part, size in sizes.items():
            tensors[f"{name}{part}.weight"] = torch.randn(size, shape.hidden) / 30
            tensors[f"{name}{part}.bias"] = torch.zeros(size)
        tensors[f"{name}self_attn.o_proj.weight"] = torch.randn(shape.hidden, query) * SMALL
        for part in ("gate_proj", "up_proj"):
            tensors[f"{name}mlp.{part}.weight"] = torch.randn(shape.intermediate, shape.hidden) / 30
        tensors[f"{name}mlp.down_proj.weight"] = torch.randn(shape.hidden, shape.intermediate) * SMALL
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{name}{norm}.weight"] = torch.ones(shape.hidden)
    save_file({key: tensor.bfloat16() for key, tensor in tensors.items()}, folder / "model.safetensors")
    return following


def answer(following: list[int], token: int, count: int) -> list[int]:
    tokens = []
    for _ in range(count):
        token = following[token]
        tokens.append(token)
    return tokens


def make_prompt(load: str, following: list[int], rng: random.Random, count: int, edit_every: int) -> list[int]:
    first = rng.randrange(1, VOCABULARY)
    text = answer(following, first, count)
    if load == "copy":
        for at in range(edit_every // 2, count, edit_every):
            text[at] = rng.randrange(1, VOCABULARY)
    elif load in ("new", "repeated"):
        text = [rng.randrange(1, VOCABULARY) for _ in range(count)]
    else:
        pairs = [[*pair, rng.randrange(1, VOCABULARY)] for pair in pairwise(text)]
        rng.shuffle(pairs)
        text = [token for pair in pairs for token in pair]
    return [*text, first]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", nargs="+", default=["int8"], choices=PRECISIONS)
    parser.add_argument("--load", nargs="+", default=["copy", "new", "misleading", "repeated", "draft"])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 8, 32, 128])
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--edit-every", type=int, default=24)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PATH", help="llama.cpp or vllm")
    options = parser.parse_args()
    peers = {name: Path(place) for name, _, place in (each.partition("=") for each in options.peer)}
    print(cpu_name())
    others = "".join(f"  {name} off, on, ratio" for name in peers)
    print(f"{'':9} {'load':10} {'streams':>7} {'off tok/s':>9} {'on tok/s':>9} {'ratio':>6}{others}")
    if "draft" in options.load:
        report_draft_model(options.rounds)
        options.load.remove("draft")
    if not options.load:
        return
    with tempfile.TemporaryDirectory() as name:
        following = make_model(Path(name), options.layers)
        for precision in options.precision:
            engine = PRECISIONS[precision] | {
                "max_model_len": 2048,
                "max_num_seqs": 128,
                "kv_cache_memory_bytes": 3 << 30,
            }
            with (
                LLM(name, spec_method="none", enable_prefix_caching=False, **engine) as off,
                LLM(name, enable_prefix_caching=False, **engine) as on,
                serving(peers, Path(name), max(options.streams)) as servers,
            ):
                for load in options.load:
                    for streams in options.streams:
                        report(precision, load, streams, off, on, servers, following, options)


@contextmanager
def serving(peers: Mapping[str, Path], folder: Path, streams: int) -> Iterator[list[Server]]:
    """Run each peer with the model in `folder` for at most this many streams: without drafts, and with drafts from its
    lookup."""
    threads = int(os.environ.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0))))
    servers: list[Server] = []
    try:
        for name, given in peers.items():
            peer = find(PEERS[name], given)
            if peer is None:
                raise SystemExit(f"there is no {name} in {given}")
            model, precision, settings, lookup = folder, "16-bit", ["--no-enable-prefix-caching"], VLLM_LOOKUP
            if isinstance(peer, LlamaCpp):
                model, precision, lookup = peer.convert(folder, "q8_0", folder / "q8_0.gguf"), "int8", LLAMA_CPP_LOOKUP
                settings = ["-np", str(streams), "-c", str(streams * 2048)]
            for arguments in ([], lookup):
                log = folder / f"{name}-{len(servers)}.log"
                servers.append(Server(peer, precision, model, threads, log, [*settings, *arguments]))
                asyncio.run(servers[-1].start([1, 2, 3], "", 600))
        yield servers
    finally:
        for server in servers:
            server.stop()


def report_draft_model(rounds: int) -> None:
    """Print the row of the demo model with its draft model, whose answers are compared. Each run has a cache salt of
    its own, so that it does not find the answers of earlier runs."""
    engine: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 4, "enable_prefix_caching": False}
    params = SamplingParams(temperature=0.0, max_tokens=200)
    salts = itertools.count()

    def seconds(llm: LLM, most: int) -> tuple[float, list[list[int]]]:
        salt = str(next(salts))
        begun, answers = time.perf_counter(), []
        for prompt in prompts:
            given = {"prompt_token_ids": prompt, "cache_salt": salt}
            (output,) = llm.generate([given], msgspec.structs.replace(params, max_tokens=most), use_tqdm=False)
            answers.append(output.outputs[0].token_ids)
        return time.perf_counter() - begun, answers

    def rate(llm: LLM) -> tuple[float, list[list[int]]]:
        prefills, _ = seconds(llm, 1)
        total, answers = seconds(llm, 200)
        return (sum(map(len, answers)) - len(answers)) / (total - prefills), answers

    with (
        LLM(str(DEMO_MODEL), spec_method="none", **engine) as off,
        LLM(str(DEMO_MODEL), spec_model=str(DEMO_MODEL.with_name("demo_draft")), **engine) as on,
    ):
        asked = [[{"role": "user", "content": question}] for question in QUESTIONS]
        first = msgspec.structs.replace(params, max_tokens=1)
        prompts = [off.chat(messages, first, use_tqdm=False)[0].prompt_token_ids for messages in asked]
        rates: list[tuple[float, float]] = []
        for _ in range(rounds + 1):
            (before, plain), (after, drafted) = rate(off), rate(on)
            assert plain == drafted, "speculation has changed an answer"
            rates.append((before, after))
    before, after = (statistics.median(column) for column in zip(*rates[1:], strict=True))
    ratio = statistics.median(after / before for before, after in rates[1:])
    print(f"{'float32':9} {'draft':10} {1:7} {before:9.1f} {after:9.1f} {ratio:6.2f}", flush=True)


def report(
    precision: str,
    load: str,
    streams: int,
    off: LLM,
    on: LLM,
    servers: Sequence[Server],
    following: list[int],
    options: argparse.Namespace,
) -> None:
    """Print one row: the median of the rounds after the first."""
    rng, count = random.Random(streams), options.tokens
    rates: list[list[float]] = []
    for number in range(options.rounds + 1):
        prompts = [make_prompt(load, following, rng, count, options.edit_every) for _ in range(streams)]
        salt = f"{precision} {load} {streams} {number}"  # so that earlier rounds are unknown
        turns = [partial(rate, llm, load, prompts, salt, following, count) for llm in (off, on)]
        turns += [partial(peer_rate, server, prompts, following, count) for server in servers]
        order = range(len(turns)) if number % 2 else reversed(range(len(turns)))
        rates.append([found for _, found in sorted((at, turns[at]()) for at in order)])
    columns = ""
    for at in range(0, 2 + len(servers), 2):
        before, after = (statistics.median(row[column] for row in rates[1:]) for column in (at, at + 1))
        ratio = statistics.median(row[at + 1] / row[at] for row in rates[1:])
        columns += f" {before:9.1f} {after:9.1f} {ratio:6.2f}"
    print(f"{precision:9} {load:10} {streams:7}{columns}", flush=True)


def peer_rate(server: Server, prompts: list[list[int]], following: list[int], count: int) -> float:
    """The same as `rate` of another server."""

    async def seconds(most: int) -> float:
        begun = time.perf_counter()
        answers = await asyncio.gather(*(completion(server, prompt, most) for prompt in prompts))
        for prompt, found in zip(prompts, answers, strict=True):
            assert found == answer(following, prompt[-1], most), "the model does not copy"
        return time.perf_counter() - begun

    first = asyncio.run(seconds(1))
    return len(prompts) * (count - 1) / (asyncio.run(seconds(count)) - first)


async def completion(server: Server, prompt: list[int], most: int) -> list[int]:
    body: dict[str, Any] = {"prompt": prompt, "temperature": 0, "ignore_eos": True}
    if isinstance(server.peer, LlamaCpp):
        body |= {"n_predict": most, "return_tokens": True, "cache_prompt": False}
        tokens: list[int] = (await post(Address(server.address.port, "/completion"), body))["tokens"]
    else:
        body |= {"model": str(server.model), "max_tokens": most, "return_token_ids": True}
        tokens = (await post(server.address, body))["choices"][0]["token_ids"]
    return tokens


def rate(llm: LLM, load: str, prompts: list[list[int]], salt: str, following: list[int], count: int) -> float:
    """Tokens per second of the decode steps of these prompts, whose answers are checked."""
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    asked = [{"prompt_token_ids": prompt, "cache_salt": salt} for prompt in prompts]
    if load == "repeated":
        llm.generate(asked, params, use_tqdm=False)
    begun = time.perf_counter()
    llm.generate(asked, msgspec.structs.replace(params, max_tokens=1), use_tqdm=False)
    prefilled = time.perf_counter()
    outputs = llm.generate(asked, params, use_tqdm=False)
    seconds = time.perf_counter() - prefilled - (prefilled - begun)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == answer(following, prompt[-1], count), "the model does not copy"
    return len(prompts) * (count - 1) / seconds


if __name__ == "__main__":
    main()
