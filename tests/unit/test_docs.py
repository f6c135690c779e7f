"""The documentation agrees with the code and with itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDES = sorted([*(ROOT / "docs" / "guides").glob("*.md"), ROOT / "docs" / "quickstart.md", ROOT / "README.md"])
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def anchors(text: str) -> set[str]:
    """The ids of a page's headings, as GitHub and Python-Markdown make them."""
    headings = re.findall(r"^#+ (.+?)$", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M), flags=re.M)
    plain = [re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading).replace("`", "").lower() for heading in headings]
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading)) for heading in plain}


def links(text: str) -> Iterator[str]:
    """The targets of a page's links and pictures that lie in this repository."""
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"[a-z]+:", target):
            yield target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page.read_text()):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{link}: there is no such file"
        if anchor:
            assert anchor in anchors(target.read_text()), f"{link}: there is no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_names_exist(page: Path) -> None:
    """Paths in backticks below the folders of the repository."""
    roots = "server|engine|kernels|scripts|benchmarks|tests|docs|examples|deploy"
    for path in re.findall(rf"`((?:{roots})/[\w./*-]+)", page.read_text()):
        assert list(ROOT.glob(path.rstrip("/."))), f"{path}: there is no such file"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_diagrams_are_pictures(page: Path) -> None:
    """Neither the site, without another host's scripts, nor a package index shows mermaid."""
    assert "```mermaid" not in page.read_text(), "draw it in scripts/draw_docs.py"


IMAGES = {"quire:cpu", "quire:cuda"}


def known_flags() -> set[str]:
    """Every flag of `quire`."""
    flags = set(re.findall(r"`(--?[a-z][\w-]*)`", (ROOT / "docs" / "reference" / "cli.md").read_text()))
    return flags | {flag.replace("--", "--no-", 1) for flag in flags} | {"--help", "--version"}


def commands(text: str) -> Iterator[str]:
    """The parts of a page about `quire`'s command line: command lines, and flags in backticks."""
    yield from re.findall(r"^(?:\$ )?(?:quire|scripts/serve) .*$", text, flags=re.M)
    yield from re.findall(rf"(?<!\.sh )(?:{'|'.join(IMAGES)}) .*$", text, flags=re.M)
    for span in re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)):
        if span.startswith(("-", "quire ", "scripts/serve ")):
            yield span


OF_DOCKER = {
    *("--build-arg", "--format", "--secret", "--push", "--sbom", "--provenance"),
    *("--read-only", "--tmpfs", "--user", "--ipc", "--shm-size", "--health-cmd", "--no-healthcheck"),
}
OF_OTHER_PROGRAMS = {"--gpus", "--budget", "--only"} | OF_DOCKER


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_flags_that_a_guide_names_exist(page: Path) -> None:
    text = page.read_text()
    known = known_flags() | OF_OTHER_PROGRAMS
    if page.name == "coming-from-vllm.md":
        known |= set(re.findall(r"`(--[a-z][\w-]*)`", (ROOT / "docs" / "reference" / "vllm.md").read_text()))
    for command in commands(text):
        for flag in re.findall(r"(?<![\w-])--[a-z][\w-]+", command):
            assert flag in known, f"{flag} is no flag of quire"


def test_metrics_that_a_guide_names_exist() -> None:
    known = set(re.findall(r"`(quire:\w+)`", (ROOT / "docs" / "reference" / "metrics.md").read_text()))
    known |= {f"{name}_bucket" for name in known} | IMAGES
    for page in GUIDES:
        for name in re.findall(r"quire:\w+", page.read_text()):
            assert name in known, f"{page.name}: there is no metric {name}"
