"""docs/reference/python.md from the names that `quire` exports; `scripts/docs` writes it.

Signatures, types and defaults are the source's own text; the rest are docstrings, which a public class, method and
field must have.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from typing import Any

from markdown_table import code, table

import quire
from quire.server.llm import prompts
from quire.server.text import conversation, output_processor

INTRODUCTION = """# Python classes

This page lists every class of the Python API with its methods, fields and errors. `scripts/docs` generates it from
signatures and docstrings, and a test fails if it is out of date. [Python API](../guides/python-api.md) has examples.

All of these classes are imported from `quire`: `from quire import LLM, SamplingParams`. The options of an engine are
the [engine flags of quire serve](cli.md#quire-serve) with underscores.
"""
GROUPS = {
    "Models": ("LLM", "AsyncLLM", "LLMEngine", "EngineArgs"),
    "Parameters": (
        *("SamplingParams", "RequestOutputKind", "StructuredOutputs", "BeamSearchParams", "PoolingParams"),
        *("TextPrompt", "TokensPrompt", "LoRARequest"),
    ),
    "Results": (
        *("RequestOutput", "CompletionOutput", "Logprob", "FlatLogprobs", "RequestStateStats", "ToolCall"),
        *("BeamSearchOutput", "BeamSearchSequence"),
        *("PoolingRequestOutput", "EmbeddingRequestOutput", "ClassificationRequestOutput", "ScoringRequestOutput"),
        *("PoolingOutput", "EmbeddingOutput", "ClassificationOutput", "ScoringOutput"),
    ),
    "Metrics": ("Metric", "Counter", "Gauge", "Histogram", "Vector"),
    "Errors": ("ConfigError", "InvalidParameter", "EngineUnavailable", "RequestFailed"),
}
NAMES = {name for group in GROUPS.values() for name in group}
ALIASES = {"PromptLike": prompts, "Message": conversation, "AnswerEnd": output_processor}
"""Names of types in signatures, and their modules."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


def render() -> str:
    """The page as Markdown."""
    classes = {name: getattr(quire, name) for name in quire.__all__}
    others = {name: cls.__name__ for name, cls in classes.items() if cls.__name__ != name}
    assert sorted([*NAMES, *others]) == sorted(classes), "scripts/python_docs.py: GROUPS has not the names of `quire`"
    parts = [INTRODUCTION]
    for title, group in GROUPS.items():
        rows = [(f"[{code(name)}](#{name.lower()})", _first_sentence(_doc(classes[name]))) for name in group]
        parts += [f"{title}:\n", table(("class", ""), rows)]
    parts.append("Other names, for programs written for vLLM:\n")
    parts.append(table(("name", "class"), [(code(other), _linked(code(name))) for other, name in others.items()]))
    for name in (name for group in GROUPS.values() for name in group):
        parts += _class(name, classes[name])
    parts.append("## Types\n")
    parts.append(table(("name", "type", ""), [_alias(name, module) for name, module in ALIASES.items()]))
    return "\n".join(parts)


def _class(name: str, cls: type) -> Iterator[str]:
    """A class of values has its fields, another one its constructor and its methods."""
    yield f"## {name}\n"
    is_error = issubclass(cls, Exception)
    for base in map(_source, _node(cls).bases):
        if is_error or base.partition("[")[0] in NAMES:
            yield f"Base class: {_linked(code(base))}.\n"
    hidden = [base for base in cls.__mro__[1:] if base.__module__.startswith("quire.") and base.__name__ not in NAMES]
    body = [each for base in (cls, *hidden) for each in _node(base).body]
    functions: dict[str, Function] = {}
    for each in body:
        if isinstance(each, Function):
            functions.setdefault(each.name, each)
    fields = list(_fields(name, body))
    if not fields and not is_error and (init := functions.get("__init__")):
        yield f"```python\n{_signature(name, init)}\n```\n"
    yield _linked(_doc(cls)) + "\n"
    if fields:
        yield table(("field", "type", "default", ""), fields)
    for method, node in functions.items():
        is_property = any(_source(each) == "property" for each in node.decorator_list)
        if method.startswith("_") or is_error or (fields and not is_property):
            continue
        yield f"### {name}.{method}\n"
        yield f"```python\n{_signature(method, node)}\n```\n"
        text = ast.get_docstring(node)
        assert text, f"{name}.{method} needs a docstring, for docs/reference/python.md"
        yield _linked(text) + "\n"


def _fields(cls: str, body: list[ast.stmt]) -> Iterator[tuple[str, str, str, str]]:
    """The annotated fields of a class, with the texts below them."""
    for each, below in zip(body, [*body[1:], None], strict=True):
        match each:
            case ast.AnnAssign(target=ast.Name(id=field), annotation=annotation, value=value):
                text = _text_of(below)
                assert text, f"{cls}.{field} needs a docstring, for docs/reference/python.md"
                kind = _source(annotation)
                match value:
                    case None if kind != (inner := kind.removeprefix("NotRequired[")):
                        kind, default = inner.removesuffix("]"), "optional"
                    case None:
                        default = "required"
                    case ast.Call(keywords=[ast.keyword(arg="default_factory", value=ast.Name(id="list"))]):
                        default = code("[]")
                    case _:
                        default = code(_source(value))
                yield code(field), code(kind), default, _linked(text)


def _signature(name: str, function: Function) -> str:
    """A definition without `self`, on one line if it fits."""
    given = function.args
    decorators = [_source(each) for each in function.decorator_list]
    defaults = [None] * (len(given.args) - len(given.defaults)) + given.defaults
    parts = [_parameter(*each) for each in zip(given.args, defaults, strict=True)]
    if "staticmethod" not in decorators:
        del parts[0]
    if given.kwonlyargs:
        parts += ["*", *(_parameter(*each) for each in zip(given.kwonlyargs, given.kw_defaults, strict=True))]
    if given.kwarg:
        parts.append("**" + _parameter(given.kwarg, None))
    start, end = "", ""
    if function.name != "__init__":
        start = "async def " if isinstance(function, ast.AsyncFunctionDef) else "def "
        end = f" -> {_source(function.returns)}" if function.returns else ""
    line = f"{start}{name}({', '.join(parts)}){end}"
    if len(line) > 88:
        line = f"{start}{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){end}"
    return "".join(f"@{each}\n" for each in decorators) + line


def _parameter(argument: ast.arg, default: ast.expr | None) -> str:
    annotation = f": {_source(argument.annotation)}" if argument.annotation else ""
    return f"{argument.arg}{annotation}" + (f" = {_source(default)}" if default else "")


def _alias(name: str, module: Any) -> tuple[str, str, str]:
    body = ast.parse(inspect.getsource(module)).body
    at = next(at for at, each in enumerate(body) if isinstance(each, ast.Assign) and _source(each.targets[0]) == name)
    definition = body[at]
    assert isinstance(definition, ast.Assign)
    return code(name), code(_source(definition.value)), _linked(_text_of(body[at + 1]))


def _source(node: ast.expr) -> str:
    return ast.unparse(node).replace("'", '"')


def _node(cls: type) -> ast.ClassDef:
    (node,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(node, ast.ClassDef)
    return node


def _text_of(statement: ast.stmt | None) -> str:
    match statement:
        case ast.Expr(ast.Constant(str(text))):
            return " ".join(text.split())
    return ""


def _doc(cls: type) -> str:
    text = ast.get_docstring(_node(cls))
    assert text, f"{cls.__name__} needs a docstring, for docs/reference/python.md"
    return text


def _first_sentence(text: str) -> str:
    return _linked(re.split(r"(?<=\.)\s", " ".join(text.split("\n\n")[0].split()))[0])


def _linked(text: str) -> str:
    """Text whose names of this page are links."""

    def link(match: re.Match[str]) -> str:
        return f"[{match[0]}](#{match[1].lower().replace('.', '')})" if match[2] in NAMES else match[0]

    return re.sub(r"`(([A-Za-z]+)[.\w]*)(?:\[\w+\])?`", link, text)


if __name__ == "__main__":
    print(render())
