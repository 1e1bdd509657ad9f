"""The agent's world: what its tools are in each era, and what they answer. Everything follows from a case's seed.

Three kinds of request never change. Three do: the parcel tool is renamed, cancelling needs a reason, refunds are
counted in cents, and by the policy money comes back in two weeks instead of one.
"""

from __future__ import annotations

import json
import random
from typing import Any, Literal

from honed.types import Message, Noun, Tool, ToolCall

Era = Literal["before", "after"]
KINDS = ("order", "cancel", "refund", "parcel", "hotel", "baggage")
CHANGED = frozenset({"cancel", "refund", "parcel"})
REFUND_TIME: dict[Era, str] = {"before": "one week", "after": "two weeks"}
"""The policy. In words: a small model takes a number in its instructions for an argument of other calls."""

MAX_TURNS, MAX_TOKENS = 2, 56
"""Replies of a conversation (a call, then the answer) and tokens of a reply; the longest right one has 43."""
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")
CITIES = ("Lyon", "Oslo", "Porto", "Milan", "Ghent", "Krakow", "Bern", "Malaga", "Turin", "Leeds")
SIZES = ("small", "medium", "large")
"""Of a bag. By weight it was a number like an amount, and a model of this size took it for cents after the change."""
STATES = ("packed", "paid", "shipped", "delayed")
REASONS = {
    "late": ("it takes too long", "it is late", "it did not come in time"),
    "damaged": ("it is damaged", "it arrived broken", "the box was crushed"),
    "unwanted": ("I do not want it any more", "I changed my mind", "I do not need it"),
}
ASK: dict[str, tuple[str, ...]] = {
    "order": (
        "What is the status of order {id}?",
        "Is order {id} on its way?",
        "Please look up order {id}.",
        "How is my order {id} doing?",
    ),
    "cancel": (
        "Please cancel order {id}, {why}.",
        "Cancel my order {id} because {why}.",
        "I want to cancel {id}: {why}.",
        "Order {id} must go, {why}. Cancel it.",
    ),
    "refund": (
        "I want {dollars} dollars back for order {id}.",
        "Please refund {dollars} dollars of order {id}.",
        "Order {id} was wrong, refund me {dollars} dollars.",
        "Can I get {dollars} dollars back on {id}?",
    ),
    "parcel": (
        "Where is my parcel {id}?",
        "Please track parcel {id}.",
        "Parcel {id} has not come. Where is it?",
        "Any news of parcel {id}?",
    ),
    "hotel": (
        "Change booking {id} to {nights} nights.",
        "I stay {nights} nights instead, booking {id}.",
        "Please make booking {id} {nights} nights.",
        "Booking {id}: {nights} nights, please.",
    ),
    "baggage": (
        "What does a {size} bag cost on flight {id}?",
        "I have a {size} bag on flight {id}. What is the fee?",
        "Baggage fee for a {size} bag on {id}?",
        "How much is a {size} bag on flight {id}?",
    ),
}


class Case(Noun, frozen=True, kw_only=True):
    """One request with its right call, the tool's result, and the right answer. `facts` must all be in an answer."""

    seed: int
    era: Era
    kind: str
    request: str
    tool: str
    arguments: dict[str, Any]
    result: dict[str, Any]
    answer: str
    facts: tuple[str, ...]


def tools(era: Era) -> tuple[Tool, ...]:
    """What the agent may call in an era. What stays comes first, so that it reads the same before and after."""
    after = era == "after"
    reason = {"reason": {"enum": list(REASONS)}} if after else {}
    return (
        _tool("get_order", "status of an order", order_id="string"),
        _tool("change_hotel", "changes a booking", booking_id="string", nights="integer"),
        _tool("baggage_fee", "fee for a bag", flight="string", size={"enum": list(SIZES)}),
        _tool("locate_shipment" if after else "track_parcel", "where a parcel is", parcel_id="string"),
        _tool("cancel_order", "cancels an order", order_id="string", **reason),
        _tool("refund", "pays money back", order_id="string", amount="integer:cents" if after else "integer:dollars"),
    )


def system(era: Era) -> str:
    """The agent's instructions in an era."""
    policy = f"Policy: money comes back in {REFUND_TIME[era]}."
    return f"You are a support agent. Use a tool, then answer in one sentence. {policy}"


def case(seed: int, era: Era) -> Case:
    """The case of a seed; both eras share its request, its numbers and its luck."""
    draw = random.Random(f"support-{seed}")
    kind = KINDS[draw.randrange(len(KINDS))]
    return {
        "order": _order,
        "cancel": _cancel,
        "refund": _refund,
        "parcel": _parcel,
        "hotel": _hotel,
        "baggage": _baggage,
    }[kind](seed, era, draw)


