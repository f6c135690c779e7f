"""Train the bundled demo model: tokenizer, chat template and a small Llama, from the text in demo_chats.

    python scripts/train_demo_model.py                 # under 20 minutes on two cores
    python scripts/train_demo_model.py --draft         # its draft model, distilled from it
    python scripts/train_demo_model.py --score-only    # score the existing folder

The score is measured with held-out chats (demo_chats.held_out) on the saved folder, with weights rounded to bfloat16,
computation in float32 and greedy decoding. A reply is correct if it equals the expected one character for character:
the topic's answer, the JSON object, or the tool call with its arguments. Tool calls about cities that no tool call of
training mentions are counted separately: they measure copying, not wordings.

The draft model learns the demo model's distribution of each next token, on the same text. It is scored by how often its
most likely token is the demo model's, in the answers of the held-out chats.
"""

import argparse
import math
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from demo_chats import CITIES, NEW_CITIES, Chat, Chats, held_out
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
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
THREADS = 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
# Capitalized words and digits are split from the space before them, so that a name or number has the same tokens
# wherever it is copied to. The names of known cities are one token each (train_tokenizer), which makes copying easy.
WORDS = r" ?\p{Ll}+|\p{Lu}\p{Ll}+|\p{Lu}+|[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+|\s"

CHAT_TEMPLATE = r"""
{%- macro text(content) -%}
{%- if content is string -%}{{ content }}
{%- elif content is iterable -%}
{%- for part in content -%}{%- if part.type == 'text' -%}{{ part.text }}{%- endif -%}{%- endfor -%}
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
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
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


def render(tokenizer: PreTrainedTokenizerBase, chat: Chat, messages: int, prompt: bool = False) -> str:
    """The first `messages` messages of a chat as text, ready for an answer if `prompt`."""
    text = tokenizer.apply_chat_template(
        chat.messages[:messages], tools=list(chat.tools or []) or None, tokenize=False, add_generation_prompt=prompt
    )
    return str(text)


def targets(ids: list[int], opening: list[int], end: int) -> list[bool]:
    """The mask of tokens to learn: all tokens after each `opening` up to and including the `end` token."""
    mask, inside = [False] * len(ids), False
    for at in range(len(opening), len(ids)):
        inside = inside or ids[at - len(opening) : at] == opening
        mask[at] = inside
        inside = inside and ids[at] != end
    return mask


def batches(chats: Chats, tokenizer: PreTrainedTokenizerBase, tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of at most `tokens` tokens, grouped by length: ids and targets, both `[chats, length]`."""
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
            yield (
                torch.tensor([ids + [raw_end] * (width - len(ids)) for ids, _ in group]),
                torch.tensor([mask + [False] * (width - len(mask)) for _, mask in group]),
            )


def gradients(
    model: LlamaForCausalLM, ids: Tensor, mask: Tensor, total: int, teacher: LlamaForCausalLM | None
) -> tuple[float, tuple[Tensor, ...]]:
    """Summed cross entropy of the targets in `ids`, or of the teacher's distributions at their places, divided by
    `total`, and its gradients in parameter order.

    The head runs on the positions of targets only.
    """
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    wanted = mask[:, 1:]
    logits, goals = model.lm_head(hidden[wanted]), ids[:, 1:][wanted]
    if teacher is not None:
        with torch.no_grad():
            known = teacher.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
            goals = teacher.lm_head(known[wanted]).softmax(-1)
    loss = functional.cross_entropy(logits, goals, reduction="sum") / total
    return loss.item(), torch.autograd.grad(loss, list(model.parameters()))


def backward(
    model: LlamaForCausalLM, pool: ThreadPoolExecutor, ids: Tensor, mask: Tensor, teacher: LlamaForCausalLM | None
) -> float:
    """Set the gradients of one batch and return its loss.

    Each thread of `pool` computes part of the batch. The threads synchronize once per step instead of once per
    operation, which is faster, especially when other programs share the cores.
    """
    total = int(mask[:, 1:].sum())
    parts = zip(ids.chunk(THREADS), mask.chunk(THREADS), strict=True)
    work = [pool.submit(gradients, model, *part, total, teacher) for part in parts]
    losses, grads = zip(*[each.result() for each in work], strict=True)
    for weight, *shares in zip(model.parameters(), *grads, strict=True):
        weight.grad = torch.stack(shares).sum(0)
    return float(sum(losses))


