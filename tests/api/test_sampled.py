"""The chat route over a local engine that really samples: a tiny random model that reads and writes bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from engine.tiny import reference_logprobs, tiny

from api.served import LINE, serving
from honed.engine.local import LocalEngine
from honed.engine.scripted import ScriptedSettings
from honed.engine.settings import EngineSettings

ASK: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    settings = EngineSettings(slots=4, capacity=2048, context=512, prefill_chunk=32, threads=1)
    engine = LocalEngine(tiny(vocab_size=258), settings)
    with serving(tmp_path_factory.mktemp("g"), ScriptedSettings(), engine=engine) as running:
        yield openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
    asyncio.run(engine.close())


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("stream", [False, True])
def test_a_tokens_logprob_is_that_of_its_entry_among_the_alternatives(
    client: openai.OpenAI, temperature: float, stream: bool
) -> None:
    asked = client.chat.completions.create(
        model=LINE, messages=ASK, temperature=temperature, seed=3, max_tokens=24, logprobs=True, top_logprobs=20,
        stream=stream,
    )  # fmt: skip
    replies: Any = asked if stream else [asked]
    choices = [choice for reply in replies for choice in reply.choices if choice.logprobs]
    entries = [entry for choice in choices for entry in choice.logprobs.content]
    found = 0
    for entry in entries:
        values = [(other.token, other.logprob) for other in entry.top_logprobs]
        if entry.token in dict(values):
            found += 1
            assert (entry.token, entry.logprob) in values
        assert entry.logprob < 0
    assert found >= 5
    assert temperature or found == len(entries)


def test_a_seed_gives_the_same_answer_again_and_another_seed_another(client: openai.OpenAI) -> None:
    def say(seed: int) -> tuple[str | None, list[str]]:
        reply = client.chat.completions.create(
            model=LINE, messages=ASK, temperature=1.0, seed=seed, max_tokens=24, logprobs=True
        )
        logprobs = reply.choices[0].logprobs
        assert logprobs is not None
        return reply.choices[0].message.content, [entry.token for entry in logprobs.content or ()]

    first, again, other = say(7), say(7), say(8)
    assert len(first[1]) > 4
    assert first == again
    assert first != other


def test_the_prompts_own_log_probabilities_are_those_of_the_model(client: openai.OpenAI) -> None:
    reply: Any = client.chat.completions.create(
        model=LINE, messages=ASK, max_tokens=2, temperature=0.0, extra_body={"prompt_logprobs": 0}
    )
    rows = reply.prompt_logprobs
    assert len(rows) == reply.usage.prompt_tokens
    assert rows[0] is None
    ids = [int(id) for row in rows[1:] for id in row]
    model = tiny(vocab_size=258).model
    text = "".join(entry["decoded_token"] for row in rows[1:] for entry in row.values())
    assert "hello" in text
    first = next(id for id in range(258) if _fits(model, [id, *ids], rows))
    assert _fits(model, [first, *ids], rows)
    plain: Any = client.chat.completions.create(model=LINE, messages=ASK, max_tokens=2, temperature=0.0)
    assert getattr(plain, "prompt_logprobs", None) is None
    assert plain.choices[0].message.content == reply.choices[0].message.content


def _fits(model: Any, ids: list[int], rows: list[Any]) -> bool:
    """Whether transformers gives these ids the log-probabilities of the rows."""
    expected = reference_logprobs(model, ids)
    given = [next(iter(row.values()))["logprob"] for row in rows[1:]]
    return given == pytest.approx([float(expected[at, id]) for at, id in enumerate(ids[1:])], abs=1e-3)
