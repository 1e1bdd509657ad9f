"""Runs the demo's child processes with a live view of how far they are: honed's own commands and the customers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from honed.errors import HonedError

EXAMPLES = Path(__file__).parents[1]
STEPS = {
    "learn.imitated": ("step", "of"),
    "learn.practised": ("step", "of"),
    "gate.progress": ("done", "of"),
    "evaluate.progress": ("done", "of"),
}


class StageFailed(HonedError):
    """A child process ended with another exit code than the story allows."""


class Stages:
    """The view of a run: one line a stage, with a bar, the time gone and the time left."""

    def __init__(self, folder: Path) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(28), TimeElapsedColumn(), TimeRemainingColumn())
        self.progress = Progress(*columns, console=Console(stderr=True))
        self.logs = folder / "log"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.environment = {
            **os.environ, "PYTHONPATH": f"{EXAMPLES}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
            "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1",
        }  # fmt: skip

    def honed(self, title: str, *arguments: str, allowed: tuple[int, ...] = (0,)) -> Any:
        """A honed command with --json: shows its progress, returns what it printed."""
        events: list[dict[str, Any]] = []
        text = self._follow(title, [_honed(), *arguments, "--json"], events.append, allowed)
        return json.loads(text), events

    def traffic(self, title: str, base_url: str, era: str, first_seed: int, num_requests: int) -> list[dict[str, Any]]:
        """The customers' process; one row a request, in the order in which they ended."""
        command = [sys.executable, "-m", "support.traffic", "--base-url", base_url, "--era", era]
        command += ["--first-seed", str(first_seed), "--requests", str(num_requests)]
        bar = self.progress.add_task(title, total=num_requests)
        rows: list[dict[str, Any]] = []
        with open(self.logs / "traffic.log", "ab") as log:
            with subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env=self.environment
            ) as child:
                assert child.stdout is not None
                for line in child.stdout:
                    rows.append(json.loads(line))
                    share = sum(row["success"] for row in rows) / len(rows)
                    self.progress.update(bar, advance=1, description=f"{title}  {100 * share:.0f} % served")
            if child.returncode:
                raise StageFailed(f"the customers' process failed; {self.logs / 'traffic.log'} says why.")
        return rows

    def serve(self, config: Path) -> Gateway:
        """Starts `honed serve` on a free port and waits until it answers."""
        log = open(self.logs / "serve.log", "ab")  # noqa: SIM115 (the child's for as long as it lives)
        child = subprocess.Popen(
            [_honed(), "serve", "-c", str(config)], stdout=subprocess.PIPE, stderr=log, text=True, env=self.environment
        )
        assert child.stdout is not None
        line = child.stdout.readline()
        if "http://" not in line:
            raise StageFailed(f"honed serve did not start; {self.logs / 'serve.log'} says why.")
        return Gateway(child, line[line.index("http://") :].strip())

    def _follow(
        self, title: str, command: list[str], on_event: Callable[[dict[str, Any]], None], allowed: tuple[int, ...]
    ) -> str:
        bar = self.progress.add_task(title, total=None)
        with open(self.logs / "honed.log", "a", buffering=1) as log, open(self.logs / "stdout", "w+") as out:
            with subprocess.Popen(
                command, stdout=out, stderr=subprocess.PIPE, text=True, env=self.environment
            ) as child:
                assert child.stderr is not None
                for line in child.stderr:
                    log.write(line)
                    event = _event(line)
                    on_event(event)
                    done, of = STEPS.get(event.get("event", ""), ("", ""))
                    if done:
                        name = event["event"].partition(".")[2]
                        self.progress.update(
                            bar, completed=event[done], total=event[of], description=f"{title}  {name}"
                        )
            self.progress.update(bar, completed=1, total=1, description=title)
            out.seek(0)
            text = out.read()
        if child.returncode not in allowed:
            raise StageFailed(
                f"{' '.join(command[1:4])} ended with {child.returncode}; {self.logs / 'honed.log'} says why.\n{text}"
            )
        return text


class Gateway:
    """A running `honed serve`."""

    def __init__(self, child: subprocess.Popen[str], url: str) -> None:
        self._child, self.url = child, url

    def version(self) -> str:
        """What serves now."""
        return str(httpx.get(self.url.removesuffix("/v1") + "/healthz", timeout=30).json()["version"])

    def wait_for(self, version: str, seconds: float) -> bool:
        """Whether `version` serves before `seconds` are over."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self.version() == version:
                return True
            time.sleep(0.2)
        return False

    def close(self) -> None:
        """SIGTERM, and wait."""
        self._child.terminate()
        self._child.wait(60)


def _honed() -> str:
    return str(Path(sys.executable).parent / "honed")


def _event(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