def rate(progress: float) -> float:
    """Learning rate relative to its peak at `progress` in 0..1: a short warm-up, then cosine decay to zero."""
    return min(1.0, progress / 0.03) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def optimizers_of(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers (it needs far fewer steps here), AdamW for embedding and norms."""
    matrices = [weight for weight in model.model.layers.parameters() if weight.dim() == 2]
    others = [weight for weight in model.model.layers.parameters() if weight.dim() == 1]
    others += [model.model.embed_tokens.weight, model.model.norm.weight]
    muon = torch.optim.Muon(matrices, lr=3e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(others, lr=2e-3, betas=(0.9, 0.97), weight_decay=0.0, fused=True)]


def train(
    model: LlamaForCausalLM,
    data: Iterator[tuple[Tensor, Tensor]],
    steps: int,
    minutes: float | None,
    teacher: LlamaForCausalLM | None = None,
) -> None:
    """Train for `steps` steps or, if given, for `minutes` of wall-clock time (then runs are not reproducible)."""
    optimizers = optimizers_of(model)
    peaks = [(group, group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]
    start, step, progress, smooth = time.monotonic(), 0, 0.0, 0.0
    torch.set_num_threads(1)
    pool = ThreadPoolExecutor(THREADS, initializer=torch.set_num_threads, initargs=(1,))
    with pool, tqdm(total=1.0, desc="train", bar_format="{l_bar}{bar}| {elapsed}<{remaining}{postfix}") as bar:
        while progress < 1:
            for group, peak in peaks:
                group["lr"] = peak * rate(progress + 1e-3)
            loss = backward(model, pool, *next(data), teacher)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            step, smooth = step + 1, loss if not step else 0.95 * smooth + 0.05 * loss
            progress = (time.monotonic() - start) / (60 * minutes) if minutes else step / steps
            bar.update(min(1.0, progress) - bar.n)
            bar.set_postfix_str(f"step {step}, loss {smooth:.3f}")
    torch.set_num_threads(THREADS)


def save(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, output: Path, *, with_tokenizer: bool = True
) -> None:
    """Write the folder to a temporary location and move it into place; weights are rounded to bfloat16."""
    output.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=".demo-", dir=output.parent))
    fresh.chmod(0o755)
    ends = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        eos_token_id=ends, pad_token_id=tokenizer.pad_token_id
    )
    model.bfloat16().save_pretrained(fresh)
    if with_tokenizer:
        tokenizer.save_pretrained(fresh)
        settings = fresh / "tokenizer_config.json"
        settings.write_text(settings.read_text().replace("TokenizersBackend", "PreTrainedTokenizerFast"))
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
def replies(model: Any, tokenizer: Any, prompts: list[str]) -> Iterator[str]:
    """Greedy answers to rendered prompts."""
    tokenizer.padding_side = "left"
    for at in tqdm(range(0, len(prompts), 32), desc="score"):
        inputs = tokenizer(prompts[at : at + 32], padding=True, return_tensors="pt")
        tokens = model.generate(**inputs, do_sample=False, max_new_tokens=120)
        for row in tokens[:, inputs["input_ids"].shape[1] :]:
            yield tokenizer.decode(row, skip_special_tokens=True)


def score(folder: Path) -> float:
    """Print wrong replies and the score of each kind of held-out chat; return the share of correct replies."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    chats = sorted(held_out(), key=lambda chat: chat.kind)
    prompts = [render(tokenizer, chat, len(chat.messages) - 1, prompt=True) for chat in chats]
    right: dict[str, list[bool]] = {}
    failed: list[str] = []
    for chat, prompt, reply in zip(chats, prompts, replies(model, tokenizer, prompts), strict=True):
        full = render(tokenizer, chat, len(chat.messages))
        wanted = full.removeprefix(prompt).removesuffix("<|im_end|>\n")
        right.setdefault(chat.kind, []).append(reply == wanted)
        if reply != wanted:
            failed.append(f"WRONG [{chat.kind}] {chat.messages[-2]['content']}\n  {reply!r}\n  expected {wanted!r}")
    print("\n".join(failed))
    for kind, marks in right.items():
        print(f"held-out {kind}: {sum(marks)} of {len(marks)}{' (not in the score)' * (kind == NEW_CITIES)}")
    scored = [mark for kind, marks in right.items() if kind != NEW_CITIES for mark in marks]
    print(f"held-out score: {sum(scored)} of {len(scored)} correct = {sum(scored) / len(scored):.1%}")
    return sum(scored) / len(scored)


@torch.inference_mode()
def agreement(draft: Path, folder: Path) -> float:
    """Print how often the draft model's token is the model's, in its held-out answers; returns the greedy share.

    At temperature 1 with the same Gumbel noise, and, for comparison, with rejection sampling.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    models = [AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32) for each in (folder, draft)]
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
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = render(tokenizer, Chat([{"role": "user", "content": question}]), 1, prompt=True)
    return next(replies(model, tokenizer, [prompt]))


def train_draft(arguments: argparse.Namespace) -> None:
    """Distill the demo model."""
    torch.manual_seed(arguments.seed)
    random.seed(arguments.seed)
    start = time.monotonic()
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    teacher: Any = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    model, chats = build_draft(tokenizer), Chats(arguments.seed, practice=10000)
    train(model, batches(chats, tokenizer, tokens=2048), arguments.steps, arguments.minutes, teacher)
    save(model, tokenizer, arguments.output, with_tokenizer=False)
    size = sum(file.stat().st_size for file in arguments.output.iterdir())
    print(f"trained in {(time.monotonic() - start) / 60:.1f} minutes; {arguments.output}: {size / 1e6:.2f} MB")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", action="store_true", help="train the draft model of the existing demo model")
    parser.add_argument("--output", type=Path, help="the model folder")
    parser.add_argument("--steps", type=int, default=2800, help="training steps of about 2,000 tokens")
    parser.add_argument("--minutes", type=float, help="train for this wall-clock time instead of --steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--score-only", action="store_true", help="score the existing folder")
    arguments = parser.parse_args()
    arguments.output = arguments.output or (DRAFT if arguments.draft else DEMO)
    if arguments.draft:
        if not arguments.score_only:
            train_draft(arguments)
        agreement(arguments.output, DEMO)
        return
    if not arguments.score_only:
        torch.manual_seed(arguments.seed)
        random.seed(arguments.seed)
        start = time.monotonic()
        tokenizer = train_tokenizer(Chats(arguments.seed + 1))
        model = build_model(tokenizer)
        chats = Chats(arguments.seed, practice=10000)
        train(model, batches(chats, tokenizer, tokens=2048), arguments.steps, arguments.minutes)
        save(model, tokenizer, arguments.output)
        size = sum(file.stat().st_size for file in arguments.output.iterdir())
        print(f"trained in {(time.monotonic() - start) / 60:.1f} minutes; {arguments.output}: {size / 1e6:.2f} MB")
    question = "How do I serve a model on two nodes with 8 GPUs each?"
    print(f"{question}\n  {ask(arguments.output, question)}")
    score(arguments.output)


if __name__ == "__main__":
    main()
