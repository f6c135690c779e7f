"""Images and videos in prompts: which placeholders are items, and which tokens are theirs."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing

from quire.engine.protocol.errors import InvalidParameter
from quire.engine.protocol.media import MediaData, MediaItem, MediaKind, MediaRun
from quire.engine.protocol.sampling_params import SamplingParams
from quire.server.media.types import LoadedItem, MediaFormat, MediaSource, MediaUnavailable
from quire.server.text.chat_formats import ChatFormats
from quire.server.text.chat_template import ChatTemplate, ChatTemplates
from quire.server.text.input_processor import InputProcessor
from quire.server.text.inputs import ChatInput, ContextLengthExceeded, GenerationInput, Prompt, RequestOptions
from quire.server.text.media_input import MediaInput, media_source
from quire.server.text.media_prompt import ItemSpan, Placeholders, media_items
from tests.fakes.configs import TINY, engine_config
from tests.fakes.media import FakeLoader, Made, media_spec
from tests.fakes.tokenizers import CHATML, byte_level, wrapped


class Model(NamedTuple):
    """How a model's template, processor and tokenizer write items."""

    template: str
    image: str
    """The placeholder."""
    image_token: str
    expanded: str
    """The text of an image of two features in a row, three in all."""
    video: str = ""
    video_token: str = ""
    around_text: tuple[str, str] = ("", "")
    """What the processor puts behind the last item, and behind the prompt, which then has no special tokens."""


QWEN = """{%- for message in messages -%}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content -%}
{%- if part.type == 'image' or 'image' in part or 'image_url' in part -%}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'video' or 'video' in part -%}<|vision_start|><|video_pad|><|vision_end|>
{%- elif 'text' in part %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
GEMMA = """{%- for message in messages -%}<start_of_turn>{{ message.role }}
{% if message.content is string %}{{ message.content | trim }}{% else %}{% for part in message.content -%}
{%- if part.type == 'image' %}<start_of_image>{% elif part.type == 'text' %}{{ part.text | trim }}{% endif -%}
{% endfor %}{% endif %}<end_of_turn>
{% endfor %}"""
LLAVA = """{% for message in messages %}{{ message.role | upper }}: {% for part in message.content
| selectattr('type', 'equalto', 'image') %}<image>
{% endfor %}{% for part in message.content | selectattr('type', 'equalto', 'video') %}<video>
{% endfor %}{% for part in message.content | selectattr('type', 'equalto', 'text') %}{{ part.text }} {% endfor %}
{% endfor %}"""
MISTRAL = """{% for message in messages %}{% if message.content is string %}[INST]{{ message.content }}[/INST]
{%- else %}[INST]{% for block in message.content %}{% if block.type == 'text' %}{{ block.text }}
{%- elif block.type in ['image', 'image_url'] %}[IMG]{% endif %}{% endfor %}[/INST]{% endif %}{% endfor %}"""
INTERNVL = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}
{%- if part.type == 'image' %}<IMG_CONTEXT>
{% elif part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}"""
IDEFICS = """{% for message in messages %}{{ message.role | capitalize }}{% if message.content[0].type == 'image' %}:
{%- else %}: {% endif %}{% for line in message.content %}{% if line.type == 'text' %}{{ line.text }}
{%- elif line.type == 'image' %}<image>{% endif %}{% endfor %}<end_of_utterance>
{% endfor %}"""

MODELS = {
    "Qwen-VL": Model(QWEN, "<|image_pad|>", "<|image_pad|>", "{t}{t}{t}", "<|video_pad|>", "<|video_pad|>"),
    "Qwen3-VL": Model(
        QWEN,
        *("<|image_pad|>", "<|image_pad|>", "{t}{t}{t}"),
        *("<|vision_start|><|video_pad|><|vision_end|>", "<|video_pad|>"),
    ),
    "Gemma 3": Model(
        GEMMA, "<start_of_image>", "<image_soft_token>", "\n\n<start_of_image>{t}{t}{t}<end_of_image>\n\n"
    ),
    "LLaVA": Model(LLAVA, "<image>", "<image>", "{t}{t}{t}", "<video>", "<video>"),
    "Mistral": Model(MISTRAL, "[IMG]", "[IMG]", "{t}{t}[IMG_BREAK]{t}[IMG_END]"),
    "InternVL": Model(INTERNVL, "<IMG_CONTEXT>", "<IMG_CONTEXT>", "<img>{t}{t}{t}</img>"),
    "Idefics3": Model(IDEFICS, "<image>", "<image>", "<fake><row_1_col_1>{t}{t}<fake><global-img>{t}<fake>"),
    "only texts": Model(CHATML, "<|image_pad|>", "<|image_pad|>", "{t}{t}{t}", "<|video_pad|>", "<|video_pad|>"),
}
MARKS = (
    *("<|vision_start|>", "<|vision_end|>", "<start_of_image>", "<end_of_image>", "<fake>", "<img>", "</img>"),
    *("[IMG_BREAK]", "[IMG_END]"),
)


