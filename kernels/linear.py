"""The matmul of a linear layer. The weight is packed once into the layout that the device multiplies fastest.

On CPUs with AVX2 or AVX-512, Quire uses its own kernels: they are faster than oneDNN for the few rows of decodes, about
as fast for many (benchmarks/matmul.py, docs/benchmarks/cpu.md), and a row's product does not depend on the other rows.
It also uses them on ARM with dot products, where their speed has not been measured.
Elsewhere, and for int8 and bfloat16 on processors with AMX, it uses oneDNN through torch: with prepacked weights
this runs at 85 % of the processor's peak, where `F.linear` (MKL) reaches 40 % on processors not made by Intel
(benchmarks/machine.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels import coded_words, dispatch, fp4, isa, packed, quantized, reference
from quire.kernels.cache import FP8_CAPABILITY
from quire.kernels.coded_words import RoundedRows, RowRounding, plain_rows
from quire.kernels.dispatch import by_device
from quire.kernels.low_rank import AdapterRows, LowRankPool
from quire.kernels.packed_state import Packed
from quire.kernels.quantized import QuantizedWeight

Quantization = Literal["int8", "int4"]

_act_mul = by_device(reference.act_mul)
_add_low_rank = by_device(reference.add_low_rank)
_gated_low_rank = by_device(packed.gated_low_rank)
_quantize_rows = by_device(packed.quantize_rows)
_scale_rows = by_device(packed.scale_rows)
_pack_tiles = by_device(packed.pack_tiles)
_quantize_weight = by_device(packed.quantize_weight)
pack_int8_tiles = by_device(packed.pack_int8_tiles)
_pack_int4_tiles = by_device(packed.pack_int4_tiles)
_tiled_linear = by_device(packed.tiled_linear)
_int8_linear = by_device(packed.int8_linear)
_int4_linear = by_device(packed.int4_linear)
_pack_coded_tiles = by_device(quantized.pack_coded_tiles)
_coded_linear = by_device(quantized.coded_linear)
_coded_matmul = by_device(coded_words.coded_matmul)
_rounded_matmul = dispatch.rounded_matmul
_fp4_matmul = by_device(fp4.fp4_matmul)
_act_mul_rounded = by_device(coded_words.act_mul_rounded)

_ROWS_HINT = 256
"""The number of rows that oneDNN packs for. A weight packed for few rows is slow for many; the reverse is not true."""
INT4_GROUPS = (128, 64, 32)
"""Sizes of groups that share a scale: the largest that divides the number of input features is used."""


class PackedLinear(Packed, ABC):
    """A weight in the layout that the device multiplies fastest."""

    @abstractmethod
    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`x @ weight.T + bias`; `x` is `[rows, in]`, the result `[rows, out]` of the same type."""

    @property
    def row_rounding(self) -> RowRounding | None:
        """How the product rounds its inputs, if they may be rounded in advance (`of_rounded`)."""
        return None

    def of_rounded(self, x: RoundedRows, bias: Tensor | None) -> Tensor:
        """Like a call, with inputs that are rounded as `row_rounding` says; only called if that is not None."""
        raise AssertionError(f"{type(self).__name__} does not take rounded inputs")

    @property
    def activation(self) -> str:
        """The gated activation that calls apply, or ""."""
        return ""

    def with_low_rank(
        self, x: Tensor | RoundedRows, bias: Tensor | None, pool: LowRankPool, rows: AdapterRows
    ) -> Tensor:
        """Like a call, of a layer that adapters change; of gated ones, gates and ups are the parts of `pool`. Rows
        without an adapter have the results of a call, to the last bit where a row does not depend on the others. If
        none has any, it is a call. Of rounded rows, the plain ones are multiplied by A."""
        call = self.of_rounded if isinstance(x, RoundedRows) else self
        if not rows.has_adapters:
            return call(x, bias)  # type: ignore[arg-type]
        out = self.gates_and_ups(x, bias) if self.activation else call(x, bias)  # type: ignore[arg-type]
        _add_low_rank(out, plain_rows(x), pool, rows)
        return _act_mul(out, self.activation).to(x.dtype) if self.activation else out

    def gates_and_ups(self, x: Tensor | RoundedRows, bias: Tensor | None) -> Tensor:
        """For a weight that `pack_gated` has packed: gates and then ups, `[rows, 2 * size]`.

        `act_mul` of them, in the type of `x`, is the result of a call, to the last bit: they are float32 where a call
        activates its sums before it rounds them.
        """
        raise AssertionError(f"{type(self).__name__} has no gates")


