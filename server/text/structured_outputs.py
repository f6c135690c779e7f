"""Validates structured outputs before anything runs: size limits, keywords, and whether they compile.

JSON Schema (draft 2020-12, and what earlier drafts name differently) is enforced as a grammar or rejected. llguidance
itself rejects much. What it would ignore is rejected here: constraints that it does not know, references that could
bypass this check, numbers that do not fit into a double, bounds that repeated keys would satisfy. As in JSON Schema,
keywords and formats that constrain nothing, such as unknown ones, are ignored. Schemas are rewritten here: date formats
are made exact.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import re
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import msgspec

from quire.engine.config.engine_config import ModelConfig
from quire.engine.protocol.errors import InvalidParameter
from quire.engine.protocol.sampling_params import StructuredOutputs
from quire.engine.scheduler.grammar import JSON_OPTIONS, GrammarCompiler
from quire.server.client.output_stream import EngineUnavailable
from quire.server.text.sandbox import Sandbox, SandboxStopped

MAX_SCHEMA_BYTES = 256 * 1024
"""Of a JSON schema, and of a grammar, in bytes."""
MAX_SCHEMA_DEPTH = 64
"""Nesting depth of objects and arrays in a JSON schema."""
MAX_REGEX_LENGTH = 16 * 1024
MAX_CHOICES = 10_000
COMPILE_SECONDS = 3.0
"""Processor time limit of compiling. The engine compiles again, in a thread that cannot be stopped."""
MAX_COMPILING = 4
"""Maximum number of grammars compiled at once; also limited by the number of cores, but at least two. Others wait."""
_CACHE_SIZE = 64
"""Number of structured outputs in the cache."""
_SEARCH_SECONDS = 0.5
"""Time limit of the search for the invalid keyword, which leaves out keywords one by one."""

_ONE = ("items", "additionalItems", "additionalProperties")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_MAPS = ("properties", "patternProperties")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "const", "enum")
_ENFORCED = {
    *(*_ONE, *_LISTS, *_MAPS, *_NUMBERS, "type", "$ref", "required", "pattern", "format"),
    *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
}
_REJECTED = {
    *("not", "if", "then", "else", "contains", "minContains", "maxContains", "propertyNames", "uniqueItems"),
    *("unevaluatedItems", "unevaluatedProperties", "dependentRequired", "dependentSchemas", "dependencies"),
    *("$dynamicRef", "$recursiveRef", "$id", "divisibleBy", "disallow", "extends", "x-guidance"),
}
"""Constraints that cannot be enforced, what could change the meaning of a reference, and llguidance's own options.
Other keywords constrain nothing.
"""
_VACUOUS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties"), (True, {})),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), ({},)),
    "propertyNames": (True, {}, {"type": "string"}),
    "uniqueItems": (False,),
    "not": (False,),
}
"""Values with which constraints that cannot be enforced allow everything."""
_COMPANIONS = {
    **dict.fromkeys(("then", "else"), ("if",)),
    **dict.fromkeys(("minContains", "maxContains"), ("contains",)),
    "if": ("then", "else"),
}
"""Keywords that only have an effect together with one of these."""
_REJECTED_FORMATS = {
    *("idn-email", "idn-hostname", "iri", "iri-reference", "json-pointer", "regex", "relative-json-pointer"),
    *("uri-reference", "uri-template"),
}
_AT_THE_ROOT = {"$schema", "$id", "id"}
_COMMON_YEAR = (
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_LEAP_YEAR = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_YEAR = r"(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_DATE = rf"(?:{_YEAR}-{_COMMON_YEAR}|{_LEAP_YEAR}-02-29)"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_FORMATS: dict[str, dict[str, Any]] = {
    "date": {"pattern": f"^{_DATE}$"},
    "time": {"pattern": f"^{_TIME}$"},
    "date-time": {"pattern": f"^{_DATE}T{_TIME}$"},
    "hostname": {"format": "hostname", "maxLength": 253},
    **{name: {"format": name} for name in ("duration", "email", "ipv4", "ipv6", "uri", "uuid")},
}
"""RFC 3339's dates and times, without what many parsers reject: year 0, leap seconds, lower-case t and z. The other
formats are llguidance's own.
"""
_ONE_OF = "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf"
_SET_OPERATION = re.compile(r"(?<!\\)(?:\\\\)*\[\^?\]?(?:\\.|[^\]\\])*?(?:\[|&&|--|~~)")
"""An operator in a character class of the regex engine; plain characters in JSON Schema's regular expressions
(ECMA-262).
"""
_EXCERPT = re.compile(r"(?:\n *[0-9]+ \| .*(?:\n *\^)?)+\s*\Z")
"""The lines of the grammar that llguidance shows; they may be this server's own."""
_PLACE = re.compile(r"^at [0-9]+\([0-9]+\): failed to compile JSON schema: ")
_UNWRITABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f\ud800-\udfff]")
"""Characters that JSON can only represent as numeric escapes."""
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_LARK_OPTION = re.compile(r"^[?!]*[a-z_][\w-]*\[[^]\n]*?\b(temperature|stop)\s*=", re.MULTILINE)
_INLINE_JSON = re.compile(r"%json\s*(?=\{)")