def make(model: Model) -> tuple[InputProcessor, FakeLoader]:
    """An image has three features, or as many as its data has bytes in one run of this grid; a video has a run of two
    for each of two frames, with the time before it."""

    def text(source: MediaSource) -> Made:
        if source.kind == "video":
            return f"<0.5 s>{model.video_token * 2}<1.5 s>{model.video_token * 2}", ((1, 1, 2), (1, 1, 2))
        if source.data:
            return model.image_token * len(source.data), ((1, 1, len(source.data)),)
        return model.expanded.format(t=model.image_token), ()

    backend = byte_level()
    tokens = [*MARKS, model.image_token, model.video_token or model.image_token]
    backend.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in tokens])
    tokenizer = wrapped(backend)
    image = backend.token_to_id(model.image_token)
    spec = media_spec(image, backend.token_to_id(model.video_token) if model.video_token else None)
    loader = FakeLoader(MediaFormat(model.image, model.video, *model.around_text, not any(model.around_text)), text)
    config = engine_config(max_model_len=256, architecture=replace(TINY, vocab_size=backend.get_vocab_size()))
    processor = InputProcessor(
        tokenizer,
        ChatTemplates(ChatTemplate(model.template, {})),
        config.model,
        ChatFormats(),
        media=MediaInput(loader, spec, {"image": 4, "video": 1}),
    )
    return processor, loader


def conversation(*turns: Any) -> ChatInput:
    """`I` and `V` in a content are an image and a video."""
    kinds: dict[str, MediaKind] = {"I": "image", "V": "video"}
    messages: list[dict[str, Any]] = []
    media: list[MediaSource] = []
    for role, content in turns:
        parts: Any = content
        if not isinstance(content, str):
            parts = [{"type": kinds[part]} if part in kinds else {"type": "text", "text": part} for part in content]
            for at, part in enumerate(parts):
                if part["type"] != "text":
                    param = f"messages[{len(messages)}].content[{at}]"
                    media.append(MediaSource(part["type"], param, url=f"https://a/{len(media)}"))
        messages.append({"role": role, "content": parts})
    return ChatInput(messages=messages, media=media)


async def until_released(loader: FakeLoader) -> None:
    """Return when no data is kept."""
    await asyncio.sleep(0)
    assert not loader.leases


async def process(processor: InputProcessor, chat: ChatInput, **options: Any) -> GenerationInput:
    return await processor.process_chat(chat, SamplingParams(max_tokens=1), RequestOptions(**options))


def shown(processor: InputProcessor, given: GenerationInput) -> str:
    """The prompt with its items in brackets, by kind, with the length of their runs."""
    ids, parts, end = list(given.prompts[0]), [], 0
    for item in given.media[0]:
        text = processor.tokenizer.decode(ids[end : item.offset], skip_special_tokens=False)
        parts += [text, f"⟦{item.kind[0]}{','.join(str(run.length) for run in item.runs)}⟧"]
        assert all(run.start + run.length <= item.length for run in item.runs)
        end = item.end
    return "".join([*parts, processor.tokenizer.decode(ids[end:], skip_special_tokens=False)])


EXPECTED = {
    "Qwen-VL": "user\na <|vision_start|>⟦i3⟧<|vision_end|>b",
    "Qwen3-VL": "user\na <|vision_start|>⟦i3⟧<|vision_end|>b",
    "Gemma 3": "user\na⟦i3⟧b",
    "LLaVA": "USER: ⟦i3⟧\na  b",
    "Mistral": "[INST]a ⟦i2,1⟧b[/INST]",
    "InternVL": "user\na ⟦i3⟧\nb",
    "Idefics3": "User: a ⟦i2,1⟧b",
    "only texts": "user\na \n⟦i3⟧\nb",
}


