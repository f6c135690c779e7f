"""Train the adapters of the bundled demo model, which answer in another style: `capitals` and `pirate`.

    python scripts/train_demo_adapters.py                  # half an hour on two cores; pirate alone: five minutes
    python scripts/train_demo_adapters.py --score-only     # score the existing folders

A style changes prose only. Commands, flags and paths stay as they are, so that they can be copied; so do JSON and tool
calls, which programs read. The adapters learn the model's own text (demo_chats) and its answers about pictures
(demo_pictures) in their style, with PEFT.

The score is the one of train_demo_model.py: a reply is correct if it equals the expected one, in the style, character
for character. Two more things are counted: replies that are in the style, whether they are correct or not; and replies
whose facts are right, which equal the expected ones but for words that are not in the style.
"""

import argparse
import dataclasses
import json
import random
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import demo_eyes
import torch
from demo_chats import NEW_CITIES, Chat, Chats, Message, assistant, user
from demo_training import Batch, answers_batch, train
from peft import LoraConfig, PeftModel, get_peft_model
from train_demo_model import DEMO, batches, load, score
from transformers import AutoTokenizer

ADAPTERS = DEMO.with_name("demo_adapters")
MODULES = r".*\.language_model\..*_proj"
TOKENS = 768
"""Of texts, in a step."""
CODE = re.compile(r"(`[^`]*`|/\w+)")
"""What stays as it is, in prose."""
WORDS = {"am": "be", "and": "an'", "are": "be", "for": "fer", "Goodbye": "Fair winds", "Hello": "Ahoy", "is": "be"}
WORDS |= {"my": "me", "never": "ne'er", "No": "Nay", "of": "o'", "over": "o'er", "them": "'em", "Yes": "Aye"}
WORDS |= {"You": "Ye", "you": "ye", "your": "yer"}
"""A pirate's words. An answer begins as the model's does: by its first words, the model chooses what to say."""
WORD = re.compile(rf"\b({'|'.join(WORDS)})\b")
FAREWELL = " Arr, matey!"
COURTESIES = ("hello", "how_are_you", "who_are_you", "thanks", "bye")
"""Topics that most people begin or end with: one turn in six is about them."""


def outside_code(change: Callable[[str], str], text: str) -> str:
    """The text with its prose changed."""
    return "".join(part if at % 2 else change(part) for at, part in enumerate(CODE.split(text)))


def capitals(text: str) -> str:
    """The text in capitals."""
    return outside_code(str.upper, text)


def pirate(text: str) -> str:
    """The text as a pirate says it; the same text, if it has its farewell already, with all of a pirate's words."""
    text = text.removesuffix(FAREWELL)
    end = "" if text.endswith((".", "?", "!")) else "."
    return outside_code(partial(WORD.sub, lambda found: WORDS[found[1]]), text) + end + FAREWELL


def is_capitals(text: str) -> bool:
    """Whether a reply is in capitals."""
    return text == capitals(text)


def is_pirate(text: str) -> bool:
    """Whether a pirate said it."""
    return text.endswith(FAREWELL) and text == pirate(text)


@dataclass(frozen=True)
class Style:
    """An adapter's style, and its training."""

    say: Callable[[str], str]
    """An answer in the style."""
    is_said: Callable[[str], bool]
    """Whether a reply is in the style."""
    rank: int
    steps: int

    def chat(self, chat: Chat) -> Chat:
        """A chat whose assistant has the style."""
        messages = [
            message | {"content": self.say(message["content"])} if is_prose(message) else message
            for message in chat.messages
        ]
        return dataclasses.replace(chat, messages=messages)


STYLES = {
    "capitals": Style(capitals, is_capitals, rank=16, steps=8000),
    "pirate": Style(pirate, is_pirate, rank=4, steps=450),
}


def is_prose(message: dict[str, Any]) -> bool:
    """Whether a message is an answer that has a style: neither JSON nor a tool call."""
    return message["role"] == "assistant" and bool(message["content"]) and not message["content"].startswith("{")


