"""Compile every Triton kernel for a GPU, which need not be present.

Run as `python -m tests.integration.kernels.compile_ahead [90]`, or 89; with `--coded` for the matmuls of weights in few
bits, and with `--types bf16` for activations of these types only. With several types, each variant of a kernel is
compiled for one of them, in turn; with `--turn 2 3`, every third variant from the second on. Each kernel is compiled
at least once for each type.

The operations are called as usual, on tensors of the CPU, and their launches are compiled instead of run, for the given
compute capability. Prints a line for each kernel and variant.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from quire.kernels import examples
from quire.kernels import triton as platform
from quire.kernels.attention_config import AttentionLayer
from quire.kernels.cache import LARGEST
from quire.kernels.examples import Example, Inputs
from quire.kernels.quantized import VALUES, QuantizedFormat
from quire.kernels.triton import elementwise, limits

CPU = torch.device("cpu")
SHARED_KIB = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}
"""Shared memory that a thread block may have, in KiB (CUDA programming guide, table of compute capabilities)."""
_TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.float8_e4m3fn: "fp8e4nv",
}
_CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


class Variant(NamedTuple):
    """The properties of a launch that its compilation depends on."""

    signature: dict[str, str]
    constants: dict[str, Any]
    divisible: dict[tuple[int, ...], list[list[object]]]
    """Arguments that are multiples of 16, by place; loads are wide, and run ahead, only where they are."""

    @classmethod
    def of(cls, kernel: JITFunction[Any], args: tuple[Any, ...], meta: dict[str, Any]) -> Variant:
        """As Triton distinguishes them: by types, and by the values of arguments that it specializes."""
        signature, constants = {}, dict(meta)
        divisible: dict[tuple[int, ...], list[list[object]]] = {}
        looked_at = {parameter.name for parameter in kernel.params if not parameter.do_not_specialize}
        for place, (name, value) in enumerate(zip(kernel.arg_names, args, strict=False)):
            match value:
                case Tensor():
                    signature[name] = f"*{_TYPES[value.dtype]}"
                case float():
                    signature[name] = "fp32"
                case None:
                    signature[name], constants[name] = "constexpr", None
                case 1 if name in looked_at:
                    signature[name], constants[name] = "constexpr", 1
                case int():
                    signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            number = value.data_ptr() if isinstance(value, Tensor) else value
            if name in looked_at and isinstance(number, int) and number % 16 == 0:
                divisible[place,] = [["tt.divisibility", 16]]
        return cls(signature | dict.fromkeys(meta, "constexpr"), constants, divisible)

    @property
    def key(self) -> tuple[object, ...]:
        return (*self.signature.items(), *self.constants.items(), *self.divisible)


class Launch(NamedTuple):
    """A kernel, the variant to compile, and options of the compiler."""

    kernel: JITFunction[Any]
    variant: Variant
    meta: dict[str, Any]
    options: dict[str, Any]

    @property
    def key(self) -> tuple[object, ...]:
        return (self.kernel.__name__, *self.variant.key)


def launches_of(calls: Iterable[Example]) -> dict[str, list[Launch]]:
    """The launches of these operations: the variants of each kernel, in order, each once."""
    found = dict[tuple[object, ...], Launch]()

    def record(self: JITFunction[Any], *args: Any, grid: object, warmup: bool, **options: Any) -> None:
        meta = {name: options.pop(name) for name in list(options) if name in self.arg_names}
        launch = Launch(self, Variant.of(self, args, meta), meta, options)
        found.setdefault(launch.key, launch)

    JITFunction.run = record
    for each in calls:
        if each.operation in platform.__all__:
            each.call(platform)
    kernels = defaultdict[str, list[Launch]](list)
    for launch in found.values():
        kernels[launch.kernel.__name__].append(launch)
    return kernels


def in_turn(by_type: list[dict[str, list[Launch]]], turn: int, turns: int) -> list[Launch]:
    """Every `turns`-th variant of each kernel from number `turn` on, for one type after the other; and the first of the
    variants that only one type has, if these include none of them."""
    chosen = dict[tuple[object, ...], Launch]()
    for name in dict.fromkeys(name for kernels in by_type for name in kernels):
        variants = [kernels.get(name, []) for kernels in by_type]
        for count, place in enumerate(range(turn, max(map(len, variants)), turns)):
            # The order of types is another in each round, as variants have periods, too. Some types may have fewer.
            first = count + count // len(variants)
            kinds = [(first + each) % len(variants) for each in range(len(variants))]
            kind = next(each for each in kinds if place < len(variants[each]))
            chosen.setdefault(variants[kind][place].key, variants[kind][place])
        counts = Counter(launch.key for of_type in variants for launch in of_type)
        for of_type in variants:
            own = [launch for launch in of_type if counts[launch.key] == 1]
            if own and not any(launch.key in chosen for launch in own):
                chosen[own[0].key] = own[0]
    return list(chosen.values())


def compile_launch(launch: Launch, capability: int) -> None:
    """Compile a launch."""
    kernel, (signature, constants, divisible), meta, options = launch
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=divisible)
    out = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    most = SHARED_KIB[capability] << 10
    assert out.metadata.shared <= most, f"{kernel.__name__} {meta} needs {out.metadata.shared} bytes of shared memory"
    kind = next(iter(signature.values())).removeprefix("*")
    if kernel.__name__.startswith("_fp4"):
        # Of 4-bit floats with scales of 16 that are 8-bit floats, tcgen05.mma on 10.0 and mma.sync on 12.0.
        assert "kind::mxf4nvf4" in out.asm["ptx"], f"{kernel.__name__} {meta} widens its operands"
    print(
        f"{kernel.__name__} {kind} {meta}: {len(out.asm['cubin'])} bytes, shared memory {out.metadata.shared}, "
        f"{' '.join(resources(out.asm['cubin']))}"
    )


def resources(cubin: bytes) -> list[str]:
    """Registers of a thread, and bytes of its stack, which is where registers are spilled to."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([_CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return re.findall(r"REG:\d+|STACK:\d+", said)