@pytest.mark.parametrize("name", MODELS)
async def test_an_image_is_where_the_template_puts_it(name: str) -> None:
    processor, loader = make(MODELS[name])
    given = await process(processor, conversation(("user", ["a ", "I", "b"])))
    assert EXPECTED[name] in shown(processor, given)
    (item,) = given.media[0]
    assert item.data is not None
    assert len(item.digest) == 16
    assert loader.leases == {"lease 1"}
    del given
    await until_released(loader)


@pytest.mark.parametrize("name", MODELS)
async def test_placeholders_of_users_are_text(name: str) -> None:
    """Whole ones, in tools' names too, and ones whose beginning and end are in texts that the template joins."""
    processor, _ = make(model := MODELS[name])
    pieces = [f"x{model.image}y", model.image[:3], "I", model.image[:4], model.image[4:], "z"]
    chat = conversation(("user", pieces), ("assistant", f"so {model.image}"), ("user", ["I", f"{model.image} "]))
    given = await process(processor, chat)
    written = shown(processor, given)
    text = processor.tokenizer.decode(list(given.prompts[0]), skip_special_tokens=False)
    assert written.count("⟦i") == len(given.media[0]) == 2
    assert f"x{model.image}y" in written
    assert f"so {model.image}" in written
    assert f"{model.image}z" in written or name in ("LLaVA", "only texts")  # whose texts are apart
    assert not any(character.isdigit() for character in text.replace("row_1_col_1", ""))  # of the marks
    digests = [item.digest for item in given.media[0]]
    assert digests[0] != digests[1]


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model.video])
async def test_images_and_videos_are_told_apart(name: str) -> None:
    processor, loader = make(MODELS[name])
    chat = conversation(("user", ["I", "then", "V", "then", "I"]), ("assistant", "ok"), ("user", "more"))
    given = await process(processor, chat)
    items: dict[str, list[MediaItem]] = defaultdict(list)
    for item in given.media[0]:
        items[item.kind].append(item)
    assert [run.grid for run in items["video"][0].runs] == [(1, 1, 2), (1, 1, 2)]
    places = [source.url for source in loader.loaded]
    assert places == ["https://a/0", "https://a/1", "https://a/2"]
    assert [len(items["image"]), len(items["video"])] == [2, 1]
    offsets = [item.offset for item in given.media[0]]
    assert offsets == sorted(offsets)
    assert "more" in shown(processor, given)


@pytest.mark.parametrize("name", ["Qwen-VL", "LLaVA", "only texts"])
async def test_results_of_tools_may_have_images(name: str) -> None:
    processor, _ = make(MODELS[name])
    call = {"type": "function", "id": "1", "function": {"name": "f", "arguments": f'{{"a": "{MODELS[name].image}"}}'}}
    chat = conversation(("user", "draw"), ("assistant", ""), ("tool", ["here:", "I"]))
    chat.messages[1]["tool_calls"] = [call]  # type: ignore[index]
    given = await process(processor, chat)
    assert shown(processor, given).count("⟦i3⟧") == 1


async def test_a_template_that_loses_images_in_some_roles_gets_them_in_the_text() -> None:
    source = QWEN.replace("message.content is string", "message.content is string or message.role == 'tool'")
    processor, _ = make(MODELS["Qwen-VL"]._replace(template=source))
    given = await process(processor, conversation(("user", "draw"), ("tool", ["here:", "I"])))
    assert "here:\n⟦i3⟧" in shown(processor, given)


async def test_an_image_that_the_template_cannot_show_is_refused() -> None:
    processor, loader = make(MODELS["Qwen-VL"]._replace(template="{{ messages[-1].content }}"))
    with pytest.raises(InvalidParameter, match="does not show each image"):
        await process(processor, conversation(("user", ["I"]), ("user", "b")))
    assert not loader.loaded


