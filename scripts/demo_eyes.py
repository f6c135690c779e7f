"""The demo model's eyes: a small SigLIP tower, whose features stand in the prompt in the place of a picture (LLaVA).

They are trained in three parts. First the tower labels its patches with what is drawn there: that costs a tenth of a
question, and every patch has an answer. Then the model answers questions about pictures, where the language model
changes only in what its texts do not notice (`protected`). At last all weights learn at a low rate, from pictures and
from what the model before says to texts, so that nearly all answers without pictures stay as they are.
"""

import contextlib
import copy
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from demo_chats import Chat
from demo_pictures import LABELS, Picture, Pictures
from demo_training import Batch, answers_batch, optimizers_of, render, targets, train
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import (
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerBase,
    SiglipVisionConfig,
)
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

SIDE, PATCH, WIDTH = 112, 16, 160
GRID = SIDE // PATCH
TOKEN = "<|image|>"
KIND = "picture, "
"""Begins the kinds of chats with pictures."""


def build(language: Any, tokenizer: PreTrainedTokenizerBase) -> LlavaForConditionalGeneration:
    """A model with the language model of another one, with eyes or without, and a tower whose layers add nothing yet;
    float32.
    """
    text: Any = copy.deepcopy(language.config.get_text_config())
    text.name_or_path, text.dtype = "", torch.float32
    make_config: Any = LlavaConfig
    config = make_config(
        vision_config=SiglipVisionConfig(
            hidden_size=WIDTH,
            intermediate_size=4 * WIDTH,
            num_hidden_layers=4,
            num_attention_heads=5,
            image_size=SIDE,
            patch_size=PATCH,
            vision_use_head=False,
        ),
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids(TOKEN),
        image_seq_length=GRID**2,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model: Any = LlavaForConditionalGeneration(config)
    model.model.language_model.load_state_dict(getattr(language.model, "language_model", language.model).state_dict())
    model.tie_weights()
    tower = model.model.vision_tower
    for layer in tower.encoder.layers:
        torch.nn.init.zeros_(layer.self_attn.out_proj.weight)
        torch.nn.init.zeros_(layer.mlp.fc2.weight)
    with torch.no_grad():
        tower.embeddings.position_embedding.weight.copy_(0.3 * waves())
        whiten(tower.embeddings.patch_embedding)
    return cast(LlavaForConditionalGeneration, model)


def waves() -> Tensor:
    """Sines and cosines of the rows and columns of patches: `[patches, WIDTH]`."""
    angles = (torch.arange(GRID) * torch.pi / GRID)[:, None] * torch.arange(1, WIDTH // 4 + 1) / 2
    axis = torch.cat([angles.sin(), angles.cos()], 1)
    return torch.cat([axis.repeat_interleave(GRID, 0), axis.repeat(GRID, 1)], 1)


def whiten(patches: torch.nn.Conv2d) -> None:
    """Begin with the principal components of patches, each with about the same variance: so that edges, which tell the
    shapes, count as much as colors do.
    """
    pictures = Pictures(-1)
    images = torch.from_numpy(np.stack([pixels(pictures.sample().image) for _ in range(400)]))
    rows = images.unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH).permute(0, 2, 3, 1, 4, 5).reshape(-1, 3 * PATCH**2)
    mean = rows.mean(0)
    values, vectors = torch.linalg.eigh(torch.cov(rows.T))
    parts = (vectors[:, -WIDTH:] / (values[-WIDTH:] + 1e-3 * values[-1]).sqrt()).T
    weight = 0.3 * torch.linalg.qr(torch.randn(WIDTH, WIDTH))[0] @ parts
    patches.weight.copy_(weight.reshape(WIDTH, 3, PATCH, PATCH))
    assert patches.bias is not None
    patches.bias.copy_(-weight @ mean)


def processor(tokenizer: PreTrainedTokenizerBase) -> LlavaProcessor:
    """What makes the model's inputs of pictures and texts."""
    images = SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE})
    make: Any = LlavaProcessor
    found = make(images, tokenizer, patch_size=PATCH, vision_feature_select_strategy="full", image_token=TOKEN)
    return cast(LlavaProcessor, found)


