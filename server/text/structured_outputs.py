"""Validates structured outputs before anything runs: size limits, keywords, and whether they compile."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from quire.engine.config.engine_config import ModelConfig
from quire.engine.protocol.errors import InvalidParameter
from quire.engine.protocol.sampling_params import StructuredOutputs
from quire.engine.scheduler.grammar import GrammarCompiler, inline_schemas
from quire.server.client.output_stream import EngineUnavailable
from quire.server.client.request_record import RECORD
from quire.server.text.json_schema import MAX_SCHEMA_BYTES, check_schema_size, checked_schema, keywords, replaced
from quire.server.text.patterns import MAX_REGEX_LENGTH
from quire.server.text.sandbox import Sandbox, SandboxStopped
from quire.server.text.schemas.common import Budget

logger = logging.getLogger(__name__)

MAX_CHOICES = 10_000
COMPILE_SECONDS = 3.0
"""Processor time limit of compiling. The engine compiles again, in a thread that cannot be stopped."""
MAX_COMPILING = 4
"""Maximum number of grammars compiled at once; also limited by the number of cores, but at least two. Others wait."""
_CACHE_SIZE = 64
"""Number of structured outputs in the cache."""
_SEARCH_SECONDS = 0.5
"""Time limit of the search for the invalid keyword, which leaves out keywords one by one."""

_UNSATISFIABLE = "nsatisfiable schema"
"""In llguidance's errors about schemas that no value matches."""
_EXCERPT = re.compile(r"(?:\n *[0-9]+ \| .*(?:\n *\^)?)+\s*\Z")
"""The lines of the grammar that llguidance shows; they may be this server's own."""
_PLACE = re.compile(r"^at [0-9]+\([0-9]+\): failed to compile JSON schema: ")
_LARK_OPTION = re.compile(r"^[?!]*[a-z_][\w-]*\[[^]\n]*?\b(temperature|stop)\s*=", re.MULTILINE)


Fallback = Literal["refuse", "warn"]
"""What happens to a JSON schema with a keyword that cannot be enforced: it is refused, or the keyword is left out."""


@dataclass
class Resolved:
    """Structured outputs that have been checked."""

    outputs: StructuredOutputs
    """For the engine."""
    reason: str = ""
    """Why they cannot be enforced."""
    dropped: list[str] = field(default_factory=list)
    """The keywords of schemas that are left out, with their paths and reasons."""


@dataclass
class _CheckJob:
    """A check in progress, shared by all requests for the same structured outputs."""

    result: asyncio.Future[Resolved]
    num_waiting: int = 0


class StructuredOutputCheck:
    """Checks structured outputs for one model, and caches the latest results, including errors."""

    def __init__(self, model: ModelConfig, fallback: Fallback = "refuse") -> None:
        self.model = model
        self._fallback = fallback
        self._compiler = Sandbox(_compiler, (model, fallback), COMPILE_SECONDS)
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
            return _enforceable(self._cached(encoded) or await self._resolve_shared(encoded), param)

    def resolve(self, outputs: StructuredOutputs, param: str = "structured_outputs") -> StructuredOutputs:
        """Return the structured outputs for the engine, with schemas as they are enforced. Blocks: usually for
        milliseconds, about a second for the first call of a process; at most for `COMPILE_SECONDS` of processor time,
        which may take ten times as long on a busy machine.

        Raises `InvalidParameter` about `param`, which names the keyword, and `EngineUnavailable` if the compiling
        process cannot be started.
        """
        with about(param):
            encoded = _encoded(outputs)
            return _enforceable(self._cached(encoded) or self._resolved(encoded), param)

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
        dropped = new_dropped(self._fallback)
        if outputs.json is not None:
            outputs.json = checked_schema(outputs.json, dropped)
        if outputs.grammar is not None:
            outputs.grammar = _checked_grammar(outputs, dropped)
        try:
            answer = self._compiler.ask(_encoded(outputs).encode())
        except SandboxStopped:
            what, hint = "it", ""
            if outputs.json is not None:
                what, hint = "the schema", ": patterns and lengths combined by allOf are expensive"
                if names := replaced(outputs.json):
                    hint += f", and {names} need alternatives, which multiply"
            took = f"takes more than {COMPILE_SECONDS:g} s to compile, or too much memory"
            return Resolved(outputs, f"{what} {took}; simplify it{hint}")
        except OSError as error:
            raise EngineUnavailable(f"structured outputs cannot be checked now: {error}") from None
        if not answer:
            return Resolved(outputs, dropped=dropped or [])
        problem = json.loads(answer)
        outputs.json = problem["json"]
        return Resolved(outputs, problem["reason"], [*(dropped or ()), *problem["dropped"]])


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


