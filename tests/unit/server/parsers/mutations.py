"""Transcripts whose tags are missing, doubled, spaced, re-cased or cut, and what a person still reads in them.

`python -m tests.unit.server.parsers.mutations [CASES]` prints for each format how often a call is lost, markup gets
into arguments, text disappears, streaming differs from the whole text, and a text that is not closed swallows calls.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any

from quire.server.parsers.output_parser import OutputFormat
from quire.server.parsers.tool_formats import TOOL_FORMATS, JsonObject, Python, Quoted, Tagged
from tests.unit.server.parsers.samples import TWO_CALLS, cut, joined
from tests.unit.server.parsers.test_transcripts import SCHEMAS, transcripts

Calls = list[tuple[str, dict[str, Any]]]
_TAG = re.compile(r"<[^<>\n]*>?|\[[A-Z_]+\]|```json|```|functools")
KINDS = ("missing", "doubled", "doubled on a line", "spaced", "space before", "line before", "space behind",
         "line behind", "upper case", "title case", "cut", "text cut")  # fmt: skip
FAULTS = ("lost call", "markup in arguments", "lost text", "stream differs")
SWALLOWED = "swallowed call"
"""No fault: calls are text of the one before, whose last text is not closed. They could be quoted there."""


@dataclass(frozen=True)
class Mutation:
    """A text that differs from a transcript, and what it must still be read as."""

    format: str
    kind: str
    text: str
    content: str
    """The content of the transcript."""
    calls: Calls
    """The calls of the transcript."""
    is_readable: bool
    """All calls can still be seen."""
    is_unclosed: bool = False
    """The last text of a call is not closed, and another one is; or the quotes of a text are both misspelt."""


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, tuple):
        for each in value:
            yield from _strings(each)
    elif is_dataclass(value):
        for field in fields(value):
            if field.name not in ("signs", "names", "read_as", "gap"):
                yield from _strings(getattr(value, field.name))
        if isinstance(value, JsonObject | Python | Quoted):
            yield from _strings(value.around)


@cache
def tags_of(format: str) -> re.Pattern[str]:
    """A pattern for the tags that a format writes."""
    tags = {tag for text in _strings(TOOL_FORMATS[format]) for tag in _TAG.findall(text)}
    patterns = [re.escape(tag) + r"[^<>\n]*>" * (tag[-1] in '="') for tag in sorted(tags, key=len, reverse=True)]
    return re.compile("|".join(patterns))


@cache
def values_with_tags(format: str) -> tuple[str, ...]:
    """Strings with every tag of a format, also misspelt and as calls, but without the tag that closes a string."""
    call = TOOL_FORMATS[format].call
    close = call.close.strip() if isinstance(call, Tagged) else call.quote if isinstance(call, Quoted) else "\0"
    tags = sorted({tag for text in _strings(TOOL_FORMATS[format]) for tag in _TAG.findall(text)})
    tags += [f"{tag}unit{end}" for tag in tags if tag[-1] in '="' for end in (">", '">', ">\n")]
    tags += [other for tag in tags for other in (tag.title(), f"{tag[:-1]} >", tag[:-1])]
    values = [f"{before}{tag}{behind}" for tag in tags for before, behind in (("", "x"), ("x ", " y"), ("x\n", "\ny"))]
    calls = TWO_CALLS[format]
    last = calls[calls.rindex(TOOL_FORMATS[format].block[0]) :]
    quoted = (calls, calls[-40:], last, f"{last}\n{last}", f"{last}\n{calls.partition(close)[0]}")
    values += [f'x = """{text.replace(close, "")}"""\nprint(x)' for text in quoted]
    return tuple(value for value in values if close not in value)


@cache
def words_of(format: str) -> frozenset[str]:
    """Words of the tags that are in no value of a transcript."""
    tags = {tag for text in _strings(TOOL_FORMATS[format]) for tag in _TAG.findall(text)}
    return frozenset(word for tag in tags for word in re.findall(r"[^\W_▁]+", tag.lower()) if len(word) > 3)


@cache
def sources() -> dict[str, list[tuple[str, str, Calls]]]:
    """Per format the texts, contents and calls of its transcripts without reasoning, all of whose calls are whole."""
    found = {name: [(text, "", [("get_weather", {"city": "Bonn"}), ("now", {})])] for name, text in TWO_CALLS.items()}
    both = found["hermes"][0][2]
    found["llama3_json"] = [(f"<|python_tag|>{TWO_CALLS['llama3_json']}", "", both)]
    found["pythonic"] = [(f"<|python_start|>{TWO_CALLS['pythonic']}<|python_end|>", "", both)]
    found["openai"] = []
    for case in transcripts():
        format, _, text, expected = case.values
        calls = [(name, arguments) for name, arguments in expected.get("calls", [])]
        is_whole = calls and all(isinstance(arguments, dict) for _, arguments in calls)
        if is_whole and "reasoning" not in expected and not tags_of(format).search(expected.get("content", "")):
            found[format].append((text, expected.get("content", ""), calls))
    return found


def mutated(format: str, generator: random.Random) -> Mutation:
    """Change one or two tags of a transcript, or cut the transcript."""
    source, content, calls = generator.choice(sources()[format])
    text, kind = source, generator.choice(KINDS)
    if kind == "text cut":
        return Mutation(format, kind, text[: generator.randrange(len(text))], content, calls, False)
    text, is_readable = changed(format, text, kind, generator)
    # Where the tag that closes a value is spoilt, only the exact tag behind it ends the value.
    closes = sum(_closes_early(format, tag) for tag in tags_of(format).finditer(source))
    is_whole = closes == sum(_closes_early(format, tag) for tag in tags_of(format).finditer(text))
    if is_whole and generator.random() < 0.3 and tags_of(format).search(text):
        second = generator.choice(KINDS[:-1])
        text, is_still_readable = changed(format, text, second, generator, is_first=False)
        kind = f"{kind}, {second}"
        is_hidden = any(each in kind for each in ("missing", "cut"))
        is_readable = is_readable and is_still_readable and not is_hidden
    is_unclosed = _last_closes(format, text) < _last_closes(format, source)
    return Mutation(format, kind, text, content, calls, is_readable, is_unclosed)


def _closes_early(format: str, tag: re.Match[str]) -> bool:
    """Whether this is the tag that closes a value, and not the last one."""
    call = TOOL_FORMATS[format].call
    return isinstance(call, Tagged) and tag[0] == (close := call.close.strip()) and close in tag.string[tag.end() :]


def _last_closes(format: str, text: str) -> int:
    """The number of tags that close the last value of a call before others; of pairs where they are quotes."""
    call = TOOL_FORMATS[format].call
    if isinstance(call, Quoted):
        return (text.count(call.quote) + 1) // 2
    if not isinstance(call, Tagged):
        return 0
    return sum(not behind.lstrip().startswith(call.open) for behind in text.split(call.close.strip())[1:-1])


def _makes_text(format: str, tag: re.Match[str], kind: str) -> bool:
    """Whether, if this tag is doubled, it or others belong to a string."""
    call = TOOL_FORMATS[format].call
    if not isinstance(call, Tagged) or "doubled" not in kind:
        return False
    return (tag[0].startswith(call.open) and tag[0] != call.open) or call.between.endswith(tag[0])


def changed(format: str, text: str, kind: str, generator: random.Random, is_first: bool = True) -> tuple[str, bool]:
    """Change one tag of a text, and say whether all calls in it can still be seen."""
    tags = [tag for tag in tags_of(format).finditer(text) if not _makes_text(format, tag, kind)]
    found = generator.choice([tag for tag in tags if is_first or not _closes_early(format, tag)])
    tag, before, behind = found[0], text[: found.start()], text[found.end() :]
    has_name = "=" in tag
    written = {
        "missing": "",
        "doubled": tag + tag,
        "doubled on a line": f"{tag}\n{tag}",
        "spaced": re.sub(r"(?<=<)(?=\w)|(?=>$)|(?<==)", " ", tag),
        "space before": f" {tag}",
        "line before": f"\n{tag}",
        "space behind": f"{tag} ",
        "line behind": f"{tag}\n",
        "upper case": tag if has_name else tag.upper(),
        "title case": tag if has_name else tag.title(),
        "cut": tag[:-1],
    }[kind]
    changed = before + written + behind
    if kind == "missing":
        is_marked = not isinstance(TOOL_FORMATS[format].call, JsonObject | Python | Quoted) or not before
        is_one_word = re.search(r"\w$", before) and re.match(r"\w", behind)
        may_go_on = changed.rstrip().endswith(tuple(SCHEMAS))  # the name of a function at the end
        return changed, bool(is_marked and not has_name and not is_one_word and not may_go_on)
    if kind == "cut":  # the tag and what follows may be one word
        return changed, not has_name and (written.endswith("|") or not re.match(r"[\w/\[({ ]", behind))
    return changed, True


def read(format: str, chunks: Iterable[str]) -> tuple[str, list[tuple[str, str]]]:
    """The content and the calls of an answer in these chunks."""
    parser = OutputFormat(tools=TOOL_FORMATS[format], schemas=SCHEMAS).parser()
    events = [event for chunk in chunks for event in parser.feed(chunk)] + parser.finish()
    content, reasoning, calls = joined(events)
    return reasoning + content, calls


def _stripped(value: Any) -> Any:
    match value:
        case str():
            return value.strip()
        case list():
            return [_stripped(each) for each in value]
        case dict():
            return {key: _stripped(each) for key, each in value.items()}
    return value


def _parsed(arguments: str) -> Any:
    try:
        return _stripped(json.loads(arguments))
    except ValueError:
        return arguments


def _words(value: Any) -> Counter[str]:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return Counter(re.findall(r"[^\W_]{2,}", text.replace("\\n", " ").replace("\\t", " ")))


def faults_of(mutation: Mutation, generator: random.Random) -> list[str]:
    """What is read wrongly: some of FAULTS, or SWALLOWED."""
    content, calls = read(mutation.format, [mutation.text])
    found = []
    got = [(name, _parsed(arguments)) for name, arguments in calls]
    wanted = [(name, _stripped(arguments)) for name, arguments in mutation.calls]
    if mutation.is_unclosed and got != wanted and [name for name, _ in got] == [name for name, _ in wanted[: len(got)]]:
        found.append(SWALLOWED)
    elif mutation.is_readable and got != wanted:
        found.append("lost call")
    if SWALLOWED not in found and any(
        words_of(mutation.format) & {*re.findall(r"[^\W_▁]+", said.lower())} for _, said in calls
    ):
        found.append("markup in arguments")
    bare = tags_of(mutation.format).sub(" ", mutation.text)
    said = _words(content) + Counter(word for name, value in got for word in (_words(name) + _words(value)))
    values = _words(mutation.content) + Counter(word for _, value in wanted for word in _words(value))
    is_cut = any(isinstance(value, str) for _, value in got)  # within an argument, whose beginning may be dropped
    if not is_cut and any(said[word] < 1 for word in values if word in _words(bare)):
        found.append("lost text")
    cuts = [generator.randrange(10_000) for _ in range(generator.randrange(1, 12))]
    if not all(read(mutation.format, way) == (content, calls) for way in (mutation.text, cut(mutation.text, cuts))):
        found.append("stream differs")
    return found


def faults_in(format: str, cases: int) -> list[tuple[str, Mutation]]:
    """The faults in this many mutations and the swallowed calls, the same in every run, and the mutations."""
    generator = random.Random(format)
    found = []
    for _ in range(cases):
        mutation = mutated(format, generator)
        found += [(fault, mutation) for fault in faults_of(mutation, generator)]
    return found


def main(cases: int = 1000) -> None:
    """Print counts of faults by format."""
    total: Counter[str] = Counter()
    columns = (*FAULTS, SWALLOWED)
    for format in ("format", *sources(), "all"):
        counts = Counter(fault for fault, _ in faults_in(format, cases)) if format in sources() else total
        row = columns if format == "format" else [counts[fault] for fault in columns]
        print(f"{format:16}{''.join(f'{cell:>22}' for cell in row)}")
        total += counts if format in sources() else Counter()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
