"""The text part of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: Qwen2 and Qwen3, with positions that are the same on all axes."""

from __future__ import annotations

from quire.engine.architecture.families import llama, moe
from quire.engine.architecture.families.family import NOT_TEXT, Family, of_multimodal
from quire.engine.architecture.families.moe import NAMES_BY_EXPERT, STACKED_EXPERTS

_QWEN2 = {**llama.QWEN, "max_window_layers": 80, "num_key_value_heads": 8, "rms_norm_eps": 1e-5}
_QWEN3 = {**llama.QWEN, "head_dim": 128, "max_position_embeddings": 128000}
_QWEN3_MOE = {
    **moe.QWEN_MOE,
    "max_position_embeddings": 128000,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 16,
    "moe_intermediate_size": 1408,
    "norm_topk_prob": True,
}


def _is_transposed(module: str) -> bool:
    return module.startswith("layers.feed_forward.experts.")


FAMILIES = {
    "Qwen2VLForConditionalGeneration": Family(llama.qwen2, llama.NAMES, _QWEN2, ignored_prefixes=NOT_TEXT),
    "Qwen2_5_VLForConditionalGeneration": Family(llama.qwen2, llama.NAMES, _QWEN2, ignored_prefixes=NOT_TEXT),
    "Qwen3VLForConditionalGeneration": Family(
        llama.qwen3, of_multimodal(llama.NAMES), _QWEN3, ignored_prefixes=NOT_TEXT
    ),
    "Qwen3VLMoeForConditionalGeneration": Family(
        moe.qwen_moe,
        of_multimodal(NAMES_BY_EXPERT | STACKED_EXPERTS),
        _QWEN3_MOE,
        is_transposed=_is_transposed,
        ignored_prefixes=NOT_TEXT,
    ),
}
