"""Random-weight checkpoints in the shapes of public models, with a tokenizer trained on the fly."""

from __future__ import annotations

import json
import random
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

VOCABULARY = 32_000
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
QUIET = 0.05
"""Scale of the embeddings of tokens that must not be generated; with tied embeddings it scales their logits too."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder with grouped-query attention and a gated MLP."""

    name: str
    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    rope_theta: float
    vocabulary: int = VOCABULARY
    tied: bool = True
    """Whether embeddings and head are tied."""
    positions: int = 8192

    @property
    def layer_weights(self) -> int:
        """Weights of the matrices of all layers, by which every token is multiplied."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head_weights(self) -> int:
        """Weights of the head, needed only where a token is sampled."""
        return self.vocabulary * self.hidden

    @property
    def kv_numbers(self) -> int:
        """Elements of the KV cache per token."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    def attention_operations(self, context: int) -> int:
        """Multiplications and additions of one token's attention over `context` tokens, in all layers."""
        return 4 * self.layers * self.heads * self.head_dim * context


SHAPES = {
    "qwen2.5-0.5b": Shape("Qwen2.5-0.5B", "qwen2", 24, 896, 14, 2, 64, 4864, 1e6),
    "llama-3.2-1b": Shape("Llama-3.2-1B", "llama", 16, 2048, 32, 8, 64, 8192, 5e5),
    "tiny": Shape("tiny", "qwen2", 2, 256, 4, 2, 64, 512, 1e4),
}


