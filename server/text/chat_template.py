"""Chat templates: Jinja templates that convert messages to a prompt.

Their location and the functions available to them follow transformers
(https://huggingface.co/docs/transformers/main/chat_templating_writing). They run in Jinja's sandbox, which does not
limit their time and memory: `TemplateRenderer` does. Compiling a template evaluates no part of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from quire.engine.protocol.errors import ConfigError, InvalidParameter, reason_of
from quire.engine.repository.model_files import check_regular, read_json
from quire.server.text.tokenizer import Tokenizer

ADDITIONAL_TEMPLATES = "additional_chat_templates"
"""The folder in a model's with its further templates."""


class ChatTemplate:
    """A template. `source` is its text."""

    def __init__(self, source: str, variables: Mapping[str, Any], *, is_valid: bool = False) -> None:
        """Compile the template; raises `ConfigError`. If `is_valid` is known, it is compiled where it is rendered."""
        self.source = source
        self._variables = dict(variables)
        if not is_valid:
            _ = self._template

    @cached_property
    def _template(self) -> jinja2.Template:
        try:
            return _environment().from_string(self.source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"the chat template is invalid: line {error.lineno}: {error.message}") from None
        except RecursionError:
            raise ConfigError("the chat template is invalid: nested too deeply") from None

    def __reduce__(self) -> tuple[Callable[..., ChatTemplate], tuple[str, Mapping[str, Any]]]:
        return partial(ChatTemplate, is_valid=True), (self.source, self._variables)

    @cached_property
    def reads(self) -> frozenset[str]:
        """The variables that the template uses."""
        environment = _environment()
        generator = _VariableFinder(environment)
        generator.visit(environment.parse(self.source))
        return frozenset(generator.undeclared_identifiers)

    @cached_property
    def thinking_switch(self) -> str | None:
        """The variable that turns reasoning on and off."""
        return next((name for name in ("enable_thinking", "thinking") if name in self.reads), None)

    @cached_property
    def needs_parts(self) -> bool:
        """Whether the template shows a text only in a list of parts, as those of LLaVA and Idefics do."""
        text = "hello"

        def shows(content: Any) -> bool:
            try:
                return text in self.render([{"role": "user", "content": content}], {})
            except InvalidParameter:
                return False

        return not shows(text) and shows([{"type": "text", "text": text}])

    def render(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], param: str = "messages"
    ) -> str:
        """Render the prompt of a conversation. If the template raises an error other than `MemoryError`, that is an
        `InvalidParameter` for `param`, the name of the messages.
        """
        try:
            return self._template.render({**self._variables, **variables, "messages": messages})
        except RecursionError:
            raise InvalidParameter("the chat template does not end for these messages", param) from None
        except MemoryError:
            raise
        except Exception as error:
            raise InvalidParameter(f"the chat template rejected these messages: {error}", param) from None


class ChatTemplates:
    """The templates of a model: the default one, and optionally another one for requests with tools."""

    def __init__(self, default: ChatTemplate, tool_use: ChatTemplate | None = None) -> None:
        self._default = default
        self._tool_use = tool_use

    @property
    def reads(self) -> frozenset[str]:
        """The variables that any of the templates uses."""
        return self._default.reads | (self._tool_use.reads if self._tool_use is not None else frozenset())

    def choose(self, has_tools: bool) -> ChatTemplate:
        """Return the template for a request."""
        return self._tool_use if has_tools and self._tool_use is not None else self._default

    @staticmethod
    def load(
        folder: Path, tokenizer: Tokenizer, override: str | None, variables: Mapping[str, Any] | None = None
    ) -> ChatTemplates | None:
        """Load `override` (a file, or the template itself), or else the folder's templates; None if there are none.
        `variables` default to the tokenizer's.
        """
        if override is not None:
            sources = {"default": _read_override(override)}
        else:
            sources = find_templates(folder, tokenizer.config)
        variables = variables or tokenizer.special_tokens
        try:
            compiled = {name: ChatTemplate(text, variables) for name, text in sources.items()}
        except ConfigError as error:
            raise ConfigError(f"{folder if override is None else '--chat-template'}: {error}") from None
        if "default" not in compiled:
            if compiled:
                names = ", ".join(compiled)
                raise ConfigError(
                    f"{folder}: none of the chat templates ({names}) is named default; set --chat-template"
                )
            return None
        return ChatTemplates(compiled["default"], compiled.get("tool_use"))


def _read_override(value: str) -> str:
    if "{" in value or "\n" in value:
        return value
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--chat-template {value}: not a readable file, and not a template: {reason_of(error)}"
        ) from None


def find_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return templates by name; `config` is tokenizer_config.json. *.jinja files take precedence over it, and it over
    chat_template.json, which belongs to the processor of models that take more than text.
    """
    named = {path.stem: _read(path) for path in (folder / ADDITIONAL_TEMPLATES).glob("*.jinja")}
    if (path := folder / "chat_template.jinja").exists():
        return named | {"default": _read(path)}
    path, inline = folder / "tokenizer_config.json", config.get("chat_template")
    if not inline and (folder / "chat_template.json").exists():
        path = folder / "chat_template.json"
        inline = read_json(path).get("chat_template")
    if isinstance(inline, str):
        return named | {"default": inline}
    try:
        return named | {str(entry["name"]): str(entry["template"]) for entry in inline or []}
    except (TypeError, LookupError):
        raise ConfigError(
            f"{path}: chat_template must be a text, or a list of objects with name and template"
        ) from None


def _read(path: Path) -> str:
    check_regular(path)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {reason_of(error)}") from None


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %} … {% endgeneration %}` marks the answers for training; here it only renders its body."""

    tags = {"generation"}  # noqa: RUF012  # declared as in Jinja

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class _CodeGenerator(jinja2.compiler.CodeGenerator):
    """Does not evaluate expressions of constants: `'x' * 10**11` is one."""

    def __init__(self, environment: jinja2.Environment, *args: Any, **kwargs: Any) -> None:
        super().__init__(environment, *args, **kwargs)
        self.optimizer = None

    def _output_child_to_const(
        self,
        node: jinja2.nodes.Expr,
        frame: jinja2.compiler.Frame,
        finalize: jinja2.compiler.CodeGenerator._FinalizeInfo,
    ) -> str:
        if not isinstance(node, jinja2.nodes.TemplateData | jinja2.nodes.Const):
            raise jinja2.nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


class _VariableFinder(_CodeGenerator, jinja2.meta.TrackingCodeGenerator):
    """Collects the variables instead of compiling."""


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.code_generator_class = _CodeGenerator
    environment.filters["tojson"] = _to_json
    helpers: dict[str, Callable[..., Any]] = {"raise_exception": _raise, "strftime_now": _now}
    environment.globals.update(helpers)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Convert to JSON as models saw it in training: not escaped for HTML, unlike Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(format: str) -> str:
    return datetime.now().strftime(format)
