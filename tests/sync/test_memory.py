"""The channel in memory."""

from __future__ import annotations

import pytest

from honed.errors import NotFound
from honed.sync.memory import MemoryChannel


async def test_what_was_published_is_fetched() -> None:
    channel = MemoryChannel({"r": 4})
    await channel.publish("line@1", {"a": 1})
    assert await channel.fetch("line@1") == {"a": 1}
    assert "line@1" in channel
    assert channel.config == {"r": 4}


async def test_a_fetched_dict_is_the_callers_own() -> None:
    channel = MemoryChannel()
    await channel.publish("line@1", {"a": 1})
    (await channel.fetch("line@1"))["b"] = 2
    assert await channel.fetch("line@1") == {"a": 1}


async def test_the_oldest_version_goes_first_and_publishing_again_renews() -> None:
    channel = MemoryChannel(limit=2)
    for name in ("1", "2", "1", "3"):
        await channel.publish(name, {})
    assert [name for name in "123" if name in channel] == ["1", "3"]


async def test_a_version_that_is_not_held_is_named() -> None:
    with pytest.raises(NotFound, match="line@7"):
        await MemoryChannel().fetch("line@7")


def test_a_channel_for_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="limit = 0"):
        MemoryChannel(limit=0)