def every_call(types: list[torch.dtype]) -> Iterator[Example]:
    """Every operation in the shapes that models of the field bring."""
    requests = [(99, 1), (12, 8)]
    for dtype in types:
        inputs = Inputs(CPU, dtype)
        yield from examples.norms(inputs, 4, 4096)
        for activation in elementwise.KINDS:
            yield examples.activation(inputs, 4, 2048, activation)
        for heads in ((32, 8, 128), (16, 8, 256), (32, 32, 80)):
            layer = AttentionLayer(*heads, 0.1)
            own = replace(layer, window=128, has_own_sinks=True, num_biases=128, has_ends=True)
            for of_cache in (dtype, *LARGEST):
                yield examples.cache_write(inputs, 9, heads, heads[2], of_cache)
                yield examples.attention(inputs, requests, layer, of_cache)
            yield from examples.int4_cache(inputs, requests, layer)
            every = replace(layer, window=128, softcap=50.0, has_sinks=True, has_alibi=True)
            for kind in (every, own, replace(layer, is_partial=True)):
                yield examples.attention(inputs, requests, kind)
        latent = AttentionLayer(128, 1, 576, 0.1, is_mla=True)
        for of_cache in (dtype, *LARGEST):
            yield examples.attention(inputs, requests, latent, of_cache)
            yield examples.attention(inputs, requests, replace(latent, is_partial=True), of_cache)
            yield from examples.selection(inputs, requests, (64, 128), ((2048, 1), (128, 16)), (), of_cache)
            yield from examples.selection(inputs, requests, (4, 128), (), ((128, 16, 1),), of_cache)
            for has_sinks in (False, True):
                layer = replace(latent, has_sinks=has_sinks)
                yield examples.sparse_attention(inputs, requests, layer, 2048, of_cache)
        yield from examples.hyper_connections(inputs, 4, 4096, iterations=20)
        for entry in ((512, 128, 1), (512, 4, 2), (128, 4, 2)):
            yield examples.compression(inputs, requests, entry, rotary_dim=64)
            yield examples.compression(inputs, requests, entry, rotary_dim=0, normed=False)
        for heads, state_size in (((16, 32, 128), 16), ((1, 32, 128), 1)):
            yield from examples.recurrent(inputs, 9, heads, state_size)
        for rows, ranks in ((9, (16,) * 4), (300, (8, 64))):
            yield from examples.low_rank(inputs, rows, 4096, (512, 128, 128), ranks)
        sizes = 8, 2, 4096, 128
        yield examples.fused_experts(inputs, 4, sizes)
        yield examples.fused_experts(inputs, 4, sizes, "swiglu_oai", has_biases=True)
        yield examples.fused_experts(inputs, 4, sizes, "relu2", gated=False)
        yield examples.fused_experts(inputs, 1024, sizes)
        yield examples.fused_experts(inputs, 4, sizes, has_changes=True)
        yield examples.fused_experts(inputs, 4, sizes, "relu2", gated=False, has_changes=True)
    inputs = Inputs(CPU, torch.float32)
    sigmoid: dict[str, Any] = {"group_score": "top2_sum", "renormalize": True, "has_bias": True}
    yield examples.route(inputs, 4, 8, 2, "softmax")
    yield examples.route(inputs, 4, 128, 8, "topk_softmax")
    yield examples.route(inputs, 4, 160, 8, "softmax", groups=8, top_groups=3)
    yield examples.route(inputs, 4, 256, 8, "sigmoid", groups=8, top_groups=4, **sigmoid)
    yield examples.route(inputs, 4, 512, 8, "softmax", renormalize=True)
    for vocabulary in (128_256, 262_144):
        for longest in (40, 100_000):
            yield from examples.on_logits(inputs, 3, vocabulary, longest, num_top=5)
        for top_k in (0, 20):
            yield examples.sample(inputs, 3, vocabulary, top_k=top_k, top_p=0.9)