async def test_texts_of_templates_that_take_only_parts() -> None:
    processor, _ = make(MODELS["Idefics3"])
    given = await process(processor, ChatInput(messages=[{"role": "user", "content": "hello"}]))
    assert not given.media
    assert "User: hello" in processor.tokenizer.decode(given.prompts[0], skip_special_tokens=False)


def test_a_token_of_two_items_is_the_first_ones() -> None:
    """As a newline that ends an image's text, and one that begins the next one's, may be."""
    spec, t = media_spec(5), 5
    items = [LoadedItem(bytes(16), "image", text, (), 0.0, MediaData((), 0)) for text in ("t\n", "\ntt")]
    sources = [MediaSource("image", f"messages[0].content[{at}]") for at in range(2)]
    offsets = [(0, 0), (0, 1), (1, 2), (2, 4), (4, 5), (5, 6), (6, 7), (7, 7)]  # of <s>, a, t, \n\n, t, t, b and </s>
    spans = [ItemSpan(1, 3, 0), ItemSpan(3, 6, 1)]
    first, second = media_items([1, 7, t, 9, t, t, 8, 2], offsets, spans, items, sources, spec)
    assert (first.offset, first.length, first.runs) == (2, 2, (MediaRun(0, 1),))
    assert (second.offset, second.length, second.runs) == (4, 2, (MediaRun(0, 2),))
    with pytest.raises(InvalidParameter, match=r"messages\[0\].content\[1\]: the model's tokenizer"):
        media_items([1, 7, t, 9, 6, 6, 8, 2], offsets, spans, items, sources, spec)


@pytest.mark.parametrize(("kept", "left"), [(3, 0), (12, 1)])
async def test_truncation_keeps_or_removes_whole_items(kept: int, left: int) -> None:
    processor, _ = make(MODELS["Mistral"])
    chat = conversation(("user", ["I", "hello", "I"]))
    given = await process(processor, chat, truncate_prompt_tokens=kept)
    assert len(given.prompts[0]) == kept
    assert [len(each) for each in given.media] == [left] * bool(left)


async def test_truncation_does_not_cut_an_item() -> None:
    processor, loader = make(MODELS["Mistral"])
    chat = conversation(("user", ["hello", "I"]))
    with pytest.raises(InvalidParameter, match=r"would cut messages\[0\].content\[1\]") as raised:
        await process(processor, chat, truncate_prompt_tokens=9)
    assert raised.value.param == "truncate_prompt_tokens"
    del raised
    await until_released(loader)


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        (conversation(("user", ["I"] * 5)), r"messages\[0\].content\[4\]: at most 4 images are allowed"),
        (conversation(("user", ["V"])), r"messages\[0\].content\[0\]: this model takes no videos"),
    ],
)
async def test_refused_numbers_and_kinds(chat: ChatInput, message: str) -> None:
    processor, loader = make(MODELS["Gemma 3"])
    with pytest.raises(InvalidParameter, match=message):
        await process(processor, chat)
    assert not loader.loaded


async def test_items_count_to_the_length() -> None:
    processor, loader = make(MODELS["Qwen-VL"])
    chat = conversation(("user", ["I"]))
    large = replace(chat, media=[MediaSource("image", "messages[0].content[0]", data=bytes(300))])
    with pytest.raises(ContextLengthExceeded):
        await process(processor, large)
    assert len(await processor.tokenize_chat(chat, None, None)) == len((await process(processor, chat)).prompts[0])
    await until_released(loader)


async def test_prompts_that_have_placeholders() -> None:
    processor, loader = make(MODELS["Qwen-VL"])
    media = conversation(("user", ["I", "V"])).media
    prompt = "a <|video_pad|> b <|image_pad|> c"
    ids = processor.tokenizer.encode(prompt, add_special_tokens=False)
    for given in (prompt, ids):
        made = await processor.process_prompts([given], SamplingParams(max_tokens=1), media=media)
        assert shown(processor, made) == "a ⟦v2,2⟧ b ⟦i3⟧ c"
    wrong: list[tuple[list[Prompt], str]] = [
        (["a <|image_pad|>"], r"must have '<\|image_pad\|>' or '<\|video_pad\|>' once for each"),
        ([ids[:-4]], r"must have the tokens \[\d+\] \('<\|image_pad\|>'\) or \[\d+\] \("),
        (["a", "b"], "need a single prompt"),
    ]
    for prompts, message in wrong:
        with pytest.raises(InvalidParameter, match=f"prompt: .*{message}"):
            await processor.process_prompts(prompts, SamplingParams(max_tokens=1), media=media)
    assert len(loader.loaded) == 4
    del made
    await until_released(loader)


