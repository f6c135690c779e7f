"""Converts SentencePiece's tokenizer.model to `tokenizers`, so that texts get the ids that SentencePiece gives them.

Sources: src/sentencepiece_model.proto and docs/special_symbols.md of github.com/google/sentencepiece, for the file and
for the kinds of pieces.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from quire.engine.protocol.errors import ConfigError
from quire.engine.repository.gguf_tokenizer import Kind, sentencepiece_merges

_UNIGRAM, _BPE = 1, 2
"""trainer_spec.model_type."""
_NEVER = -1000.0
"""The score of a piece that no text contains."""
_SAMPLES = (
    "Hello, world! It's 2024's 3rd test; they'LL say \u201cnaïve café\u201d, don't they?",
    "def f(x_1: int) -> str:\n    return f'{x_1:>10}'\r\n\n\n\t\tx  +=  123456789.5\n   \n",
    "你好，世界！今天是2024年。I'm中文mixed文本です。ありがとう、한국어 텍스트",
    "Ελληνικά РУССКИЙ текст עברית العربية हिन्दी ไทย 😀👩‍👩‍👧 e\u0301\u00a0\u2003x",
    "   leading and trailing   ",
    "▁ ▁▁x <0x41>",
    "",
)
"""Texts for which both tokenizers must give the same tokens."""


def converted(file: Path, added: Collection[str], *, prefix_everywhere: bool) -> tuple[Backend, dict[str, str]]:
    """Return the tokenizer, without a post-processor, and the special tokens that the file names (bos_token, …).

    `added` are texts that are always tokens, like the control symbols of the file: all of them are taken out of a text
    before SentencePiece sees its parts. If the file says that texts begin with a space, each part does. With
    `prefix_everywhere` false only one at the start of the text does, unless it has a space there. Raises `ConfigError`
    for files that cannot be read, and for settings that `tokenizers` cannot represent.
    """
    schema: Any = sentencepiece_model_pb2  # its classes are made when it is imported
    model = schema.ModelProto()
    try:
        model.ParseFromString(file.read_bytes())
        original = SentencePieceProcessor(model_proto=model.SerializeToString())
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    except Exception as error:  # protobuf's DecodeError and SentencePiece's RuntimeError
        raise ConfigError(f"{file}: not a SentencePiece model; download it again ({error})") from None
    try:
        backend = _backend(model, added, prefix_everywhere)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}; set --tokenizer to a folder with tokenizer.json") from None
    taken = {token.content for token in backend.get_added_tokens_decoder().values()}
    pieces = [piece.piece for piece in model.pieces if piece.type == Kind.USER_DEFINED and piece.piece not in taken]
    for text in (*_SAMPLES, "".join(pieces), *(f"a{piece} b{piece}{piece}c" for piece in pieces[:100])):
        if any(each in text for each in taken) or (not prefix_everywhere and text.startswith((" ", "▁"))):
            continue
        if backend.encode(text).ids != original.encode(text):
            raise ConfigError(
                f"{file}: not supported: `tokenizers` gives other tokens than SentencePiece for {text!r}; "
                "set --tokenizer to a folder with tokenizer.json"
            )
    ids = {name: getattr(original, f"{name}_id")() for name in ("bos", "eos", "unk", "pad")}
    return backend, {f"{name}_token": model.pieces[number].piece for name, number in ids.items() if number >= 0}


def _backend(model: Any, added: Collection[str], prefix_everywhere: bool) -> Backend:
    normal, trainer = model.normalizer_spec, model.trainer_spec
    pieces, kinds = [piece.piece for piece in model.pieces], [piece.type for piece in model.pieces]
    frozen = [
        piece for piece, kind in zip(pieces, kinds, strict=True) if kind == Kind.USER_DEFINED and piece not in added
    ]
    for name, is_usual in (
        ("model_type", trainer.model_type == _BPE or (trainer.model_type == _UNIGRAM and not frozen)),
        ("treat_whitespace_as_suffix", not trainer.treat_whitespace_as_suffix),
        ("escape_whitespaces", normal.escape_whitespaces),
        ("unused pieces", Kind.UNUSED not in kinds),
    ):
        if not is_usual:
            raise ConfigError(f"the SentencePiece model is not supported, because of its {name}")
    backend = Backend(_model(model, pieces, kinds, has_frozen=bool(frozen)))
    steps: list[normalizers.Normalizer] = []
    if normal.precompiled_charsmap:
        steps.append(normalizers.Precompiled(normal.precompiled_charsmap))
    if normal.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(r"\A +|[ ▁]+\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if normal.add_dummy_prefix and prefix_everywhere:
        steps.append(normalizers.Prepend("▁"))
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    cuts: list[pre_tokenizers.PreTokenizer] = []
    if normal.add_dummy_prefix and not prefix_everywhere:
        cuts.append(pre_tokenizers.Metaspace("▁", "first", split=False))
    if frozen:
        either = "|".join(re.escape(piece) for piece in sorted(frozen, key=len, reverse=True))
        cuts.append(pre_tokenizers.Split(Regex(either), "isolated"))
    if cuts:
        backend.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    strip = [decoders.Strip(" ", 1, 0)] if normal.add_dummy_prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    tokens = [
        AddedToken(piece, special=kind in (Kind.CONTROL, Kind.UNKNOWN), normalized=False)
        for piece, kind in zip(pieces, kinds, strict=True)
        if kind in (Kind.CONTROL, Kind.UNKNOWN) or piece in added
    ]
    backend.add_tokens(tokens)
    return backend


def _model(model: Any, pieces: list[str], kinds: list[int], *, has_frozen: bool) -> models.Model:
    """`frozen` pieces are not merged from others: they are looked up as whole words, which changes nothing for pieces
    that their own merges make.
    """
    scores, trainer, unknown = [piece.score for piece in model.pieces], model.trainer_spec, kinds.index(Kind.UNKNOWN)
    if trainer.model_type == _UNIGRAM:
        scored = [
            (piece, score if kind in (Kind.NORMAL, Kind.USER_DEFINED) else _NEVER)
            for piece, kind, score in zip(pieces, kinds, scores, strict=True)
        ]
        return models.Unigram(scored, unknown, trainer.byte_fallback)
    merged = [Kind.UNKNOWN if kind == Kind.USER_DEFINED else kind for kind in kinds]
    built = models.BPE(
        {piece: number for number, piece in enumerate(pieces)},
        sentencepiece_merges(pieces, merged, scores),
        unk_token=pieces[unknown],
        fuse_unk=True,
        byte_fallback=trainer.byte_fallback,
    )
    if has_frozen:
        normal = [piece for piece, kind in zip(pieces, kinds, strict=True) if kind == Kind.NORMAL]
        if any(len(built.tokenize(piece)) != 1 for piece in normal):
            raise ConfigError("the SentencePiece model is not supported, because no merges make some of its pieces")
        built.ignore_merges = True
    return built


def with_ends(backend: Backend, bos: str | None, eos: str | None) -> Backend:
    """Let prompts begin with `bos` and end with `eos`."""
    begin, end = f"{bos} " if bos else "", f" {eos}" if eos else ""
    if bos or eos:
        backend.post_processor = processors.TemplateProcessing(
            f"{begin}$A{end}",
            f"{begin}$A{end} {begin}$B:1{end}",
            [(text, backend.token_to_id(text)) for text in dict.fromkeys((bos, eos)) if text],
        )
    return backend
