"""Our reading of a tokenizer folder against transformers' AutoTokenizer."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NoReturn

import pytest
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from quire.engine.config.options import DEMO_MODEL
from quire.engine.protocol.errors import ConfigError, InvalidParameter
from quire.server.text.chat_template import ChatTemplate, ChatTemplates
from quire.server.text.tokenizer import Tokenizer, TokenizerFailed
from tests.fakes.tokenizers import CHATML, SPECIAL, byte_fallback, byte_level, wrapped, write_slow_files

TEXTS = ["hello world", " two  spaces", "中文 😀 é", "<|im_start|>user<|im_end|><s></s><|extra|>", "", "a\nb"]
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": 'be <brief> & "good"'},
    {"role": "user", "content": "hello 中文"},
    {"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": {"ä": [1, 2.5]}}}]},
]
FANCY = """{%- if not messages %}{{ raise_exception('none') }}{% endif %}
{%- set ns = namespace(seen=0) %}
{{ bos_token }}
{%- for message in messages %}
    {%- if loop.index0 > 5 %}{% break %}{% endif %}
    {%- if message.role == 'assistant' %}
        {% generation %}{{ message.content }}{% set ns.seen = ns.seen + 1 %}{% endgeneration %}
    {%- else %}
<{{ message['role'] }}> {{ message['content'] | trim }}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}{{ call | tojson }}{{ call | tojson(indent=2) }}{% endfor %}
{% endfor -%}
{{ ns.seen }}{{ strftime_now('%Y') }}{% if tools %}{{ tools | tojson }}{% endif %}
{%- if add_generation_prompt %}>>{{ eos_token }}{% endif %}
"""


def auto_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer  # takes long: not in processes that run other files

    return AutoTokenizer.from_pretrained(folder)


def write(folder: Path, backend: Backend, config: dict[str, Any], **files: str) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for name, text in files.items():
        (folder / f"{name}.jinja").write_text(text)
    return folder


def prompt_of(
    folder: Path, tokenizer: Tokenizer, messages: Any = MESSAGES[:1], tools: Any = None, override: str | None = None
) -> str:
    templates = ChatTemplates.load(folder, tokenizer, override)
    assert templates is not None
    variables = {"tools": tools, "documents": None, "add_generation_prompt": True}
    return templates.choose(bool(tools)).render(messages, variables)


@pytest.mark.parametrize("kind", [byte_level, byte_fallback])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"bos_token": "<s>", "eos_token": "</s>"},
        {"bos_token": "<s>", "eos_token": {"content": "</s>", "__type": "AddedToken"}, "add_bos_token": True},
        {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "add_eos_token": True},
        {"bos_token": "<s>", "add_bos_token": False},
        {"eos_token": "<|im_end|>", "pad_token": "<|pad|>", "additional_special_tokens": ["<|extra|>"]},
        {"extra_special_tokens": ["<|extra|>"]},
        {"model_max_length": 5, "clean_up_tokenization_spaces": False},
    ],
    ids=str,
)
def test_same_ids_as_transformers(tmp_path: Path, kind: Any, config: dict[str, Any]) -> None:
    backend = kind()
    backend.enable_truncation(3)
    write(tmp_path, backend, {"tokenizer_class": "PreTrainedTokenizerFast", **config})
    ours, theirs = Tokenizer.load(tmp_path), auto_tokenizer(tmp_path)
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs(text, add_special_tokens=special)["input_ids"], text
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.special_tokens.items() <= {k: str(v) for k, v in theirs.special_tokens_map.items()}.items()


@pytest.mark.parametrize("template", [CHATML, FANCY], ids=["chatml", "fancy"])
@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "f"}}]])
@pytest.mark.parametrize("place", ["file", "config", "list"])
def test_same_prompt_as_transformers(tmp_path: Path, template: str, tools: list[Any] | None, place: str) -> None:
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    files = {}
    match place:
        case "file":
            files["chat_template"] = template
        case "config":
            config["chat_template"] = template
        case "list":
            config["chat_template"] = [
                {"name": "default", "template": template},
                {"name": "tool_use", "template": "tools! " + template},
            ]
    write(tmp_path, byte_fallback(), config, **files)
    ours, theirs = Tokenizer.load(tmp_path), auto_tokenizer(tmp_path)
    assert prompt_of(tmp_path, ours, MESSAGES, tools) == theirs.apply_chat_template(
        MESSAGES, tools=tools, tokenize=False, add_generation_prompt=True
    )


def test_demo_model_reads_the_same() -> None:
    ours, theirs = Tokenizer.load(DEMO_MODEL), auto_tokenizer(DEMO_MODEL)
    ids = theirs.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert ours.encode(prompt_of(DEMO_MODEL, ours, MESSAGES), add_special_tokens=False) == ids


def test_a_folder_without_tokenizer_json_is_left_to_transformers(tmp_path: Path) -> None:
    backend = write_slow_files(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    assert Tokenizer.load(tmp_path).encode("hello 😀", add_special_tokens=False) == backend.encode("hello 😀").ids


def test_special_tokens_map_of_older_folders(tmp_path: Path) -> None:
    """It takes precedence where tokenizer_config.json has no `added_tokens_decoder`."""
    decoder = {"0": {"content": "<|endoftext|>", "special": True}}
    for config, end in (({}, "<|im_end|>"), ({"added_tokens_decoder": decoder}, "<|endoftext|>")):
        named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", **config}
        write(tmp_path, byte_level(), named)
        (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
        assert Tokenizer.load(tmp_path).special_tokens == {"eos_token": end}
        assert auto_tokenizer(tmp_path).eos_token == end


@pytest.mark.parametrize(("start", "missing"), [(b"\n\x05", "sentencepiece, google.protobuf"), (b"IQ== 0", "tiktoken")])
def test_what_reading_a_vocabulary_needs_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: bytes, missing: str
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(start)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=rf"its vocabulary needs {missing}; run pip install 'quire-llm\[tokenizers\]'"
    ):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["code.Slow", null]}}')
    with pytest.raises(ConfigError, match="requires its own Python code, which needs --trust-remote-code"):
        Tokenizer.load(tmp_path)


class Encoding:
    """tiktoken's, as far as it is read."""

    __module__ = "tiktoken.core"

    def __init__(self, ranks: dict[bytes, int], special_tokens: dict[str, int]) -> None:
        self._pat_str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
        self._mergeable_ranks, self._special_tokens = ranks, special_tokens