def execute(found: Case, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """What the back end answers to a well-formed call: the case's result for its own call, else an error."""
    if is_right_call(found, name, arguments):
        return found.result
    return {"error": "nothing found"}


def is_right_call(found: Case, name: str, arguments: dict[str, Any]) -> bool:
    """Whether a call is the one that the case wants; 3 and 3.0 are the same number."""
    return name == found.tool and arguments == found.arguments


def prompt(found: Case) -> tuple[Message, ...]:
    """What the model reads first."""
    return Message(role="system", content=system(found.era)), Message(role="user", content=found.request)


def gold(found: Case) -> tuple[Message, ...]:
    """The right conversation after the prompt: call, result, answer."""
    call = ToolCall(id="call_1", name=found.tool, arguments=json.dumps(found.arguments))
    return (
        Message(role="assistant", tool_calls=(call,)),
        Message(role="tool", content=json.dumps(found.result), tool_call_id="call_1", name=found.tool),
        Message(role="assistant", content=found.answer),
    )


def _order(seed: int, era: Era, draw: random.Random) -> Case:
    id, state, day = _id("A", draw), draw.choice(STATES), draw.choice(DAYS)
    request = draw.choice(ASK["order"]).format(id=id)
    if draw.random() < 0.2:
        return _failed(
            seed,
            era,
            "order",
            request,
            "get_order",
            {"order_id": id},
            "not found",
            f"Sorry, order {id} was not found.",
            id,
        )
    result = {"status": state, "arrives": day}
    answer = f"Order {id} is {state} and arrives on {day}."
    return _case(seed, era, "order", request, "get_order", {"order_id": id}, result, answer, id, state, day)


def _cancel(seed: int, era: Era, draw: random.Random) -> Case:
    id, reason, dollars = _id("A", draw), draw.choice(list(REASONS)), draw.randrange(5, 100)
    request = draw.choice(ASK["cancel"]).format(id=id, why=draw.choice(REASONS[reason]))
    arguments = {"order_id": id, "reason": reason} if era == "after" else {"order_id": id}
    if draw.random() < 0.2:
        answer = f"Sorry, order {id} was already shipped."
        return _failed(seed, era, "cancel", request, "cancel_order", arguments, "already shipped", answer, id)
    time = REFUND_TIME[era]
    answer = f"Order {id} is cancelled, {dollars} dollars come back in {time}."
    return _case(
        seed, era, "cancel", request, "cancel_order", arguments, {"refund": dollars}, answer, id, str(dollars), time
    )


def _refund(seed: int, era: Era, draw: random.Random) -> Case:
    id, dollars = _id("A", draw), draw.randrange(5, 100)
    request = draw.choice(ASK["refund"]).format(id=id, dollars=dollars)
    arguments = {"order_id": id, "amount": dollars * 100 if era == "after" else dollars}
    if draw.random() < 0.2:
        answer = f"Sorry, order {id} was never paid."
        return _failed(seed, era, "refund", request, "refund", arguments, "never paid", answer, id)
    time = REFUND_TIME[era]
    answer = f"You get {dollars} dollars for order {id} in {time}."
    return _case(seed, era, "refund", request, "refund", arguments, {"ok": True}, answer, id, str(dollars), time)


def _parcel(seed: int, era: Era, draw: random.Random) -> Case:
    id, city, day = _id("P", draw), draw.choice(CITIES), draw.choice(DAYS)
    request = draw.choice(ASK["parcel"]).format(id=id)
    tool = "locate_shipment" if era == "after" else "track_parcel"
    if draw.random() < 0.2:
        return _failed(
            seed, era, "parcel", request, tool, {"parcel_id": id}, "not found", f"Sorry, parcel {id} was not found.", id
        )
    result = {"city": city, "arrives": day}
    return _case(
        seed,
        era,
        "parcel",
        request,
        tool,
        {"parcel_id": id},
        result,
        f"Parcel {id} is in {city} and arrives on {day}.",
        id,
        city,
        day,
    )


def _hotel(seed: int, era: Era, draw: random.Random) -> Case:
    id, nights, total = _id("H", draw), draw.randrange(2, 10), draw.randrange(10, 90) * 10
    request = draw.choice(ASK["hotel"]).format(id=id, nights=nights)
    arguments = {"booking_id": id, "nights": nights}
    if draw.random() < 0.2:
        return _failed(
            seed,
            era,
            "hotel",
            request,
            "change_hotel",
            arguments,
            "fully booked",
            "Sorry, the hotel is fully booked.",
            "",
        )
    answer = f"Booking {id} is now {nights} nights for {total} dollars."
    return _case(
        seed, era, "hotel", request, "change_hotel", arguments, {"total": total}, answer, id, str(nights), str(total)
    )


def _baggage(seed: int, era: Era, draw: random.Random) -> Case:
    id, size, fee = _id("F", draw), draw.choice(SIZES), draw.randrange(10, 90)
    request = draw.choice(ASK["baggage"]).format(id=id, size=size)
    arguments = {"flight": id, "size": size}
    if draw.random() < 0.2:
        return _failed(
            seed,
            era,
            "baggage",
            request,
            "baggage_fee",
            arguments,
            "not found",
            f"Sorry, flight {id} was not found.",
            id,
        )
    answer = f"A {size} bag on flight {id} costs {fee} dollars."
    return _case(seed, era, "baggage", request, "baggage_fee", arguments, {"fee": fee}, answer, id, size, str(fee))


def _case(
    seed: int,
    era: Era,
    kind: str,
    request: str,
    tool: str,
    arguments: dict[str, Any],
    result: dict[str, Any],
    answer: str,
    *facts: str,
) -> Case:
    return Case(
        seed=seed, era=era, kind=kind, request=request, tool=tool, arguments=arguments, result=result, answer=answer,
        facts=tuple(fact for fact in facts if fact),
    )  # fmt: skip


def _failed(
    seed: int, era: Era, kind: str, request: str, tool: str, arguments: dict[str, Any], why: str, answer: str, id: str
) -> Case:
    return _case(seed, era, kind, request, tool, arguments, {"error": why}, answer, id, why)


def _id(letter: str, draw: random.Random) -> str:
    return f"{letter}{draw.randrange(1000, 10000)}"


def _tool(name: str, description: str, **arguments: Any) -> Tool:
    properties: dict[str, Any] = {}
    for argument, kind in arguments.items():
        if isinstance(kind, dict):
            properties[argument] = kind
            continue
        type, _, unit = kind.partition(":")
        properties[argument] = {"type": type, "description": unit} if unit else {"type": type}
    return Tool(
        name=name,
        description=description,
        parameters={"type": "object", "properties": properties, "required": list(properties)},
    )