def every_coded_call(capability: int, types: list[torch.dtype]) -> Iterator[Example]:
    """Matmuls of weights in few bits: every kind of values, and every tile and type for one of 4 bits and one of 8."""
    for values in VALUES:
        form = QuantizedFormat(values, 16 if values == "e2m1" else 64, has_offsets=values == "uint4")
        yield from examples.quantized_matmuls(Inputs(CPU, torch.bfloat16), form, (4,), 2048, 2048)
    static, ordered = QuantizedFormat("int8", has_rounding=True), QuantizedFormat("e2m1", 32, has_order=True)
    rounded = [QuantizedFormat("int8", rounds_inputs=True)]
    if capability >= 89:
        rounded += [QuantizedFormat("fp8", group, rounds_inputs=True) for group in (0, 128)]
    sizes = 2, 2, 1024, 512
    for dtype in types:
        inputs = Inputs(CPU, dtype)
        for form in (QuantizedFormat("uint4", 128, has_offsets=True), QuantizedFormat("fp8")):
            yield from examples.quantized_matmuls(inputs, form, (4, 40, 400), 2048, 2048)
        yield from examples.quantized_matmuls(inputs, static, (4,), 2048, 2048)
        for form in (QuantizedFormat("e2m1", 32), ordered, static):
            yield from examples.quantized_experts(inputs, form, (4, 1024), sizes)
        yield from examples.quantized_experts(inputs, QuantizedFormat("e2m1", 32), (4, 1024), sizes, gated=False)
        for form in rounded:
            counts = (400,) if form.group else (4, 400)
            yield from examples.quantized_matmuls(inputs, form, counts, 2048, 2048)
            for gated in (True, False):
                yield from examples.quantized_experts(inputs, form, counts, sizes, gated=gated)
        if capability >= 100:
            form = QuantizedFormat("e2m1", 16, rounds_inputs=True)
            yield from examples.quantized_matmuls(inputs, form, (4, 40, 400), 2048, 2048)
            yield from examples.quantized_experts(inputs, form, (4, 40, 400), sizes)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("capability", nargs="?", type=int, default=90)
    parser.add_argument("--coded", action="store_true")
    parser.add_argument("--types", nargs="+", default=["fp32", "bf16", "fp16"])
    parser.add_argument("--turn", nargs=2, type=int, default=(1, 1), metavar=("N", "OF"))
    args = parser.parse_args()
    setattr(limits, "is_narrow", lambda _: SHARED_KIB[args.capability] < 160)  # noqa: B010
    calls = partial(every_coded_call, args.capability) if args.coded else every_call
    types = [dtype for dtype, name in _TYPES.items() if name in args.types]
    turn, turns = args.turn
    chosen = in_turn([launches_of(calls([dtype])) for dtype in types], turn - 1, turns)
    for launch in chosen:
        compile_launch(launch, args.capability)
    print(f"{len(chosen)} kernels compiled for sm_{args.capability}")


if __name__ == "__main__":
    main()
