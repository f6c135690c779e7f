"""Validates structured outputs before anything runs: size limits, keywords, and whether they compile."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.engine.config.engine_config import ModelConfig
from quire.engine.protocol.errors import InvalidParameter
from quire.engine.protocol.sampling_params import StructuredOutputs
from quire.engine.scheduler.grammar import GrammarCompiler
from quire.server.client.output_stream import EngineUnavailable
from quire.server.text.json_schema import FORMATS, MAX_SCHEMA_BYTES, check_schema_size, checked_schema, keywords
from quire.server.text.sandbox import Sandbox, SandboxStopped

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

_ONE_OF = "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf"
_EXCERPT = re.compile(r"(?:\n *[0-9]+ \| .*(?:\n *\^)?)+\s*\Z")
"""The lines of the grammar that llguidance shows; they may be this server's own."""
_PLACE = re.compile(r"^at [0-9]+\([0-9]+\): failed to compile JSON schema: ")
_LARK_OPTION = re.compile(r"^[?!]*[a-z_][\w-]*\[[^]\n]*?\b(temperature|stop)\s*=", re.MULTILINE)
_INLINE_JSON = re.compile(r"%json\s*(?=\{)")


Resolved = tuple[StructuredOutputs, str]
"""The structured outputs for the engine, and the reason if they cannot be enforced."""


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
    """Replaces `StructuredOutputCheck`: checks sizes only, and leaves the rest to another process."""

    def __init__(self) -> None:
        self.unresolved: list[tuple[StructuredOutputs, str]] = []
        """The structured outputs to resolve, in this order, and the names of their parameters."""

    async def resolve_in_thread(
        self, outputs: StructuredOutputs, param: str = "structured_outputs"
    ) -> StructuredOutputs:
        """Return the structured outputs as they are; raises `InvalidParameter` if they are too large."""
        with about(param):
            _check_sizes(outputs)
            if isinstance(outputs.json, dict):
                check_schema_size(outputs.json)
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
    """Return the structured outputs for the engine; raises ValueError if they cannot be enforced."""
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
    for path, holder, keyword in keywords(schema, ""):
        if time.monotonic() > deadline:
            break
        items = list(holder.items())
        del holder[keyword]
        good = grammars.error(StructuredOutputs(json=schema)) is None
        holder.clear()
        holder.update(items)
        if good and holder in FORMATS.values():
            return f"format (at {path.rpartition('/allOf/')[0] or '/'})"
        if good:
            return f"{keyword} (at {path or '/'})"
    return None


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
