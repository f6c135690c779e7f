"""`QUIRE_CPU_ISA` makes Quire choose and compile kernels as on a lesser processor."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import get_args

import pytest
import torch

from quire import kernels
from quire.engine.config.resolve import _ENVIRONMENT
from quire.kernels import isa, linear
from quire.kernels.cpu import build, compiler
from tests.integration.kernels.conftest import reference_only

needs_avx2 = pytest.mark.skipif("avx2" not in isa.processor_features(), reason="needs AVX2")


@reference_only
def test_without_it_the_processor_has_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUIRE_CPU_ISA", raising=False)
    assert isa.has("avx2") == torch.cpu._is_avx2_supported()
    assert isa.has("avx512_bf16") == torch.cpu._is_avx512_bf16_supported()
    assert isa.has("amx_tile") == torch.cpu._is_amx_tile_supported()


@reference_only
@pytest.mark.parametrize(
    ("machine", "features", "name"),
    [
        ("x86_64", isa._V4 | {"avx512_vnni", "avx512_bf16", "amx_tile"}, "avx512_bf16"),
        ("x86_64", isa._V4 | {"avx512_vnni"}, "avx512_vnni"),
        ("x86_64", isa._V4, "avx512"),
        ("x86_64", isa._V3 | {"avx_vnni"}, "avx_vnni"),
        ("x86_64", isa._V3 - {"f16c"}, "native"),
        ("aarch64", {"asimd", "asimddp", "i8mm"}, "neon_dotprod"),
        ("aarch64", {"asimd"}, "native"),
        ("riscv64", set(), "native"),
    ],
)
def test_the_most_capable_that_fits_is_chosen(
    monkeypatch: pytest.MonkeyPatch, machine: str, features: set[str], name: str
) -> None:
    monkeypatch.delenv("QUIRE_CPU_ISA", raising=False)
    monkeypatch.setattr(isa, "processor_features", lambda: frozenset(features))
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert isa.chosen().name == name


@needs_avx2
def test_avx2_is_all_there_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, implementation: str) -> None:
    monkeypatch.setenv("QUIRE_CPU_ISA", "avx2")
    assert [feature for feature in get_args(isa.Feature) if isa.has(feature)] == ["avx2"]
    assert isa.chosen().flags == ("-march=x86-64-v3",)
    keys = {build._key("c++", each) for each in isa.ISAS}
    assert len(keys) == len(isa.ISAS)
    monkeypatch.setattr("quire.kernels.cpu.compiler.SOURCES", shutil.copytree(compiler.SOURCES, tmp_path / "elsewhere"))
    assert {build._key("c++", each) for each in isa.ISAS} == keys  # checkouts with the same sources share a library
    if implementation == "cpu":  # the same forms as elsewhere, for all but AMX
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            assert type(kernels.pack_linear(torch.zeros(2, 4, dtype=dtype))) is linear.TiledLinear
    else:  # oneDNN takes no bfloat16 there
        assert type(kernels.pack_linear(torch.zeros(2, 4, dtype=torch.bfloat16))) is linear.PlainLinear
    assert type(kernels.pack_linear(torch.zeros(2, 4), "int8")) is linear.Int8Linear
    assert type(kernels.pack_linear(torch.zeros(2, 32), "int4")) is linear.Int4Linear


@reference_only
def test_what_is_not_known_or_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CPU_ISA", "sse9")
    with pytest.raises(ValueError, match="QUIRE_CPU_ISA is 'sse9'; it must be one of avx512_bf16, avx512_vnni, avx512"):
        isa.has("avx2")
    monkeypatch.setenv("QUIRE_CPU_ISA", "avx2")
    monkeypatch.setattr(isa, "processor_features", frozenset)
    with pytest.raises(ValueError, match="which this processor does not have"):
        isa.has("avx2")


@reference_only
def test_every_name_passes_the_check_of_the_environment() -> None:
    pattern, names = _ENVIRONMENT["QUIRE_CPU_ISA"]
    assert all(re.fullmatch(pattern, each.name) and each.name in names for each in isa.ISAS)
