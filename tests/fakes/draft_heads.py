"""Tiny random targets with heads that draft, and the heads' forward pass as the papers give it.

A case's target and the layers of heads for multi-token prediction are transformers'. EAGLE's layer is written out.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.fakes.families import CASES, SIZES, write, write_model

HEAD = "head"
"""The folder of a head with a checkpoint of its own, in that of its target."""
_DRAFT_VOCAB = 60
_EAGLE3 = {"num_key_value_heads": 2, "head_dim": 20, "intermediate_size": 56, "rope_theta": 5000.0}


@dataclass
class Reference:
    """A target of transformers and its head, in float32, without caches."""

    target: Any
    reads: tuple[int, ...]
    """The layers whose inputs the head reads; empty: the normalized output of the last one."""
    combine: Callable[[Tensor], Tensor]
    """What the head reads of them."""
    step: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    """The next tokens `[tokens]` and hidden states → what is fed back, and logits `[tokens, vocab]`."""

    @torch.no_grad()
    def states(self, tokens: Tensor) -> Tensor:
        """What the head reads at each position, `[tokens, hidden]`."""
        streams: list[Tensor] = []
        hook = self.target.model.norm.register_forward_pre_hook(lambda norm, inputs: streams.append(inputs[0]))
        *inputs, normed = self.target(tokens[None], output_hidden_states=True).hidden_states
        hook.remove()
        inputs += streams[-1:]
        return self.combine(torch.cat([inputs[each][0] for each in self.reads], -1) if self.reads else normed[0])

    @torch.no_grad()
    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """Greedy drafts after `tokens`, the last of which the target has sampled: the head's most likely tokens."""
        states, known = self.states(torch.tensor(tokens))[:-1], list(tokens)
        for _ in range(count):
            fed_back, logits = self.step(torch.tensor(known[1:]), states)
            known.append(int(logits[-1].argmax()))
            states = torch.cat((states, fed_back[-1:]))
        return known[len(tokens) :]


