"""Chat templates: Jinja in a sandbox, with the few helpers that the field's templates expect. Text only; no tokens."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from honed.errors import BadRequest, ConfigError


class ChatTemplate:
    """A model's template. `native_tools` says whether it renders a tool list by itself (SmolLM2's, for one, doesn't),
    `takes_tool_role` and `takes_system_role` whether it knows such messages; all three are found by trying."""

    def __init__(self, source: str, special: dict[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda pattern: datetime.datetime.now().strftime(pattern)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the model's chat template is broken: {error}") from error
        self._special = special
        self.source = source
        self.native_tools = self._renders([_USER], [_TOOL])
        self.takes_tool_role = self._renders([_USER, _CALL, _RESULT])
        self.takes_system_role = self._renders([{"role": "system", "content": PROBE}, _USER])

    def render(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = (), *, prompt: bool) -> str:
        """The conversation as text; with `prompt` also the start of the reply. Raises BadRequest (param messages) for a
        conversation that the template refuses, such as two user messages in a row for some models."""
        try:
            return self._template.render(
                messages=list(messages), tools=list(tools) or None, add_generation_prompt=prompt, **self._special
            )
        except (jinja2.TemplateError, TypeError, AttributeError, LookupError, ValueError, ArithmeticError) as error:
            raise BadRequest(f"the model's chat template refuses these messages: {error}", param="messages") from error

    def _renders(self, messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> bool:
        try:
            return PROBE in self.render(messages, tools, prompt=True)
        except BadRequest:
            return False


PROBE = "honedprobe"
_ID = "honedcall"  # nine letters: some templates insist on that
_USER = {"role": "user", "content": "a"}
_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": _ID, "type": "function", "function": {"name": "f", "arguments": {}}}],
}
_RESULT = {"role": "tool", "content": PROBE, "name": "f", "tool_call_id": _ID}
_TOOL = {
    "type": "function",
    "function": {"name": PROBE, "description": "", "parameters": {"type": "object", "properties": {}}},
}


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, indent: int | None = None, **_: Any) -> str:
    # Jinja's own filter escapes HTML; a prompt is no page.
    return json.dumps(value, ensure_ascii=False, indent=indent)
