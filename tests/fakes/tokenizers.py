"""Small tokenizers of both kinds in use, built on the spot."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from quire.server.text import tokenizer

COMMANDS = ("<die>", "<vanish>", "<fail>", "<hang>", "<mute>")
"""Commands to the fake core (tests/fakes/fake_core.py) in a prompt; their token ids are 3, 4, …"""
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *COMMANDS)
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEXTS = ["hello world, how are you?", "the quick brown fox 中文 does it", "serve a model on two nodes", "é ü 😀 😁"]


def byte_level() -> Tokenizer:
    """As GPT-2's, Llama 3's or Qwen's: every token is a run of bytes."""
    built = Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    built.train_from_iterator(_TEXTS, trainer)
    return built


def byte_fallback() -> Tokenizer:
    """As Llama 2's and Mistral's: words with ▁ for the space, and single bytes for text without a token."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁▁", *"abcdehlowréü中", "▁he", "ll", "he", "llo", "▁hello", "▁wor", "ld"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = [("▁", "he"), ("h", "e"), ("l", "l"), ("ll", "o"), ("▁", "▁")]
    built = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    built.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    built.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    built.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    built.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return built


def wrapped(backend: Tokenizer) -> tokenizer.Tokenizer:
    """As the server holds it."""
    return tokenizer.Tokenizer(backend, {}, {})


def write_slow_files(folder: Path) -> Tokenizer:
    """The byte-level tokenizer in the files that were there before tokenizer.json."""
    built = byte_level()
    model = json.loads(built.to_str())["model"]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    return built


def write_model(folder: Path) -> Path:
    """A model folder without weights: config, byte-level tokenizer and chat template."""
    built = byte_level()
    built.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 128}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(CHATML)
    model = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 320,
        "max_position_embeddings": 128,
        "eos_token_id": built.token_to_id("<|im_end|>"),
    }
    (folder / "config.json").write_text(json.dumps(model))
    return folder