def write_eagle3(target: str, folder: Path, *, texts: Sequence[list[int]] = (), **settings: Any) -> Reference:
    """A head with a draft vocabulary for the case `target` of `families`, in `folder / HEAD`. Its logits are random, or
    fitted to `texts`."""
    model = write(target, folder)
    width, number, vocab = model.config.hidden_size, model.config.num_hidden_layers, model.config.vocab_size
    config = SIZES | {"hidden_size": width, "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
    config |= _EAGLE3 | {"num_hidden_layers": 1, "vocab_size": vocab, "draft_vocab_size": _DRAFT_VOCAB} | settings
    hidden, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    dim, inner, drafted = config["head_dim"], config["intermediate_size"], config["draft_vocab_size"]
    tensors = _random(
        {
            "fc.weight": (hidden, 3 * width),
            "midlayer.input_layernorm.weight": (hidden,),
            "midlayer.hidden_norm.weight": (hidden,),
            "midlayer.post_attention_layernorm.weight": (hidden,),
            "midlayer.self_attn.q_proj.weight": (heads * dim, 2 * hidden),
            "midlayer.self_attn.k_proj.weight": (kv_heads * dim, 2 * hidden),
            "midlayer.self_attn.v_proj.weight": (kv_heads * dim, 2 * hidden),
            "midlayer.self_attn.o_proj.weight": (hidden, heads * dim),
            "midlayer.mlp.gate_proj.weight": (inner, hidden),
            "midlayer.mlp.up_proj.weight": (inner, hidden),
            "midlayer.mlp.down_proj.weight": (hidden, inner),
            "norm.weight": (hidden,),
            "lm_head.weight": (drafted, hidden),
        }
    )
    if hidden != width:
        tensors |= _random({"embed_tokens.weight": (vocab, hidden)})
    often = [token for token, _ in Counter(token for text in texts for token in text).most_common(drafted)]
    others = [token for token in torch.randperm(vocab).tolist() if token not in often]
    chosen = torch.tensor([*often, *others][:drafted]).sort().values
    mask = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, chosen, True)
    embedding = tensors.get("embed_tokens.weight", model.get_input_embeddings().weight)
    part = {name.removeprefix("midlayer.").removesuffix(".weight"): each for name, each in tensors.items()}

    def stream(tokens: Tensor, states: Tensor) -> Tensor:
        embedded = _rms(F.embedding(tokens, embedding), part["input_layernorm"])
        normed = _rms(states, part["hidden_norm"])
        residual = normed if config.get("norm_before_residual") else states
        residual = residual + _attention(torch.cat((embedded, normed), -1), part, config)
        x = _rms(residual, part["post_attention_layernorm"])
        inner = F.silu(x @ part["mlp.gate_proj"].T) * (x @ part["mlp.up_proj"].T)
        return residual + inner @ part["mlp.down_proj"].T

    def step(tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        out = stream(tokens, states)
        logits = torch.full((len(out), vocab), -torch.inf)
        logits[:, chosen] = _rms(out, part["norm"]) @ part["lm_head"].T
        return out, logits

    reads = tuple(config.get("reads", (2, number // 2, number - 3)))
    reference = Reference(model, reads, lambda states: states @ part["fc"].T, step)
    if texts:
        known = [torch.tensor(text) for text in texts]
        seen = torch.cat([_rms(stream(text[1:], reference.states(text)[:-1]), part["norm"])[:-1] for text in known])
        wanted = (torch.cat([text[2:] for text in known])[:, None] == chosen).float()
        part["lm_head"] = torch.linalg.lstsq(seen, wanted).solution.T
    tensors["lm_head.weight"] = part["lm_head"]
    _save(folder / HEAD, config, tensors | {"d2t": chosen - torch.arange(drafted), "t2d": mask})
    return reference


def write_eagle(target: str, folder: Path) -> Reference:
    """EAGLE's head for a case without biases: a layer of Llama without its first norm, and no norm behind it."""
    model = write(target, folder)
    width, vocab = model.config.hidden_size, model.config.vocab_size
    config = SIZES | {"hidden_size": width, "num_hidden_layers": 1, "vocab_size": vocab, "model_type": "llama"}
    layer: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).train(False)
    torch.nn.init.normal_(layer.model.layers[0].post_attention_layernorm.weight, 1.0, 0.2)
    tensors = {f"layers.0.{name}": each.detach() for name, each in layer.model.layers[0].state_dict().items()}
    del tensors["layers.0.input_layernorm.weight"]
    tensors |= _random({"fc.weight": (width, 2 * width), "fc.bias": (width,)})
    tensors["embed_tokens.weight"] = model.get_input_embeddings().weight.detach().clone()
    _save(folder / HEAD, config | {"architectures": ["LlamaForCausalLM"]}, tensors)
    layer.model.layers[0].input_layernorm = layer.model.norm = torch.nn.Identity()

    def step(tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.cat((model.get_input_embeddings()(tokens), states), -1)
        out = layer.model(inputs_embeds=F.linear(both, tensors["fc.weight"], tensors["fc.bias"])[None])
        hidden = out.last_hidden_state[0]
        return hidden, model.get_output_embeddings()(hidden)

    return Reference(model, (), lambda states: states, step)


_AFTER = {name: f"model.layers.{{after}}.{own}" for name, own in (("embedding", "enorm"), ("hidden", "hnorm"))} | {
    "projection": "model.layers.{after}.eh_proj",
    "norm": "model.layers.{after}.shared_head.norm",
    "layer": "model.layers.{after}",
}
_MTP = {
    "embedding": "mtp.pre_fc_norm_embedding",
    "hidden": "mtp.pre_fc_norm_hidden",
    "projection": "mtp.fc",
    "norm": "mtp.norm",
    "layer": "mtp.layers.0",
}
_MIMO = {
    name: f"model.mtp_layers.0.{own}" for name, own in (("embedding", "token_layernorm"), ("norm", "final_layernorm"))
}
_MIMO |= {"hidden": "model.mtp_layers.0.hidden_layernorm", "projection": "model.mtp_layers.0.input_proj"}
_MIMO |= {"layer": "model.mtp_layers.0"}
MTP_CASES = {
    "DeepSeek V3": ("DeepSeek V3", {"first_k_dense_replace": 0}, _AFTER, "num_nextn_predict_layers"),
    "DeepSeek V3.2": ("DeepSeek V3.2", {"first_k_dense_replace": 0}, _AFTER, "num_nextn_predict_layers"),
    "GLM-5": ("GLM-5", {"first_k_dense_replace": 0}, _AFTER, "num_nextn_predict_layers"),
    "GLM-4 MoE": ("GLM-4 MoE", {"first_k_dense_replace": 0}, _AFTER, "num_nextn_predict_layers"),
    "MiMo": ("Qwen2, tied", {}, _MIMO, "num_nextn_predict_layers"),
    "Qwen3-Next": ("Qwen3-Next", {"decoder_sparse_step": 1}, _MTP, "num_nextn_predict_layers"),
    "Qwen3.5": ("Qwen3.5", {}, _MTP, "mtp_num_hidden_layers"),
}
"""The case of `families` that the target is, what a model of one layer that is the head's changes in it, names of what
is before, in and after the layer, and the setting with the number of heads."""


def write_mtp(case: str, folder: Path, **sizes: int) -> Reference:
    """A target with a head for multi-token prediction in its checkpoint."""
    target, one_layer, names, count = MTP_CASES[case]
    model = write(target, folder, **sizes)
    architecture, changes = CASES[target]
    config, after = model.config, model.config.num_hidden_layers
    settings = SIZES | changes | sizes | one_layer | {"num_hidden_layers": 1}
    if getattr(config, "layer_types", None):
        settings["layer_types"] = ["full_attention"]
    layer = write_model(architecture, settings, folder / "layer")
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)) * 0.05)
        layer.save_pretrained(folder / "layer")
    own = load_file(folder / "layer" / "model.safetensors")
    names = {name: each.replace("{after}", str(after)) for name, each in names.items()}
    width = config.hidden_size
    tensors = {
        f"{names['layer']}.{name.removeprefix('model.layers.0.')}": each
        for name, each in own.items()
        if name.startswith("model.layers.0.")
    }
    tensors[f"{names['norm']}.weight"] = own["model.norm.weight"]
    shapes: dict[str, tuple[int, ...]] = {f"{names['projection']}.weight": (width, 2 * width)}
    shapes |= {f"{names[each]}.weight": (width,) for each in ("embedding", "hidden")}
    tensors |= _random(shapes)
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors, file, {"format": "pt"})
    stated = json.loads((folder / "config.json").read_text()) | {count: 1}
    if case == "MiMo":
        stated |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
    (folder / "config.json").write_text(json.dumps(stated))
    norm = layer.model.norm

    def normed(x: Tensor, name: str) -> Tensor:
        before, norm.weight = norm.weight, torch.nn.Parameter(tensors[f"{names[name]}.weight"])
        try:
            return norm(x)  # type: ignore[no-any-return]
        finally:
            norm.weight = before

    def step(tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        both = [normed(model.get_input_embeddings()(tokens), "embedding"), normed(states, "hidden")]
        both = both[::-1] if case == "MiMo" else both
        x = torch.cat(both, -1) @ tensors[f"{names['projection']}.weight"].T
        hidden = layer.model(inputs_embeds=x[None], use_cache=False).last_hidden_state[0]
        return hidden, model.get_output_embeddings()(hidden)

    return Reference(model, (), lambda states: states, step)


def _random(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    found = {}
    for name, shape in shapes.items():
        is_norm = len(shape) == 1 and "norm" in name
        found[name] = is_norm + torch.randn(shape, generator=generator) * 0.2
    return found


def _save(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors")


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def _attention(x: Tensor, part: dict[str, Tensor], config: dict[str, Any]) -> Tensor:
    """Grouped-query attention with rotary positions, `[tokens, features]` → `[tokens, hidden]`."""
    query, key, value = (
        torch.unflatten(x @ part[f"self_attn.{name}_proj"].T, -1, (-1, config["head_dim"])).transpose(0, 1)
        for name in "qkv"
    )
    half = config["head_dim"] // 2
    angles = torch.arange(len(x))[:, None] * config["rope_theta"] ** (-torch.arange(half) / half)
    query, key = (
        torch.cat(
            (
                each[..., :half] * angles.cos() - each[..., half:] * angles.sin(),
                each[..., half:] * angles.cos() + each[..., :half] * angles.sin(),
            ),
            -1,
        )
        for each in (query, key)
    )
    key, value = (each.repeat_interleave(len(query) // len(each), 0) for each in (key, value))
    scores = query @ key.transpose(1, 2) * config["head_dim"] ** -0.5
    scores = scores + torch.full((len(x), len(x)), -torch.inf).triu(1)
    mixed: Tensor = (scores.softmax(-1) @ value).transpose(0, 1).flatten(1)
    return mixed @ part["self_attn.o_proj"].T
