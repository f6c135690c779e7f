"""Tiny random targets with heads that draft, and the heads' forward pass as the papers give it.

A case's target and the layers of heads for multi-token prediction are transformers'. EAGLE's layer is written out.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.fakes.families import CASES, RENAMED, SIZES, name_as_published, write, write_model, write_renamed

HEAD = "head"
"""The folder of a head with a checkpoint of its own, in its target's folder."""
_DRAFT_VOCAB = 60
_EAGLE3 = {"num_key_value_heads": 2, "head_dim": 20, "intermediate_size": 56, "rope_theta": 5000.0}


@dataclass
class Reference:
    """A target of transformers and its head, in float32, without caches."""

    target: Any
    reads: tuple[int, ...]
    """The layers whose inputs the head reads; empty: the normalized output of the last one."""
    combine: Callable[[Tensor], Tensor]
    """Combines these inputs to the head's input."""
    step: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    """The next tokens `[tokens]` and hidden states → the hidden states to feed back, and logits `[tokens, vocab]`."""
    further: Sequence[Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = ()
    """The same for heads that read the tokens 2, 3, … places ahead."""
    is_chained: bool = False
    """Each reads the hidden states that the head before it would feed back."""

    @torch.no_grad()
    def states(self, tokens: Tensor) -> Tensor:
        """The head's input at each position, `[tokens, hidden]`."""
        streams: list[Tensor] = []
        hook = _last_norm(self.target).register_forward_pre_hook(lambda norm, inputs: streams.append(inputs[0]))
        *inputs, normed = self.target(tokens[None], output_hidden_states=True).hidden_states
        hook.remove()
        inputs += streams[-1:]
        return self.combine(torch.cat([inputs[each][0] for each in self.reads], -1) if self.reads else normed[0])

    @torch.no_grad()
    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """Greedy drafts after `tokens`, the last of which the target has sampled: the head's most likely tokens."""
        states, known = self.states(torch.tensor(tokens))[:-1], list(tokens)
        if self.further:
            for ahead, step in enumerate((self.step, *self.further)[:count], 1):
                fed_back, logits = step(torch.tensor(known[ahead:]), states)
                known.append(int(logits[-1].argmax()))
                states = fed_back if self.is_chained else states
            return known[len(tokens) :]
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
    """EAGLE's head for a case without biases: a layer of Llama without its first norm, and no norm after it."""
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
_NEMOTRON = {name: f"mtp.layers.0.{own}" for name, own in (("embedding", "enorm"), ("hidden", "hnorm"))}
_NEMOTRON |= {
    "projection": "mtp.layers.0.eh_proj",
    "norm": "mtp.layers.1.final_layernorm",
    "layer": "mtp.layers.{layer}",
}
_ERNIE = {
    "embedding": "model.mtp_emb_norm.0",
    "hidden": "model.mtp_hidden_norm.0",
    "projection": "model.mtp_linear_proj.0",
    "layer": "model.mtp_block.0",
}
_MIMO_V2 = {name: f"model.mtp.layers.{{head}}.{own}" for name, own in (("embedding", "enorm"), ("hidden", "hnorm"))} | {
    "projection": "model.mtp.layers.{head}.eh_proj",
    "norm": "model.mtp.layers.{head}.final_layernorm",
    "layer": "model.mtp.layers.{head}",
}


class MtpCase(NamedTuple):
    """A target with heads for multi-token prediction."""

    target: str
    """The case of `families`."""
    one_layer: dict[str, Any]
    """Changes of its settings for a model that consists of a head's layers."""
    names: Mapping[str, str]
    """Names of the tensors before, in and after the layers; without a norm, the target's is used."""
    counted_by: str | None = "num_nextn_predict_layers"
    """The setting with the number of heads."""
    renamed: tuple[str, str] = ("", "")
    """A name in the target's layers, and the same in the head's."""
    stated: Mapping[str, Any] = MappingProxyType({})
    """Other settings in the target's config.json."""
    num_heads: int = 1
    reads_normed: bool = True
    is_chained: bool = False


_STEP_HEAD: dict[str, Any] = {
    "layer_types": ["sliding_attention"],
    "rope_theta": [10000.0],
    "partial_rotary_factors": [1.0],
    "swiglu_limits": [0.0],
    "swiglu_limits_shared": [0.0],
}
_STEP_TARGET = CASES["Step 3.7"][1]["text_config"]
MTP_CASES = {
    "DeepSeek V3": MtpCase("DeepSeek V3", {"first_k_dense_replace": 0}, _AFTER),
    "DeepSeek V3.2": MtpCase("DeepSeek V3.2", {"first_k_dense_replace": 0}, _AFTER),
    "GLM-5": MtpCase("GLM-5", {"first_k_dense_replace": 0}, _AFTER),
    "GLM-4 MoE": MtpCase("GLM-4 MoE", {"first_k_dense_replace": 0}, _AFTER),
    "MiMo": MtpCase("Qwen2, tied", {}, _MIMO),
    "Qwen3-Next": MtpCase("Qwen3-Next", {"decoder_sparse_step": 1}, _MTP),
    "Qwen3.5": MtpCase("Qwen3.5", {}, _MTP, "mtp_num_hidden_layers"),
    "Nemotron 3": MtpCase(
        "Nemotron 3", {"layers_block_type": ["full_attention", "moe"], "num_hidden_layers": 2}, _NEMOTRON
    ),
    "Nemotron 3, latent experts": MtpCase(
        "Nemotron 3, latent experts",
        {"layers_block_type": ["full_attention", "moe"], "num_hidden_layers": 2},
        _NEMOTRON,
    ),
    "Ling hybrid": MtpCase(
        "Ling hybrid", {"first_k_dense_replace": 0}, _AFTER | {"norm": "model.layers.{after}.final_layernorm"}
    ),
    "ERNIE 4.5 MoE": MtpCase("ERNIE 4.5 MoE", {}, _ERNIE),
    "EXAONE MoE": MtpCase("EXAONE MoE", {"layer_types": ["sliding_attention"], "mlp_layer_types": ["dense"]}, _MTP),
    "MiMo-V2-Flash": MtpCase(
        "MiMo-V2-Flash",
        {"layer_types": ["sliding_attention"], "mlp_layer_types": ["dense"]},
        _MIMO_V2,
        counted_by=None,
        renamed=("post_attention_layernorm", "pre_mlp_layernorm"),
        num_heads=3,
        reads_normed=False,
    ),
    "Step 3.5": MtpCase(
        "Step 3.5",
        {
            "text_config": _STEP_TARGET
            | _STEP_HEAD
            | {"num_hidden_layers": 1, "num_nextn_predict_layers": 0, "moe_layers_enum": "1"}
        },
        {name: each.replace("after}.shared", "after}.transformer.shared") for name, each in _AFTER.items()}
        | {"logits": "model.layers.{after}.transformer.shared_head.output"},
        stated={name: _STEP_TARGET[name][:4] + own * 3 for name, own in _STEP_HEAD.items()}
        | {"moe_layers_enum": "1,2,3"},
        num_heads=3,
        reads_normed=False,
        is_chained=True,
    ),
}


def write_mtp(case: str, folder: Path, *, texts: Sequence[list[int]] = (), **sizes: int) -> Reference:
    """A target with heads for multi-token prediction in its checkpoint. The matrices for logits that the heads have of
    their own are random, or fitted to `texts`."""
    chosen = MTP_CASES[case]
    if chosen.target in RENAMED:
        model, (_, architecture, changes, _) = write_renamed(chosen.target, folder), RENAMED[chosen.target]
    else:
        model, (architecture, changes) = write(chosen.target, folder, **sizes), CASES[chosen.target]
    settings = SIZES | changes | sizes | {"num_hidden_layers": 1}
    if getattr(model.config, "layer_types", None) and "layers_block_type" not in chosen.one_layer:
        settings["layer_types"] = ["full_attention"]
    file, steps, outputs = folder / "model.safetensors", [], []
    tensors = load_file(file)
    for number in range(chosen.num_heads):
        own = folder / f"head {number}"
        layer = write_model(architecture, settings | chosen.one_layer, own)
        steps.append(_head(chosen, model, layer, number, own, tensors, hidden_first=case == "MiMo"))
        outputs.append(layer.get_output_embeddings())
    reads = () if chosen.reads_normed else (model.config.get_text_config().num_hidden_layers,)
    reference = Reference(model, reads, lambda states: states, steps[0], steps[1:], chosen.is_chained)
    if texts:
        _fit(reference, outputs, texts)
    save_file(tensors, file, {"format": "pt"})
    stated = json.loads((folder / "config.json").read_text())
    stated |= chosen.stated if chosen.counted_by is None else {**chosen.stated, chosen.counted_by: chosen.num_heads}
    if case == "MiMo":
        stated |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
    (folder / "config.json").write_text(json.dumps(stated))
    return reference


def _head(
    case: MtpCase,
    model: Any,
    layer: Any,
    number: int,
    folder: Path,
    tensors: dict[str, Tensor],
    *,
    hidden_first: bool,
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Head `number` with the layers of the model `layer`, in `folder`. Its tensors are added to `tensors`."""
    with torch.no_grad():
        for parameter in layer.parameters():
            generator = torch.Generator().manual_seed(5 + number)
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
        norm = _last_norm(layer)
        if "norm" not in case.names:
            norm.weight.copy_(_last_norm(model).weight)
    layer.save_pretrained(folder)
    after = model.config.get_text_config().num_hidden_layers
    names = {
        name: each.replace("{after}", str(after + number)).replace("{head}", str(number))
        for name, each in case.names.items()
    }
    for name, tensor in load_file(folder / "model.safetensors").items():
        if (match := re.match(r"(?:model|backbone)\.layers\.(\d+)\.(.*)", name)) is not None:
            tensors[f"{names['layer'].replace('{layer}', match[1])}.{match[2].replace(*case.renamed, 1)}"] = tensor
    if "norm" in names:
        tensors[f"{names['norm']}.weight"] = norm.weight.detach().clone()
    output = model.get_output_embeddings()
    if "logits" in names:
        output = layer.get_output_embeddings()
        tensors[f"{names['logits']}.weight"] = output.weight.detach()
    width = model.get_input_embeddings().weight.shape[1]
    shapes: dict[str, tuple[int, ...]] = {f"{names['projection']}.weight": (width, 2 * width)}
    shapes |= {f"{names[each]}.weight": (width,) for each in ("embedding", "hidden")}
    own = _random(shapes, 3 + number)
    tensors |= own

    def normed(x: Tensor, name: str) -> Tensor:
        before, norm.weight = norm.weight, torch.nn.Parameter(own[f"{names[name]}.weight"])
        try:
            return norm(x)  # type: ignore[no-any-return]
        finally:
            norm.weight = before

    def step(tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        both = [normed(model.get_input_embeddings()(tokens), "embedding"), normed(states, "hidden")]
        x = torch.cat(both[::-1] if hidden_first else both, -1) @ own[f"{names['projection']}.weight"].T
        streams: list[Tensor] = []
        hook = norm.register_forward_pre_hook(lambda norm, inputs: streams.append(inputs[0][0]))
        hidden = _decoder(layer)(inputs_embeds=x[None], use_cache=False).last_hidden_state[0]
        hook.remove()
        return hidden if case.reads_normed else streams[-1], output(hidden)

    return step


@torch.no_grad()
def _fit(reference: Reference, outputs: Sequence[Any], texts: Sequence[list[int]]) -> None:
    """Set the weights of `outputs`, which compute the heads' logits, to the values that predict the texts best."""
    known = [torch.tensor(text) for text in texts]
    read = [reference.states(text) for text in known]
    for number, (step, output) in enumerate(zip((reference.step, *reference.further), outputs, strict=True)):
        seen: list[Tensor] = []
        hook = output.register_forward_pre_hook(lambda module, inputs, seen=seen: seen.append(inputs[0]))
        count = [len(text) - number - 2 for text in known]
        fed_back = [
            step(text[number + 1 : -1], states[:length])[0]
            for text, states, length in zip(known, read, count, strict=True)
        ]
        hook.remove()
        wanted = F.one_hot(torch.cat([text[number + 2 :] for text in known]), len(output.weight)).float()
        output.weight.copy_(torch.linalg.lstsq(torch.cat(seen), wanted).solution.T)
        read = fed_back if reference.is_chained else read


def _decoder(model: Any) -> Any:
    return getattr(model.model, "language_model", model.model)


def _last_norm(model: Any) -> Any:
    return _decoder(model).norm_f if hasattr(_decoder(model), "norm_f") else _decoder(model).norm


class _Streams(Reference):
    """The same for a head that reads all residual streams after the last layer, side by side."""

    @torch.no_grad()
    def states(self, tokens: Tensor) -> Tensor:
        return _merged(self.target.model, lambda: self.target(tokens[None]))


def write_v4_mtp(
    folder: Path, *, texts: Sequence[list[int]] = (), kind: str = "sliding_attention", **settings: Any
) -> Reference:
    """DeepSeek V4 with its head for multi-token prediction, whose layer has attention of a `kind`. With `texts`, the
    head has learned the successor of each token, and little else."""
    case = "DeepSeek V4"
    model, (architecture, changes) = write(case, folder, **settings), CASES[case]
    width, eps = model.config.hidden_size, model.config.rms_norm_eps
    one_layer = {"num_hidden_layers": 1, "layer_types": [kind], "mlp_layer_types": ["moe"]}
    layer = write_model(architecture, SIZES | changes | settings | one_layer, folder / "layer")
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)) * 0.05)
            if texts and name.endswith(("o_b_proj.weight", "down_proj", "down_proj.weight")):
                parameter.mul_(0.1)
        layer.save_pretrained(folder / "layer")
    name_as_published(architecture, folder / "layer", layer)
    own = load_file(folder / "layer" / "model.safetensors")
    tensors = {f"mtp.0.{name.removeprefix('layers.0.')}": own[name] for name in own if name.startswith("layers.0.")}
    tensors |= {f"mtp.0.{name}": own[name] for name in own if name.startswith(("norm.", "hc_head_"))}
    shapes: dict[str, tuple[int, ...]] = {f"mtp.0.{each}_proj.weight": (width, width) for each in "eh"}
    tensors |= _random(shapes | {f"mtp.0.{each}norm.weight": (width,) for each in "eh"})
    part = {name: tensors[f"mtp.0.{name}.weight"] for name in ("enorm", "hnorm", "e_proj", "h_proj")}

    def embedded(tokens: Tensor) -> Tensor:
        return F.rms_norm(model.get_input_embeddings()(tokens), (width,), part["enorm"], eps)

    if texts:
        following = {before: after for text in texts for before, after in pairwise(text)}
        wanted = model.get_output_embeddings().weight[list(following.values())]
        known = embedded(torch.tensor([*following]))
        with torch.no_grad():
            part["e_proj"].copy_(torch.linalg.lstsq(known, wanted, driver="gelsd").solution.T * 4)
            part["h_proj"].mul_(0.01)
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_nextn_predict_layers": 1, "layer_types": [*config["layer_types"], kind]}
    (folder / "config.json").write_text(json.dumps(config))

    def step(tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        streams = F.rms_norm(states.unflatten(-1, (-1, width)), (width,), part["hnorm"], eps)  # type: ignore[no-untyped-call]
        x = (embedded(tokens) @ part["e_proj"].T)[:, None] + streams @ part["h_proj"].T
        put = layer.model.layers[0].register_forward_pre_hook(
            lambda module, inputs, others: ((x[None], *inputs[1:]), others), with_kwargs=True
        )
        placeholder = torch.zeros(1, len(x), width)
        out = _merged(layer.model, lambda: layer.model(inputs_embeds=placeholder, use_cache=False))
        put.remove()
        hidden = layer.model.norm(layer.model.hc_head(out.view(1, len(x), -1, width)))[0]
        return out, model.get_output_embeddings()(hidden)

    return _Streams(model, (), lambda states: states, step)


def _merged(model: Any, run: Callable[[], object]) -> Tensor:
    """The residual streams that a model of transformers merges in a run, `[tokens, streams * hidden]`."""
    found: list[Tensor] = []
    hook = model.hc_head.register_forward_pre_hook(lambda module, inputs: found.append(inputs[0]))
    run()
    hook.remove()
    return found[-1][0].flatten(1)


def _random(shapes: Mapping[str, tuple[int, ...]], seed: int = 3) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
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
