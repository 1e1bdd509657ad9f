import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from honed.errors import StoreError
from honed.store import Store, open_store

HOLD = """
import sys, time
from honed.store import open_store
with open_store(None, sys.argv[1]).jobs.lock("support", "the loop of " + sys.argv[2]):
    print("held", flush=True)
    time.sleep(600)
"""


def test_values_are_kept_by_line_and_key(store: Store) -> None:
    store.jobs.put("a", "learn", {"step": 1, "order": [1, 2]})
    store.jobs.put("a", "learn", {"step": 2})
    store.jobs.put("a", "arrays", {"x": np.arange(3, dtype=np.int32)})
    assert store.jobs.get("a", "learn") == {"step": 2}
    assert store.jobs.get("b", "learn") is None
    assert store.jobs.keys("a") == ["arrays", "learn"]
    found = store.jobs.get("a", "arrays")
    assert found is not None
    assert found["x"].tolist() == [0, 1, 2]
    store.jobs.delete("a", "learn")
    store.jobs.delete("a", "learn")
    assert store.jobs.get("a", "learn") is None


def test_a_line_has_one_holder(store: Store) -> None:
    with store.jobs.lock("a", "first"), open_store(None, store.root) as again:
        with pytest.raises(StoreError, match=rf"'first' \(pid {os.getpid()} on "), again.jobs.lock("a", "second"):
            pass
        with again.jobs.lock("b/../c", "another line"):
            pass
    with store.jobs.lock("a", "third"):
        pass


def test_a_killed_process_lets_go(store: Store, tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(store.root), "somebody"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        with (
            pytest.raises(StoreError, match=rf"'the loop of somebody' \(pid {child.pid} on "),
            store.jobs.lock("support", "me"),
        ):
            pass
        child.send_signal(signal.SIGKILL)
        child.wait()
    with store.jobs.lock("support", "me"):
        pass