def make_checkpoint(shape: Shape, cache: Path) -> Path:
    """The checkpoint of `shape` in bfloat16, in the format of the hub; created at the first call."""
    folder = cache / shape.name / "bfloat16"
    if (folder / "complete").exists():
        return folder
    print(f"creating {folder}: random weights in the shape of {shape.name}", file=sys.stderr, flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    quiet = write_tokenizer(folder)
    write_config(shape, folder)
    _write_weights(shape, folder, quiet)
    (folder / "complete").touch()
    return folder


def _texts() -> Iterator[str]:
    """ASCII sources of Python's standard library, then random words, enough for the vocabulary."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="ignore")
        yield "".join(character for character in text if character.isascii())
    random_words = random.Random(0)
    syllables = [
        first + last for first in "bcdfghjklmnprstvwz" for last in ("a", "e", "i", "o", "u", "an", "er", "ing")
    ]
    words = ["".join(random_words.choices(syllables, k=random_words.randint(2, 4))) for _ in range(40_000)]
    for _ in range(400):
        yield " ".join(random_words.choices(words, k=1000))


def write_tokenizer(folder: Path, marks: Sequence[str] = (), chat_template: str = _TEMPLATE) -> list[int]:
    """A byte-level BPE tokenizer of exactly `VOCABULARY` tokens, and of special tokens `marks` behind them; returns the
    ids that must not be generated."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    built = Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    built.train_from_iterator(
        _texts(),
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=list(SPECIAL),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    assert built.get_vocab_size() == VOCABULARY, built.get_vocab_size()
    built.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    built.save(str(folder / "tokenizer.json"))
    _write_settings(folder, chat_template)
    # Detokenizers delay a token that is not made of complete characters.
    return [i for i in range(VOCABULARY) if not (text := built.decode([i])) or not text.isascii() or not text.strip()]


def _write_settings(folder: Path, chat_template: str = _TEMPLATE) -> None:
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 8192,
        "eos_token": SPECIAL[0],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": chat_template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_pair_tokenizer(folder: Path, count: int) -> None:
    """A byte-level BPE tokenizer of `count` tokens that needs no training: bytes, pairs of letters, pairs of pairs."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = "abcdefghijklmnopqrstuvwxyz"
    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    pairs = [(first, second) for first in letters for second in letters]
    halves = ["".join(pair) for pair in pairs]
    merges = [*pairs, *((first, second) for first in halves for second in halves)][: count - len(tokens)]
    tokens += ["".join(merge) for merge in merges]
    assert len(tokens) == count, f"cannot make {count} tokens from {len(tokens)}"
    built = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    built.add_special_tokens(list(SPECIAL))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    built.save(str(folder / "tokenizer.json"))
    _write_settings(folder)


def words(folder: Path, vocabulary: int = VOCABULARY) -> list[int]:
    """Token ids whose sequences all decode to text that encodes to the same sequence: single words after a space."""
    from tokenizers import Tokenizer

    built = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = [built.decode([token]) for token in range(vocabulary)]
    return [
        token
        for token, text in enumerate(texts)
        if text[:1] == " " and text[1:].isalpha() and text.isascii() and built.encode(text).ids == [token]
    ]


def write_config(shape: Shape, folder: Path) -> None:
    """config.json and generation_config.json."""
    config = {
        "architectures": [{"qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}[shape.family]],
        "model_type": shape.family,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.positions,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": shape.tied,
        "eos_token_id": 0,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    # No end of sequence, so that servers without ignore_eos generate to the requested length.
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": False}))


def tensor_sizes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """The tensors of a checkpoint."""
    sizes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocabulary, shape.hidden)}
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            sizes[f"{prefix}.self_attn.{name}_proj.weight"] = rows, shape.hidden
            if shape.family == "qwen2":
                sizes[f"{prefix}.self_attn.{name}_proj.bias"] = (rows,)
        sizes[f"{prefix}.self_attn.o_proj.weight"] = shape.hidden, queries
        for name in ("gate", "up"):
            sizes[f"{prefix}.mlp.{name}_proj.weight"] = shape.intermediate, shape.hidden
        sizes[f"{prefix}.mlp.down_proj.weight"] = shape.hidden, shape.intermediate
        for name in ("input", "post_attention"):
            sizes[f"{prefix}.{name}_layernorm.weight"] = (shape.hidden,)
    sizes["model.norm.weight"] = (shape.hidden,)
    if not shape.tied:
        sizes["lm_head.weight"] = shape.vocabulary, shape.hidden
    return sizes


def is_norm(name: str) -> bool:
    """Whether a tensor of a checkpoint is the weight of a norm, which is filled with ones."""
    return name.endswith("norm.weight")


def _write_weights(shape: Shape, folder: Path, quiet: list[int]) -> None:
    import torch
    from safetensors.torch import save_file

    noise = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.ones(sizes) if is_norm(name) else torch.empty(sizes).normal_(std=0.02, generator=noise)
        for name, sizes in tensor_sizes(shape).items()
    }
    tensors["model.embed_tokens.weight"][quiet] *= QUIET
    halved = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    save_file(halved, folder / "model.safetensors", metadata={"format": "pt"})


def make_w8a8(shape: Shape, cache: Path) -> Path:
    """The same checkpoint with int8 weights, one scale per channel, in the compressed-tensors format that vLLM reads.

    Activations are int8 too, quantized dynamically per token. The head is not quantized, as in such checkpoints on the
    hub.
    """
    import torch
    from safetensors.torch import load_file, save_file

    source = make_checkpoint(shape, cache)
    folder = cache / shape.name / "w8a8"
    if (folder / "complete").exists():
        return folder
    print(f"creating {folder}: int8 weights for vLLM", file=sys.stderr, flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        weight = tensors.pop(name).float()
        scale = weight.abs().amax(1, keepdim=True) / 127
        tensors[name] = (weight / scale).round().clamp(-127, 127).to(torch.int8)
        tensors[f"{name}_scale"] = scale.to(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    scheme = {"num_bits": 8, "type": "int", "symmetric": True}
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**scheme, "strategy": "channel", "dynamic": False},
                "input_activations": {**scheme, "strategy": "token", "dynamic": True},
            }
        },
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_bytes((source / name).read_bytes())
    (folder / "complete").touch()
    return folder
