"""Large files by path, over fsspec: weights, optimiser states, attachments. Local by default, any bucket by its URL.

A write is atomic: whoever reads sees the old bytes or the new ones. Paths are relative to the root and stay inside it.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import shutil
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import quote

import fsspec

from honed.errors import NotFound, UserError


class Blobs:
    """A tree of blobs under one root: a folder or a URL that fsspec knows ("s3://bucket/prefix").

    `cache` is the folder in which `local` keeps what it brings from a remote root.
    """

    def __init__(self, root_url: str, *, cache: Path | None = None) -> None:
        self._files, root = fsspec.core.url_to_fs(root_url)
        self._root: str = root.rstrip("/")
        self._cache = cache or Path(tempfile.gettempdir()) / f"honed-blobs-{os.getuid()}"
        self._is_local = "file" in _protocols(self._files)
        self._resolved = str(Path(self._root).resolve()) if self._is_local else self._root

    def of_tenant(self, tenant: str) -> Blobs:
        """The blobs of one tenant, out of every other's reach."""
        if not tenant:
            raise UserError("a tenant's blobs need the tenant's name.")
        name = quote(tenant, safe="").replace(".", "%2E")
        return Blobs(self._files.unstrip_protocol(f"{self._root}/tenants/{name}"), cache=self._cache / "tenants" / name)

    def write(self, path: str, data: bytes) -> str:
        """Writes a blob, whole or not at all, and returns its URI (which `read` and `local` take too)."""
        full = self._full(path)
        if self._is_local:
            _write_atomically(Path(full), data)
        else:
            self._files.pipe_file(full, data)  # an object store shows an object once it is whole
        return self._files.unstrip_protocol(full)

    def read(self, path: str) -> bytes:
        """A blob's bytes. Raises NotFound."""
        try:
            return self._files.cat_file(self._full(path))
        except (FileNotFoundError, IsADirectoryError) as error:
            raise NotFound(f"no blob {path!r} under {self._root}.") from error

    def exists(self, path: str) -> bool:
        """Whether there is a blob, or something under that prefix."""
        return bool(self._files.exists(self._full(path)))

    def delete(self, prefix: str) -> None:
        """Deletes a blob or all under a prefix; nothing there is fine."""
        full = self._full(prefix)
        with contextlib.suppress(FileNotFoundError):
            self._files.rm(full, recursive=True)

    def local(self, path: str) -> Path:
        """Where a blob (or a folder of blobs) lies on this machine; a remote one is brought here first.

        With a local root this is the place itself, whether or not something lies there yet. Raises NotFound for a
        remote one that does not exist. What has been brought once is not brought again: blobs are written once.
        """
        full = self._full(path)
        if self._is_local:
            return Path(full)
        target = self._cache / posixpath.relpath(full, self._root)
        if not target.exists():
            self._bring(full, target)
        return target

    def _bring(self, full: str, target: Path) -> None:
        if not self._files.exists(full):
            raise NotFound(f"no blob {full!r}.")
        target.parent.mkdir(parents=True, exist_ok=True)
        room = Path(tempfile.mkdtemp(dir=target.parent, prefix=".part-"))
        try:
            self._files.get(full, str(room / target.name), recursive=True)
            with contextlib.suppress(FileExistsError, OSError):  # another process was first: its copy is as good
                os.rename(room / target.name, target)
        finally:
            shutil.rmtree(room, ignore_errors=True)

    def _full(self, path: str) -> str:
        path = str(path)
        if "://" in path:
            path = self._files._strip_protocol(path)
        for root in (self._root, self._resolved):
            path = path.removeprefix(f"{root}/")
        parts = path.split("/")
        if "\0" in path or "\\" in path or any(part in ("", ".", "..") for part in parts):
            raise UserError(f"{path!r} is no blob path: write names joined by '/', without '..', inside {self._root}.")
        full = f"{self._root}/{path}"
        if self._is_local and not Path(full).resolve().is_relative_to(self._resolved):
            raise UserError(f"{path!r} leads out of {self._root} through a link.")
        return full

    def list(self, prefix: str = "") -> list[str]:
        """The paths of the blobs under a prefix, sorted, relative to the root."""
        full = self._full(prefix) if prefix else self._root
        return sorted(posixpath.relpath(found, self._root) for found in self._files.find(full))


def _write_atomically(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".part-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _protocols(files: Any) -> tuple[str, ...]:
    return (files.protocol,) if isinstance(files.protocol, str) else tuple(files.protocol)
