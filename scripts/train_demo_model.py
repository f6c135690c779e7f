"""Train the bundled demo model: tokenizer, chat template and a small Llama, from the text in demo_chats; then its eyes.

    python scripts/train_demo_model.py                 # the text model: under 20 minutes on two cores
    python scripts/train_demo_model.py --eyes          # adds a tower for pictures (demo_eyes): about 80 minutes
    python scripts/train_demo_model.py --draft         # its draft model, distilled from it
    python scripts/train_demo_model.py --score-only    # score the existing folder

The score is measured with held-out chats (demo_chats.held_out) on the saved folder, with weights rounded to bfloat16,
computation in float32 and greedy decoding. A reply is correct if it equals the expected one character for character:
the topic's answer, the JSON object, or the tool call with its arguments. Tool calls about cities that no tool call of
training mentions are counted separately: they measure copying, not wordings. So are questions about pictures
(demo_pictures.held_out), with the pictures as transformers' processor makes them of PNG files.

The draft model learns the demo model's distribution of each next token, on the same text. It is scored by how often its
most likely token is the demo model's, in the answers of the held-out chats.
"""

import argparse
import json
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import demo_eyes
import torch
from demo_chats import CITIES, NEW_CITIES, Chat, Chats, held_out
from demo_pictures import held_out as held_out_pictures
from demo_training import Batch, answers_batch, optimizers_of, render, targets, train
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

DEMO = Path(__file__).resolve().parent.parent / "engine" / "models" / "demo"
DRAFT = DEMO.with_name("demo_draft")
VOCABULARY = 3072
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
# Capitalized words and digits are split from the space before them, so that a name or number has the same tokens
# wherever it is copied to. The names of known cities are one token each (train_tokenizer), which makes copying easy.
WORDS = r" ?\p{Ll}+|\p{Lu}\p{Ll}+|\p{Lu}+|[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+|\s"

CHAT_TEMPLATE = r"""
{%- macro text(content) -%}
{%- if content is string -%}{{ content }}
{%- elif content is iterable -%}
{%- for part in content -%}
{%- if part.type == 'text' -%}{{ part.text }}{%- elif part.type == 'image' -%}{{ '<|image|>' }}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- set first = 1 if messages and messages[0].role in ['system', 'developer'] else 0 -%}
{%- if first or tools -%}
{{- '<|im_start|>system\n' -}}
{%- if first -%}{{- text(messages[0].content) -}}{%- endif -%}
{%- if tools -%}
{{- ('\n\n' if first else '') + '<tools>' -}}
{%- for tool in tools -%}{{- '\n' -}}{{- tool | tojson -}}{%- endfor -%}
{{- '\n</tools>' -}}
{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages[first:] -%}
{{- '<|im_start|>' + message.role + '\n' -}}
{%- if message.role == 'tool' -%}
{{- '<tool_response>\n' -}}{{- text(message.content) -}}{{- '\n</tool_response>' -}}
{%- else -%}
{%- set said = text(message.content) -%}
{{- said -}}
{%- for tool_call in message.tool_calls or [] -%}
{%- set function = tool_call.function if tool_call.function is defined else tool_call -%}
{{- '\n' if said or not loop.first else '' -}}
{{- '<tool_call>\n{"name": "' + function.name + '", "arguments": ' -}}
{{- function.arguments if function.arguments is string else function.arguments | tojson -}}
{{- '}\n</tool_call>' -}}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""


def train_tokenizer(chats: Chats) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer of VOCABULARY tokens; decoding reproduces any text."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(WORDS), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(MARKS),
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = [str(chat.messages) + str(chat.tools or "") for chat in (chats.sample() for _ in range(12000))]
    names = [f"{city} {country}" for city, country in CITIES]
    tokenizer.train_from_iterator(texts + 100 * names, trainer)
    # Byte 0xFF is in no UTF-8 text, so its token can stand for pictures.
    state = json.loads(tokenizer.to_str())
    state["model"]["vocab"][demo_eyes.TOKEN] = state["model"]["vocab"].pop("ÿ")
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.add_special_tokens([AddedToken(demo_eyes.TOKEN, normalized=False)])
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>", demo_eyes.TOKEN],
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE.strip()
    return fast


def build_model(tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    """The untrained model: six layers, eight query heads, four KV heads, tied embeddings; float32."""
    return _build(tokenizer, layers=6, heads=8)


def build_draft(tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    """The untrained draft model: two layers, four query heads, two KV heads, tied embeddings; float32."""
    return _build(tokenizer, layers=2, heads=4)


def _build(tokenizer: PreTrainedTokenizerBase, layers: int, heads: int) -> LlamaForCausalLM:
    """A model whose layers add nothing yet."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32 * heads,
        intermediate_size=64 * heads,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=0.05)
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return model