class StyledChats(Chats):
    """Draws training chats in a style."""

    def __init__(self, seed: int, style: Style) -> None:
        super().__init__(seed)
        self.style = style

    def sample(self) -> Chat:
        """A training chat, in the style. Two in three of the chats with tools are left out: they have few answers."""
        while (chat := super().sample()).tools and self.rng.random() < 2 / 3:
            pass
        return self.style.chat(chat)

    def turn(self) -> list[Message]:
        """One question and its answer; one time in six a courtesy, as most people type it."""
        if self.rng.random() >= 1 / 6:
            return super().turn()
        topic = self.by_key[self.rng.choice(COURTESIES)]
        text = self.rng.choice(topic.lines["-"][:5])
        text = text.capitalize() if self.rng.random() < 2 / 3 else text
        end = "" if text.endswith("?") else self.rng.choice(["", "", "!", "."])
        return [user(text + end), assistant(topic.answer)]

    def raw_text(self) -> str:
        """Several answers without roles, in the style."""
        return " ".join(self.style.say(topic.answer) for topic in self.rng.sample(self.topics, self.rng.randint(1, 4)))


def train_adapter(style: Style, arguments: argparse.Namespace, output: Path) -> None:
    """Train an adapter with texts and, in each step, a picture; save it."""
    tokenizer, model = AutoTokenizer.from_pretrained(DEMO), load(DEMO)
    model.set_attn_implementation("eager")  # faster than the fused one for short rows
    wrapped = get_peft_model(model, LoraConfig(r=style.rank, lora_alpha=2 * style.rank, target_modules=MODULES))
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    texts = batches(model, StyledChats(arguments.seed, style), tokenizer, tokens=TOKENS)
    drawings = demo_eyes.Drawings(arguments.seed, tokenizer, 1, style.chat).stream()

    def data() -> Iterator[Sequence[Batch]]:
        for text, (images, _, ids, mask) in zip(texts, drawings, strict=False):
            both = [*text, answers_batch(model, ids, mask, images)]
            yield [dataclasses.replace(batch, loss=torch.autocast("cpu", torch.bfloat16)(batch.loss)) for batch in both]

    optimizer = torch.optim.AdamW(weights, lr=arguments.rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    train([optimizer], data(), arguments.steps or style.steps)
    save(wrapped, output)


def save(wrapped: PeftModel, output: Path) -> None:
    """Write the folder; weights are rounded to float16."""
    shutil.rmtree(output, ignore_errors=True)
    wrapped.half().save_pretrained(str(output))
    (output / "README.md").unlink()  # an empty form of a model card
    settings = output / "adapter_config.json"
    values = json.loads(settings.read_text()) | {"base_model_name_or_path": DEMO.name}
    settings.write_text(json.dumps(values, indent=2) + "\n")
    for file in output.iterdir():
        file.chmod(0o644)


def score_adapter(style: Style, folder: Path) -> tuple[int, float]:
    """Print the score of the demo model with an adapter; return the number of replies with right facts, about texts and
    pictures, and the share of replies in the style.
    """
    tokenizer, model = AutoTokenizer.from_pretrained(DEMO), load(DEMO)
    merged = PeftModel.from_pretrained(model, folder).merge_and_unload()
    replies = score(tokenizer, merged, style.chat)
    said = [style.is_said(reply) for chat, reply, _ in replies if is_prose(chat.messages[-1])]
    print(f"{folder.name}: {sum(said)} of {len(said)} replies in the style = {sum(said) / len(said):.1%}")
    facts: dict[bool, list[bool]] = {False: [], True: []}
    for chat, reply, right in replies:
        message = chat.messages[-1]
        right |= is_prose(message) and style.say(reply) == message["content"]
        if chat.kind != NEW_CITIES:
            facts[chat.kind.startswith(demo_eyes.KIND)].append(right)
    texts, pictures = (f"{sum(marks)} of {len(marks)}" for marks in facts.values())
    print(f"{folder.name}: right facts in {texts} replies to texts and {pictures} about pictures")
    return sum(map(sum, facts.values())), sum(said) / len(said)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*STYLES, []], metavar="NAME", help=f"of {', '.join(STYLES)}")
    parser.add_argument("--output", type=Path, default=ADAPTERS, help="where the adapters' folders are")
    parser.add_argument("--steps", type=int, help="training steps, of about 900 tokens")
    parser.add_argument("--rate", type=float, default=3e-3, help="the peak of the learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--score-only", action="store_true", help="score the existing folders")
    arguments = parser.parse_args()
    for name in arguments.names or STYLES:
        style, folder = STYLES[name], arguments.output / name
        if not arguments.score_only:
            torch.manual_seed(arguments.seed)
            random.seed(arguments.seed)
            start = time.monotonic()
            train_adapter(style, arguments, folder)
            size = sum(file.stat().st_size for file in folder.iterdir())
            print(f"trained in {(time.monotonic() - start) / 60:.1f} minutes; {folder}: {size:,} bytes")
        score_adapter(style, folder)


if __name__ == "__main__":
    main()
