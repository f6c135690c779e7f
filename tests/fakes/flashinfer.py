"""FlashInfer's two wrappers as we call them, computed by the reference; `plans` are the plans that were made.

The parameters named here have the names, the order and the defaults of the library's own, 0.7.2, which a slow test of
tests/integration/kernels/test_flashinfer.py compares.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from quire.kernels import reference

__version__ = "0.7.2"
plans: list[str] = []


class _Planned:
    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str) -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "HND"
        self.batch: tuple[Tensor, Tensor, Tensor] | None = None

    def keep(
        self, starts: Tensor, page_starts: Tensor, pages: Tensor, last: Tensor, sizes: tuple[int, ...], **options: Any
    ) -> None:
        rows = (starts, page_starts, pages, last, options["seq_lens"])
        assert all(each.dtype == torch.int32 and each.dim() == 1 for each in rows)
        assert len(starts) == len(page_starts) == len(last) + 1
        assert len(pages) == page_starts[-1]
        heads, kv_heads, _, page_size = sizes
        assert heads % kv_heads == 0
        counts = page_starts.diff()
        lengths = (counts - 1) * page_size + last
        assert torch.equal(lengths, options["seq_lens"])
        tables = torch.zeros(len(last), int(counts.max()), dtype=torch.int64)
        for number, (begin, end) in enumerate(pairwise(page_starts.tolist())):
            tables[number, : end - begin] = pages[begin:end]
        self.batch, self.sizes, self.options = (tables, lengths.long(), starts.long()), sizes, options

    def compute(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], out: Tensor) -> Tensor:
        assert self.batch is not None, "run before plan"
        heads, kv_heads, head_dim, page_size = self.sizes
        keys, values = paged_kv_cache
        assert q.shape[1:] == out.shape[1:] == (heads, head_dim)
        assert q.dtype == self.options["q_data_type"]
        assert keys.dtype == values.dtype == self.options["kv_data_type"]
        assert keys.shape[1:] == values.shape[1:] == (kv_heads, page_size, head_dim)
        done = reference.paged_attention(
            *(q, torch.stack((keys, values)), *self.batch, self.options["sm_scale"]),
            window=self.options["window_left"] + 1,
            softcap=self.options["logits_soft_cap"] or 0.0,
        )
        return out.copy_(done)


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        self._planned = _Planned(float_workspace_buffer, kv_layout)

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        seq_lens: Tensor | None = None,
    ) -> None:
        assert causal
        plans.append("prompts")
        self._planned.keep(
            *(qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len),
            (num_qo_heads, num_kv_heads, head_dim_qk, page_size),
            sm_scale=sm_scale,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
            seq_lens=seq_lens,
        )

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor | None = None) -> Tensor:
        assert out is not None
        return self._planned.compute(q, paged_kv_cache, out)


class BatchDecodeWithPagedKVCacheWrapper:
    def __init__(
        self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", *, use_tensor_cores: bool = False
    ) -> None:
        assert use_tensor_cores, "the kernels without serve few numbers of heads to a KV head"
        self._planned = _Planned(float_workspace_buffer, kv_layout)

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        **kwargs: Any,
    ) -> None:
        self._plan_impl(
            *(indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size),
            **kwargs,
        )

    def _plan_impl(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype | None = "float16",
        kv_data_type: str | torch.dtype | None = None,
        sm_scale: float | None = None,
        seq_lens: Tensor | None = None,
    ) -> None:
        plans.append("decodes")
        self._planned.keep(
            *(torch.arange(len(indptr), dtype=torch.int32), indptr, indices, last_page_len),
            (num_qo_heads, num_kv_heads, head_dim, page_size),
            sm_scale=sm_scale,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
            seq_lens=seq_lens,
        )

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor | None = None) -> Tensor:
        assert out is not None
        return self._planned.compute(q, paged_kv_cache, out)
