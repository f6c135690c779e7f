"""Our reading of a tokenizer folder against transformers' AutoTokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from quire.engine.config.options import DEMO_MODEL
from quire.engine.protocol.errors import ConfigError, InvalidParameter
from quire.server.frontend.chat_template import ChatTemplate, ChatTemplates
from quire.server.frontend.tokenizer import Tokenizer
from tests.fakes.tokenizers import CHATML, byte_fallback, byte_level, wrapped, write_slow_files

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
    templates = ChatTemplates.load(tmp_path, ours, None)
    assert templates is not None
    variables = {"tools": tools, "documents": None, "add_generation_prompt": True}
    mine = templates.choose(bool(tools)).render(MESSAGES, variables)
    assert mine == theirs.apply_chat_template(MESSAGES, tools=tools, tokenize=False, add_generation_prompt=True)


def test_demo_model_reads_the_same() -> None:
    ours, theirs = Tokenizer.load(DEMO_MODEL), auto_tokenizer(DEMO_MODEL)
    templates = ChatTemplates.load(DEMO_MODEL, ours, None)
    assert templates is not None
    prompt = templates.choose(False).render(MESSAGES, {"tools": None, "documents": None, "add_generation_prompt": True})
    ids = theirs.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert ours.encode(prompt, add_special_tokens=False) == ids


def test_a_folder_without_tokenizer_json_is_left_to_transformers(tmp_path: Path) -> None:
    backend = write_slow_files(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    assert Tokenizer.load(tmp_path).encode("hello 😀", add_special_tokens=False) == backend.encode("hello 😀").ids


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
        templates = ChatTemplates.load(tmp_path, tokenizer, override)
        assert templates is not None
        assert templates.choose(True).render(MESSAGES[:1], {}) == text
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
