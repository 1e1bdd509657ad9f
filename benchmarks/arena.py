"""Where contenders meet: each in a process and an environment of its own, asked in turn, on the same cores.

A contender is a script in contenders/ that loads its model, prints one JSON line (its versions, the seconds that took),
and then answers each JSON line on its standard input (a job) by one JSON line. Rounds go through all contenders before
the next one begins, so that a neighbour on a shared machine hurts all alike.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parent / ".bench"


@dataclass
class Contender:
    """A process that answers jobs; `unavailable` says why it can't. `requirements`: packages of an environment of its
    own, made when it starts; without any it runs in ours. `preload`: shared libraries, those that are there."""

    name: str
    script: str
    requirements: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    preload: tuple[str, ...] = ()
    start_seconds: float = 900.0
    job_seconds: float = 3600.0
    unavailable: str = ""
    hello: dict[str, Any] = field(default_factory=dict)
    _process: subprocess.Popen[str] | None = None
    _peak_gb: float | None = None

    def start(self) -> None:
        """Starts it and waits until it is ready; a failure is kept as `unavailable`."""
        python = Path(sys.executable)
        if self.requirements:
            try:
                python = environment(self.script.removesuffix(".py"), *self.requirements)
            except (subprocess.CalledProcessError, OSError) as error:
                self.unavailable = f"its environment could not be made: {error}"
                return
        log = ENVIRONMENTS / f"{self.name}.log"
        log.parent.mkdir(exist_ok=True)
        libraries = [str(found) for name in self.preload if (found := library(name, python.parent.parent / "lib"))]
        preload = {"LD_PRELOAD": ":".join(libraries)} if libraries else {}
        started = time.perf_counter()
        with open(log, "w") as errors:
            self._process = subprocess.Popen(
                [str(python), str(HERE / "contenders" / self.script), json.dumps(self.options)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **preload, **self.env},
            )  # fmt: skip
        hello = self._answer(self.start_seconds)
        self.hello = {
            **(hello or {}), "start_s": round(time.perf_counter() - started, 2),
            **({"preloaded": [Path(each).name for each in libraries]} if self.preload else {}),
        }  # fmt: skip
        if hello is None or "error" in hello:
            self.unavailable = (hello or {}).get("error") or f"it ended or hung while it started, see {log}"
            self.close()

    def ask(self, job: dict[str, Any]) -> dict[str, Any] | None:
        """What it answers; None when it can't, and from then on it is out."""
        if self.unavailable:
            return None
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
            found = self._answer(self.job_seconds)
        except OSError:
            found = None
        if found is None or "error" in found:
            self.unavailable = f"at a job of {', '.join(job)}: {(found or {}).get('error', 'it died or hung')}"
            self.close()
            return None
        return found

    @property
    def peak_gb(self) -> float | None:
        """The most memory that it and its children held, each at its own peak."""
        if self._process is None or self._process.poll() is not None:
            return self._peak_gb
        pids = [self._process.pid, *_children(self._process.pid)]
        return round(sum(_peak_bytes(pid) for pid in pids) / 1e9, 2)

    def close(self) -> None:
        """Ends it."""
        self._peak_gb = self.peak_gb
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()

    def _answer(self, limit: float) -> dict[str, Any] | None:
        """The next line of JSON, what a library prints beside skipped; None at its end, or after `limit` seconds."""
        assert self._process is not None
        assert self._process.stdout is not None
        timer = threading.Timer(limit, self._process.kill)
        timer.start()
        try:
            for line in self._process.stdout:
                if line.startswith("{"):
                    try:
                        return dict(json.loads(line))
                    except ValueError:
                        continue
            return None
        finally:
            timer.cancel()


def environment(name: str, *requirements: str) -> Path:
    """The Python of a virtual environment with these packages, made when first needed; those after a "!" are taken out
    again. Raises CalledProcessError."""
    folder = ENVIRONMENTS / name
    ready = folder / ".ready"
    wanted = "\n".join(requirements)
    if not ready.is_file() or ready.read_text() != wanted:
        print(f"making {folder} with {', '.join(requirements)}", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
        for requirement in requirements:
            act = ["uninstall", "--yes"] if requirement.startswith("!") else ["install"]
            subprocess.run([*pip, *act, *requirement.removeprefix("!").split()], check=True, stdout=sys.stderr)
        ready.write_text(wanted)
    return folder / "bin" / "python"


def library(name: str, folder: Path) -> Path | None:
    """A shared library of an environment's folder, else of the system."""
    places = (folder, Path("/usr/lib/x86_64-linux-gnu"), Path("/usr/lib64"), Path("/usr/lib"), Path("/usr/local/lib"))
    return next((place / name for place in places if (place / name).is_file()), None)


def rounds(contenders: list[Contender], job: dict[str, Any], count: int) -> dict[str, list[dict[str, Any]]]:
    """`count` answers of each contender to a job, one of each in turn."""
    found: dict[str, list[dict[str, Any]]] = {contender.name: [] for contender in contenders}
    for number in range(count):
        for contender in contenders:
            answer = contender.ask({**job, "round": number})
            if answer is not None:
                found[contender.name].append(answer)
                print(f"{contender.name}, round {number + 1}: {json.dumps(answer)}", file=sys.stderr, flush=True)
    return found


def median(answers: list[dict[str, Any]], key: str) -> float | None:
    """The median of a figure, None of no answers."""
    values = [answer[key] for answer in answers if key in answer]
    return statistics.median(values) if values else None


def ratio(one: float | None, other: float | None) -> float | None:
    """one / other, None where one of them is missing."""
    return None if not one or not other else round(one / other, 3)


def machine() -> dict[str, Any]:
    """What this ran on."""
    text = Path("/proc/cpuinfo").read_text()
    model = next((line.split(":")[1].strip() for line in text.splitlines() if line.startswith("model name")), "unknown")
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "").split()
    named = [flag for flag in ("avx2", "avx512f", "avx512_vnni", "amx_int8") if flag in flags]
    return {"cpu": model, "cores": os.cpu_count(), "flags": named}


def finish(result: dict[str, Any]) -> None:
    """Prints the result, as one JSON object on the last line."""
    print(json.dumps({**result, "machine": machine()}))


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            child = int(path.parent.name)
            found += [child, *_children(child)]
    return found


def _peak_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)
