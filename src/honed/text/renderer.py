"""Messages to tokens, for one model: its tokenizer, its chat template, its tool-call format.

Two roads lead to a prompt. `start` renders a whole conversation. `extend` gives only the ids between a reply that was
sampled and the next one, so that a conversation's tokens are those that the engine really read and wrote: text is
never tokenised again. A template that rewrites history (one that strips earlier reasoning) can't be extended, and
says so.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from honed import codec
from honed.errors import BadRequest, ConfigError
from honed.text.guard import Guard
from honed.text.stream import ReplyStream
from honed.text.template import ChatTemplate
from honed.text.tools import FORMATS, ToolFormat, json_value
from honed.types import Message, Tool

SENTINEL = "honedsentinelreply"
THINKING = "<think>\nhonedthought\n</think>\n\n"


class Renderer:
    """A model's way of reading and writing conversations. `stop_ids` end a reply; `digest` names tokenizer, template
    and format together."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate, stop_ids: Sequence[int], format: ToolFormat
    ) -> None:
        if not stop_ids:
            raise ConfigError("the model names no stop token: set eos_token_id in its generation_config.json.")
        self._tokenizer, self._template, self._format = tokenizer, template, format
        self.stop_ids = tuple(stop_ids)
        self._hidden = frozenset(stop_ids)
        self._guard = Guard(tokenizer)
        self._end = tokenizer.decode([self.stop_ids[0]], skip_special_tokens=False)
        parts = [template.source, self.stop_ids, type(format).__name__, tokenizer.to_str()]
        self.digest = codec.digest(parts)[:24]

    def start(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """Ids of the whole conversation and of the start of the reply. Raises BadRequest (param messages)."""
        if not messages:
            raise BadRequest("there are no messages to answer.", param="messages")
        return self.encode(self._render(messages, tools))

    def extend(self, messages: Sequence[Message], *, closed: bool) -> list[int] | None:
        """Ids between a sampled reply and the next one: the end of the reply where the model did not sample it
        (`closed` False), the new messages, the start of the next reply. None where the template would rewrite what
        came before: then a full render starts a new branch."""
        after = self._after(tuple(messages))
        if after is None:
            return None
        return self.encode(after.removeprefix(self._end) if closed else after)

    def encode_reply(self, message: Message) -> list[int]:
        """The ids of an assistant's message as the model would have sampled them, the stop id last."""
        said = (message.content or "") + self._format.write(message.tool_calls)
        return [*self.encode(self._guard.hide(said)), self.stop_ids[0]]

    def reply_stream(self, tools: Sequence[Tool] = (), stop: Sequence[str] = ()) -> ReplyStream:
        """A fresh reader of one reply; without tools, text that looks like a call is text."""
        return ReplyStream(self._tokenizer, self._hidden, self._format if tools else None, stop)

    def grammar(self, tools: Sequence[Tool], single: bool, schema: dict[str, Any] | None) -> str:
        """The grammar of a reply that must call one of `tools` or be a value of `schema` (Sampling.grammar)."""
        parts = [self._format.grammar(tools, single)] if tools else []
        if schema is not None:
            parts.append(json_value(schema))
        return "start: " + " | ".join(parts)

    def encode(self, text: str) -> list[int]:
        """Ids of rendered text; the special tokens that the template wrote are recognised."""
        return self._guard.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens included."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def _after(self, messages: tuple[Message, ...]) -> str | None:
        before = (Message(role="user", content="a"), Message(role="assistant", content=THINKING + SENTINEL))
        try:
            head, _, _ = self._render(before, (), prompt=False).partition(SENTINEL)
            text = self._render((*before, *messages), ())
        except BadRequest:  # such as a tool's result after a message without calls: the full render may do
            return None
        if text.count(SENTINEL) != 1 or not text.startswith(head):
            return None
        return text.partition(SENTINEL)[2]

    def _render(self, messages: Sequence[Message], tools: Sequence[Tool], *, prompt: bool = True) -> str:
        native = self._template.native_tools
        plain = [self._plain(message, native) for message in messages]
        if tools and not native:
            offer = self._format.offer(tools)
            if plain[0]["role"] == "system":
                plain[0] = {**plain[0], "content": f"{plain[0]['content']}\n\n{offer}".strip()}
            else:
                plain.insert(0, {"role": "system", "content": offer})
        plain = self._guard.hide(self._folded(plain))
        schemas = self._guard.hide([_schema(tool) for tool in tools]) if native else ()
        return self._template.render(plain, schemas, prompt=prompt)

    def _folded(self, plain: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages without the roles that the template refuses: the system's text goes before the first user's, and
        results that stand beside each other become one message, for users may not speak twice in a row there."""
        system_first = [message["role"] for message in plain[:2]] == ["system", "user"]
        if system_first and not self._template.takes_system_role:
            plain = [{**plain[1], "content": f"{plain[0]['content']}\n\n{plain[1]['content']}"}, *plain[2:]]
        folded: list[dict[str, Any]] = []
        for message in plain:
            if message.pop("result", False) and folded and folded[-1]["role"] == "user":
                folded[-1] = {**folded[-1], "content": f"{folded[-1]['content']}\n{message['content']}"}
            else:
                folded.append(message)
        return folded

    def _plain(self, message: Message, native: bool) -> dict[str, Any]:
        content = message.content or ""
        if message.role == "tool" and not self._template.takes_tool_role:
            return {"role": "user", "content": self._format.result(message.name or "", content), "result": True}
        plain: dict[str, Any] = {"role": message.role, "content": content}
        if message.role == "tool":
            return {**plain, "name": message.name or "", "tool_call_id": message.tool_call_id or ""}
        if message.tool_calls and native:
            return {**plain, "tool_calls": [_call(call.id, call.name, call.arguments) for call in message.tool_calls]}
        if message.tool_calls:
            plain["content"] = content + self._format.write(message.tool_calls)
        return plain


@functools.cache
def load_renderer(directory: str | Path, format: str | None = None) -> Renderer:
    """The renderer of a Hugging Face model directory. `format` overrides the tool-call format by name. Raises
    ConfigError where the directory lacks a tokenizer or a chat template."""
    directory = Path(directory)
    try:
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    except Exception as error:  # the library raises bare Exceptions
        raise ConfigError(f"{directory / 'tokenizer.json'} is no tokenizer: {error}") from error
    settings = _json(directory / "tokenizer_config.json")
    special = {name: _content(settings.get(name)) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    template = ChatTemplate(_template(directory, settings), special)
    chosen = FORMATS.get(format or codec.digest(template.source)[:24], None if format else FORMATS["hermes"])
    if chosen is None:
        raise ConfigError(f"no tool-call format is called {format!r}; known: {', '.join(sorted(FORMATS))}.")
    return Renderer(tokenizer, template, _stop_ids(directory, tokenizer, special), chosen)


def _template(directory: Path, settings: dict[str, Any]) -> str:
    if (path := directory / "chat_template.jinja").exists():
        return path.read_text(encoding="utf-8")
    found = settings.get("chat_template")
    if isinstance(found, list):
        found = {entry["name"]: entry["template"] for entry in found}.get("default")
    if not found:
        raise ConfigError(f"{directory} has no chat template: add a chat_template.jinja, or use an instruct model.")
    return str(found)


def _stop_ids(directory: Path, tokenizer: Tokenizer, special: dict[str, str]) -> list[int]:
    """eos of the tokenizer first (what templates write after a reply), then what the generation config adds."""
    ids = [tokenizer.token_to_id(special["eos_token"])] if special["eos_token"] else []
    declared = _json(directory / "generation_config.json").get("eos_token_id") or []
    ids += declared if isinstance(declared, list) else [declared]
    return list(dict.fromkeys(id for id in ids if id is not None))


def _json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error


def _content(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token or "")


def _schema(tool: Tool) -> dict[str, Any]:
    described = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": described}


def _call(id: str, name: str, arguments: str) -> dict[str, Any]:
    try:
        parsed = json.loads(arguments)
    except ValueError:
        parsed = arguments
    return {"id": id, "type": "function", "function": {"name": name, "arguments": parsed}}