def _enforceable(resolved: Resolved, param: str) -> StructuredOutputs:
    """Return the structured outputs for the engine; raises ValueError if they cannot be enforced."""
    if resolved.reason:
        raise ValueError(resolved.reason)
    warn(resolved.dropped, param)
    return resolved.outputs


def new_dropped(fallback: Fallback) -> list[str] | None:
    """Return the `dropped` of `checked_schema`."""
    return [] if fallback == "warn" else None


def warn(dropped: Sequence[str], param: str) -> None:
    """Tell the client of the current request that parts of this parameter are not enforced; without one, log it."""
    warnings = [f"{param}: {each}" for each in dropped]
    if (record := RECORD.get()) is not None:
        record.warnings += warnings
    elif warnings:
        logger.warning("not enforced: %s", ascii("; ".join(warnings))[1:-1])


def _encoded(outputs: StructuredOutputs) -> str:
    return json.dumps(msgspec.to_builtins(outputs))


def _decoded(encoded: str | bytes) -> StructuredOutputs:
    """Raises `msgspec.ValidationError`, a ValueError, for invalid types."""
    return msgspec.convert(json.loads(encoded), StructuredOutputs)


def _compiler(argument: tuple[ModelConfig, Fallback]) -> Callable[[bytes], bytes]:
    """Make the sandbox's function. It returns nothing for outputs that can be enforced, else the reason as JSON; with
    the fallback "warn" a schema that can, and what it leaves out.
    """
    model, fallback = argument
    grammars = GrammarCompiler(model)
    grammars.error(StructuredOutputs(regex="a"))  # loads the vocabulary

    def answer(question: bytes) -> bytes:
        outputs = _decoded(question)
        dropped: list[str] = []
        reason = grammars.error(outputs)
        while reason is not None:
            found = _find_unsupported_keyword(outputs.json, grammars) if isinstance(outputs.json, dict) else None
            reason = _explained(reason, outputs.json, None if found is None else found[0])
            if found is None or fallback != "warn" or _UNSATISFIABLE in reason:
                break
            _, holder, keyword = found
            dropped.append(reason)
            del holder[keyword]
            reason = grammars.error(outputs)
        if reason is None and not dropped:
            return b""
        return json.dumps({"reason": reason or "", "json": outputs.json, "dropped": dropped}).encode()

    return answer


def _explained(reason: str, schema: Any, name: str | None) -> str:
    """Return llguidance's error without the grammar that it shows, about the keyword of this name, if it is known."""
    name = name or (replaced(schema) if isinstance(schema, dict) else "")
    reason = _PLACE.sub("", _EXCERPT.sub("", reason))
    keyword = name.partition(" ")[0]
    if keyword and reason.startswith(f"{keyword} "):
        return f"the schema's {name}{reason.removeprefix(keyword)}"
    return f"the schema's {name}: {reason}" if name else reason


def _find_unsupported_keyword(
    schema: dict[str, Any], grammars: GrammarCompiler
) -> tuple[str, dict[str, Any], str] | None:
    """Find the innermost keyword without which the schema could be enforced, as `keywords` yields it."""
    deadline = time.monotonic() + _SEARCH_SECONDS
    for name, holder, keyword in keywords(schema):
        if time.monotonic() > deadline:
            break
        items = list(holder.items())
        del holder[keyword]
        good = grammars.error(StructuredOutputs(json=schema)) is None
        holder.clear()
        holder.update(items)
        if good:
            return name, holder, keyword
    return None


def _checked_grammar(outputs: StructuredOutputs, dropped: list[str] | None) -> str:
    """Return the grammar with its inline schemas checked and rewritten; `dropped`: as for `checked_schema`."""
    grammar = outputs.grammar or ""
    if option := _LARK_OPTION.search(grammar):
        raise ValueError(f"the grammar's option {option[1]}= is not supported")
    parts, end, budget = [], 0, Budget()
    for found in inline_schemas(outputs):
        schema = checked_schema(found.schema, dropped, budget, keeps_unique_items=found.mark is not None)
        parts += [grammar[end : found.begin], json.dumps(schema, ensure_ascii=False)]
        end = found.end
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