class PackedEmbedding(PackedLinear):
    """A weight whose rows are also looked up: an embedding's, and a head's that is tied to it."""

    @abstractmethod
    def rows(self, rows: Tensor) -> Tensor:
        """Rows of the weight, `[rows, in]` in float32; inputs are padded."""


def pack_linear(
    weight: Tensor | QuantizedWeight, quantization: Quantization | None = None, *, inputs: torch.dtype | None = None
) -> PackedLinear:
    """Pack `weight` `[out, in]` for a matmul; the caller may free it. Quantization is for tensors on CPUs only.

    `inputs` is the type of the inputs, if it is not the weight's own: float32, with a weight of 16 bits, which is then
    widened in registers.
    int8: one scale per output feature and one per row of `x`, computed at run time (W8A8, dynamic).
    int4: a scale and a zero per group of up to 128 weights of an output feature; `in` must be a multiple of 32.
    A quantized weight keeps its codes.
    """
    return _pack(weight, "", quantization, inputs)


def pack_groups(weight: Tensor, groups: int) -> PackedLinear:
    """Pack `weight` `[groups * out, in]` for a matmul of each group's inputs with its own rows; calls take
    `[rows, groups * in]` and return `[rows, groups * out]`."""
    return PackedGroups([pack_linear(part) for part in weight.chunk(groups)])


def pack_embedding(weight: QuantizedWeight) -> PackedEmbedding:
    """Pack `weight` `[out, in]` for lookups of rows, which stay as they are to the last bit, and for a matmul, which
    does not round `x` to 8 bits."""
    packed = pack_linear(replace(weight, wide=True, activations=None, rounding=None))
    assert isinstance(packed, PackedEmbedding)
    return packed


def pack_gated(
    weight: Tensor | QuantizedWeight,
    activation: str,
    quantization: Quantization | None = None,
    *,
    inputs: torch.dtype | None = None,
) -> PackedLinear:
    """Pack `weight` `[2 * size, in]`, gates before ups, for a matmul and `act_mul`; calls return `[rows, size]`."""
    return _pack(weight, activation, quantization, inputs)


def _pack(
    weight: Tensor | QuantizedWeight, activation: str, quantization: Quantization | None, inputs: torch.dtype | None
) -> PackedLinear:
    if isinstance(weight, QuantizedWeight):
        is_on_gpu = gpu_capability(weight.codes.device) is not None
        if weight.rounding is not None and not is_on_gpu and not rounds_inputs(weight):
            scaled = replace(weight, scales=weight.scales * weight.rounding[0], rounding=None, activations=None)
            return StaticScaleLinear(_pack(scaled, activation, None, None), weight.rounding)
        if weight.columns is not None:
            in_order = replace(weight, columns=None, activations=None)
            return GatheredLinear(_pack(in_order, activation, None, None), weight.columns)
    kind = packing(weight, quantization, inputs)
    if issubclass(kind, FusedLinear):
        return kind(weight, activation)  # type: ignore[arg-type]
    product: PackedLinear = kind(weight)
    return PackedGatedLinear(product, activation) if activation else product


def packing(
    weight: Tensor | QuantizedWeight, quantization: Quantization | None = None, inputs: torch.dtype | None = None
) -> type[Any]:
    """The class that packs a weight `[out, in]`, whose columns are in order; the arguments are as in `pack_linear`."""
    every = _of_codes(weight) if isinstance(weight, QuantizedWeight) else _of_numbers(weight, quantization, inputs)
    return next(kind for kind, supports in every if supports)


