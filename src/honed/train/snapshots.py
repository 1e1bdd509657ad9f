"""A trained state as a folder: the weights, the optimiser's state beside them, the manifest last.

A snapshot is written in a hidden folder and renamed into place, so a half-written one has no name and can't be loaded.
The weights' own files and their digest are checkpoint.py's; this file adds the optimiser.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save_file
from torch import Tensor

from honed.errors import CorruptData, UserError
from honed.model import checkpoint
from honed.protocols import Snapshot
from honed.types import VersionKind

FOLDER, STATE, SUMS = "optimiser", "optimiser.safetensors", "optimiser.json"


def write(
    blobs: Path, name: str, weights: Callable[[Path], str], state: dict[str, Tensor], kind: VersionKind
) -> Snapshot:
    """Writes the snapshot `name` (a relative path) under `blobs`. The same content again changes nothing.

    `weights` writes a checkpoint into a folder and returns its digest. Raises UserError for a name that leads out of
    the folder.
    """
    final = _place(blobs, name)
    final.parent.mkdir(parents=True, exist_ok=True)
    staging = final.parent / f".part-{final.name}"
    shutil.rmtree(staging, ignore_errors=True)  # what a killed trainer left; one trainer writes a name
    staging.mkdir()
    try:
        _write_optimiser(staging / FOLDER, state)
        digest = weights(staging)
        if not _is_same(final, staging, digest):
            _put(staging, final)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return Snapshot(uri=str(final), digest=digest, optimiser=str(final / FOLDER), kind=kind)


def read_optimiser(snapshot: Snapshot) -> dict[str, Tensor] | None:
    """The optimiser's state, verified; None when the snapshot has none. Raises CorruptData naming the file."""
    if not snapshot.optimiser:
        return None
    folder = Path(snapshot.optimiser)
    try:
        data = (folder / STATE).read_bytes()
        expected = json.loads((folder / SUMS).read_text())["sha256"]
        if hashlib.sha256(data).hexdigest() != expected:
            raise CorruptData(f"{folder / STATE} does not match its sha256; restore without the optimiser's state.")
        return load_tensors(data)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CorruptData(f"cannot read {folder}: {error}; restore without the optimiser's state.") from error


def _place(blobs: Path, name: str) -> Path:
    parts = name.split("/")
    if any(part in ("", ".", "..") or part.startswith(".part-") for part in parts) or "\0" in name:
        raise UserError(f"{name!r} is no snapshot name: write names joined by '/', without '..'.")
    return Path(os.path.abspath(blobs)).joinpath(*parts)


def _write_optimiser(folder: Path, state: dict[str, Tensor]) -> None:
    folder.mkdir()
    save_file(state, folder / STATE)  # not by way of one string: the state of all weights is twice the model
    with open(folder / STATE, "rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    _write(folder / SUMS, json.dumps({"sha256": digest}).encode())


def _write(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _is_same(final: Path, staging: Path, digest: str) -> bool:
    try:
        checkpoint.verify(final, digest)
        return (final / FOLDER / SUMS).read_bytes() == (staging / FOLDER / SUMS).read_bytes()
    except (CorruptData, OSError):
        return False


def _put(staging: Path, final: Path) -> None:
    """`staging` takes the place of `final`, which may hold a half-written or another snapshot."""
    old = final.parent / f".part-old-{final.name}"
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    staging.rename(final)
    shutil.rmtree(old, ignore_errors=True)
    folder = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
