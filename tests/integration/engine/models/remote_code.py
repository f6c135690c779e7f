"""A model folder that brings its own Python code: a decoder that no release of transformers knows."""

from __future__ import annotations

import json
from pathlib import Path

CONFIG = """
from transformers import PreTrainedConfig


class PebbleConfig(PreTrainedConfig):
    model_type = "pebble"
    base_model_tp_plan = {
        "layers.*.attention.queries": "colwise",
        "layers.*.attention.keys": "colwise",
        "layers.*.attention.values": "colwise",
        "layers.*.attention.output": "rowwise",
    }

    hidden_size: int = 48
    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    vocab_size: int = 131
    max_position_embeddings: int = 256
    penalty: float = 0.5
"""

MODEL = """
import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

from .configuration_pebble import PebbleConfig


class PebbleAttention(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.config, self.layer_idx, self.is_causal, self.num_key_value_groups = config, layer_idx, True, 1
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.scaling = config.penalty * self.head_dim**-0.5
        self.queries, self.keys, self.values, self.output = (
            nn.Linear(config.hidden_size, config.hidden_size, bias=False) for _ in range(4)
        )

    def forward(self, x, attention_mask, cache=None, **kwargs):
        shape = (*x.shape[:-1], -1, self.head_dim)
        query, key, value = (
            side(x).view(shape).transpose(1, 2) for side in (self.queries, self.keys, self.values)
        )
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        mixed, _ = attend(self, query, key, value, attention_mask, scaling=self.scaling, **kwargs)
        return self.output(mixed.reshape(*x.shape[:-1], -1))


class PebbleLayer(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size)
        self.attention = PebbleAttention(config, layer_idx)
        self.up = nn.Linear(config.hidden_size, 2 * config.hidden_size)
        self.down = nn.Linear(2 * config.hidden_size, config.hidden_size)

    def forward(self, x, *args, **kwargs):
        normed = self.norm(x)
        return x + self.attention(normed, *args, **kwargs) + self.down(self.up(normed).relu())


class PebblePreTrainedModel(PreTrainedModel):
    config_class = PebbleConfig
    base_model_prefix = "model"
    _supports_attention_backend = True


class PebbleModel(PebblePreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.places = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList([PebbleLayer(config, number) for number in range(config.num_hidden_layers)])
        self.post_init()

    def forward(
        self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, cache=None,
        inputs_embeds=None, **kwargs,
    ):
        cache = past_key_values if cache is None else cache  # the name until transformers 5.23, and since
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            seen = cache.get_seq_length() if cache is not None else 0
            position_ids = (torch.arange(x.shape[1], device=x.device) + seen)[None]
        mask = create_causal_mask(self.config, x, attention_mask, cache, position_ids=position_ids)
        x = x + self.places(position_ids)
        for layer in self.layers:
            x = layer(x, mask, cache=cache)
        return BaseModelOutputWithPast(last_hidden_state=x)


class PebbleForCausalLM(PebblePreTrainedModel, GenerationMixin):
    def __init__(self, config):
        super().__init__(config)
        self.model = PebbleModel(config)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids=None, **kwargs):
        output = self.model(input_ids=input_ids, **kwargs)
        return CausalLMOutputWithPast(logits=self.head(output.last_hidden_state))
"""


def write_code(folder: Path) -> None:
    """The code, and a config.json that points to it."""
    (folder / "configuration_pebble.py").write_text(CONFIG)
    (folder / "modeling_pebble.py").write_text(MODEL)
    names = {
        "AutoConfig": "configuration_pebble.PebbleConfig",
        "AutoModelForCausalLM": "modeling_pebble.PebbleForCausalLM",
    }
    config = {"architectures": ["PebbleForCausalLM"], "model_type": "pebble", "auto_map": names, "eos_token_id": 130}
    (folder / "config.json").write_text(json.dumps(config))