Resolved = tuple[StructuredOutputs, str]
"""What the engine gets, and why it cannot be enforced."""


@dataclass
class _CheckJob:
    """A check in progress, shared by all requests for the same structured outputs."""

    result: asyncio.Future[Resolved]
    num_waiting: int = 0


class StructuredOutputCheck:
    """Checks structured outputs for one model, and caches the latest results, including errors."""

    def __init__(self, model: ModelConfig) -> None:
        self.model = model
        self._compiler = Sandbox(_compiler, model, COMPILE_SECONDS)
        cores = len(os.sched_getaffinity(0))
        self._waiting = ThreadPoolExecutor(min(MAX_COMPILING, max(2, cores)), "structured")
        self._lock = threading.Lock()
        self._cache: OrderedDict[str, Resolved] = OrderedDict()
        self._jobs: dict[str, _CheckJob] = {}
        """By encoded structured outputs; used only in the event loop's thread."""

    async def resolve_in_thread(
        self, outputs: StructuredOutputs, param: str = "structured_outputs"
    ) -> StructuredOutputs:
        """Like `resolve`, without blocking other streams. Cached results return immediately. Concurrent requests for
        the same result compile it once; it is cancelled when nobody waits for it any more.
        """
        with about(param):
            encoded = _encoded(outputs)
            return _enforceable(self._cached(encoded) or await self._resolve_shared(encoded))

    def resolve(self, outputs: StructuredOutputs, param: str = "structured_outputs") -> StructuredOutputs:
        """Return the structured outputs for the engine, with schemas as they are enforced. Blocks: usually for
        milliseconds, about a second for the first call of a process; at most for `COMPILE_SECONDS` of processor time,
        which may take ten times as long on a busy machine.

        Raises `InvalidParameter` about `param`, which names the keyword, and `EngineUnavailable` if the compiling
        process cannot be started.
        """
        with about(param):
            encoded = _encoded(outputs)
            return _enforceable(self._cached(encoded) or self._resolved(encoded))

    def close(self) -> None:
        """Stop the compiling process."""
        self._waiting.shutdown(wait=False, cancel_futures=True)  # first, as another question would start a new process
        self._compiler.close()

    def _cached(self, encoded: str) -> Resolved | None:
        with self._lock:
            if encoded in self._cache:
                self._cache.move_to_end(encoded)
            return self._cache.get(encoded)

    async def _resolve_shared(self, encoded: str) -> Resolved:
        """Call `_resolved` in a thread, once for all concurrent requests."""
        job = self._jobs.get(encoded)
        if job is None:
            result = asyncio.get_running_loop().run_in_executor(self._waiting, self._resolved, encoded)
            job = self._jobs[encoded] = _CheckJob(result)
        job.num_waiting += 1
        try:
            return await asyncio.shield(job.result)
        finally:
            job.num_waiting -= 1
            if not job.num_waiting:
                job.result.cancel()
                del self._jobs[encoded]

    def _resolved(self, encoded: str) -> Resolved:
        """Resolve, and cache the result."""
        resolved = self._compiled(encoded)
        with self._lock:
            self._cache[encoded] = resolved
            if len(self._cache) > _CACHE_SIZE:
                self._cache.popitem(last=False)
        return resolved

    def _compiled(self, encoded: str) -> Resolved:
        outputs = _decoded(encoded)
        _check_sizes(outputs)
        if outputs.json is not None:
            outputs.json = checked_schema(outputs.json)
        if outputs.grammar is not None:
            outputs.grammar = _checked_grammar(outputs.grammar)
        try:
            return outputs, self._compiler.ask(_encoded(outputs).encode()).decode()
        except SandboxStopped:
            what, hint = "it", ""
            if outputs.json is not None:
                what, hint = "the schema", ": patterns and lengths combined by allOf are expensive"
            took = f"takes more than {COMPILE_SECONDS:g} s to compile, or too much memory"
            return outputs, f"{what} {took}; simplify it{hint}"
        except OSError as error:
            raise EngineUnavailable(f"structured outputs cannot be checked now: {error}") from None


