import json
from collections.abc import Callable
from pathlib import Path

import pytest

from honed.errors import BadRequest, ConfigError
from honed.text import Renderer, load_renderer
from honed.types import Message, Tool, ToolCall

from .templates import write_model

RendererOf = Callable[[str], Renderer]
KINDS = ["smollm2", "chatml", "llama3", "alternating", "thinking"]
WEATHER = Tool(
    name="weather",
    description="the weather\n of a city",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "unit": {"enum": ["C", "F"]},
            "days": {"type": "array", "items": {"type": "integer"}, "description": "ahead"},
        },
        "required": ["city"],
    },
)
CALL = ToolCall(id="call_1", name="weather", arguments='{"city": "Lyon"}')


def user(text: str) -> Message:
    return Message(role="user", content=text)


def said(text: str, *calls: ToolCall) -> Message:
    return Message(role="assistant", content=text, tool_calls=calls)


def result(text: str, id: str = "call_1") -> Message:
    return Message(role="tool", content=text, tool_call_id=id, name="weather")


CONVERSATION = (
    (user("Hello, who are you?"), said("I am a small model, naïve 😀.")),
    (user("How is Lyon?"), said("", CALL)),
    (result('{"degrees": 21}'), said("It is 21 degrees.")),
    (user("And 12345?\n"), said("No idea")),
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tools", [(), (WEATHER,)], ids=["plain", "tools"])
def test_start_output_and_extend_equal_a_full_render(
    renderer_of: RendererOf, kind: str, tools: tuple[Tool, ...]
) -> None:
    renderer = renderer_of(kind)
    messages: tuple[Message, ...] = ()
    ids: list[int] = []
    for new, reply in CONVERSATION:
        messages = (*messages, new)
        more = renderer.extend(messages[-1:], closed=True) if ids else renderer.start(messages, tools)
        if more is None:
            assert (kind, messages[-1].role) == ("thinking", "user")
            more, ids = renderer.start(messages, tools), []
        ids = [*ids, *more]
        assert ids == renderer.start(messages, tools)
        ids = [*ids, *renderer.encode_reply(reply)]
        messages = (*messages, reply)


@pytest.mark.parametrize("kind", ["smollm2", "chatml", "llama3", "alternating"])
def test_a_reply_that_was_cut_is_ended_by_extend(renderer_of: RendererOf, kind: str) -> None:
    renderer = renderer_of(kind)
    before, after = (user("a"),), (user("b"),)
    ids = [*renderer.start(before), *renderer.encode("cut off")]
    more = renderer.extend(after, closed=False)
    assert more is not None
    assert [*ids, *more] == renderer.start((*before, said("cut off"), *after))


def test_smollm2_is_rendered_as_its_authors_do(renderer_of: RendererOf) -> None:
    renderer = renderer_of("smollm2")
    assert renderer.decode(renderer.start([Message(role="system", content="Be kind."), user("Hi")])) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert renderer.stop_ids == (2,)


def test_tools_are_offered_in_the_system_message_where_the_template_knows_none(renderer_of: RendererOf) -> None:
    renderer = renderer_of("smollm2")
    offer = (
        "Tools:\nweather(city: string, unit?: C|F, days?: integer[] ahead) - the weather of a city\n"
        'To call one, reply <tool_call>{"name": ..., "arguments": {...}}</tool_call>'
    )
    alone = renderer.decode(renderer.start([user("Hi")], [WEATHER]))
    joined = renderer.decode(renderer.start([Message(role="system", content="Be kind."), user("Hi")], [WEATHER]))
    assert f"<|im_start|>system\n{offer}<|im_end|>" in alone
    assert f"<|im_start|>system\nBe kind.\n\n{offer}<|im_end|>" in joined


def test_a_template_that_knows_tools_renders_them_itself(renderer_of: RendererOf) -> None:
    text = renderer_of("chatml").decode(renderer_of("chatml").start([user("Hi")], [WEATHER]))
    assert (
        json.loads(text.split("# Tools\n")[1].split("\n<|im_end|>")[0])["function"]["parameters"] == WEATHER.parameters
    )
    assert "To call one" not in text


def test_roles_that_a_template_refuses_become_the_users(renderer_of: RendererOf) -> None:
    renderer = renderer_of("alternating")
    second = ToolCall(id="call_2", name="weather", arguments="{}")
    messages = [
        Message(role="system", content="Be kind."),
        user("Hi"),
        said("", CALL, second),
        result("one"),
        result("two", "call_2"),
    ]
    text = renderer.decode(renderer.start(messages))
    assert "<|im_start|>user\nBe kind.\n\nHi<|im_end|>" in text
    assert (
        "<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>"
        in text
    )
    ids = [*renderer.start(messages[:2]), *renderer.encode_reply(messages[2])]
    more = renderer.extend(messages[3:], closed=True)
    assert more is not None
    assert [*ids, *more] == renderer.start(messages)


def test_extend_says_none_where_history_is_rewritten(renderer_of: RendererOf) -> None:
    renderer = renderer_of("thinking")
    assert renderer.extend([user("b")], closed=True) is None
    assert renderer.extend([result("b")], closed=True) is not None


def test_extend_says_none_when_the_new_messages_can_not_be_told_apart(renderer_of: RendererOf) -> None:
    assert renderer_of("smollm2").extend([user("honedsentinelreply")], closed=True) is None


def test_extend_says_none_where_the_template_refuses_it_out_of_context(renderer_of: RendererOf) -> None:
    assert renderer_of("alternating").extend([user("a"), user("b")], closed=True) is None


def test_messages_that_the_template_refuses_are_the_callers_error(renderer_of: RendererOf) -> None:
    with pytest.raises(BadRequest, match="roles must alternate") as caught:
        renderer_of("alternating").start([user("a"), user("b")])
    assert caught.value.param == "messages"
    with pytest.raises(BadRequest, match="no messages"):
        renderer_of("smollm2").start([])


def test_templates_can_not_reach_out_of_their_sandbox(tmp_path: Path) -> None:
    folder = write_model("chatml", tmp_path)
    (folder / "chat_template.jinja").write_text("{{ messages.__class__.__mro__ }}")
    with pytest.raises(BadRequest, match="refuses these messages"):
        load_renderer(folder).start([user("a")])


def test_a_template_beside_the_tokenizer_comes_first_and_a_list_has_a_default(tmp_path: Path) -> None:
    folder = write_model("chatml", tmp_path)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "listed"}]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load_renderer(folder).decode(load_renderer(folder).start([user("a")])) == "listed"
    other = write_model("chatml", tmp_path / "other")
    (other / "chat_template.jinja").write_text("beside")
    assert load_renderer(other).decode(load_renderer(other).start([user("a")])) == "beside"