async def test_text_around_that_of_a_prompt() -> None:
    """In place of the tokenizer's special tokens, which a prompt without items has."""
    processor, _ = make(MODELS["LLaVA"]._replace(around_text=("</img>", "\n")))
    start: Any = processor.tokenizer.encode("<img>", add_special_tokens=False)[0]
    processor.tokenizer.backend.post_processor = TemplateProcessing(
        single="<img> $A", special_tokens=[("<img>", start)]
    )
    media = conversation(("user", ["I", "I"])).media
    made = await processor.process_prompts(["<image> a <image> b"], SamplingParams(max_tokens=1), media=media)
    assert shown(processor, made) == "⟦i3⟧ a ⟦i3⟧</img> b\n"
    made = await processor.process_prompts(["b"], SamplingParams(max_tokens=1))
    assert made.prompts[0][0] == start


async def test_placeholders_of_several_tokens() -> None:
    processor, _ = make(MODELS["Qwen3-VL"])
    media = conversation(("user", ["V", "I"])).media
    ids = processor.tokenizer.encode(
        "<|vision_start|><|video_pad|><|vision_end|><|image_pad|>", add_special_tokens=False
    )
    made = await processor.process_prompts([ids], SamplingParams(max_tokens=1), media=media)
    assert shown(processor, made) == "⟦v2,2⟧⟦i3⟧"


async def test_what_cannot_be_loaded() -> None:
    processor, _ = make(MODELS["Qwen-VL"])
    chat = conversation(("user", ["I"]))
    for url, kind in (("https://missing", InvalidParameter), ("https://down", MediaUnavailable)):
        with pytest.raises(kind):
            await process(processor, replace(chat, media=[MediaSource("image", "messages[0].content[0]", url=url)]))


def test_the_longest_placeholder_counts() -> None:
    placeholders = Placeholders({"image": "<v>", "video": "<a><v><b>"})
    assert placeholders.are_in("<v> <a><v><b>", ["video", "image"])
    assert not placeholders.are_in("<v>", ["image", "image"])


@pytest.mark.parametrize(
    ("url", "data"),
    [
        ("data:image/png;base64,aGk=", b"hi"),
        ("data:image/png;name=a;base64,aGk", b"hi"),
        ("DATA:;BASE64, aG k=\n", b"hi"),
        ("data:image/png;base64,aGk%3D", b"hi"),
        ("https://host/a.png", b""),
    ],
)
def test_urls(url: str, data: bytes) -> None:
    source = media_source("image", url, "x")
    assert source.data == data
    assert source.url == ("" if data else url)


@pytest.mark.parametrize(
    "url",
    ["data:image/png;base64,a*k=", "data:image/png;base64,", "ftp://a/b", "a.png", "", "data:"],
)
def test_refused_urls(url: str) -> None:
    with pytest.raises(InvalidParameter, match="x: "):
        media_source("image", url, "x")


@pytest.mark.parametrize(
    ("url", "uuid", "options"),
    [
        ("http://a", "u" * 257, {}),
        (None, "\ud800", {}),
        ("http://a\ud800/x", None, {}),
        ("http://a", None, {"max_pixels": 10**30}),
        ("http://a", None, {"\ud800": 1}),
        ("http://a", None, {"max_pixels": "9" * 5000}),
    ],
)
def test_what_the_media_process_cannot_be_sent(url: str | None, uuid: str | None, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameter, match="x: ") as refused:
        media_source("image", url, "x", uuid=uuid, options=options)
    assert refused.value.param == "x"


def test_text_of_data_urls_may_be_any() -> None:
    assert media_source("image", "data:,\ud800a", "x").data.endswith(b"a")


def test_a_uuid_alone_is_an_item() -> None:
    assert media_source("image", None, "x", uuid="mine").uuid == "mine"
    with pytest.raises(InvalidParameter, match="x: a URL is missing"):
        media_source("image", None, "x")