class SlowTokenizer:
    """A Python class over tiktoken, as in Kimi K2's folder; GPT-2's `tokenizers` stand for tiktoken."""

    def __init__(self, drop: str = "", gap: int = 0) -> None:
        trained = json.loads(byte_level().to_str())["model"]
        pieces = {piece: number for piece, number in trained["vocab"].items() if piece not in SPECIAL}
        count, self._drop = len(pieces), drop
        vocabulary = {piece: number for number, piece in enumerate(sorted(pieces, key=pieces.__getitem__))}
        self._backend = Backend(models.BPE(vocabulary, [tuple(merge) for merge in trained["merges"]]))
        self._backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._backend.add_tokens(["[EOS]", "<|call|>", "<|reserved|>"])
        bytes_of = wrapped(byte_level()).token_bytes
        ranks = {bytes_of(pieces[piece]): number for piece, number in vocabulary.items()}
        self.model = Encoding(ranks, {"[EOS]": count, "<|call|>": count + 1, "<|reserved|>": count + 2 + gap})
        self.added_tokens_decoder = {count: AddedToken("[EOS]", special=True), count + 1: AddedToken("<|call|>")}

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._backend.encode(text.replace(self._drop, "") if self._drop else text).ids
        return ids


def test_a_python_class_over_tiktoken_is_converted() -> None:
    from quire.server.text.tiktoken_conversion import converted  # imports transformers, which takes long

    slow = SlowTokenizer()
    ours = wrapped(converted(slow))
    for text in ("the fox [EOS] hello  wor'll<|call|> 中 😀\n\n x", "<|reserved|>", ""):
        assert ours.encode(text, add_special_tokens=True) == slow.encode(text, add_special_tokens=True)
    ids = ours.encode("hello [EOS]<|call|>", add_special_tokens=True)
    assert ours.decode(ids, skip_special_tokens=True) == "hello <|call|>"
    with pytest.raises(ConfigError, match=r"SlowTokenizer is not supported: .* other tokens than it for .*2024"):
        converted(SlowTokenizer(drop="2024"))
    with pytest.raises(ConfigError, match=r"the ids of its special tokens have gaps before <\|reserved\|>"):
        converted(SlowTokenizer(gap=1))
    with pytest.raises(ConfigError, match="str is not supported, because it uses neither `tokenizers` nor tiktoken"):
        converted(type("str", (), {})())