def _of_codes(weight: QuantizedWeight) -> Iterator[tuple[type[PackedLinear], bool]]:
    """The classes of quantized weights, and whether each supports this one on its device; the first that does is
    used."""
    is_on_gpu, rounds = gpu_capability(weight.codes.device) is not None, rounds_inputs(weight)
    yield CodedWordsLinear, is_on_gpu and not rounds
    yield Fp4Linear, is_on_gpu and weight.values == "e2m1"
    yield RoundedLinear, is_on_gpu
    yield CodedLinear, not rounds
    yield Int4Linear, weight.values != "int8"
    yield Int8Linear, weight.rounding is not None or not _prefers_onednn_for_int8()
    yield Int8OneDNNLinear, True


def _of_numbers(
    weight: Tensor, quantization: Quantization | None, inputs: torch.dtype | None
) -> Iterator[tuple[type[PackedLinear], bool]]:
    """The same for other weights."""
    is_compiled, is_widened = "cpu" in dispatch.PLATFORMS, inputs not in (None, weight.dtype)
    # With AVX2 only, oneDNN does not support bfloat16.
    onednn_is_faster = {
        torch.float32: not widens_weights(),
        torch.bfloat16: isa.has("amx_tile") or (isa.has("avx512_bf16") and not is_compiled),
    }.get(weight.dtype, False)
    yield PlainLinear, weight.device.type != "cpu"
    yield Int4Linear, quantization == "int4"
    yield Int8OneDNNLinear, quantization == "int8" and _prefers_onednn_for_int8()
    yield Int8Linear, quantization == "int8"
    assert not is_widened or (inputs == torch.float32 and widens_weights())
    yield TiledLinear, is_widened
    yield OneDNNLinear, onednn_is_faster and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    yield TiledLinear, is_compiled and (weight.dtype != torch.float32 or widens_weights())
    yield PlainLinear, True


def _prefers_onednn_for_int8() -> bool:
    return isa.has("amx_tile") or (isa.has("avx512_vnni") and "cpu" not in dispatch.PLATFORMS)


def gpu_capability(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of a GPU; None: the device is a CPU."""
    return None if device.type == "cpu" else torch.cuda.get_device_capability(device)


def rounds_inputs(weight: QuantizedWeight) -> bool:
    """Whether products round their inputs to 8 bits (W8A8, or W4A8 on CPUs) or to 4 (W4A4): they may, and the device
    has an operation for the types, the groups, and a static scale if there is one."""
    capability, group = gpu_capability(weight.codes.device), weight.codes.shape[-1] // weight.scales.shape[-1]
    of_rows, is_static = weight.scales.shape[-1] == 1, weight.rounding is not None
    has_global_scale = weight.global_scale is not None
    match weight.values, weight.activations:
        case _ if weight.columns is not None:
            return False
        case "int4", "int8":
            return capability is None and not is_static and group % INT4_GROUPS[-1] == 0
        case "int8", "int8":
            return of_rows and weight.offsets is None and not (capability and is_static)
        case "fp8", "fp8":
            has_groups = of_rows or group == coded_words.ROUNDED_GROUP
            is_plain = weight.offsets is None and not is_static
            return capability is not None and capability >= FP8_CAPABILITY and has_groups and is_plain
        case "e2m1", "fp4":
            has_groups = group == fp4.GROUP and not of_rows
            return capability is not None and capability >= fp4.FP4_CAPABILITY and has_groups and has_global_scale
    return False


def widens_weights() -> bool:
    """Whether products of float32 on CPUs take weights of 16 bits."""
    return "cpu" in dispatch.PLATFORMS and (isa.has("avx2") or isa.has("asimddp"))


def _padded(x: Tensor) -> Tensor:
    """`x` with its rows padded to one of a few sizes: oneDNN compiles and caches code for every number of rows.

    That takes 0.3 to 1.4 ms and 0.2 to 8 MB per shape, and steps have all sizes.
    """
    rows = len(x)
    step = 1 if rows <= 8 else 4 if rows <= 32 else 16 if rows <= 128 else 32 if rows <= 512 else 128
    return F.pad(x, (0, 0, 0, -rows % step)) if rows % step else x


class PlainLinear(PackedLinear):
    """torch's own matmul."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight.detach()

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, self._weight, bias)


