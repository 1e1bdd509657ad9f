"""The house rules that a program can check: sizes, names, and what importing honed loads."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src" / "honed").rglob("*.py"))
MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 60
UNPICKLERS = {"pickle", "cloudpickle", "dill", "shelve", "joblib", "torch.load", "np.load"}
BANNED = {"utils", "util", "common", "helpers", "misc", "base", "manager"}

LONG_FILES: dict[str, str] = {}
"""Exceptions to the file limit: path under src/honed -> the reason."""
LONG_FUNCTIONS: dict[str, str] = {
    "store/migrations/versions/0001_first.py:upgrade": "one migration is one list of tables",
}
"""Exceptions to the function limit: path:function -> the reason."""


def name_of(path: Path) -> str:
    return path.relative_to(ROOT / "src" / "honed").as_posix()


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """(name, lines) of every function, decorators and docstring included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            yield node.name, (node.end_lineno or first) - first + 1


def test_files_stay_under_400_lines() -> None:
    long = {name_of(path): num for path in SOURCES if (num := len(path.read_text().splitlines())) > MAX_FILE_LINES}
    assert {name: num for name, num in long.items() if name not in LONG_FILES} == {}


def test_functions_stay_under_60_lines() -> None:
    found = {f"{name_of(path)}:{name}": num for path in SOURCES for name, num in functions(path)}
    long = {name: num for name, num in found.items() if num > MAX_FUNCTION_LINES}
    assert {name: num for name, num in long.items() if name not in LONG_FUNCTIONS} == {}


def test_exceptions_are_still_needed() -> None:
    found = {f"{name_of(path)}:{name}": num for path in SOURCES for name, num in functions(path)}
    assert all(found.get(name, 0) > MAX_FUNCTION_LINES for name in LONG_FUNCTIONS)
    lengths = {name_of(path): len(path.read_text().splitlines()) for path in SOURCES}
    assert all(lengths.get(name, 0) > MAX_FILE_LINES for name in LONG_FILES)


def test_no_module_has_a_name_that_says_nothing() -> None:
    parts = {part for path in SOURCES for part in (path.stem, *path.relative_to(ROOT).parts[:-1])}
    assert parts & BANNED == set()


def test_everything_public_has_a_docstring() -> None:
    bare = []
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        if not ast.get_docstring(tree):
            bare.append(name_of(path))
        for node in tree.body:
            is_public = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            if is_public and not node.name.startswith("_") and not ast.get_docstring(node):
                bare.append(f"{name_of(path)}:{node.name}")
    assert bare == []


def test_nothing_unpickles() -> None:
    found = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if UNPICKLERS & {*names, called}:
                found.append(f"{name_of(path)}:{node.lineno}")
    assert found == []


@pytest.mark.parametrize("module", ["honed", "honed.cli", "honed.assemble", "honed.loop.run", "honed.api.app"])
def test_these_load_no_torch(module: str) -> None:
    check = f"import sys, {module}\nprint(sorted({{'torch', 'transformers', 'peft', 'ray'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