def test_the_template_of_a_processor_is_read_where_the_tokenizer_has_none(tmp_path: Path) -> None:
    tokenizer = wrapped(byte_level())
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "processor"}))
    assert prompt_of(tmp_path, tokenizer) == "processor"
    tokenizer.config["chat_template"] = "tokenizer"
    assert prompt_of(tmp_path, tokenizer) == "tokenizer"
    tokenizer.config["chat_template"] = [{"name": "rag", "template": "rag"}]
    with pytest.raises(ConfigError, match=r"none of the chat templates \(rag\) is named default; set --chat-template"):
        prompt_of(tmp_path, tokenizer)
    (tmp_path / "chat_template.jinja").write_text("file")
    assert prompt_of(tmp_path, tokenizer) == "file"
    (tmp_path / "chat_template.jinja").unlink()
    tokenizer.config.clear()
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": 5}))
    with pytest.raises(ConfigError, match=r"chat_template\.json: chat_template must be a text, or a list"):
        prompt_of(tmp_path, tokenizer)


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no usable tokenizer"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer\.json: not a valid tokenizer"):
        Tokenizer.load(tmp_path)


def test_template_override_is_text_or_file(tmp_path: Path) -> None:
    tokenizer = wrapped(byte_level())
    (tmp_path / "mine.jinja").write_text("file {{ messages|length }}")
    for override, text in (("inline {{ messages|length }}", "inline 1"), (str(tmp_path / "mine.jinja"), "file 1")):
        assert prompt_of(tmp_path, tokenizer, override=override, tools=[{}]) == text
    with pytest.raises(ConfigError, match="--chat-template"):
        ChatTemplates.load(tmp_path, tokenizer, str(tmp_path / "none.jinja"))
    with pytest.raises(ConfigError, match="line 1"):
        ChatTemplates.load(tmp_path, tokenizer, "{% if %}")
    assert ChatTemplates.load(tmp_path, tokenizer, None) is None


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ undefined.x }}",
        "{{ 1 / 0 }}",
    ],
)
def test_what_a_template_refuses_is_the_clients_error(source: str) -> None:
    with pytest.raises(InvalidParameter, match="chat template") as caught:
        ChatTemplate(source, {}).render(MESSAGES, {})
    assert caught.value.param == "messages"


