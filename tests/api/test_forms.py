"""Forced tool calls and JSON by the openai client, over HTTP, from a model of random weights that knows neither."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from engine.test_grammar import DIRECTORY, model

from honed.engine.local import LocalEngine
from honed.engine.settings import EngineSettings
from honed.text import load_renderer

from .served import LINE, serving

WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Bern"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "ping", "parameters": {"type": "object", "properties": {}}}},
]
SCHEMA: Any = {**WEATHER, "additionalProperties": False}
ASK: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    engine = LocalEngine(model(), EngineSettings(slots=4, context=512, threads=1))
    with serving(tmp_path_factory.mktemp("forms"), None, renderer=load_renderer(DIRECTORY), engine=engine) as running:
        yield openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_named_tool_is_called_once_and_its_arguments_match(client: openai.OpenAI, stream: bool) -> None:
    choice: Any = {"type": "function", "function": {"name": "weather"}}
    asked = client.chat.completions.create(
        model=LINE, messages=ASK, tools=TOOLS, tool_choice=choice, stream=stream, max_tokens=60
    )
    chunks: list[Any] = list(asked) if stream else [asked]
    said = [chunk.choices[0].delta if stream else chunk.choices[0].message for chunk in chunks]
    calls = [call for each in said for call in each.tool_calls or ()]
    assert [call.function.name for call in calls] == ["weather"]
    jsonschema.validate(json.loads(calls[0].function.arguments), SCHEMA)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_a_required_call_is_of_some_tool(client: openai.OpenAI) -> None:
    names = set()
    for seed in range(6):
        reply = client.chat.completions.create(
            model=LINE, messages=ASK, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, seed=seed,
            max_tokens=60,
        )  # fmt: skip
        (call,) = reply.choices[0].message.tool_calls or ()
        names.add(call.function.name)  # type: ignore[union-attr]
    assert names <= {"weather", "ping"}


def test_a_response_format_is_followed(client: openai.OpenAI) -> None:
    described: Any = {"type": "json_schema", "json_schema": {"name": "w", "schema": SCHEMA, "strict": True}}
    reply = client.chat.completions.create(model=LINE, messages=ASK, response_format=described, max_tokens=60)
    jsonschema.validate(json.loads(reply.choices[0].message.content or ""), SCHEMA)


def test_a_schema_that_cannot_be_followed_is_a_400_and_the_engine_lives(client: openai.OpenAI) -> None:
    odd: Any = {"type": "json_schema", "json_schema": {"name": "w", "schema": {"not": {"type": "integer"}}}}
    with pytest.raises(openai.BadRequestError, match="can't be followed") as caught:
        client.chat.completions.create(model=LINE, messages=ASK, response_format=odd)
    assert caught.value.param == "response_format"
    assert client.chat.completions.create(model=LINE, messages=ASK, max_tokens=3).choices[0].finish_reason == "length"
