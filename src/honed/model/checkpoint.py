"""Trained weights as a folder with a manifest that is written last and verified first. Never pickled.

An adapter has PEFT's layout (adapter_config.json, adapter_model.safetensors), a whole model Hugging Face's, so that
PEFT, transformers and vLLM load them; manifest.json holds the sha256 of each file and the digest of the content. A
folder without a manifest is half-written and is not a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
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
    return _sealed(folder, sums)


def write_model(folder: Path, model: Any, source: Path) -> str:
    """Writes a whole transformers model into `folder`, with the tokenizer's files of `source`; returns its digest."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    for path in sorted(source.iterdir()):
        is_text = path.suffix in (".json", ".jinja") and not path.name.endswith(".index.json")
        if is_text and path.name != MANIFEST and not (folder / path.name).exists():
            shutil.copyfile(path, folder / path.name)
    sums = {}
    for path in sorted(path for path in folder.iterdir() if path.is_file() and path.name != MANIFEST):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            sums[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return _sealed(folder, sums)


def read_adapter(folder: Path, digest: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and config, verified first. Raises CorruptData that names the file, before anything live is touched."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    folder = Path(folder)
    sums = _manifest(folder, digest)
    if set(sums) != {CONFIG, WEIGHTS}:
        raise CorruptData(f"{folder} holds {', '.join(sorted(sums)[:4])}, so it is no adapter.")
    files = {name: _checked(folder / name, expected) for name, expected in sums.items()}
    try:
        return load(files[WEIGHTS]), dict(json.loads(files[CONFIG]))
    except (SafetensorError, ValueError) as error:
        raise CorruptData(
            f"{folder} is damaged: {error}. Restore it from a copy, or release another version."
        ) from error


def verify(folder: Path, digest: str) -> None:
    """Raises CorruptData, naming what is wrong, unless the folder is a whole checkpoint with this digest."""
    folder = Path(folder)
    for name, expected in _manifest(folder, digest).items():
        try:
            with open(folder / name, "rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise _unreadable(folder / name, error) from error
        if found != expected:
            raise _damaged(folder / name)


def _sealed(folder: Path, sums: Mapping[str, str]) -> str:
    digest = _digest(sums)
    _write(folder / MANIFEST, json.dumps({"digest": digest, "files": dict(sums)}, indent=1).encode())
    return digest


def _manifest(folder: Path, digest: str) -> dict[str, str]:
    """The sha256 of each file, once they are those of `digest`."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        sums = {str(name): str(value) for name, value in manifest["files"].items()}
    except FileNotFoundError:
        raise CorruptData(f"{folder} is no checkpoint: it has no {MANIFEST} (half-written, or deleted).") from None
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CorruptData(f"{folder / MANIFEST} can't be read: {error}.") from error
    if not sums or _digest(sums) != digest:
        raise CorruptData(
            f"{folder} holds another version than the one asked for (digest {_digest(sums)[:12]}, not {digest[:12]})."
        )
    return sums


def _checked(path: Path, expected: str) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error
    if hashlib.sha256(data).hexdigest() != expected:
        raise _damaged(path)
    return data


def _unreadable(path: Path, error: OSError) -> CorruptData:
    return CorruptData(f"{path} can't be read: {error}. Restore it, or release another version.")


def _damaged(path: Path) -> CorruptData:
    return CorruptData(f"{path} does not match its digest: restore it from a copy, or release another version.")


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
