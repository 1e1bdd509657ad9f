import uuid
from pathlib import Path

import pytest

from honed import plugins
from honed.errors import ConfigError


@pytest.fixture
def slot() -> str:
    """A slot that no other test registers in."""
    return f"slot_{uuid.uuid4().hex}"


def test_a_registered_name_resolves(slot: str) -> None:
    plugins.register(slot, "path", "pathlib:Path")
    assert plugins.resolve(slot, "path") is Path
    assert plugins.names(slot) == ["path"]


def test_module_and_attribute_resolve(slot: str) -> None:
    assert plugins.resolve(slot, "pathlib:Path") is Path


def test_registering_imports_nothing(slot: str) -> None:
    plugins.register(slot, "later", "no_such_module:thing")
    with pytest.raises(ConfigError, match="cannot be imported"):
        plugins.resolve(slot, "later")


def test_an_unknown_name_gets_the_nearest(slot: str) -> None:
    plugins.register(slot, "sandbox", "pathlib:Path")
    with pytest.raises(ConfigError, match=r"Did you mean 'sandbox'.*Known: sandbox"):
        plugins.resolve(slot, "sandbax")


def test_an_empty_slot_says_so(slot: str) -> None:
    with pytest.raises(ConfigError, match="Known: none; or write module:attribute"):
        plugins.resolve(slot, "x")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:thing", "PYTHONPATH"),
        ("pathlib:Nothing", "has no 'Nothing'"),
        (":thing", "module:attribute"),
        ("pathlib:", "module:attribute"),
    ],
)
def test_a_target_that_does_not_load(slot: str, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plugins.resolve(slot, name)


def test_a_module_that_breaks_by_itself_keeps_its_own_error(
    slot: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_plugin.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ZeroDivisionError):
        plugins.resolve(slot, "broken_plugin:thing")


@pytest.fixture
def installed(slot: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An installed package whose entry point "theirs" stands for pathlib.Path; the slot's name."""
    info = tmp_path / "plugin_of_somebody-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin-of-somebody\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[honed.{slot}]\ntheirs = pathlib:Path\n")
    monkeypatch.syspath_prepend(tmp_path)
    return slot


def test_an_installed_package_s_entry_point_resolves(installed: str) -> None:
    assert plugins.names(installed) == ["theirs"]
    assert plugins.resolve(installed, "theirs") is Path
    with pytest.raises(ConfigError, match=r"Did you mean 'theirs'"):
        plugins.resolve(installed, "their")


def test_a_registered_name_goes_before_an_installed_one(installed: str) -> None:
    plugins.register(installed, "theirs", "pathlib:PurePath")
    assert plugins.resolve(installed, "theirs").__name__ == "PurePath"
    assert plugins.names(installed) == ["theirs"]
