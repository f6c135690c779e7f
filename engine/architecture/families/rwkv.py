"""RWKV-4: layers without attention, whose state is a weighted mean and the token before."""

from __future__ import annotations

from quire.engine.architecture.families.family import Config, Family, architecture, layer_norm
from quire.engine.architecture.model_spec import LayerSpec, ModelSpec
from quire.engine.architecture.recurrent_spec import RWKVSpec


def _rwkv(name: str, config: Config) -> ModelSpec:
    """There are no positions: lengths have no limit of the model's own. transformers halves the residual stream every
    `rescale_every` layers, for float16, which is refused here. Halving changes nothing but the size that the norms'
    epsilons are compared with."""
    norm, hidden = layer_norm(config["layer_norm_epsilon"]), int(config["hidden_size"])
    state = RWKVSpec(
        width=int(config["attention_hidden_size"] or hidden),
        inner_size=int(config["intermediate_size"] or 4 * hidden),
        norm=norm,
        hidden_size=hidden,
        conv_size=2,
    )
    layer = LayerSpec(attention=None, state=state, attention_norm=None, feed_forward=None, feed_forward_norm=None)
    return architecture(name, config, [layer] * int(config["num_hidden_layers"]), norm, embedding_norm=norm)


_ATTENTION, _INNER = "rwkv.blocks.{layer}.attention", "rwkv.blocks.{layer}.feed_forward"
_NAMES = {
    "embedding": "rwkv.embeddings",
    "embedding_norm": "rwkv.blocks.0.pre_ln",
    "layers.state.norm": "rwkv.blocks.{layer}.ln1",
    "layers.state.mix_key": f"{_ATTENTION}.time_mix_key",
    "layers.state.mix_value": f"{_ATTENTION}.time_mix_value",
    "layers.state.mix_receptance": f"{_ATTENTION}.time_mix_receptance",
    "layers.state.decay": f"{_ATTENTION}.time_decay",
    "layers.state.bonus": f"{_ATTENTION}.time_first",
    "layers.state.key": f"{_ATTENTION}.key",
    "layers.state.value": f"{_ATTENTION}.value",
    "layers.state.receptance": f"{_ATTENTION}.receptance",
    "layers.state.output": f"{_ATTENTION}.output",
    "layers.state.inner_norm": "rwkv.blocks.{layer}.ln2",
    "layers.state.inner_mix_key": f"{_INNER}.time_mix_key",
    "layers.state.inner_mix_receptance": f"{_INNER}.time_mix_receptance",
    "layers.state.inner_key": f"{_INNER}.key",
    "layers.state.inner_receptance": f"{_INNER}.receptance",
    "layers.state.inner_value": f"{_INNER}.value",
    "norm": "rwkv.ln_out",
    "head": "head",
}
FAMILIES = {
    "RwkvForCausalLM": Family(
        _rwkv,
        _NAMES,
        {
            "vocab_size": 50277,
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "attention_hidden_size": None,
            "intermediate_size": None,
            "layer_norm_epsilon": 1e-5,
            "max_position_embeddings": 262144,
        },
        prefix="rwkv.",
    ),
}