class SizeCheck:
    """In place of `StructuredOutputCheck`: checks sizes only, and leaves the rest to another process."""

    def __init__(self) -> None:
        self.unresolved: list[tuple[StructuredOutputs, str]] = []
        """What is to be resolved, in this order, and the parameters that it is about."""

    async def resolve_in_thread(
        self, outputs: StructuredOutputs, param: str = "structured_outputs"
    ) -> StructuredOutputs:
        """Return the structured outputs as they are; raises `InvalidParameter` if they are too large."""
        with about(param):
            _check_sizes(outputs)
            if isinstance(outputs.json, dict):
                _check_schema_size(outputs.json)
        self.unresolved.append((outputs, param))
        return outputs

    def close(self) -> None:
        """There is no process."""


@contextlib.contextmanager
def about(param: str, place: str = "") -> Iterator[None]:
    """Convert errors to `InvalidParameter` about this parameter, with a message about `place` (default: it)."""
    try:
        yield
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidParameter(f"{place or param}: {error}", param) from None


def _enforceable(resolved: Resolved) -> StructuredOutputs:
    """Return what the engine gets; raises ValueError if it cannot be enforced."""
    outputs, reason = resolved
    if reason:
        raise ValueError(reason)
    return outputs


def _encoded(outputs: StructuredOutputs) -> str:
    return json.dumps(msgspec.to_builtins(outputs))


def _decoded(encoded: str | bytes) -> StructuredOutputs:
    """Raises `msgspec.ValidationError`, a ValueError, for invalid types."""
    return msgspec.convert(json.loads(encoded), StructuredOutputs)


def _compiler(model: ModelConfig) -> Callable[[bytes], bytes]:
    """Make the sandbox's function, which returns why an output cannot be enforced, or nothing."""
    grammars = GrammarCompiler(model)
    grammars.error(StructuredOutputs(regex="a"))  # loads the vocabulary

    def problem(question: bytes) -> bytes:
        outputs = _decoded(question)
        reason = grammars.error(outputs)
        if reason is None:
            return b""
        keyword = None if outputs.json is None else _find_unsupported_keyword(outputs.json, grammars)
        at = f"the schema's {keyword}: " if keyword else ""
        reason = _PLACE.sub("", _EXCERPT.sub("", reason))
        reason = at + reason.replace(_ONE_OF, "several alternatives may match at once; use anyOf")
        return reason.encode(errors="replace")

    return problem


def _find_unsupported_keyword(schema: Any, grammars: GrammarCompiler) -> str | None:
    """Find the innermost keyword without which the schema could be enforced."""
    deadline = time.monotonic() + _SEARCH_SECONDS
    for path, holder, keyword in _keywords(schema, ""):
        if time.monotonic() > deadline:
            break
        items = list(holder.items())
        del holder[keyword]
        good = grammars.error(StructuredOutputs(json=schema)) is None
        holder.clear()
        holder.update(items)
        if good and holder in _FORMATS.values():
            return f"format (at {path.rpartition('/allOf/')[0] or '/'})"
        if good:
            return f"{keyword} (at {path or '/'})"
    return None