@pytest.mark.parametrize("kind", [byte_level, byte_fallback])
def test_token_bytes_put_together_are_the_text(kind: Any) -> None:
    tokenizer = wrapped(kind())
    ids = tokenizer.encode("hello wor 中 ü😀", add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode().strip() == "hello wor 中 ü😀"


def test_how_much_text_a_token_represents() -> None:
    for backend, longest in ((byte_level(), len("<|endoftext|>")), (byte_fallback(), len("<0x00>"))):
        assert wrapped(backend).max_characters == longest
    composing = byte_level()
    composing.normalizer = normalizers.NFC()
    assert wrapped(composing).max_characters == 4 * len("<|endoftext|>")


@pytest.mark.parametrize(
    "change",
    [
        lambda backend: setattr(backend, "normalizer", normalizers.Lowercase()),
        lambda backend: setattr(backend, "normalizer", normalizers.Replace("  ", " ")),
        lambda backend: setattr(backend, "pre_tokenizer", pre_tokenizers.WhitespaceSplit()),
        lambda backend: setattr(backend, "pre_tokenizer", pre_tokenizers.Split(" ", "removed")),
        lambda backend: setattr(backend, "model", models.WordPiece({"[UNK]": 0}, unk_token="[UNK]")),
        lambda backend: backend.add_tokens([AddedToken("<x>", rstrip=True)]),
    ],
)
def test_tokenizers_that_drop_text(change: Callable[[Backend], object]) -> None:
    backend = byte_level()
    change(backend)
    assert wrapped(backend).max_characters is None


PAIR_PROCESSORS = [
    None,
    processors.ByteLevel(trim_offsets=True),
    processors.BertProcessing(("<|im_end|>", 2), ("<|im_start|>", 1)),
    processors.RobertaProcessing(("<|im_end|>", 2), ("<|im_start|>", 1)),
    processors.TemplateProcessing("<s> $A", "<s> $A <s>:1 $B:1", [("<s>", 1)]),
    processors.Sequence(
        [processors.ByteLevel(), processors.TemplateProcessing("$A", "$A:1 </s>:2 $B:2 </s>:1", [("</s>", 2)])]
    ),
]


@pytest.mark.parametrize("processor", PAIR_PROCESSORS)
@pytest.mark.parametrize("add_special_tokens", [False, True])
def test_pairs_are_joined_as_the_backend_does(processor: Any, add_special_tokens: bool) -> None:
    backend = byte_level()
    if processor is not None:
        backend.post_processor = processor
    tokenizer = Tokenizer(backend, {}, {})
    for first in ("", "a", "hello world", "a a a a a a"):
        for second in ("", "a", "the fox", "hello hello hello"):
            one, other = backend.encode_batch([first, second], add_special_tokens=False)
            room = 5
            limit = room + backend.num_special_tokens_to_add(True) * add_special_tokens
            ids, start = tokenizer.join_pair(
                one.ids, other.ids, None, add_special_tokens=add_special_tokens, side="left"
            )
            right = backend.post_process(one, other, add_special_tokens)
            assert (ids, start) == (right.ids, right.type_ids.index(1) if 1 in right.type_ids else 0)
            sides: tuple[Literal["left", "right"], ...] = ("left", "right")
            for side in sides:
                one, other = backend.encode_batch([first, second], add_special_tokens=False)
                kept = min(len(one.ids), len(other.ids), room // 2)
                for each, most in zip(sorted((one, other), key=lambda e: len(e.ids)), (kept, room - kept), strict=True):
                    each.truncate(most, direction=side)
                a, b = (each.ids for each in backend.encode_batch([first, second], add_special_tokens=False))
                ids, _ = tokenizer.join_pair(a, b, limit, add_special_tokens=add_special_tokens, side=side)
                assert ids == backend.post_process(one, other, add_special_tokens).ids


def test_a_panic_of_the_backend_is_the_clients_error() -> None:
    panic = type("PanicException", (BaseException,), {})

    def encode_batch(texts: list[str], add_special_tokens: bool) -> NoReturn:
        raise panic("Onig: fail to memory allocation")

    with pytest.raises(TokenizerFailed, match=r"^the tokenizer cannot process this text$") as failed:
        Tokenizer.load(DEMO_MODEL)._encoding(encode_batch, "a")
    assert pickle.loads(pickle.dumps(failed.value)).reason == "Onig: fail to memory allocation"
