"""The support agent's verifier: a program that can tell from a conversation whether the request was served."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from honed.protocols import Outcome, Sandbox
from honed.types import Message, Score, Task, Trace
from support.world import Case, case, is_right_call

VERIFIER = "support.verify:check"


def check(task: Task, trace: Trace, outcome: Outcome, sandbox: Sandbox | None) -> Score:
    """1 when the one right call was made and the answer states every fact, else 0; `parts` says what was right."""
    return judge(case(task.spec["seed"], task.spec["era"]), outcome.messages)


def judge(found: Case, messages: Sequence[Message]) -> Score:
    """Scores what was said after the prompt."""
    calls = [call for message in messages for call in message.tool_calls]
    answer = messages[-1].content or "" if messages and messages[-1].role == "assistant" else ""
    called = len(calls) == 1 and is_right_call(found, calls[0].name, _arguments(calls[0].arguments))
    missing = [fact for fact in found.facts if not _states(answer, fact)]
    parts = {"format": float(len(calls) == 1), "call": float(called), "answer": float(not missing and bool(answer))}
    evidence = (
        "served"
        if called and not missing
        else f"right call: {called}; not in the answer: {', '.join(missing) or 'nothing'}"
    )
    return Score(value=float(called and not missing), parts=parts, verifier=VERIFIER, evidence=evidence)


def _arguments(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _states(answer: str, fact: str) -> bool:
    """Whether a fact stands in the answer as a word or number of its own: 40 in "40 dollars.", not in 140 or 40.5."""
    pattern = rf"(?<!\w)(?<!\d[.,]){re.escape(fact.lower())}(?!\w)(?![.,]\d)"
    return re.search(pattern, answer.lower()) is not None