def test_stop_ids_are_the_tokenizers_end_then_those_of_the_generation_config(tmp_path: Path) -> None:
    folder = write_model("llama3", tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
    renderer = load_renderer(folder)
    assert [renderer.decode([id]) for id in renderer.stop_ids] == ["<|eot_id|>", "<|endoftext|>", "<|im_end|>"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.json": "{}"}, "is no tokenizer"),
        ({"tokenizer_config.json": "{"}, "is not JSON"),
        ({"tokenizer_config.json": '{"eos_token": "<|im_end|>"}'}, "has no chat template"),
        ({"tokenizer_config.json": '{"chat_template": "x"}'}, "no stop token"),
        ({"chat_template.jinja": "{% if %}"}, "template is broken"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, change: dict[str, str], message: str) -> None:
    folder = write_model("chatml", tmp_path)
    for name, text in change.items():
        (folder / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_renderer(folder)


def test_an_unknown_format_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="known: hermes"):
        load_renderer(write_model("chatml", tmp_path), "hermse")


def test_the_digest_tells_templates_and_tokenizers_apart(renderer_of: RendererOf, tmp_path: Path) -> None:
    digests = {renderer_of(kind).digest for kind in KINDS}
    assert len(digests) == len(KINDS)
    assert load_renderer(write_model("chatml", tmp_path)).digest == renderer_of("chatml").digest
