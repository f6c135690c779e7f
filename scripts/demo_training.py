"""Training of the demo models: batches, the loss of answers, optimizers and the loop."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from demo_chats import Chat
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

THREADS = 2


@dataclass(frozen=True)
class Batch:
    """Tensors with a first dimension for examples, and the loss of some of these: the sum over their targets."""

    loss: Callable[..., Tensor]
    tensors: tuple[Tensor, ...]
    num_targets: int


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


def answers_batch(model: Any, ids: Tensor, mask: Tensor, *pixels: Tensor, teacher: Any = None) -> Batch:
    """The answers in `ids`, where `mask` is true; both `[chats, length]`. `pixels` has the picture of each chat. With a
    `teacher`, its distributions are the goals.
    """
    return Batch(partial(_answers_loss, model, teacher), (ids, mask, *pixels), int(mask[:, 1:].sum()))


def _answers_loss(model: Any, teacher: Any, ids: Tensor, mask: Tensor, *pixels: Tensor) -> Tensor:
    """The cross entropy of targets. The head runs on their positions only."""
    seen = {"pixel_values": pixels[0]} if pixels else {}
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False, **seen).last_hidden_state
    wanted = mask[:, 1:]
    logits, goals = model.lm_head(hidden[wanted]), ids[:, 1:][wanted]
    if teacher is not None:
        with torch.no_grad():
            known = teacher.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
            goals = teacher.lm_head(known[wanted]).softmax(-1)
    return functional.cross_entropy(logits, goals, reduction="sum")


def rate(progress: float) -> float:
    """Learning rate relative to its peak at `progress` in 0..1: a short warm-up, then cosine decay to zero."""
    return min(1.0, progress / 0.03) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def optimizers_of(
    weights: Iterable[tuple[str, Tensor]], speed: float = 1.0, decay: float = 0.1
) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers (it needs far fewer steps here), AdamW for embeddings, norms and biases.
    `speed` multiplies their learning rates; `decay` is that of matrices, of which each thread has a part.
    """
    matrices, others = list[Tensor](), list[Tensor]()
    for name, weight in weights:
        (matrices if weight.dim() == 2 and "embed" not in name else others).append(weight)
    found: list[torch.optim.Optimizer] = [
        torch.optim.Muon(part, lr=3e-3 * speed, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
        for part in (matrices[at::THREADS] for at in range(THREADS))
    ]
    if others:
        found.append(torch.optim.AdamW(others, lr=2e-3 * speed, betas=(0.9, 0.97), weight_decay=0.0, fused=True))
    return found


def backward(weights: list[Tensor], pool: ThreadPoolExecutor, batches: Sequence[Batch]) -> float:
    """Set the gradients of the sum of the batches' losses, each of which is a mean over targets, and return this sum.

    Each thread of `pool` computes part of each batch. The threads synchronize once per step instead of once per
    operation, which is faster, especially when other programs share the cores.
    """

    def gradients(batch: Batch, *part: Tensor) -> tuple[float, tuple[Tensor | None, ...]]:
        loss = batch.loss(*part) / batch.num_targets
        return loss.item(), torch.autograd.grad(loss, weights, allow_unused=True)

    work = [
        pool.submit(gradients, batch, *part)
        for batch in batches
        for part in zip(*[tensor.chunk(THREADS) for tensor in batch.tensors], strict=True)
    ]
    losses, grads = zip(*[each.result() for each in work], strict=True)
    for weight, *shares in zip(weights, *grads, strict=True):
        used = [share for share in shares if share is not None]
        weight.grad = torch.stack(used).sum(0) if used else None
    return float(sum(losses))


def train(
    optimizers: list[torch.optim.Optimizer], data: Iterator[Sequence[Batch]], steps: int, minutes: float | None = None
) -> None:
    """Train for `steps` steps or, if given, for `minutes` of wall-clock time (then runs are not reproducible)."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    weights, peaks = [weight for group in groups for weight in group["params"]], [group["lr"] for group in groups]
    start, step, progress, smooth = time.monotonic(), 0, 0.0, 0.0
    torch.set_num_threads(1)
    pool = ThreadPoolExecutor(THREADS, initializer=torch.set_num_threads, initargs=(1,))
    with pool, tqdm(total=1.0, desc="train", bar_format="{l_bar}{bar}| {elapsed}<{remaining}{postfix}") as bar:
        while progress < 1:
            for group, peak in zip(groups, peaks, strict=True):
                group["lr"] = peak * rate(progress + 1e-3)
            loss = backward(weights, pool, next(data))
            list(pool.map(lambda optimizer: optimizer.step(), optimizers))
            step, smooth = step + 1, loss if not step else 0.95 * smooth + 0.05 * loss
            progress = (time.monotonic() - start) / (60 * minutes) if minutes else step / steps
            bar.update(min(1.0, progress) - bar.n)
            bar.set_postfix_str(f"step {step}, loss {smooth:.3f}")
    torch.set_num_threads(THREADS)