def checked_schema(schema: Any) -> dict[str, Any]:
    """Return a JSON schema (an object or text) as it is enforced; also used for `%json` in a grammar.

    Raises ValueError for a schema that is too large or cannot be enforced.
    """
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the schema is not JSON: {error}") from None
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    if not isinstance(schema, dict):
        raise ValueError(f"a JSON schema must be an object, not {type(schema).__name__}")
    _check_schema_size(schema)
    checked = _SchemaWalk(schema).result()
    return {"x-guidance": JSON_OPTIONS, **checked}


class _SchemaWalk:
    """One pass over a schema and its references, in time linear in the schema's size."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = {key: value for key, value in root.items() if key not in _AT_THE_ROOT}
        self._targets: dict[str, Any] = {}
        """The rewritten targets of references, by name."""
        self._names: dict[str, str] = {"#": "#"}
        self._by_target: dict[int, str] = {}
        """Names of the targets by identity, since a target has several possible pointers."""
        self._pending: deque[tuple[str, Any, str]] = deque()
        """Name, schema and path of the targets to rewrite."""
        self._namesakes: Counter[str] = Counter()

    def result(self) -> dict[str, Any]:
        checked: dict[str, Any] = self._schema(self._root, "")
        while self._pending:
            name, target, path = self._pending.popleft()
            self._targets[name] = self._schema(target, path)
        if self._targets:
            checked["$defs"] = self._targets
        if not self._is_finite(checked):
            raise self._error("$ref", "", "refers to itself endlessly, so no value can be complete")
        return checked

    def _schema(self, schema: Any, path: str) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise ValueError(f"the schema at {path or '/'} is not an object")
        schema = {keyword: value for keyword, value in schema.items() if not _is_vacuous(keyword, value, schema)}
        result: dict[str, Any] = {}
        for keyword, value in schema.items():
            here = f"{path}/{keyword}"
            if keyword in _LISTS or (keyword == "items" and isinstance(value, list)):
                if not isinstance(value, list):
                    raise self._error(keyword, path, "must be a list")
                result[keyword] = [self._schema(each, f"{here}/{at}") for at, each in enumerate(value)]
            elif keyword in _MAPS:
                if not isinstance(value, dict):
                    raise self._error(keyword, path, "must be an object")
                result[keyword] = {name: self._schema(each, f"{here}/{name}") for name, each in value.items()}
            elif keyword in _ONE:
                result[keyword] = self._schema(value, here)
            elif keyword == "$ref":
                result[keyword] = self._reference(value, path)
            elif keyword in _ENFORCED:
                if keyword not in _NUMBERS and not all(map(_fits, _leaves(value))):
                    raise self._error(keyword, path, "has an integer of more than 64 bits")
                result[keyword] = value
            elif keyword in _REJECTED:
                raise self._error(keyword, path, "is not supported")
            elif isinstance(value, str) and _SURROGATE.search(value):
                raise self._error(keyword, path, "contains an unpaired surrogate")
        self._check(schema, path)
        if (format := _FORMATS.get(result.pop("format", ""))) is not None:
            result["allOf"] = [*result.get("allOf", ()), format]
        return result

    def _check(self, schema: dict[str, Any], path: str) -> None:
        """Reject what llguidance would enforce only partially."""
        if "format" in schema and (not isinstance(schema["format"], str) or schema["format"] in _REJECTED_FORMATS):
            raise self._error("format", path, f"must be one of {', '.join(_FORMATS)}, not {schema['format']!r}")
        literals = {keyword: list(_leaves(schema[keyword])) for keyword in _NUMBERS if keyword in schema}
        for keyword, values in (*literals.items(), ("properties", schema.get("properties", ()))):
            if not all(map(_is_exact, values)):
                raise self._error(
                    keyword,
                    path,
                    "contains a number that does not fit into a double and 64 bits; integers up to 2^53 always do",
                )
            if any(isinstance(value, str) and _UNWRITABLE.search(value) for value in values):
                raise self._error(keyword, path, "contains a control character or an unpaired surrogate")
        for pattern in (schema.get("pattern"), *schema.get("patternProperties", ())):
            if isinstance(pattern, str) and _SET_OPERATION.search(pattern):
                keyword = "pattern" if pattern == schema.get("pattern") else "patternProperties"
                raise self._error(
                    keyword, path, r"contains [, &&, -- or ~~ in a character class; write \[, \& and so on"
                )
        if "prefixItems" in schema and ("additionalItems" in schema or isinstance(schema.get("items"), list)):
            raise self._error("prefixItems", path, "cannot be combined with additionalItems or a list of items")
        least, required = schema.get("minProperties", 0), schema.get("required", ())
        if isinstance(least, int) and isinstance(required, list | tuple) and least > len(set(map(str, required))) + 1:
            raise self._error(
                "minProperties",
                path,
                "must be at most one more than the number of required properties, since keys may repeat",
            )

    def _reference(self, reference: Any, path: str) -> str:
        """Resolve a reference inside the schema once, and return its new name."""
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise self._error("$ref", path, 'must be "#" or point into this schema as "#/…"')
        if reference not in self._names:
            target: Any = self._root
            for part in unquote(reference[2:]).split("/"):
                part = part.replace("~1", "/").replace("~0", "~")
                try:
                    target = target[int(part) if isinstance(target, list) else part]
                except (LookupError, TypeError, ValueError):
                    raise self._error("$ref", path, f"points to nothing: {reference}") from None
            if (name := self._by_target.get(id(target))) is None:
                name = self._new_name(re.sub(r"\W", "_", reference.rpartition("/")[2]) or "_")
                self._by_target[id(target)] = name
                self._targets[name] = True  # keeps the order
                self._pending.append((name, target, reference[1:]))
            self._names[reference] = f"#/$defs/{name}"
        return self._names[reference]

    def _new_name(self, wanted: str) -> str:
        """Return an unused target name."""
        name = wanted
        while name in self._targets:
            self._namesakes[wanted] += 1
            name = f"{wanted}_{self._namesakes[wanted]}"
        return name

    def _is_finite(self, root: dict[str, Any]) -> bool:
        """Return whether a complete value exists; True if that is unclear.

        A schema is finite once each of its needs has a finite alternative. So finiteness propagates from schemas
        without needs to those that depend on them; each need is visited once.
        """
        unmet: dict[int, int] = {}
        """By identity of a schema: how many of its needs have no finite alternative yet."""
        waiting: dict[int, list[tuple[int, list[Any]]]] = {}
        """By identity of a schema: the schemas that need it, and the alternatives of each of these needs; emptied once
        met.
        """
        finite: list[int] = []
        pending: list[dict[str, Any]] = [root]
        while pending:
            schema = pending.pop()
            if id(schema) in unmet:
                continue
            needs = [need for need in self._needs(schema, root) if all(isinstance(each, dict) for each in need)]
            unmet[id(schema)] = len(needs)
            if not needs:
                finite.append(id(schema))
            for need in needs:
                for each in need:
                    waiting.setdefault(id(each), []).append((id(schema), need))
                    pending.append(each)
        while finite and unmet[id(root)]:
            for waiter, need in waiting.get(finite.pop(), ()):
                if need:
                    need.clear()
                    unmet[waiter] -= 1
                    if not unmet[waiter]:
                        finite.append(waiter)
        return not unmet[id(root)]

    def _needs(self, schema: dict[str, Any], root: dict[str, Any]) -> Iterator[list[Any]]:
        """What must be complete for a value of this schema to be: one schema of each list."""
        if (reference := schema.get("$ref")) is not None:
            yield [root if reference == "#" else self._targets[reference.removeprefix("#/$defs/")]]
        for keyword in ("anyOf", "oneOf"):
            if options := schema.get(keyword):
                yield list(options)
        if schema.get("type") == "object" and isinstance(required := schema.get("required"), list):
            properties = schema.get("properties", {})
            yield from ([properties[name]] for name in required if isinstance(name, str) and name in properties)
        least = schema.get("minItems", 0)
        if schema.get("type") == "array" and isinstance(least, int) and least > 0:
            first, rest = schema.get("prefixItems", []), schema.get("items", True)
            if isinstance(rest, list):
                first, rest = rest, schema.get("additionalItems", True)
            yield from ([each] for each in first[:least])
            if least > len(first):
                yield [rest]
        yield from ([each] for each in schema.get("allOf", ()))

    def _error(self, keyword: str, path: str, problem: str) -> ValueError:
        return ValueError(f"the schema's {keyword} (at {path or '/'}) {problem}; it cannot be enforced")


def _checked_grammar(grammar: str) -> str:
    """Return a grammar with its inline schemas checked and rewritten."""
    if option := _LARK_OPTION.search(grammar):
        raise ValueError(f"the grammar's option {option[1]}= is not supported")
    parts, end = [], 0
    for found in _INLINE_JSON.finditer(grammar):
        if found.start() < end:
            continue
        try:
            schema, after = json.JSONDecoder().raw_decode(grammar, found.end())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the grammar's %json is not JSON: {error}") from None
        parts += [grammar[end : found.end()], json.dumps(checked_schema(schema), ensure_ascii=False)]
        end = after
    return "".join((*parts, grammar[end:]))


def _check_sizes(outputs: StructuredOutputs) -> None:
    choices = outputs.choice or ["one"]
    for size, most, what in (
        (len(outputs.regex or ""), MAX_REGEX_LENGTH, "characters in a regex"),
        (len(choices), MAX_CHOICES, "choices"),
        (sum(map(len, choices)), MAX_SCHEMA_BYTES, "characters in all choices"),
        (len(outputs.grammar or ""), MAX_SCHEMA_BYTES, "characters in a grammar"),
        (len(outputs.json) if isinstance(outputs.json, str) else 0, MAX_SCHEMA_BYTES, "characters in a schema"),
    ):
        if size > most:
            raise ValueError(f"at most {most} {what}, got {size}")
    if outputs.choice == []:
        raise ValueError("choice must not be empty")


def _check_schema_size(schema: Any) -> None:
    level = [schema]
    for _ in range(MAX_SCHEMA_DEPTH + 1):
        level = [
            each
            for one in level
            for each in (one.values() if isinstance(one, dict) else one)
            if isinstance(each, dict | list)
        ]
        if not level:
            break
    else:
        raise ValueError(f"the schema is nested more than {MAX_SCHEMA_DEPTH} levels deep")
    if len(json.dumps(schema, ensure_ascii=False).encode(errors="replace")) > MAX_SCHEMA_BYTES:
        raise ValueError(f"the schema has more than {MAX_SCHEMA_BYTES} bytes")


def _keywords(schema: Any, path: str) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield path, holder and name of every keyword, innermost first."""
    if not isinstance(schema, dict):
        return
    for keyword, value in list(schema.items()):
        if keyword in _MAPS or keyword == "$defs":
            for name, each in list(value.items()):
                yield from _keywords(each, f"{path}/{keyword}/{name}")
        elif isinstance(value, list) and (keyword in _LISTS or keyword == "items"):
            for number, each in enumerate(value):
                yield from _keywords(each, f"{path}/{keyword}/{number}")
        elif keyword in _ONE:
            yield from _keywords(value, f"{path}/{keyword}")
    for keyword in sorted(schema, key=lambda keyword: keyword == "type"):
        if keyword in _ENFORCED:
            yield path, schema, keyword


def _is_vacuous(keyword: str, value: Any, schema: dict[str, Any]) -> bool:
    """Return whether a keyword of a schema constrains nothing, because of its value or without another keyword."""
    if keyword in ("contains", "minContains") and schema.get("minContains") == 0 and schema.get("maxContains") is None:
        return True
    if keyword in _COMPANIONS and all(schema.get(name) is None for name in _COMPANIONS[keyword]):
        return True
    return value in _VACUOUS.get(keyword, ()) or (value is None and keyword != "const")


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the strings, property names, numbers and other leaves of a value."""
    match value:
        case dict():
            yield from value
            for each in value.values():
                yield from _leaves(each)
        case list():
            for each in value:
                yield from _leaves(each)
        case _:
            yield value


def _fits(value: Any) -> bool:
    """Return whether a message to the engine can contain the value."""
    return not isinstance(value, int) or -(2**63) <= value < 2**64


def _is_exact(value: Any) -> bool:
    """Return whether a number fits into a double and, if it is an integer, also into 64 bits; True for other values."""
    match value:
        case int():
            return _fits(value) and int(float(value)) == value
        case float():
            return math.isfinite(value)
    return True