def batches(
    model: Any, chats: Chats, tokenizer: PreTrainedTokenizerBase, tokens: int, teacher: Any = None
) -> Iterator[list[Batch]]:
    """Yield batches of at most `tokens` tokens, grouped by length."""
    opening = tokenizer.encode("<|im_start|>assistant\n")
    end, raw_end = int(tokenizer.eos_token_id), int(tokenizer.pad_token_id)
    while True:
        drawn = [chats.sample() for _ in range(600)]
        encoded = tokenizer([render(tokenizer, chat, len(chat.messages)) for chat in drawn])["input_ids"]
        rows = [(ids, targets(ids, opening, end)) for ids in encoded]
        raw = tokenizer([chats.raw_text() for _ in range(10)])["input_ids"]
        rows += [([*ids, raw_end], [False] + [True] * len(ids)) for ids in raw]
        rows.sort(key=lambda row: len(row[0]))
        groups: list[list[tuple[list[int], list[bool]]]] = [[]]
        for row in rows:
            if (len(groups[-1]) + 1) * len(row[0]) > tokens:
                groups.append([])
            groups[-1].append(row)
        chats.rng.shuffle(groups)
        for group in groups:
            width = max(len(ids) for ids, _ in group)
            padded = torch.tensor([ids + [raw_end] * (width - len(ids)) for ids, _ in group])
            wanted = torch.tensor([mask + [False] * (width - len(mask)) for _, mask in group])
            yield [answers_batch(model, padded, wanted, teacher=teacher)]


def load(folder: Path) -> Any:
    """The model in a folder, with eyes or without; float32."""
    has_eyes = hasattr(AutoConfig.from_pretrained(folder), "vision_config")
    loader: Any = AutoModelForImageTextToText if has_eyes else AutoModelForCausalLM
    return loader.from_pretrained(folder, dtype=torch.float32)


