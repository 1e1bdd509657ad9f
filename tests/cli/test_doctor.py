"""`honed doctor`: every check is made and shown, whatever is broken."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from honed.store import Store

from .conftest import CONFIG, Run

ALWAYS = {"python", "torch", "transformers", "peft", "safetensors", "gguf", "openai", "config", "gpu", "cores"}


def checks(run: Run, *arguments: str) -> dict[str, dict[str, Any]]:
    """The checks by name, after their names and the exit code were looked at."""
    done = run("doctor", "--json", *arguments)
    found = {check["name"]: check for check in json.loads(done.stdout)}
    assert set(found) >= ALWAYS | {"memory", "disk", "store"}
    assert done.exit_code == int(any(check["ok"] is False for check in found.values()))
    return found


@pytest.mark.usefixtures("store")
def test_a_whole_machine_passes(run: Run) -> None:
    found = checks(run)
    assert found["config"]["ok"] is True
    assert found["store"]["ok"] is True
    assert "support" in found["store"]["found"]
    assert found["gpu"]["ok"] is None  # for information: nothing depends on it
    text = run("doctor").stdout
    assert text.startswith("ok      python")
    assert "lines support" in text


def test_without_a_store_it_says_what_makes_one(run: Run) -> None:
    found = checks(run)["store"]
    assert found["ok"] is None
    assert "honed serve" in found["advice"]


def test_a_corrupt_store_is_a_failed_line(config: Path, run: Run) -> None:
    (config.parent / "kept").mkdir()
    (config.parent / "kept" / "honed.db").write_bytes(b"no database at all" * 100)
    found = checks(run)["store"]
    assert found["ok"] is False
    assert "Restore it from a backup" in found["advice"]
    done = run("doctor")
    assert done.exit_code == 1
    assert done.stdout.startswith("ok      python")
    assert "FAILED  store" in done.stdout


def test_a_newer_store_is_a_failed_line(store: Store, config: Path, run: Run) -> None:
    store.close()
    with sqlite3.connect(config.parent / "kept" / "honed.db") as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    found = checks(run)["store"]
    assert found["ok"] is False
    assert "Upgrade honed" in found["advice"]


@pytest.mark.parametrize(
    ("text", "told"), [("[model", "is not TOML"), ("[modle]\nsource = 1", "did you mean 'model'"), (None, "no config")]
)
def test_a_broken_config_is_a_failed_line(config: Path, run: Run, text: str | None, told: str) -> None:
    config.unlink() if text is None else config.write_text(text)
    found = checks(run)
    assert found["config"]["ok"] is False
    assert told in found["config"]["advice"]
    assert found["store"]["ok"] is None


@pytest.mark.parametrize(
    ("source", "ok", "told"),
    [
        ("./missing.gguf", False, "does not exist"),
        (".", True, ""),
        ("owner/name", None, "from the hub"),
        ("scripted", None, "for tests"),
    ],
)
def test_the_model_of_the_config_is_looked_for(config: Path, run: Run, source: str, ok: bool | None, told: str) -> None:
    config.write_text(CONFIG.replace("scripted", source))
    found = checks(run)["model"]
    assert found["ok"] is ok
    assert told in found["found"]
