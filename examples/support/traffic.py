"""The customers: a separate process that sends requests with the openai client, runs the tools, and posts feedback.

    python -m support.traffic --base-url http://127.0.0.1:8700/v1 --era after --first-seed 1000 --requests 96

It is an ordinary OpenAI-style agent: it knows nothing of honed but the feedback route. Feedback is the verdict of the
verifier that a support team could run; one negative in four carries the conversation as it should have been.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from typing import Any

import httpx
import openai

from honed.env.chat import ToolError, check_arguments
from honed.types import Message, ToolCall
from support import world
from support.verify import judge

TEMPERATURE = 0.3


async def serve_customer(
    client: openai.AsyncOpenAI,
    http: httpx.AsyncClient,
    found: world.Case,
    model: str,
    correct: bool,
    max_tokens: int = world.MAX_TOKENS,
) -> dict[str, Any]:
    """One conversation from request to feedback; says what happened."""
    messages: list[dict[str, Any]] = [_plain(message) for message in world.prompt(found)]
    tools = [_schema(tool) for tool in world.tools(found.era)]
    said: list[Message] = []
    replies: list[Any] = []
    for _ in range(world.MAX_TURNS):
        reply = await client.chat.completions.create(
            model=model, messages=messages, tools=tools, temperature=TEMPERATURE, max_tokens=max_tokens,  # type: ignore[arg-type]
            metadata={"case": str(found.seed), "era": found.era},
        )  # fmt: skip
        replies.append(reply)
        said.append(_message(reply.choices[0].message))
        messages.append(_plain(said[-1]))
        if not said[-1].tool_calls:
            break
        for call in said[-1].tool_calls:
            said.append(_run_tool(found, call))
            messages.append(_plain(said[-1]))
    score = judge(found, said)
    await _tell(http, replies[0].id, replies[-1].id, score.value, found if correct else None)
    return {
        "at": time.time(), "seed": found.seed, "era": found.era, "kind": found.kind,
        "changed": found.kind in world.CHANGED,
        "success": score.value, "turn": replies[-1].id, "version": replies[-1].model,
        "corrected": correct and score.value < 1,
    }  # fmt: skip


async def send(
    base_url: str,
    era: world.Era,
    first_seed: int,
    num_requests: int,
    concurrency: int,
    model: str,
    max_tokens: int = world.MAX_TOKENS,
) -> None:
    """Sends the cases of a range of seeds, in order, and prints a JSON line for each as it ends."""
    client = openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=5, timeout=120)
    limit = asyncio.Semaphore(concurrency)

    async with httpx.AsyncClient(base_url=base_url, timeout=30) as http:

        async def one(seed: int) -> None:
            async with limit:
                row = await serve_customer(client, http, world.case(seed, era), model, seed % 4 == 0, max_tokens)
                print(json.dumps(row), flush=True)

        await asyncio.gather(*(one(first_seed + index) for index in range(num_requests)))


async def _tell(http: httpx.AsyncClient, first: str, last: str, success: float, correction: world.Case | None) -> None:
    """Says of the last answer how it went, and of the first reply what should have been said from there on."""
    row: dict[str, Any] = {"target": last, "name": "success", "value": success, "source": "verifier"}
    rows = [{**row, "key": f"{last}/success"}]
    if success < 1 and correction is not None:
        value = [_plain(message) for message in world.gold(correction)]
        told = {"name": "correction", "kind": "correction", "value": value, "source": "team"}
        rows.append({"target": first, **told, "key": f"{first}/correction"})
    (await http.post("feedback", json=rows)).raise_for_status()


def _run_tool(found: world.Case, call: ToolCall) -> Message:
    try:
        result = world.execute(found, call.name, check_arguments(call, world.tools(found.era)))
    except ToolError as error:
        result = {"error": str(error)}
    return Message(role="tool", content=json.dumps(result), tool_call_id=call.id, name=call.name)


def _message(message: Any) -> Message:
    calls = tuple(
        ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
        for call in message.tool_calls or ()
    )
    return Message(role="assistant", content=message.content, tool_calls=calls)


def _plain(message: Message) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        plain["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.role == "tool":
        plain |= {"tool_call_id": message.tool_call_id or "", "name": message.name or ""}
    return plain


def _schema(tool: Any) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", required=True)
    parser.add_argument("--era", choices=("before", "after"), required=True)
    parser.add_argument("--first-seed", type=int, required=True)
    parser.add_argument("--requests", type=int, required=True)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--model", default="support")
    given = parser.parse_args()
    asyncio.run(send(given.base_url, given.era, given.first_seed, given.requests, given.concurrency, given.model))


if __name__ == "__main__":
    main()