def pixels(image: Image.Image) -> NDArray[np.float32]:
    """A picture as the processor makes it: `[3, SIDE, SIDE]` in -1..1."""
    resized = image.resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    return np.asarray(resized, np.float32).transpose(2, 0, 1) / 127.5 - 1


def patch_labels(labels: Image.Image) -> NDArray[np.int64]:
    """What is in each patch, by nine points in it: `[patches, 3]`."""
    points: NDArray[np.int64] = np.asarray(labels.resize((3 * GRID, 3 * GRID), Image.Resampling.NEAREST), np.int64)
    points = points.reshape(GRID, 3, GRID, 3, 3).transpose(0, 2, 1, 3, 4).reshape(GRID**2, 9, 3)
    first = (points[..., 1] > 0).argmax(-1)
    found: NDArray[np.int64] = points[np.arange(GRID**2), first]
    return found


def chat(picture: Picture, rng: random.Random | None = None, turns: int = 1) -> Chat:
    """A conversation about a picture, which is before the first question or, with `rng`, sometimes after it."""
    messages: list[dict[str, Any]] = []
    for question, answer in picture.turns[:turns]:
        content: Any = question
        if not messages:
            content = [{"type": "image"}, {"type": "text", "text": question}]
            if rng is not None and rng.random() < 0.5:
                content.reverse()
        messages += [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    return Chat(messages, kind=KIND + picture.kind)


class Drawings(IterableDataset[tuple[Tensor, ...]]):
    """Batches of pictures without end: their pixels, the labels of their patches, and chats about them with targets.
    `style` changes the chats.
    """

    def __init__(
        self,
        seed: int,
        tokenizer: PreTrainedTokenizerBase,
        count: int,
        style: Callable[[Chat], Chat] = lambda chat: chat,
    ) -> None:
        self.seed, self.tokenizer, self.count, self.style = seed, tokenizer, count, style

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        worker: Any = get_worker_info()
        pictures = Pictures(f"training {self.seed}, process {worker.id}")
        opening, end = self.tokenizer.encode("<|im_start|>assistant\n"), int(self.tokenizer.eos_token_id)
        pad = int(self.tokenizer.pad_token_id)
        while True:
            drawn = [pictures.sample() for _ in range(self.count)]
            chats = [self.style(chat(each, pictures.rng, turns=4)) for each in drawn]
            texts = [render(self.tokenizer, each, len(each.messages)) for each in chats]
            rows = self.tokenizer([text.replace(TOKEN, TOKEN * GRID**2) for text in texts])["input_ids"]
            width = max(map(len, rows))
            masks = [targets(row, opening, end) + [False] * (width - len(row)) for row in rows]
            yield (
                torch.from_numpy(np.stack([pixels(each.image) for each in drawn])),
                torch.from_numpy(np.stack([patch_labels(each.labels) for each in drawn])),
                torch.tensor([row + [pad] * (width - len(row)) for row in rows]),
                torch.tensor(masks),
            )

    def stream(self) -> Iterator[tuple[Tensor, ...]]:
        """The batches, drawn by two processes."""
        return iter(DataLoader(self, batch_size=None, num_workers=2, prefetch_factor=4))


def train_tower(model: Any, drawings: Iterator[tuple[Tensor, ...]], steps: int, minutes: float | None) -> None:
    """Train the tower to label patches; those with background count a tenth."""
    heads = torch.nn.Linear(WIDTH, sum(LABELS))
    torch.nn.init.zeros_(heads.weight)

    def loss(images: Tensor, labels: Tensor) -> Tensor:
        features = model.model.vision_tower(images, output_hidden_states=True).hidden_states[-1]
        logits = heads(features).split(LABELS, -1)
        counts = torch.where(labels[..., 1] > 0, 1.0, 0.1).flatten()
        parts = [
            functional.cross_entropy(part.flatten(0, 1), labels[..., at].flatten(), reduction="none")
            for at, part in enumerate(logits)
        ]
        return torch.stack(parts).sum(0) @ counts

    weights = [*model.model.vision_tower.named_parameters(), *heads.named_parameters()]
    data = ([Batch(loss, (images, labels), labels.shape[0] * GRID**2)] for images, labels, *_ in drawings)
    train(optimizers_of(weights, speed=2.0), data, steps, minutes)


@contextlib.contextmanager
def protected(
    language: Any, tokenizer: PreTrainedTokenizerBase, texts: list[str], share: float = 1e-3
) -> Iterator[None]:
    """While the context is open, training changes a language model only in what texts do not notice: each matrix in the
    directions of its inputs that have this share of their energy together, and the embeddings of tokens that none of
    the texts has. This is gradient projection memory (https://arxiv.org/abs/2103.09762).
    """
    linear = [module for module in language.layers.modules() if isinstance(module, torch.nn.Linear)]
    moments = {module: torch.zeros(module.in_features, module.in_features) for module in linear}
    unused = torch.ones(language.embed_tokens.num_embeddings, 1)
    unused[tokenizer.convert_tokens_to_ids(TOKEN)] = 0.0

    def add(module: torch.nn.Linear, inputs: tuple[Tensor, ...], _: Tensor) -> None:
        rows = inputs[0].flatten(0, -2)
        moments[module] += rows.T @ rows

    with contextlib.ExitStack() as hooks, torch.no_grad():
        for module in linear:
            hooks.enter_context(module.register_forward_hook(add))
        for number, text in enumerate(texts):
            ids = torch.tensor([tokenizer.encode(text)])
            unused[ids] = 0.0
            if number % 16 == 0:  # few texts have all directions
                language(input_ids=ids, use_cache=False)
    with contextlib.ExitStack() as hooks:
        hooks.callback(language.requires_grad_)
        language.requires_grad_(False)
        embeddings: Any = language.embed_tokens.weight.requires_grad_()
        hooks.enter_context(embeddings.register_hook(partial(torch.mul, other=unused)))
        for module in linear:
            values, vectors = torch.linalg.eigh(moments[module].double())
            quiet = vectors[:, values.clamp(min=0).cumsum(0) < share * values.sum()].float()
            weight: Any = module.weight.requires_grad_()
            hooks.enter_context(weight.register_hook(partial(torch.matmul, other=quiet @ quiet.T)))
        yield


def train_answers(model: Any, drawings: Iterator[tuple[Tensor, ...]], steps: int, minutes: float | None) -> None:
    """Train all weights that are not protected to answer questions about pictures."""
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    layers = {name for name in weights if "language_model.layers" in name}
    tower = {name for name in weights if "vision_tower" in name}
    optimizers = [
        *optimizers_of([(name, weights[name]) for name in weights if name in tower], speed=0.7),
        *optimizers_of([(name, weights[name]) for name in weights if name not in layers | tower], speed=1.5),
        *optimizers_of([(name, weights[name]) for name in weights if name in layers], decay=0.0),
    ]
    data = ([answers_batch(model, ids, mask, images)] for images, _, ids, mask in drawings)
    train(optimizers, data, steps, minutes)


def train_all(
    model: Any,
    drawings: Iterator[tuple[Tensor, ...]],
    texts: Iterator[Sequence[Batch]],
    steps: int,
    minutes: float | None,
) -> None:
    """Train all weights at a low rate, with batches of texts beside those of pictures: in two rounds, of which the
    second has twice the texts, and the mean of both ends is taken.
    """
    weights = [*model.named_parameters()]
    language = [(name, weight) for name, weight in weights if "language_model" in name]
    eyes = [(name, weight) for name, weight in weights if "language_model" not in name]
    ends = list[list[Tensor]]()
    for count in (1, 2):
        data = (
            [answers_batch(model, ids, mask, images), *(batch for _ in range(count) for batch in next(texts))]
            for images, _, ids, mask in drawings
        )
        optimizers = [*optimizers_of(eyes, speed=0.4, decay=0.0), *optimizers_of(language, speed=0.1, decay=0.0)]
        train(optimizers, data, steps, minutes)
        ends.append([weight.detach().clone() for _, weight in weights])
    with torch.no_grad():
        for (_, weight), *of_ends in zip(weights, *ends, strict=True):
            weight.copy_(torch.stack(of_ends).mean(0))
