"""Where a command's config comes from: --config, an argument, HONED_CONFIG, honed.toml, the defaults."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from honed import __version__
from honed.cli import output
from honed.errors import ConfigError
from honed.store import Store
from honed.testing import fake_task
from honed.types import Version

from .conftest import Run


def test_a_config_that_somebody_named_must_be_there(config: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no config file .*missing\.toml"):
        output.settings(Path("missing.toml"))
    with pytest.raises(ConfigError, match=r"there is no config file .*honed\.toml"):
        output.settings(output.DEFAULT_CONFIG)
    assert output.settings(None).model.source == "smollm2"
    shutil.copy(config, output.DEFAULT_CONFIG)
    assert output.settings(None).model.source == "scripted"


@pytest.mark.parametrize("command", [["run", "missing.toml"], ["run", "honed.toml"], ["ledger", "-c", "missing.toml"]])
def test_a_missing_file_ends_with_2(run: Run, command: list[str]) -> None:
    done = run(*command)
    assert done.exit_code == 2
    assert "there is no config file" in done.stderr


@pytest.mark.usefixtures("store")
def test_the_loop_takes_its_config_as_the_others_do(run: Run, config: Path) -> None:
    """The filled store has one new failure, and its line's name shows which file was read."""
    config.write_text(config.read_text().replace('"support"', '"another"'))
    done = run("run", "--once")
    assert done.exit_code == 0
    assert "nothing to do for another: 0 new failures" in done.stdout
    assert run("run", str(config), "--once", env={"HONED_CONFIG": "missing.toml"}).stdout == done.stdout


def test_there_is_nothing_to_abandon(run: Run) -> None:
    done = run("run", "--abandon")
    assert done.exit_code == 0
    assert done.stdout == "there is no turn to abandon\n"


def test_a_supervisor_wants_a_file(run: Run) -> None:
    done = run("up", env={"HONED_CONFIG": ""})
    assert done.exit_code == 2
    assert "name one with --config" in done.stderr


def test_an_evaluation_without_tasks_starts_no_learner(store: Store, run: Run) -> None:
    """The scripted model has no learner: a command that tried to start one would end with 1."""
    done = run("eval", "support@1", "--suite", "nothing")
    assert done.exit_code == 2
    assert "no ready dev tasks of the suite 'nothing' to attempt; suites that have some: orders." in done.stderr
    only = store.tasks.list("dev")[0]
    store.tasks.set_state(only.id, "retired")
    assert "there are none in the split dev" in run("eval", "support@1", "--json").stderr
    store.tasks.put([fake_task("order again", split="dev", suite="orders")])
    assert run("eval", "support@1").exit_code == 1


def test_a_version_of_another_line_is_not_measured_with_this_model(store: Store, run: Run) -> None:
    store.versions.put(Version(line="other", number=1))
    done = run("eval", "other@1")
    assert done.exit_code == 2
    assert "not of the config's line, 'support'" in done.stderr


def test_an_unusable_store_ends_with_1(config: Path, run: Run) -> None:
    (config.parent / "kept").mkdir()
    (config.parent / "kept" / "honed.db").write_bytes(b"no database at all" * 100)
    done = run("traces", "ls")
    assert done.exit_code == 1
    assert done.stderr.startswith("honed: ")
    assert len(done.stderr.splitlines()) == 1


def test_lessons_that_nobody_wrote_are_wrong_usage(run: Run) -> None:
    done = run("train", "no_such_module:lessons")
    assert done.exit_code == 2
    assert "no_such_module" in done.stderr


def test_the_version_is_printed(run: Run) -> None:
    assert run("--version").stdout == f"honed {__version__}\n"


def test_every_command_explains_itself_in_whole_sentences(run: Run) -> None:
    listed = run("--help").stdout.partition("Commands:")[2]
    assert "..." not in listed  # no summary is cut
    names = [line.split()[0] for line in listed.splitlines() if line.strip()]
    assert len(names) == 12
    for name in names:
        assert run(name, "--help").exit_code == 0
