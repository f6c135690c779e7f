"""The arithmetic of benchmarks/compare.py: floors, ratios, percentiles, lengths; and the words of its prompts."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

_PROGRAMS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(autouse=True)
def _programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmarks are programs, not a package: they import each other by name."""
    monkeypatch.syspath_prepend(str(_PROGRAMS))


def module(name: str) -> Any:
    return importlib.import_module(name)


def machine(**changes: Any) -> Any:
    """1 GB/s either way and one G operations/s in float32."""
    figures = {"cpu": "one", "threads": 1, "copy": 1e9, "read": 0.5e9, "large": {"f32": 1e9}, "few": {"f32": 0.5e9}}
    return module("machine").Machine(**(figures | changes))


def shape() -> Any:
    """8 M weights in a layer of 1000 × …: numbers that can be followed by hand."""
    return module("shapes").Shape("s", "llama", 1, 1000, 10, 5, 100, 1000, 1e4, vocabulary=2000)


def test_weights_of_a_shape() -> None:
    assert shape().layer_weights == 1000 * 100 * (2 * 10 + 2 * 5) + 3 * 1000 * 1000  # q, o, k, v; gate, up, down
    assert shape().head_weights == 2000 * 1000
    assert shape().kv_numbers == 2 * 5 * 100
    qwen = module("shapes").SHAPES["qwen2.5-0.5b"]
    assert round((qwen.layer_weights + qwen.head_weights) / 1e6) == 386


