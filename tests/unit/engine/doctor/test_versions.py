"""Versions against the ranges in the metadata."""

from __future__ import annotations

import pytest

from quire.engine.doctor import versions

REQUIREMENTS = (
    "torch<2.14,>=2.11",
    "numpy>=1.26",
    'flashinfer-python<0.8,>=0.7; extra == "flashinfer"',
    'pytest>=8; extra == "test"',
)


@pytest.mark.parametrize(
    ("version", "allowed", "status"),
    [("3.12.1", ">=3.11", "ok"), ("3.10.2", ">=3.11", "fault"), ("3.12.1", None, "not applicable")],
)
def test_python(version: str, allowed: str | None, status: str) -> None:
    assert versions.python(version, allowed).status == status


def test_packages_that_fit() -> None:
    (found,) = versions.packages(REQUIREMENTS, {"torch": "2.13.0+cpu", "numpy": "2.1"}.get)
    assert (found.status, found.found) == ("ok", "torch 2.13.0+cpu, numpy 2.1")


def test_packages_that_do_not() -> None:
    found = versions.packages(REQUIREMENTS, {"torch": "2.9.1", "flashinfer-python": "0.9"}.get)
    assert [(check.name, check.status) for check in found] == [
        *(("torch", "fault"), ("numpy", "fault")),
        *(("flashinfer-python", "warning"), ("packages", "ok")),
    ]
    assert found[0].remedy == "pip install 'torch<2.14,>=2.11'"
    assert found[1].found == "not installed; >=1.26 is needed"


def test_packages_of_a_checkout_that_is_not_installed() -> None:
    (found,) = versions.packages(None)
    assert found.status == "not applicable"


@pytest.mark.parametrize(
    ("of_torch", "of_driver", "status"),
    [
        ("13.0", 13000, "ok"),
        ("12.8", 13000, "ok"),
        ("12.8", 12040, "warning"),
        ("13.0", 12080, "fault"),
        (None, 13000, "fault"),
        (None, None, "not applicable"),
        ("13.0", None, "not applicable"),
    ],
)
def test_cuda(of_torch: str | None, of_driver: int | None, status: str) -> None:
    assert versions.cuda(of_torch, of_driver, "580.65").status == status


def test_the_versions_that_hosts_compare() -> None:
    found = versions.collect()
    assert {*versions.COMPARED, "transformers", "triton"} <= found.keys()
    assert found["torch"] != "none"
