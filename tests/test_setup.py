"""The set-up: what the Makefile does with a Python (a stub that fetches nothing), and what the repository pins."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
STUB = r"""#!/bin/sh
echo "$@" >> "$CALLS"
case "$*" in
  "-m venv"*)
    mkdir -p .venv/bin
    if [ -e broken ]; then  # what a Python without ensurepip leaves
      printf '#!/bin/sh\nexit 1\n' > .venv/bin/python; chmod +x .venv/bin/python
      echo "ensurepip is not available" >&2; exit 1
    fi
    cp "$0" .venv/bin/python ;;
  "--version") echo "Python 3.10.1" ;;
  "-c "*) [ ! -e old ] ;;
esac
"""
REGISTRIES = ("pypi" + ".org", "pythonhosted" + ".org", "download." + "pytorch", "conda" + ".anaconda", "/simple" + "/")


class Machine:
    """A folder with the Makefile and a stub of Python that notes how it was called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._calls = folder / "calls"
        for name in ("Makefile", "requirements.lock", "pyproject.toml"):
            (folder / name).write_text((ROOT / name).read_text())
        (folder / "stub").write_text(STUB)
        (folder / "stub").chmod(0o755)

    def make(self, *variables: str) -> tuple[int, str, list[str]]:
        """Exit code, stderr and Python's new calls of `make .venv/.ready`."""
        self._calls.write_text("")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
        done = subprocess.run(
            ["make", f"PYTHON={self.folder / 'stub'}", *variables, ".venv/.ready"],
            cwd=self.folder,
            env={**environment, "CALLS": str(self._calls)},
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stderr, self._calls.read_text().splitlines()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A fresh machine."""
    return Machine(tmp_path)


def installs(calls: list[str]) -> list[str]:
    return [call for call in calls if call.startswith("-m pip install")]


def test_a_second_run_installs_nothing(machine: Machine) -> None:
    code, _, calls = machine.make()
    assert code == 0
    torch, locked, own = installs(calls)
    assert torch.endswith("torch==2.13.0")
    assert locked.endswith("--no-deps -r requirements.lock")
    assert own.endswith("-e .")
    assert machine.make() == (0, "", [])
    os.utime(machine.folder / "requirements.lock", (4e9, 4e9))
    assert len(installs(machine.make()[2])) == 3


def test_a_changed_lock_keeps_the_venv(machine: Machine) -> None:
    machine.make()
    os.utime(machine.folder / "requirements.lock", (4e9, 4e9))
    assert not any("venv" in call for call in machine.make()[2])


def test_only_torch_is_fetched_from_its_index(machine: Machine) -> None:
    _, _, calls = machine.make("TORCH_INDEX=the-index-of-torch")
    assert [("--index-url the-index-of-torch" in call) for call in installs(calls)] == [True, False, False]


def test_a_venv_that_was_left_half_made_is_made_again(machine: Machine) -> None:
    (machine.folder / "broken").touch()
    for _ in range(2):
        code, told, calls = machine.make()
        assert code != 0
        assert "python3-venv" in told
        assert installs(calls) == []
    (machine.folder / "broken").unlink()
    code, _, calls = machine.make()
    assert code == 0
    assert "-m venv --clear .venv" in calls
    assert len(installs(calls)) == 3


@pytest.mark.parametrize(("python", "found"), [("stub", "Python 3.10.1"), ("no-such-python", "not there")])
def test_an_old_python_is_refused_before_anything_is_fetched(machine: Machine, python: str, found: str) -> None:
    (machine.folder / "old").touch()
    code, told, calls = machine.make(f"PYTHON={machine.folder / python}")
    assert code != 0
    assert f"honed needs Python 3.11 or newer, and {machine.folder / python} is {found}: " in told
    assert not any("venv" in call or "install" in call for call in calls)


def locked() -> dict[str, str]:
    """Version by name; every line of the lock pins one."""
    pins = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if not line.startswith("#")]
    assert [pin for pin in pins if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!+]+", pin)] == []
    return {canonicalize_name(name): version for name, _, version in (pin.partition("==") for pin in pins)}


def test_the_lock_holds_what_every_extra_wants() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    for extra in project["project"]["optional-dependencies"].values():
        wanted += extra
    pins = locked()
    for requirement in map(Requirement, wanted):
        if requirement.name != "honed":
            assert canonicalize_name(requirement.name) in pins, f"{requirement} is not locked"
            assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), str(requirement)


def test_the_makefile_installs_the_torch_of_the_lock() -> None:
    assert f"torch=={locked()['torch']}\n" in (ROOT / "Makefile").read_text()
    assert f"torch=={locked()['torch']}`" in (ROOT / "README.md").read_text()


def test_the_judge_runs_the_readme_s_own_command() -> None:
    judge = ROOT / ".ci" / "run"
    assert os.access(judge, os.X_OK)
    assert judge.read_text().splitlines()[-1] == "make test"
    assert "    make test " in (ROOT / "README.md").read_text()


def test_no_file_names_a_registry() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    named = []
    for path in (ROOT / name for name in listed.split("\0") if name):
        text = path.read_text(errors="replace") if path.is_file() else ""
        named += [f"{path.relative_to(ROOT)}: {registry}" for registry in REGISTRIES if registry in text]
    assert named == []
