"""Model families: the decoder that runs each, and how its checkpoint names what the decoder is made of."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from quire.engine.architecture import Architecture
from quire.engine.layers.weight import Shard
from quire.engine.models.decoder import Decoder


@dataclass(frozen=True)
class Family:
    """`names` maps our modules, layer numbers left out, to the checkpoint's."""

    decoder: type[Decoder]
    names: Mapping[str, str]

    def tensor(self, path: str, shard: Shard, arch: Architecture) -> str:
        """The checkpoint tensor behind a shard of the parameter `path`, such as layers.3.attention.qkv.weight."""
        module, _, kind = path.rpartition(".")
        if module == "head" and arch.tie_embeddings:
            module = "embedding"
        number = re.search(r"\d+", module)
        template = self.names[re.sub(r"\.\d+", "", module)]
        return f"{template.format(layer=number and number[0], part=shard.part)}.{kind}"


_LLAMA = Family(
    Decoder,
    {
        "embedding": "model.embed_tokens",
        "layers.attention_norm": "model.layers.{layer}.input_layernorm",
        "layers.attention.qkv": "model.layers.{layer}.self_attn.{part}_proj",
        "layers.attention.query_norm": "model.layers.{layer}.self_attn.q_norm",
        "layers.attention.key_norm": "model.layers.{layer}.self_attn.k_norm",
        "layers.attention.output": "model.layers.{layer}.self_attn.o_proj",
        "layers.feed_forward_norm": "model.layers.{layer}.post_attention_layernorm",
        "layers.feed_forward.gate_up": "model.layers.{layer}.mlp.{part}_proj",
        "layers.feed_forward.down": "model.layers.{layer}.mlp.down_proj",
        "norm": "model.norm",
        "head": "lm_head",
    },
)

FAMILIES = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": _LLAMA,
    "Qwen3ForCausalLM": _LLAMA,
}