def save(model: Any, tokenizer: PreTrainedTokenizerBase, output: Path, *, with_tokenizer: bool = True) -> None:
    """Write the folder to a temporary location and move it into place; weights are rounded to bfloat16."""
    output.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=".demo-", dir=output.parent))
    fresh.chmod(0o755)
    ends = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        eos_token_id=ends, pad_token_id=tokenizer.pad_token_id
    )
    for part in model.config.sub_configs:
        getattr(model.config, part).dtype = torch.bfloat16
    model.bfloat16().save_pretrained(fresh)
    if with_tokenizer:
        (demo_eyes.processor(tokenizer) if hasattr(model.config, "vision_config") else tokenizer).save_pretrained(fresh)
        settings = fresh / "tokenizer_config.json"
        values = json.loads(settings.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
        kept = {name: value for name, value in values.items() if name not in ("is_local", "local_files_only")}
        settings.write_text(json.dumps(kept, indent=2) + "\n")
    for file in fresh.iterdir():
        file.chmod(0o644)
    if output.exists():
        old = fresh.with_name(fresh.name + ".old")
        output.rename(old)
        fresh.rename(output)
        shutil.rmtree(old)
    else:
        fresh.rename(output)


@torch.inference_mode()
def replies(model: Any, tokenizer: Any, prompts: list[str], images: list[Any] | None = None) -> Iterator[str]:
    """Greedy answers to rendered prompts; with `images`, each has one."""
    tokenizer.padding_side = "left"
    process = tokenizer if images is None else demo_eyes.processor(tokenizer)
    for at in tqdm(range(0, len(prompts), 32), desc="score"):
        seen = {} if images is None else {"images": images[at : at + 32]}
        inputs = process(text=prompts[at : at + 32], **seen, padding=True, return_tensors="pt")
        tokens = model.generate(**inputs, do_sample=False, max_new_tokens=120)
        for row in tokens[:, inputs["input_ids"].shape[1] :]:
            yield tokenizer.decode(row, skip_special_tokens=True)


def score(
    tokenizer: PreTrainedTokenizerBase, model: Any, style: Callable[[Chat], Chat] = lambda chat: chat
) -> list[tuple[Chat, str, bool]]:
    """Print wrong replies and the score of each kind of held-out chat, which `style` may change; return the chats with
    the replies, and whether these are correct.
    """
    chats = sorted(map(style, held_out()), key=lambda chat: chat.kind)
    prompts = [render(tokenizer, chat, len(chat.messages) - 1, prompt=True) for chat in chats]
    answers = list(replies(model, tokenizer, prompts))
    if hasattr(model.config, "vision_config"):
        pictures = sorted(held_out_pictures(), key=lambda picture: picture.kind)
        asked = [style(demo_eyes.chat(picture)) for picture in pictures]
        questions = [render(tokenizer, chat, 1, prompt=True) for chat in asked]
        answers += replies(model, tokenizer, questions, [picture.image for picture in pictures])
        chats, prompts = chats + asked, prompts + questions
    found: list[tuple[Chat, str, bool]] = []
    right: dict[str, list[bool]] = {}
    failed: list[str] = []
    for chat, prompt, reply in zip(chats, prompts, answers, strict=True):
        full = render(tokenizer, chat, len(chat.messages))
        wanted = full.removeprefix(prompt).removesuffix("<|im_end|>\n")
        found.append((chat, reply, reply == wanted))
        right.setdefault(chat.kind, []).append(reply == wanted)
        if reply != wanted:
            failed.append(f"WRONG [{chat.kind}] {chat.messages[-2]['content']}\n  {reply!r}\n  expected {wanted!r}")
    print("\n".join(failed))
    for kind, marks in right.items():
        print(f"held-out {kind}: {sum(marks)} of {len(marks)}{' (not in the score)' * (kind == NEW_CITIES)}")
    seen = [mark for kind, marks in right.items() if kind.startswith(demo_eyes.KIND) for mark in marks]
    if seen:
        print(f"pictures: {sum(seen)} of {len(seen)} correct = {sum(seen) / len(seen):.1%}")
    others = {kind: marks for kind, marks in right.items() if not kind.startswith(demo_eyes.KIND)}
    scored = [mark for kind, marks in others.items() if kind != NEW_CITIES for mark in marks]
    print(f"held-out score: {sum(scored)} of {len(scored)} correct = {sum(scored) / len(scored):.1%}")
    return found


@torch.inference_mode()
def agreement(draft: Path, folder: Path) -> float:
    """Print how often the draft model's token is the model's, in its held-out answers; returns the greedy share.

    At temperature 1 with the same Gumbel noise, and, for comparison, with rejection sampling.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    models = [load(each) for each in (folder, draft)]
    opening, end = tokenizer.encode("<|im_start|>assistant\n"), int(tokenizer.eos_token_id)
    generator = torch.Generator().manual_seed(0)
    shares = []
    for chat in held_out():
        ids = tokenizer.encode(render(tokenizer, chat, len(chat.messages)))
        wanted = torch.tensor(targets(ids, opening, end))[1:]
        ours, theirs = (model(torch.tensor([ids])).logits[0, :-1][wanted].log_softmax(-1) for model in models)
        noise = -torch.empty(16, *ours.shape).exponential_(generator=generator).log()
        greedy = (ours.argmax(-1) == theirs.argmax(-1)).float()
        coupled = ((ours + noise).argmax(-1) == (theirs + noise).argmax(-1)).float().mean(0)
        shares.append(torch.stack((greedy, coupled, torch.minimum(ours, theirs).exp().sum(-1))))
    greedy, coupled, rejection = torch.cat(shares, dim=1).mean(1).tolist()
    print(
        f"the draft's next token is the model's at {greedy:.1%} of the places; at temperature 1 with the same noise at "
        f"{coupled:.1%}, and with rejection sampling at {rejection:.1%}"
    )
    return float(greedy)


def ask(folder: Path, question: str) -> str:
    """The model's greedy answer to one question."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), load(folder)
    prompt = render(tokenizer, Chat([{"role": "user", "content": question}]), 1, prompt=True)
    return next(replies(model, tokenizer, [prompt]))


def train_text(arguments: argparse.Namespace) -> None:
    """Train the tokenizer and the model without eyes."""
    tokenizer = train_tokenizer(Chats(arguments.seed + 1))
    model = build_model(tokenizer)
    data = batches(model, Chats(arguments.seed, practice=10000), tokenizer, tokens=2048)
    train(optimizers_of(model.named_parameters()), data, arguments.steps or 2800, arguments.minutes)
    save(model, tokenizer, arguments.output)


def train_draft(arguments: argparse.Namespace) -> None:
    """Distill the demo model."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    model = build_draft(tokenizer)
    data = batches(model, Chats(arguments.seed, practice=10000), tokenizer, tokens=2048, teacher=load(DEMO))
    train(optimizers_of(model.named_parameters()), data, arguments.steps or 2800, arguments.minutes)
    save(model, tokenizer, arguments.output, with_tokenizer=False)


def train_eyes(arguments: argparse.Namespace) -> None:
    """Add a tower to the model in the output folder, or train its tower again, in the three parts of `demo_eyes`, whose
    shares of the time are 0.15, 0.55 and twice 0.15; --steps are those of the second part.
    """
    tokenizer = AutoTokenizer.from_pretrained(arguments.output)
    if demo_eyes.TOKEN not in tokenizer.get_vocab():
        raise SystemExit(f"{arguments.output}: the tokenizer has no {demo_eyes.TOKEN}; train the text model again")
    before = load(arguments.output)
    model: Any = demo_eyes.build(before, tokenizer)
    tower, answers, last = (arguments.minutes and share * arguments.minutes for share in (0.15, 0.55, 0.15))
    steps = arguments.steps or 4000
    drawings = [demo_eyes.Drawings(arguments.seed + at, tokenizer, count).stream() for at, count in enumerate((32, 16))]
    demo_eyes.train_tower(model, drawings[0], 3 * steps // 8, tower)
    chats = Chats(arguments.seed, practice=10000)
    texts = [render(tokenizer, chat, len(chat.messages)) for chat in (chats.sample() for _ in range(3000))]
    texts += [chats.raw_text() for _ in range(300)]
    with demo_eyes.protected(model.model.language_model, tokenizer, texts):
        demo_eyes.train_answers(model, drawings[1], steps, answers)
    known = batches(model, chats, tokenizer, tokens=1024, teacher=before)
    demo_eyes.train_all(model, drawings[1], known, steps // 4, last)
    save(model, tokenizer, arguments.output)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", action="store_true", help="train the draft model of the existing demo model")
    parser.add_argument("--eyes", action="store_true", help="train a tower for the existing model")
    parser.add_argument("--output", type=Path, help="the model folder")
    parser.add_argument("--steps", type=int, help="training steps, of about 2,000 tokens for texts")
    parser.add_argument("--minutes", type=float, help="train for this wall-clock time instead of --steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--score-only", action="store_true", help="score the existing folder")
    arguments = parser.parse_args()
    arguments.output = arguments.output or (DRAFT if arguments.draft else DEMO)
    if not arguments.score_only:
        torch.manual_seed(arguments.seed)
        random.seed(arguments.seed)
        start = time.monotonic()
        (train_draft if arguments.draft else train_eyes if arguments.eyes else train_text)(arguments)
        size = sum(file.stat().st_size for file in arguments.output.iterdir())
        print(f"trained in {(time.monotonic() - start) / 60:.1f} minutes; {arguments.output}: {size / 1e6:.2f} MB")
    if arguments.draft:
        agreement(arguments.output, DEMO)
        return
    question = "How do I serve a model on two nodes with 8 GPUs each?"
    print(f"{question}\n  {ask(arguments.output, question)}")
    score(AutoTokenizer.from_pretrained(arguments.output), load(arguments.output))


if __name__ == "__main__":
    main()