def test_decode_is_bound_by_bytes_and_prefill_by_operations() -> None:
    """Weights have two bytes, as in the checkpoint."""
    floor = module("machine").Floor(machine(), shape(), "f32")
    moved = 2 * (6_000_000 + 2_000_000) + 4 * 500 * 1000
    assert floor.decode(500) == pytest.approx(moved / 1e9)  # more than 2 × 8 M operations
    operations = 2 * (100 * 6_000_000 + 2_000_000) + 4 * 10 * 100 * (100 * 101 // 2)
    assert floor.prefill(100) == pytest.approx(operations / 1e9)


def test_throughput_is_one_prefill_and_a_step_for_each_further_token() -> None:
    floor = module("machine").Floor(machine(), shape(), "f32")
    seconds = floor.prefill(10, 4) + floor.decode(11, 4) + floor.decode(12, 4)
    assert floor.throughput(4, 10, 3) == pytest.approx(4 * 3 / seconds)


def test_a_floor_counts_on_the_best_that_was_measured() -> None:
    both = machine(copy=1e9, read=2e9, large={"f32": 3e9, "16-bit": 1e9}, few={"f32": 1e9})
    assert both.bandwidth == 2e9
    assert both.rate("16-bit") == 3e9  # widened to float32
    better = module("machine").best([machine(copy=5.0, few={"f32": 1.0}), machine(copy=4.0, few={"f32": 2.0})])
    assert (better.copy, better.few) == (5.0, {"f32": 2.0})


def test_ratios_are_taken_round_by_round() -> None:
    report = module("report")
    assert report.ratios([2.0, 3.0, 4.0], [1.0, 2.0]) == [2.0, 1.5]
    assert report.spread([3.0, 1.0, 2.0], 1) == "2.0 (1.0–3.0)"
    assert report.spread([1.25], 2) == "1.25"
    assert report.spread([], 2) == "–"


def test_the_rate_is_a_share_of_the_slowest_useful_capacity() -> None:
    assert module("compare").useful_rate([100.0, 60.0, 40.0], 10) == pytest.approx(0.6 * 60 / 10)


def test_figures_of_answers() -> None:
    load = module("load")
    even = load.Answer(0.0, 3, [1.0, 2.0, 3.0])
    pieces = load.Answer(0.0, 5, [2.0, 4.0])  # five tokens in two pieces
    figures = load.figures([even, pieces])
    assert figures.throughput == 8 / 4
    assert figures.ttft == 1.5
    assert figures.itl == pytest.approx((1.0 + 0.5) / 2)
    assert figures.itl_p99 == 2.0


def test_percentiles() -> None:
    percentile = module("load").percentile
    assert percentile(range(1, 101), 99) == 99
    assert percentile([5.0], 99) == 5.0
    assert percentile([], 99) == 0.0


def test_an_answer_of_another_length_is_refused() -> None:
    load = module("load")
    load.check_lengths([load.Answer(0.0, 4)], 4)
    with pytest.raises(load.RequestFailed, match=r"1 of 2 answers have \[3\] tokens, not 4"):
        load.check_lengths([load.Answer(0.0, 4), load.Answer(0.0, 3)], 4)


def test_likeness_of_logprobs() -> None:
    likeness = module("compare").compare_logprobs([-1.0, -2.0, -3.0], [-1.0, -2.5, -3.0])
    assert likeness["largest"] == 0.5
    assert likeness["tokens"] == 3
    assert 0.9 < likeness["correlation"] < 1


@pytest.mark.parametrize("framing", ["chunked", "length", "close"])
async def test_the_client_reads_every_framing(framing: str) -> None:
    load = module("load")
    tokens = [{"choices": [{"text": " a"}]}, {"choices": [{"text": " b"}]}, {"usage": {"completion_tokens": 2}}]
    content = "".join(f"data: {json.dumps(event)}\n\n" for event in tokens).encode() + b"data: [DONE]\n\n"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"POST /v1/completions HTTP/1.1" in head
        writer.write(b"HTTP/1.1 200 OK\r\n")
        if framing == "chunked":  # cut where no event ends
            parts = content[:30], content[30:]
            writer.write(b"Transfer-Encoding: chunked\r\n\r\n")
            writer.write(b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n")
        else:
            writer.write(b"Content-Length: %d\r\n" % len(content) if framing == "length" else b"")
            writer.write(b"\r\n" + content)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        address = load.Address(server.sockets[0].getsockname()[1])
        got = await load.run(address, load.Workload([{"prompt": [1]}], [0.0], 2))
    assert got[0].tokens == 2
    assert len(got[0].times) == 2


def test_a_document_has_figures_floors_and_what_is_missing() -> None:
    compare, report = module("compare"), module("report")
    figures = {"throughput": 50.0, "ttft": 0.1, "ttft_p99": 0.2, "itl": 0.05, "itl_p99": 0.3}
    servers = []
    for peer, factor in (("quire", 2.0), ("other", 1.0)):
        rounds = [{name: value * factor for name, value in figures.items()}] * 2
        server = compare.Measured(peer, "1", "float32", f"{peer} serve", [1.0], 0.0, 1.5, {})
        servers.append(vars(server) | {"figures": dict.fromkeys(compare.WORKLOADS, rounds)})
    group = {
        "shape": "Qwen2.5-0.5B",
        "precision": "f32",
        "sizes": vars(compare.Sizes()),
        "rate": 0.5,
        "machine": vars(machine()),
        "servers": servers,
    }
    results = {"date": "2026-01-01", "commit": "c", "command": "compare.py", "python": "3", "torch": "2", "threads": 2}
    results |= {"rounds": 2, "missing": [{"peer": "gone", "why": "not found"}], "groups": [group]}
    text = report.document(results)
    assert "| other, float32 | 2.00 (2.00–2.00) |" in text  # the ratio
    assert "| quire, float32 | 100.0 (100.0–100.0) |" in text
    assert "| floor | " in text
    assert "- gone: not found" in text
    assert "2026-01-01, Quire c, rounds: 2." in text
    later = results | {"commit": "d", "groups": [group | {"precision": "int8", "servers": servers[:1]}]}
    later["missing"] = [{"peer": "other", "why": "not asked for"}]
    merged = report.merge([results, results | {"commit": "e"}, later])
    assert [each["measured"] for each in merged["groups"]] == [
        "2026-01-01, Quire e, rounds: 2",
        "2026-01-01, Quire d, rounds: 2",
    ]
    assert merged["missing"] == results["missing"]
    assert "Quire e, rounds: 2." in report.document(merged | {"groups": merged["groups"][:1]})


def test_each_quire_of_a_group_is_compared_with_the_others_alone() -> None:
    compare, report = module("compare"), module("report")
    rounds = [{"throughput": 50.0, "ttft": 0.1, "ttft_p99": 0.2, "itl": 0.05, "itl_p99": 0.3}]
    names = ("quire", "quire-int4", "other")
    servers = [vars(compare.Measured(name, "1", "4", "", figures={"stream": rounds})) for name in names]
    servers.append(vars(compare.Measured("gone", "1", "4", "", failure="gone did not start\nfirst\nOSError: last")))
    group = {"shape": "tiny", "precision": "4-bit", "rate": None, "sizes": vars(compare.Sizes()), "servers": servers}
    shown = report.tables({"groups": [group | {"machine": vars(machine()), "measured": "today"}]})
    assert "quire / peer, round by round" in shown
    assert "quire-int4 / peer, round by round" in shown
    assert shown.count("| other, 4 | – | – | 1.00 | 1.00 | – |") == 2
    assert "gone failed: gone did not start OSError: last" in shown


def test_words_survive_text(tmp_path: Path) -> None:
    shapes = module("shapes")
    tokenizers = importlib.import_module("tokenizers")
    vocabulary = {"Ġ": 0, "a": 1, "b": 2, "Ġa": 3, "Ġab": 4, "ab": 5}
    merges = [("Ġ", "a"), ("Ġa", "b"), ("a", "b")]
    built = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    built.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = tokenizers.decoders.ByteLevel()
    built.save(str(tmp_path / "tokenizer.json"))
    assert shapes.words(tmp_path, len(vocabulary)) == [3, 4]
    assert str(_PROGRAMS) in sys.path


def test_traffic_of_hand_overs_is_that_of_prompts() -> None:
    """Not that of the streams beside them; and prompts that stay are stored, too."""
    names = ("handed", "handovers", "seconds", "recomputed", "written", "read")
    start, before, end = (
        dict(zip(names, values, strict=True))
        for values in ((0, 0, 0, 0, 0, 0), (0, 0, 0, 0, 7e6, 0), (2, 2, 0.5, 30, 46e6, 16e6))
    )
    found = module("prefill_decode").of_hand_overs(start, before, end, 4)
    assert found == {"handed_over": 2, "handover_ms": 250.0, "written_mb": 8.0, "read_mb": 8.0, "recomputed": 15.0}
    assert module("prefill_decode").of_hand_overs(start, start, before, 4) == {"handed_over": 0}
