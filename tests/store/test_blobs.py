import uuid
from pathlib import Path

import pytest

from honed.errors import NotFound, UserError
from honed.store import Blobs


@pytest.fixture(params=["local", "memory"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> Blobs:
    root = str(tmp_path / "blobs") if request.param == "local" else f"memory://{uuid.uuid4().hex}"
    return Blobs(root, cache=tmp_path / "cache")


def test_write_read_list_delete(blobs: Blobs) -> None:
    uri = blobs.write("versions/a/1/x.bin", b"one")
    blobs.write("versions/a/2/x.bin", b"two")
    assert blobs.read("versions/a/1/x.bin") == blobs.read(uri) == b"one"
    assert blobs.list() == ["versions/a/1/x.bin", "versions/a/2/x.bin"]
    assert blobs.list("versions/a/2") == ["versions/a/2/x.bin"]
    assert blobs.exists("versions/a")
    blobs.delete("versions/a/1")
    blobs.delete("versions/a/1")
    assert not blobs.exists("versions/a/1/x.bin")
    assert blobs.list() == ["versions/a/2/x.bin"]


def test_a_write_replaces_whole(blobs: Blobs) -> None:
    blobs.write("x", b"a" * 1000)
    blobs.write("x", b"b")
    assert blobs.read("x") == b"b"
    assert blobs.list() == ["x"], "no temporary file stays"


def test_local_gives_files(blobs: Blobs) -> None:
    blobs.write("v/1/a", b"1")
    uri = blobs.write("v/1/b", b"2")
    assert blobs.local(uri).read_bytes() == b"2"
    assert sorted(path.name for path in blobs.local("v/1").iterdir()) in (["a", "b"], ["b"])
    assert (blobs.local("v/1") / "b").read_bytes() == b"2"


def test_a_remote_folder_is_brought_whole_and_once(tmp_path: Path) -> None:
    remote = Blobs(f"memory://{uuid.uuid4().hex}", cache=tmp_path / "cache")
    for name in ("a", "deep/b"):
        remote.write(f"v/1/{name}", name.encode())
    folder = remote.local("v/1")
    assert (folder / "a").read_bytes() == b"a"
    assert (folder / "deep" / "b").read_bytes() == b"deep/b"
    assert remote.local("v/1") == folder
    assert [path.name for path in (tmp_path / "cache" / "v").iterdir()] == ["1"], "nothing half-brought stays"
    with pytest.raises(NotFound):
        remote.local("v/2")


def test_what_is_not_there(blobs: Blobs) -> None:
    blobs.write("v/x", b"")
    for path in ("nothing", "v"):
        with pytest.raises(NotFound):
            blobs.read(path)
    assert not blobs.exists("nothing")
    assert blobs.list("nothing") == []


@pytest.mark.parametrize("path", ["", "/etc/passwd", "../x", "a/../../x", "a//b", "a/./b", "a\\b", "a\0b", "a/", ".."])
def test_paths_stay_inside(blobs: Blobs, path: str) -> None:
    for attempt in (blobs.read, blobs.delete, blobs.local, lambda path: blobs.write(path, b"")):
        with pytest.raises(UserError, match="no blob path"):
            attempt(path)


def test_links_do_not_lead_out(tmp_path: Path) -> None:
    blobs = Blobs(str(tmp_path / "blobs"))
    blobs.write("x", b"")
    (tmp_path / "blobs" / "out").symlink_to(tmp_path)
    with pytest.raises(UserError, match="leads out"):
        blobs.write("out/y", b"")


def test_a_root_behind_a_link_knows_its_own_paths(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    blobs = Blobs(str(tmp_path / "link"))
    blobs.write("v/x", b"1")
    for path in (tmp_path / "link" / "v" / "x", tmp_path / "real" / "v" / "x"):
        assert blobs.read(str(path)) == b"1"


def test_tenants_do_not_meet(blobs: Blobs) -> None:
    blobs.of_tenant("a").write("x", b"a")
    blobs.of_tenant("b").write("x", b"b")
    blobs.of_tenant("..").write("x", b"dots")
    blobs.of_tenant("a/b").write("x", b"slash")
    assert blobs.of_tenant("a").read("x") == b"a"
    assert blobs.of_tenant("a").list() == ["x"]
    assert len(blobs.list("tenants")) == 4
    with pytest.raises(UserError):
        blobs.of_tenant("")