class PackedGatedLinear(PackedLinear):
    """A matmul of gates and ups, followed by their activation."""

    def __init__(self, product: PackedLinear, activation: str) -> None:
        self._product, self._activation = product, activation

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return _act_mul(self._product(x, bias), self._activation)

    @property
    def row_rounding(self) -> RowRounding | None:
        return self._product.row_rounding

    @property
    def activation(self) -> str:
        return self._activation

    def of_rounded(self, x: RoundedRows, bias: Tensor | None) -> Tensor:
        return _act_mul(self._product.of_rounded(x, bias), self._activation)

    def gates_and_ups(self, x: Tensor | RoundedRows, bias: Tensor | None) -> Tensor:
        return self._product.of_rounded(x, bias) if isinstance(x, RoundedRows) else self._product(x, bias)

    def rounded(self, x: Tensor | RoundedRows, bias: Tensor | None, rounding: RowRounding) -> RoundedRows:
        """Return the result quantized for the next matmul."""
        both = self.gates_and_ups(x, bias)
        return RoundedRows(*_act_mul_rounded(both, self._activation, *rounding), both.dtype, rounding)


class FusedLinear(PackedLinear):
    """Quire's own matmul on CPUs, which applies a gated activation in registers. Constructors take the weight and the
    activation; none is ""."""

    def __init__(self, outs: int, activation: str) -> None:
        self._features, self._activation = outs // (2 if activation else 1), activation

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self._multiply(x, self._interleaved(bias), self._activation)

    @property
    def activation(self) -> str:
        return self._activation

    def with_low_rank(
        self, x: Tensor | RoundedRows, bias: Tensor | None, pool: LowRankPool, rows: AdapterRows
    ) -> Tensor:
        assert isinstance(x, Tensor)
        if not (rows.has_adapters and self._activation) or self._tiles is None:
            return super().with_low_rank(x, bias, pool, rows)
        bias = self._interleaved(bias)
        return _gated_low_rank(x, *self._tiles, bias, self._features, self._activation, pool, rows)

    @property
    def _tiles(self) -> tuple[Tensor, Tensor | None] | None:
        """The weight and its scales for `packed.gated_low_rank`; None: it does not support them."""
        return None

    def gates_and_ups(self, x: Tensor | RoundedRows, bias: Tensor | None) -> Tensor:
        assert isinstance(x, Tensor)
        assert self._activation
        return self._multiply(x, self._interleaved(bias), packed.SEPARATE)

    def _interleaved(self, bias: Tensor | None) -> Tensor | None:
        return packed.interleave_gated(bias) if bias is not None and self._activation else bias

    @abstractmethod
    def _multiply(self, x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
        """`activation` and `bias` are as in `packed.tiled_linear`."""


class TiledLinear(FusedLinear):
    """A matmul of float32, bfloat16 or float16 with float32 sums."""

    def __init__(self, weight: Tensor, activation: str = "") -> None:
        super().__init__(len(weight), activation)
        self._weight = pack_float_tiles(weight, bool(activation))

    @property
    def _tiles(self) -> tuple[Tensor, Tensor | None]:
        return self._weight, None

    def _multiply(self, x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
        return _tiled_linear(x, self._weight, bias, self._features, activation)


class PackedGroups(PackedLinear):
    """Matmuls of equal parts of the inputs by weights of their own."""

    def __init__(self, parts: Sequence[PackedLinear]) -> None:
        self._parts = list(parts)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        assert bias is None
        inputs = x.chunk(len(self._parts), dim=1)
        return torch.cat([part(each, None) for part, each in zip(self._parts, inputs, strict=True)], dim=1)


class OneDNNLinear(PackedLinear):
    """oneDNN's matmul by a prepacked weight, with float32 sums."""

    is_opaque = True

    def __init__(self, weight: Tensor) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS_HINT)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(_padded(x), self._weight, bias, "none", [], "")
        return out[: len(x)]

    def __getstate__(self) -> dict[str, Any]:
        return {"weight": self._weight.to_dense()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


def pack_float_tiles(weight: Tensor, gated: bool = False) -> Tensor:
    """Pack `weight` `[out, in]` as `pack_tiles`, with two inputs per word of bfloat16."""
    return _pack_tiles(weight.detach(), 2 if weight.dtype == torch.bfloat16 else 1, gated)


def pack_int4_tiles(weight: Tensor | QuantizedWeight, gated: bool = False) -> Tensor:
    """Pack `weight` `[out, in]` as 4-bit weights in the largest groups of INT4_GROUPS that divide its inputs, or the
    groups of a quantized weight, which `rounds_inputs`."""
    if isinstance(weight, QuantizedWeight):
        stored = weight.codes.shape[1] // weight.scales.shape[1]
        group = next(size for size in INT4_GROUPS if stored % size == 0)
        return quantized.pack_int4_codes(weight, group, gated, _pack_coded_tiles)
    group = next(size for size in INT4_GROUPS if weight.shape[1] % size == 0)
    return _pack_int4_tiles(weight.detach(), group, gated)


class Int8Linear(FusedLinear):
    """A matmul of 8-bit integers: exact except for rounding weights and `x` to 255 levels."""

    def __init__(self, weight: Tensor | QuantizedWeight, activation: str = "") -> None:
        """A quantized weight, which `rounds_inputs`, keeps its integers."""
        self._rounding: list[Tensor] = []
        if isinstance(weight, QuantizedWeight):
            tiles = quantized.pack_int8_codes(weight, bool(activation), _pack_tiles)
            outs, (self._weight, self._scales) = len(weight.codes), tiles
            if weight.rounding is not None:
                excess = quantized.pack_int8_excess(weight, weight.rounding, bool(activation))
                self._rounding = [weight.rounding, excess]
        else:
            outs, (self._weight, self._scales) = len(weight), pack_int8_tiles(weight.detach(), bool(activation))
        super().__init__(outs, activation)

    @property
    def _tiles(self) -> tuple[Tensor, Tensor | None] | None:
        return None if self._rounding else (self._weight, self._scales)

    def _multiply(self, x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
        return _int8_linear(x, self._weight, self._scales, bias, self._features, activation, *self._rounding)


class Int8OneDNNLinear(PackedLinear):
    """oneDNN's matmul of 8-bit integers. Without VNNI, it would sum two products in 16 bits, which may overflow."""

    is_opaque = True

    def __init__(self, weight: Tensor | QuantizedWeight) -> None:
        if isinstance(weight, QuantizedWeight):
            self._pack(weight.codes.view(torch.int8), weight.scales[:, 0].contiguous())
        else:
            self._pack(*_quantize_weight(weight.detach()))

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        integers, scales = _quantize_rows(x)
        out = torch.ops.onednn.qlinear_pointwise(
            qx=_padded(integers),
            x_scale=1.0,
            x_zero_point=packed.INT8_ZERO,
            qw=self._weight,
            w_scale=self._scales,
            w_zero_point=self._zeros,
            bias=None,
            output_scale=1.0,
            output_zero_point=0,
            output_dtype=torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32,
            post_op_name="none",
            post_op_args=[],
            post_op_algorithm="",
        )
        return _scale_rows(out[: len(x)], scales, bias, x.dtype)

    def __getstate__(self) -> dict[str, Any]:
        return {"integers": self._weight.to_dense().T.contiguous(), "scales": self._scales}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._pack(**state)

    def _pack(self, integers: Tensor, scales: Tensor) -> None:
        self._weight, self._scales = torch.ops.onednn.qlinear_prepack(integers, None), scales
        self._zeros = torch.zeros(len(integers), dtype=torch.int32)


class Int4Linear(FusedLinear):
    """4-bit weights in groups that share a scale and a zero. `x` is rounded to 255 levels in each group."""

    def __init__(self, weight: Tensor | QuantizedWeight, activation: str = "") -> None:
        """A quantized weight, which `rounds_inputs`, keeps its integers."""
        super().__init__(len(weight.codes if isinstance(weight, QuantizedWeight) else weight), activation)
        self._weight = pack_int4_tiles(weight, bool(activation))

    @property
    def _tiles(self) -> tuple[Tensor, Tensor | None]:
        return self._weight, None

    def _multiply(self, x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
        return _int4_linear(x, self._weight, bias, self._features, activation)


class CodedLinear(FusedLinear, PackedEmbedding):
    """A weight in few bits as it is published, with float32 sums: see `quantized.coded_linear`."""

    def __init__(self, weight: QuantizedWeight, activation: str = "") -> None:
        super().__init__(len(weight.codes), activation)
        tiles = quantized.pack_coded(weight, bool(activation), _pack_coded_tiles)
        self._weight, self._scales = tiles.tiles, tiles.scales
        self._values, self._group, self._factors = tiles.values, tiles.group, tiles.factors

    def _multiply(self, x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
        form = self._values, self._group, self._factors
        return _coded_linear(x, self._weight, self._scales, bias, self._features, *form, activation)

    def rows(self, rows: Tensor) -> Tensor:
        tiles = quantized.CodedTiles(self._values, self._group, self._factors, self._weight, self._scales)
        return quantized.unpack_coded(tiles, rows) * self._scales[rows, None]


class CodedWordsLinear(PackedEmbedding):
    """A weight in few bits as it is published, on a GPU: codes are widened in registers, and `x` is rounded only if its
    scale is static."""

    def __init__(self, weight: QuantizedWeight) -> None:
        self._weight = coded_words.pack_words(weight)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return _coded_matmul(x, self._weight, bias)

    def rows(self, rows: Tensor) -> Tensor:
        return coded_words.unpack_words(self._weight.rows(rows))


class RoundedLinear(PackedLinear):
    """A weight of 8 bits as it is published, on a GPU: `x` is rounded to its type, which tensor cores multiply."""

    def __init__(self, weight: QuantizedWeight) -> None:
        self._weight = coded_words.typed_codes(weight), weight.scales

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return _rounded_matmul(x, *self._weight, bias)

    @property
    def row_rounding(self) -> RowRounding | None:
        codes, scales = self._weight
        return RowRounding(codes.dtype, scales.shape[1])

    def of_rounded(self, x: RoundedRows, bias: Tensor | None) -> Tensor:
        return _rounded_matmul(x.codes, *self._weight, bias, x.scales, x.dtype)


class Fp4Linear(PackedLinear):
    """A weight of 4-bit floats as it is published, on a GPU: `x` is rounded to them, and tensor cores multiply both."""

    def __init__(self, weight: QuantizedWeight) -> None:
        self._weight = fp4.pack_fp4(weight)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return _fp4_matmul(x, self._weight, bias)


class GatheredLinear(PackedEmbedding):
    """A matmul whose columns are in another order than the inputs."""

    def __init__(self, product: PackedLinear, columns: Tensor) -> None:
        """`columns` is as in `QuantizedWeight`: more than the inputs if some have none."""
        self._product, self._columns = product, columns

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self._product(self._gathered(x), bias)

    @property
    def activation(self) -> str:
        return self._product.activation

    def gates_and_ups(self, x: Tensor | RoundedRows, bias: Tensor | None) -> Tensor:
        assert isinstance(x, Tensor)
        return self._product.gates_and_ups(self._gathered(x), bias)

    def _gathered(self, x: Tensor) -> Tensor:
        x = F.pad(x, (0, 1)) if x.shape[1] < len(self._columns) else x
        return x.index_select(1, self._columns)

    def rows(self, rows: Tensor) -> Tensor:
        assert isinstance(self._product, PackedEmbedding)
        columns = self._product.rows(rows)[:, : len(self._columns)]
        return columns.new_zeros(len(rows), len(self._columns) + 1).index_copy_(1, self._columns, columns)


class StaticScaleLinear(PackedLinear):
    """On CPUs, a matmul of inputs that are rounded to integers of 8 bits in steps of constant size."""

    def __init__(self, product: PackedLinear, rounding: Tensor) -> None:
        """`rounding` is as in `QuantizedWeight`; the product's scales include the inputs' scale."""
        self._product, self._rounding = product, rounding

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self._product(quantized.round_static(x, self._rounding), bias)

    @property
    def activation(self) -> str:
        return self._product.activation

    def gates_and_ups(self, x: Tensor | RoundedRows, bias: Tensor | None) -> Tensor:
        assert isinstance(x, Tensor)
        return self._product.gates_and_ups(quantized.round_static(x, self._rounding), bias)
