"""`honed up` and a model that is not there, as a person runs them: real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import psutil

import honed

from .conftest import CONFIG

HONED = [sys.executable, "-c", "from honed.cli import main; main()"]
MISSING = CONFIG.replace("scripted", "./missing.gguf") + "[serve]\nport = 0\n"


def environment(folder: Path) -> dict[str, str]:
    """This process's own honed, whatever folder the child runs in, and a cache that nobody shares."""
    source = str(Path(honed.__file__).parents[1])
    return {**os.environ, "PYTHONPATH": source, "HONED_LOG": "on", "HONED_CACHE": str(folder / "cache")}


def call(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*HONED, *arguments]
    return subprocess.run(command, cwd=folder, env=environment(folder), capture_output=True, text=True)


def test_both_children_serve_and_end_with_their_supervisor(tmp_path: Path) -> None:
    (tmp_path / "honed.toml").write_text(CONFIG + "[serve]\nport = 0\n")
    with subprocess.Popen(
        [*HONED, "up"],
        cwd=tmp_path,
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as supervisor:
        assert supervisor.stdout is not None
        line = supervisor.stdout.readline()
        while "http://" not in line and supervisor.poll() is None:
            line = supervisor.stdout.readline()
        children = psutil.Process(supervisor.pid).children()
        url = line[line.index("http://") :].strip()
        body = {"model": "support", "messages": [{"role": "user", "content": "again"}]}
        answer = httpx.post(f"{url}/chat/completions", json=body, timeout=30).raise_for_status().json()
        everyone = psutil.Process(supervisor.pid).children(recursive=True)
        supervisor.send_signal(signal.SIGTERM)
        supervisor.stdout.read()
        assert supervisor.wait(60) == 0
    assert answer["choices"][0]["message"]["content"] == "again"
    assert len(children) == 2
    assert len(everyone) >= 3  # the engine of the gateway too
    _, alive = psutil.wait_procs(everyone, timeout=30)
    assert alive == []
    why = call(tmp_path, "why", answer["id"])
    assert "support@0 is the base model" in why.stdout


def test_a_child_that_was_asked_for_something_wrong_ends_all_with_2(tmp_path: Path) -> None:
    (tmp_path / "honed.toml").write_text(MISSING)
    done = call(tmp_path, "up")
    assert done.returncode == 2
    assert "there is no model" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_model_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "honed.toml").write_text(MISSING)
    done = call(tmp_path, "serve")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("honed: there is no model ")


def test_a_conversion_that_fails_is_tried_once(tmp_path: Path) -> None:
    (tmp_path / "honed.toml").write_text(MISSING)
    (tmp_path / "missing.gguf").write_bytes(b"GGUF no more" * 50)
    done = call(tmp_path, "serve")
    assert done.returncode in (1, 2)
    assert done.stderr.count("model.convert") == 1
    assert done.stderr.splitlines()[-1].startswith("honed: ")
    assert "Traceback" not in done.stderr
