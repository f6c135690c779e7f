"""Compile every Triton kernel for a GPU that need not be there.

Run as `python -m tests.integration.kernels.compile_ahead [90]`, or 89; with `--coded` for the matmuls of weights in few
bits, and with `--types bf16` for activations of these types only. With several types, each variant of a kernel is
compiled for one of them, in turn; with `--turn 2 3`, every third variant from the second on. Each kernel is compiled
at least once for each type.

The operations are called as ever, on tensors of the CPU, and what they would launch is compiled instead, for the
compute capability given. Prints a line for each kernel and variant.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable
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

from quire.kernels import reference
from quire.kernels import triton as platform
from quire.kernels.cache import LARGEST, StateSegments, allocate_kv_cache
from quire.kernels.coded_words import CodedWords, pack_words
from quire.kernels.fp4 import Fp4Weight
from quire.kernels.quantized import VALUES, QuantizedWeight
from quire.kernels.triton import coded, elementwise, fp4, limits, rounded

SHARED_KIB = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}
"""That a block of threads may have (CUDA programming guide, table of compute capabilities)."""
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
    """What a launch is compiled for."""

    signature: dict[str, str]
    constants: dict[str, Any]
    divisible: dict[tuple[int, ...], list[list[object]]]
    """Arguments that are multiples of 16, by place; loads are wide, and run ahead, only where they are."""

    @classmethod
    def of(cls, kernel: JITFunction[Any], args: tuple[Any, ...], meta: dict[str, Any]) -> Variant:
        """As Triton tells them apart: by types, and by what of its arguments it is not told to leave out."""
        signature, constants = {}, dict(meta)
        divisible: dict[tuple[int, ...], list[list[object]]] = {}
        looked_at = {parameter.name for parameter in kernel.params if not parameter.do_not_specialize}
        for place, (name, value) in enumerate(zip(kernel.arg_names, args, strict=False)):
            match value:
                case Tensor():
                    signature[name] = f"*{_TYPES[value.dtype]}"
                case float():
                    signature[name] = "fp32"
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
    """A kernel, what it is compiled for, and options of the compiler."""

    kernel: JITFunction[Any]
    variant: Variant
    meta: dict[str, Any]
    options: dict[str, Any]

    @property
    def key(self) -> tuple[object, ...]:
        return (self.kernel.__name__, *self.variant.key)


def launches_of(run: Callable[[], None]) -> dict[str, list[Launch]]:
    """What an operation or several would launch: the variants of each kernel, in order, each once."""
    found = dict[tuple[object, ...], Launch]()

    def record(self: JITFunction[Any], *args: Any, grid: object, warmup: bool, **options: Any) -> None:
        meta = {name: options.pop(name) for name in list(options) if name in self.arg_names}
        launch = Launch(self, Variant.of(self, args, meta), meta, options)
        found.setdefault(launch.key, launch)

    JITFunction.run = record
    run()
    kernels = defaultdict[str, list[Launch]](list)
    for launch in found.values():
        kernels[launch.kernel.__name__].append(launch)
    return kernels


def in_turn(by_type: list[dict[str, list[Launch]]], turn: int, turns: int) -> list[Launch]:
    """Of the variants of each kernel, every `turns`-th from the one numbered `turn` on, for one type after the other;
    and the first of those that only one type has, if none of them is among these."""
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
    """Compile what a launch would run."""
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


def run_all(types: list[torch.dtype]) -> None:
    """Every operation in the shapes that models of the field bring."""
    for dtype in types:
        x, weight = torch.zeros(4, 4096, dtype=dtype), torch.zeros(4096, dtype=dtype)
        platform.rms_norm(x, weight, 1e-6)
        platform.add_rms_norm(x, x, weight, 1e-6, 1.0)
        for activation in elementwise.KINDS:
            platform.act_mul(x, activation)
        lengths, starts, table = torch.tensor([700, 20]), torch.tensor([0, 1, 9]), torch.zeros(2, 64, dtype=torch.int64)
        for heads, kv_heads, head_dim in ((32, 8, 128), (16, 8, 256), (32, 32, 80)):
            query, cache = torch.zeros(9, heads, head_dim, dtype=dtype), torch.zeros(2, 64, kv_heads, 16, head_dim)
            key = torch.zeros(9, kv_heads, head_dim, dtype=dtype)
            slots, turns = torch.zeros(9, dtype=torch.int64), torch.zeros(9, head_dim)
            per_head = torch.zeros(heads)
            for of_cache in (dtype, *LARGEST):
                shape = (1, 64, kv_heads, 16, head_dim, of_cache, cache.device)
                of_layer = allocate_kv_cache(*shape)[0]
                platform.rotary_write_kv(query, key, key, turns, of_layer, slots)
                platform.paged_attention(query, of_layer, table, lengths, starts, 0.1)
            platform.paged_attention(
                *(query, cache.to(dtype), table, lengths, starts, 0.1),
                window=128,
                softcap=50.0,
                sinks=per_head,
                slopes=per_head,
            )
            platform.paged_attention(
                *(query, cache.to(dtype), table, lengths, starts, 0.1),
                window=128,
                sinks=torch.zeros(9, heads),
                biases=torch.zeros(9, heads, 128, dtype=dtype),
            )
        query = torch.zeros(9, 128, 576, dtype=dtype)
        for of_cache in (dtype, *LARGEST):
            side = allocate_kv_cache(1, 64, 1, 16, 576, of_cache, query.device, num_tensors=1)[0]
            platform.paged_attention(query, side.expand(2, -1, -1, -1, -1), table, lengths, starts, 0.1)
            keys = allocate_kv_cache(1, 64, 1, 16, 128, of_cache, query.device, num_tensors=1)[0]
            queries, per_query = torch.zeros(9, 64, 128, dtype=dtype), torch.zeros(9, 64)
            slots = platform.select_tokens(queries, per_query, keys, table, lengths, starts, 2048)
            platform.select_tokens(queries, per_query, keys, table, lengths, starts, 128, 16)
            platform.select_blocks(queries[:, :4], keys, table, lengths, starts, 128, 16, 1)
            counts = torch.full((9,), 2048)
            for sinks in (None, per_head):
                platform.sparse_attention(query, side.expand(2, -1, -1, -1, -1), slots, counts, 0.1, sinks)
        streams, function = torch.zeros(4, 4 * 4096, dtype=dtype), torch.zeros(24, 4 * 4096)
        for rows, kinds, steps in ((24, 3, 20), (8, 2, 0), (4, 1, 0)):
            connection = function[:rows], function[:rows, 0], function[0, :kinds]
            read, outputs, mixed = platform.mhc_pre(streams, *connection, 4, 1e-6, 1e-6, steps)
            if kinds > 1:
                platform.mhc_post(read, streams, outputs, mixed)
        for head_dim, ratio, width in ((512, 128, 512), (512, 4, 1024), (128, 4, 256)):
            entries = torch.zeros(1, 64, 1, 4, head_dim, dtype=dtype)
            inputs, of_places = torch.zeros(1, 64, 1, 16, 2 * width, dtype=dtype), torch.zeros(ratio, width)
            where = starts.new_zeros(9), table, lengths, starts, table
            platform.compress_tokens(inputs, of_places, entries[0, 0, 0, 0], 1e-6, torch.zeros(9, 64), entries, *where)
            platform.compress_tokens(inputs, of_places, None, 0.0, torch.zeros(9, 0), entries, *where)
        pages = torch.zeros(3, 32, 128, 128), torch.zeros(3, 3, 8192, dtype=dtype)
        mixed, gates = torch.zeros(9, 12288, dtype=dtype), torch.zeros(9, 32)
        segments = StateSegments(starts, torch.tensor([0, 2]), starts[:2], starts[:2])
        taps = torch.zeros(8192, 4, dtype=dtype)
        platform.causal_conv(mixed[:, :8192], taps, None, pages[1], segments)
        platform.causal_conv(mixed[:, :8192], taps, taps[:, 0].contiguous(), pages[1], segments, silu=False)
        parts = torch.unflatten(mixed[:, :8192], 1, (64, 128))
        platform.linear_attention(
            *(parts[:, :16], parts[:, 16:32], parts[:, 32:], gates, gates, pages[0], segments, 0.1, 1e-6)
        )
        platform.linear_attention(
            *(parts[:, :1], parts[:, 1:2], parts[:, 32:], gates, gates, pages[0], segments, 1.0), is_delta=False
        )
        state = torch.zeros(3, 1, 16, 8192)
        platform.selective_scan(
            *(mixed[:, :8192], torch.zeros(9, 8192), state[0, 0], mixed[:, :16], mixed[:, 16:32], state, segments)
        )
        one, state, wide = torch.zeros(9, 1), torch.zeros(3, 1, 1, 4096), torch.zeros(9, 4096)  # of a recurrent unit
        platform.selective_scan(wide, wide, state[0, 0], one, one, state, segments)
        platform.wkv(
            *(mixed[:, :4096], mixed[:, 4096:8192], torch.zeros(4096), torch.zeros(4096)),
            *(torch.zeros(3, 1, 3, 4096), segments),
        )
        weights, ids = torch.ones(4, 2), torch.zeros(4, 2, dtype=torch.int64)
        matrices = torch.zeros(8, 256, 4096, dtype=dtype), torch.zeros(8, 4096, 128, dtype=dtype)
        biases = torch.zeros(8, 256, dtype=dtype), torch.zeros(8, 4096, dtype=dtype)
        platform.fused_experts(x, weights, ids, *matrices, "silu")
        platform.fused_experts(x, weights, ids, *matrices, "swiglu_oai", *biases)
        platform.fused_experts(x, weights, ids, matrices[0][:, :128], matrices[1], "relu2")  # without gates
        many = x.repeat(256, 1)
        platform.fused_experts(many, torch.ones(1024, 2), torch.zeros(1024, 2, dtype=torch.int64), *matrices, "silu")
    routers: tuple[tuple[int, reference.Scoring, dict[str, Any]], ...] = (
        (8, "softmax", {}),
        (128, "topk_softmax", {}),
        (160, "softmax", {"groups": 8, "top_groups": 3}),
        (256, "sigmoid", {"groups": 8, "top_groups": 4, "group_score": "top2_sum", "renormalize": True}),
        (512, "softmax", {"renormalize": True}),
    )
    for experts, scoring, options in routers:
        bias = torch.zeros(experts) if scoring == "sigmoid" else None
        platform.route(torch.zeros(4, experts), min(8, experts // 4), scoring, correction_bias=bias, **options)
    ones, whole = torch.ones(3), torch.ones(3, dtype=torch.int64)
    for vocab in (128_256, 262_144):
        logits, spans = torch.zeros(3, vocab), torch.zeros(3, 3, dtype=torch.int64)
        platform.score_tokens(logits, whole, 5)
        for longest in (40, 100_000):
            platform.penalize(logits, torch.zeros(9, dtype=torch.int32), whole, spans, torch.ones(3, 3), longest)
        for top_k in (0, 20):
            platform.sample(torch.zeros(3, vocab), ones, whole * top_k, 0.9 * ones, ones, whole, whole)


def run_coded(capability: int, types: list[torch.dtype]) -> None:
    """Matmuls of weights in few bits: every kind of values, and every tile and type for one of 4 bits and one of 8."""

    def packed(values: str, group: int, dtype: torch.dtype, *stack: int) -> CodedWords:
        codes = torch.zeros(*stack, 2048, 2048, dtype=torch.uint8)
        scales = torch.ones(*stack, 2048, 2048 // (group or 2048))
        return pack_words(QuantizedWeight(values, dtype, codes, scales, scales if values == "uint4" else None))

    x = torch.zeros(2048, 2048, dtype=torch.bfloat16)
    for values in VALUES:
        coded.coded_matmul(x[:4], packed(values, 16 if values == "e2m1" else 64, x.dtype), x[0])
    for dtype in types:
        rows = x.to(dtype)
        for values, group in (("uint4", 128), ("fp8", 0)):
            weight = packed(values, group, dtype)
            for count in (4, 40, 400):
                coded.coded_matmul(rows[:count], weight)
        gate_up, down = (packed("e2m1", 32, dtype, 2) for _ in range(2))
        assert down.scales is not None
        down = replace(down, inputs=1024, words=down.words[:, :8].contiguous(), scales=down.scales[:, :32].contiguous())
        columns, rounding = torch.zeros(2, 2048, dtype=torch.int64), torch.ones(2, 2)
        ordered, static = replace(gate_up, columns=columns), replace(packed("int8", 0, dtype, 2), rounding=rounding)
        for kind in (torch.int8, torch.float8_e4m3fn):
            if kind == torch.int8 or capability >= 89:
                matrix = torch.zeros(2048, 2048, dtype=kind)
                for groups in (1, 16):
                    for plain in (None, torch.empty_like(rows[:4])):
                        elementwise.rms_norm_rounded(rows[:4], rows[0], 1e-6, 0.0, kind, groups, plain)
                        elementwise.add_rms_norm_rounded(rows[:4], rows[:4], rows[0], 1e-6, 0.0, kind, groups, plain)
                    elementwise.act_mul_rounded(torch.cat((rows[:4], rows[:4]), 1), "silu", kind, groups)
                    elementwise.act_mul_rounded(rows[:4], "relu2", kind, groups, gated=False)
                for count, groups in ((4, 1), (400, 1), *(((400, 16),) if kind != torch.int8 else ())):
                    rounded.rounded_matmul(rows[:count], matrix, torch.ones(2048, groups))
                    ids, stack = torch.zeros(count, 2, dtype=torch.int64), (matrix[None], torch.ones(1, 2048, groups))
                    half = matrix[None, :, :1024].contiguous(), torch.ones(1, 2048, max(1, groups // 2))
                    rounded.rounded_fused_experts(rows[:count], torch.ones(count, 2), ids, *stack, *half, "silu")
                    rounded.rounded_fused_experts(rows[:count], torch.ones(count, 2), ids, *stack, *stack, "relu2")
        for count in (4, 1024):
            ids = torch.zeros(count, 2, dtype=torch.int64)
            for first in (gate_up, ordered, static):
                coded.coded_fused_experts(rows[:count], torch.ones(count, 2), ids, first, down, "silu")
            coded.coded_fused_experts(rows[:count], torch.ones(count, 2), ids, gate_up, gate_up, "relu2", gated=False)
        coded.coded_matmul(rows[:4], static.at(0))
        if capability >= 100:
            scales, ones = torch.zeros(2, 2048, 128, dtype=torch.float8_e4m3fn), torch.ones(2, 2048)
            whole = Fp4Weight(torch.zeros(2, 2048, 1024, dtype=torch.uint8), scales, ones, torch.ones(2, 1))
            narrow = Fp4Weight(whole.codes[..., :512].contiguous(), scales[..., :64].contiguous(), *whole[2:])
            for count in (4, 40, 400):
                fp4.fp4_matmul(rows[:count], whole.at(0), rows[0] if count == 4 else None)
                ids = torch.zeros(count, 2, dtype=torch.int64)
                fp4.fp4_fused_experts(rows[:count], torch.ones(count, 2), ids, whole, narrow, "silu")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("capability", nargs="?", type=int, default=90)
    parser.add_argument("--coded", action="store_true")
    parser.add_argument("--types", nargs="+", default=["fp32", "bf16", "fp16"])
    parser.add_argument("--turn", nargs=2, type=int, default=(1, 1), metavar=("N", "OF"))
    args = parser.parse_args()
    setattr(limits, "is_narrow", lambda _: SHARED_KIB[args.capability] < 160)  # noqa: B010
    run = partial(run_coded, args.capability) if args.coded else run_all
    types = [dtype for dtype, name in _TYPES.items() if name in args.types]
    turn, turns = args.turn
    chosen = in_turn([launches_of(partial(run, [dtype])) for dtype in types], turn - 1, turns)
    for launch in chosen:
        compile_launch(launch, args.capability)
    print(f"{len(chosen)} kernels compiled for sm_{args.capability}")


if __name__ == "__main__":
    main()
