"""An adapter as a folder in PEFT's layout, with a manifest that is written last and verified first. Never pickled.

adapter_config.json and adapter_model.safetensors are what PEFT and vLLM load; manifest.json holds the sha256 of each
file and the digest of the content. A folder without a manifest is half-written and is not a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from honed.errors import CorruptData

if TYPE_CHECKING:  # whoever only verifies files needs no torch
    from torch import Tensor

CONFIG, WEIGHTS, MANIFEST = "adapter_config.json", "adapter_model.safetensors", "manifest.json"


def write_adapter(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> str:
    """Writes the adapter into `folder` and returns its digest; the same tensors and config give the same digest.

    `config` is JSON-able, or has sets, which are written as sorted lists (PEFT keeps its target modules in one). Each
    file is synced before the manifest is written, so that a crash leaves a whole checkpoint or none.
    """
    from safetensors.torch import save

    folder.mkdir(parents=True, exist_ok=True)
    files = {
        CONFIG: json.dumps(config, indent=1, sort_keys=True, default=_plain).encode(),
        WEIGHTS: save({name: tensors[name].detach().contiguous().cpu() for name in sorted(tensors)}),
    }
    sums = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    for name, data in files.items():
        _write(folder / name, data)
    digest = _digest(sums)
    _write(folder / MANIFEST, json.dumps({"digest": digest, "files": sums}, indent=1).encode())
    return digest


def read_adapter(folder: Path, digest: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and config, verified first. Raises CorruptData that names the file, before anything live is touched."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    files = verify(folder, digest)
    try:
        return load(files[WEIGHTS]), dict(json.loads(files[CONFIG]))
    except (SafetensorError, ValueError) as error:
        raise CorruptData(
            f"{folder} is damaged: {error}. Restore it from a copy, or release another version."
        ) from error


def verify(folder: Path, digest: str) -> dict[str, bytes]:
    """The files of a whole checkpoint with this digest. Raises CorruptData otherwise."""
    folder = Path(folder)
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        sums = {str(name): str(value) for name, value in manifest["files"].items()}
    except FileNotFoundError:
        raise CorruptData(f"{folder} is no checkpoint: it has no {MANIFEST} (half-written, or deleted).") from None
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CorruptData(f"{folder / MANIFEST} can't be read: {error}.") from error
    if set(sums) != {CONFIG, WEIGHTS} or _digest(sums) != digest:
        raise CorruptData(
            f"{folder} holds another version than the one asked for (digest {_digest(sums)[:12]}, not {digest[:12]})."
        )
    return {name: _checked(folder / name, expected) for name, expected in sums.items()}


def _checked(path: Path, expected: str) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CorruptData(f"{path} can't be read: {error}. Restore it, or release another version.") from error
    if hashlib.sha256(data).hexdigest() != expected:
        raise CorruptData(f"{path} does not match its digest: restore it from a copy, or release another version.")
    return data


def _digest(sums: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(dict(sorted(sums.items()))).encode()).hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(f"an adapter's config can't hold {type(value).__name__}")


def _write(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
