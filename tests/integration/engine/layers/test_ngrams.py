"""Embeddings of n-grams against transformers', whole and in chunks."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from transformers import Qwen4ExpTextConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextPLELayer

from quire import kernels
from quire.engine.architecture.families import from_hf_config
from quire.engine.architecture.residual_spec import NGramSpec
from quire.engine.distributed.communicator import Parallel
from quire.engine.layers.ngrams import NGrams
from tests.fakes.families import CASES, SIZES
from tests.fakes.ranks import on_ranks

HIDDEN, END = SIZES["hidden_size"], SIZES["eos_token_id"]
NAMES = {"key_proj": "key", "value_proj": "value"} | {
    f"norm_{each}": f"{each}_norm" for each in ("key", "query", "conv")
}


def spec_and_layer(index: int = 1) -> tuple[NGramSpec, Qwen4ExpTextPLELayer]:
    """Ours, and transformers' with random weights: the layer with n-grams of this number."""
    name, changes = CASES["Qwen4-Exp"]
    spec = from_hf_config(SIZES | changes | {"architectures": [name]}).layers[2 * index].ngrams
    assert spec is not None
    torch.manual_seed(0)
    theirs = Qwen4ExpTextPLELayer(Qwen4ExpTextConfig(**(SIZES | changes)), 2 * index, index)
    for parameter in theirs.parameters():
        parameter.data.normal_(std=0.5)
    return spec, theirs


def ours(spec: NGramSpec, theirs: Qwen4ExpTextPLELayer, parallel: Parallel) -> NGrams:
    layer, state = NGrams(spec, HIDDEN, parallel), theirs.state_dict()
    table = state["ple_embedding.ngram_embedding.weight"]
    layer.embedding.weight.data.zero_()
    for shard in layer.embedding.weight.shards:
        start = list(spec.part_rows).index(shard.part) * next(iter(spec.part_rows.values())) + shard.start
        layer.embedding.weight.data[shard.target] = table[start : start + shard.length]
    for name, module in NAMES.items():
        layer.get_submodule(module).weight.data = state[f"{name}.weight"]
    layer.conv.data = state["conv1d.weight"]
    return layer


def run(
    spec: NGramSpec, theirs: Qwen4ExpTextPLELayer, cuts: list[int], x: Tensor, ids: Tensor, parallel: Parallel
) -> Tensor:
    """A request in chunks, with its state in a page that is written after each."""
    layer, parts = ours(spec, theirs, parallel), []
    others = tuple(torch.full((1, *shape), 7.0) for shape in spec.kept_inputs(HIDDEN))
    state = kernels.RecurrentState(torch.zeros(1, 0, 0, 0), torch.zeros(1, 0, 0), others)
    for start, end in pairwise([0, *cuts, len(x)]):
        segments = kernels.StateSegments(
            torch.tensor([0, end - start]), torch.tensor([0, 1]), torch.tensor([0 if start else -1]), torch.tensor([0])
        )
        parts.append(layer(x[start:end], ids[start:end], segments, state))
    return torch.cat(parts)


@pytest.mark.parametrize("cuts", [[], [1], [2, 3, 4, 20], [17, 18]])
@pytest.mark.parametrize("tp", [1, 2])
def test_ngrams_are_those_of_transformers(cuts: list[int], tp: int) -> None:
    """With ends of text at the beginning, side by side and before a chunk."""
    spec, theirs = spec_and_layer()
    noise = torch.Generator().manual_seed(1)
    x = torch.randn(40, spec.num_streams * HIDDEN, generator=noise)
    ids = torch.randint(0, END, (40,), generator=noise)
    for place in (0, 3, 9, 10, 16, 18, 30):
        ids[place] = END
    with torch.inference_mode():
        expected = theirs(x[None], ids[None], None)[0]
        for found in on_ranks(tp, partial(run, spec, theirs, cuts, x, ids)):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert (ids != END).sum() > 30


def test_ids_of_large_vocabularies_are_exact_in_half_precision() -> None:
    spec, theirs = spec_and_layer()
    layer = ours(spec, theirs, Parallel())
    ids = torch.tensor([0, 1, 255, 256, 65535, 65536, 248319, END, 5, 131071, 7])
    segments = kernels.StateSegments(*map(torch.tensor, ([0, len(ids)], [0, 1], [-1], [0])))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        kept = torch.zeros(1, *spec.kept_inputs(HIDDEN)[0], dtype=dtype)
        last, before = layer.ids_before(ids, kept, segments, dtype)
        assert last.tolist() == [END, *ids[:-1].tolist()]
        assert before.tolist() == [END, END, 0, 1, 255, 256, 65535, 65536, END, END, 5]
