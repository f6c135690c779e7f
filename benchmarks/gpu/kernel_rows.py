"""The speed of the kernels that have their own targets."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from machine import fastest

from gpu.lab import Lab
from gpu.records import Note, Record, Row
from quire import kernels
from quire.kernels import QuantizedFormat, examples, packed_state
from quire.kernels.examples import Inputs
from quire.kernels.fp4 import FP4_CAPABILITY


def attention(lab: Lab) -> Iterator[Record]:
    """Decode with long contexts, which reads all keys and values once."""
    requests, length, *heads = lab.sizes.attention
    dtype = getattr(torch, lab.dtype)
    layer = kernels.AttentionLayer(heads[0], heads[1], heads[2], heads[2] ** -0.5)
    device, said = _prepare(lab, kernels.AttentionConfig((layer,), cache_dtype=dtype))
    case = examples.attention_case(Inputs(device, dtype, torch.Generator(device)), [(length - 1, 1)] * requests, layer)
    for text in said:
        yield Note(text)
    attend = functools.partial(kernels.paged_attention, *case.args, **case.options, host=case.host)
    seconds = fastest(attend, lab.sizes.seconds, lab.device)
    keys = 2 * requests * length * heads[1] * heads[2] * lab.number_bytes
    moved = keys + 2 * case.args[0].nbytes
    formula = f"keys, values, query and output {moved / 1e6:,.1f} MB in {seconds * 1e6:,.1f} µs; floor: copying"
    yield Row("attention", moved / seconds / 1e9, lab.limit(lambda machine: machine.copy / 1e9), formula)


def sampler(lab: Lab) -> Iterator[Record]:
    """Top-p over the whole vocabulary, which reads the logits at least once."""
    device, _ = _prepare(lab)
    rows, vocabulary = lab.sizes.sampler
    inputs = Inputs(device, torch.float32, torch.Generator(device))
    arguments = examples.sampler_arguments(inputs, rows, vocabulary, top_p=0.9)
    seconds = fastest(lambda: kernels.sample(*arguments), lab.sizes.seconds, lab.device)
    floor = lab.limit(lambda machine: arguments[0].nbytes / machine.bandwidth * 1e6)
    yield Row("sampler", seconds * 1e6, floor, f"logits {arguments[0].nbytes / 1e6:,.1f} MB / bandwidth")


def quantized(lab: Lab) -> Iterator[Record]:
    """The gates and ups of a layer: few rows by 4-bit weights, which are read once, and many rows by 8-bit floats and,
    where the card multiplies them, by 4-bit floats (NVFP4).

    A note for int8 and for fp8 has the times of torch's product and of the kernel."""
    device, said = _prepare(lab)
    for text in said:
        if " products on " in text:
            yield Note(text)
    dtype, shape = getattr(torch, lab.dtype), lab.shape
    inputs, size = Inputs(device, dtype, torch.Generator(device)), (2 * shape.intermediate, shape.hidden)
    rows, few = 16, QuantizedFormat("int4", 128)
    products = [kernels.pack_linear(examples.random_weight(inputs, few, *size)) for _ in range(_WEIGHTS)]
    x = inputs.normal(rows, shape.hidden)
    run = _replayed(lambda: [product(x, None) for product in products], lab.device)
    seconds = fastest(run, lab.sizes.seconds, lab.device) / _WEIGHTS
    moved = sum(tensor.nbytes for tensor in packed_state.tensors_of(products[0]))
    formula = f"{rows} rows, codes and scales {moved / 1e6:,.1f} MB in {seconds * 1e6:,.1f} µs; floor: reading"
    yield Row("4 bits", moved / seconds / 1e9, lab.limit(lambda machine: machine.bandwidth / 1e9), formula)
    rows = lab.sizes.prefill
    x = inputs.normal(rows, shape.hidden)
    global_scale = torch.full((), 6 * 448 / 8, device=device)  # inputs are at most about 8
    weights = {
        "fp8": replace(examples.random_weight(inputs, QuantizedFormat("fp8"), *size), activations="fp8"),
        "fp4": replace(
            examples.random_weight(inputs, QuantizedFormat("e2m1", 16), *size),
            activations="fp4",
            global_scale=global_scale,
        ),
    }
    if lab.device == "cuda" and torch.cuda.get_device_capability(device) < FP4_CAPABILITY:
        del weights["fp4"]
        yield Note("products of 4-bit floats (fp4) are not measured: they need compute capability 10.0 or higher")
    for key, weight in weights.items():
        product = kernels.pack_linear(weight)
        seconds = fastest(functools.partial(product, x, None), lab.sizes.seconds, lab.device)
        operations = 2 * rows * size[0] * size[1]
        of = f"{rows} rows, {operations / 1e12:,.3g} T operations in {seconds * 1e3:,.2f} ms"
        floor = lab.limit(lambda machine: machine.rate(lab.precision) / 1e12)
        yield Row(key, operations / seconds / 1e12, floor, f"{of}; floor: {lab.precision}")


_WEIGHTS = 4
"""So many that they do not fit the L2 cache together."""


def _replayed(work: Callable[[], object], device: str) -> Callable[[], object]:
    """The work as a decode step runs it: on a GPU in a CUDA graph, without the time that launches take."""
    if device != "cuda":
        return work
    work()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def _prepare(lab: Lab, needs: kernels.AttentionConfig | None = None) -> tuple[torch.device, list[str]]:
    """The device, and the log line about the selected attention backend."""
    torch.manual_seed(0)
    device = torch.device(lab.device)
    said = _Said()
    logger = logging.getLogger("quire.kernels")
    logger.addHandler(said)
    logger.setLevel(logging.INFO)
    kernels.prepare(device, getattr(torch, lab.dtype), needs)()
    logger.removeHandler(said)
    return device, said.texts


class _Said(logging.Handler):
    """Collects log records."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
