"""Paged attention by FlashInfer (Ye et al. 2025), an optional library, with the interface of the reference.

FlashInfer plans a step on the host, once for all layers of the same kind, and then runs each layer. A plan needs the
per-request numbers on the host and belongs to the step (`HostMetadata.plans`). It is stored in the memory of one of a
few wrappers, which are used in rotation: steps are launched ahead of the device, and the copy from a wrapper's pinned
memory must finish before the next plan is written there.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Hashable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.kernels import reference
from quire.kernels.attention_config import AttentionCase, AttentionLayer, HostMetadata
from quire.kernels.cache import INT4

logger = logging.getLogger(__name__)

HEAD_DIMS = (64, 128, 256)
TYPES = (torch.float16, torch.bfloat16)
"""The head sizes and types that all FlashInfer kernels support, on every GPU that FlashInfer supports."""
_WORKSPACE_BYTES = 128 << 20
"""The size its documentation recommends; partial results of split sequences are merged there."""
_AHEAD = 3
"""Wrappers of a kind that are created at once: the steps in flight, and one more."""


class FlashInferMissing(RuntimeError):
    """FlashInfer cannot be used. The message gives the reason."""


class FlashInferWrong(FlashInferMissing):
    """FlashInfer can be imported, but fails or disagrees with the reference."""


class _Wrapper:
    """A FlashInfer wrapper and the step whose plan it holds."""

    def __init__(self, wrapper: Any, device: torch.device) -> None:
        self.wrapper = wrapper
        self._sent: Any = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._host: HostMetadata | None = None

    def is_free_for(self, host: HostMetadata) -> bool:
        """Whether its plan belongs to another step and has been copied out of the pinned memory."""
        return self._host is not host and (self._sent is None or self._sent.query())

    def plan(self, host: HostMetadata, *args: object, **options: object) -> None:
        self._host = host
        self.wrapper.plan(*args, **options)
        if self._sent is not None:
            self._sent.record()


class FlashInfer:
    """FlashInfer on one device, called like `reference.paged_attention`; returns None to decline a call.

    It declines calls that need a feature named by `unsupported`, steps that cannot be planned on the host
    (`HostMetadata.plans`), and CUDA graph capture, because a graph would outlive the plan. Raises `FlashInferMissing`
    if FlashInfer is not installed or cannot be imported.
    """

    def __init__(self, device: torch.device) -> None:
        try:
            self._library = importlib.import_module("flashinfer")
        except Exception as error:  # its import looks for compilers and drivers
            raise FlashInferMissing(f"cannot be imported ({error}); pip install 'quire-llm[flashinfer]'") from error
        self.handles_prefill = self.handles_decode = True
        self._device = device
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers: dict[Hashable, list[_Wrapper]] = {}
        self._has_warned = False

    @staticmethod
    def unsupported(layer: AttentionLayer, dtype: torch.dtype, cache_dtype: torch.dtype) -> str:
        """The unsupported feature that such a layer needs, or ""."""
        if layer.is_mla:
            return "latent attention"
        if layer.is_partial:
            return "a part of the keys"
        if layer.has_sinks or layer.has_own_sinks or layer.has_alibi or layer.num_biases:
            has_sinks = layer.has_sinks or layer.has_own_sinks
            return "sinks" if has_sinks else "ALiBi" if layer.has_alibi else "biases of queries and distances"
        if layer.head_dim not in HEAD_DIMS:
            return f"heads of {layer.head_dim}"
        if dtype not in TYPES:
            return str(dtype).removeprefix("torch.")
        kind = "int4" if cache_dtype == INT4 else str(cache_dtype).removeprefix("torch.")
        return "" if cache_dtype == dtype else f"a cache of {kind}"

    def __call__(
        self,
        query: Tensor,
        cache: Tensor,
        block_tables: Tensor,
        sequence_lengths: Tensor,
        query_starts: Tensor,
        scale: float,
        *,
        window: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        slopes: Tensor | None = None,
        biases: Tensor | None = None,
        ends: Tensor | None = None,
        host: HostMetadata | None = None,
    ) -> Tensor | None:
        is_decode = len(query) == len(sequence_lengths)
        if (
            host is None
            or host.plans is None
            or not len(query)
            or not (self.handles_decode if is_decode else self.handles_prefill)
        ):
            return None
        heads, head_dim, dtype = query.shape[1], query.shape[2], query.dtype
        if not sinks is slopes is biases is ends is None or head_dim not in HEAD_DIMS:
            return None
        if dtype not in TYPES or cache.dtype != dtype or (query.is_cuda and torch.cuda.is_current_stream_capturing()):
            return None
        key = (block_tables.data_ptr(), heads, cache.shape[2:], dtype, scale, window, softcap)
        if key not in host.plans:
            options = {
                "sm_scale": scale,
                "window_left": window - 1,  # the query's own key is not counted; -1: no window
                "logits_soft_cap": softcap,
                "q_data_type": dtype,
                "kv_data_type": dtype,
            }
            shape = (heads, cache.shape[2], head_dim, cache.shape[3])
            host.plans[key] = self._plan(is_decode, shape, block_tables, sequence_lengths, host, options)
        wrapper: Any = host.plans[key]
        if wrapper is None:
            return None
        query = query if query.stride(-1) == 1 else query.contiguous()
        out = torch.empty(query.shape, dtype=dtype, device=query.device)
        wrapper.run(query, (cache[0], cache[1]), out=out)
        return out

    def _plan(
        self,
        is_decode: bool,
        shape: tuple[int, int, int, int],
        block_tables: Tensor,
        sequence_lengths: Tensor,
        host: HostMetadata,
        options: dict[str, Any],
    ) -> Any:
        """Plan a step and return the wrapper, or None if planning fails. `shape` is (heads, KV heads, head, block).

        Nothing waits for the device: the host's numbers are copied from pinned memory, and the block numbers are
        gathered on the device.
        """
        block_size = shape[3]
        pages = -(-host.lengths // block_size)
        starts, page_starts, last_page, lengths = self._pinned(
            np.concatenate(([0], host.counts.cumsum())),
            np.concatenate(([0], pages.cumsum())),
            host.lengths - (pages - 1) * block_size,
            host.lengths,
        )
        counts = (sequence_lengths + block_size - 1) // block_size
        total = int(pages.sum())
        owners = torch.arange(len(counts), device=self._device).repeat_interleave(counts, output_size=total)
        places = torch.arange(total, device=self._device) - (counts.cumsum(0) - counts)[owners]
        blocks = block_tables[owners, places].int()
        wrapper = self._wrapper(is_decode, (shape, options["q_data_type"]), host)
        try:
            if is_decode:
                wrapper.plan(host, page_starts, blocks, last_page, *shape, seq_lens=lengths, **options)
            else:
                args = (starts, page_starts, blocks, last_page, *shape)
                wrapper.plan(host, *args, causal=True, seq_lens=lengths, **options)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # such as a workspace that is too small for the step
            if not self._has_warned:
                logger.warning("FlashInfer cannot plan a step; another backend computes it and similar ones: %s", error)
            self._has_warned = True
            return None
        return wrapper.wrapper

    def _pinned(self, *rows: np.ndarray[Any, np.dtype[Any]]) -> tuple[Tensor, ...]:
        """The rows as int32, in pinned memory on a GPU."""
        joined = torch.from_numpy(np.concatenate(rows).astype(np.int32))
        if self._device.type == "cuda":
            joined = joined.pin_memory()
        return joined.split_with_sizes([len(row) for row in rows])

    def _wrapper(self, is_decode: bool, shape: Hashable, host: HostMetadata) -> _Wrapper:
        kind = (is_decode, shape)
        if kind not in self._wrappers:
            self._wrappers[kind] = [self._make(is_decode) for _ in range(_AHEAD)]
        wrappers = self._wrappers[kind]
        free = next((each for each in wrappers if each.is_free_for(host)), None)
        if free is None:
            wrappers.append(free := self._make(is_decode))
        return free

    def _make(self, is_decode: bool) -> _Wrapper:
        """A new wrapper. Decodes use tensor cores, which support any number of query heads per KV head."""
        library = self._library
        make = library.BatchPrefillWithPagedKVCacheWrapper
        if is_decode:
            make = functools.partial(library.BatchDecodeWithPagedKVCacheWrapper, use_tensor_cores=True)
        return _Wrapper(make(self._workspace, kv_layout="HND"), self._device)

    def compare(self, case: AttentionCase) -> str:
        """How its result differs from the reference's beyond the precision of the type, or ""."""
        step = 8 * torch.finfo(case.args[0].dtype).eps
        try:
            actual = self(*case.args, **case.options, host=case.host)
            expected = reference.paged_attention(*case.args, **case.options)
            assert actual is not None, "it declines the call"
            torch.testing.assert_close(actual, expected, rtol=step, atol=step)
        except Exception as error:  # from a compiler, a driver or the comparison
            return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]
        return ""
