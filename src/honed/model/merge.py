"""An adapter added into the model that it adapts: a folder that any server of models opens, without knowing of LoRA."""

from __future__ import annotations

import shutil
from pathlib import Path

from honed.errors import Refused
from honed.model import checkpoint
from honed.model.load import Prepared, load


def merge(base: Prepared, adapter: Path, digest: str, target: Path) -> str:
    """Writes W + scaling B A of every adapted W, and all else of `base`, in float32 to the folder `target`; returns its
    digest.

    The adapter is verified first. Raises CorruptData, and Refused where `target` is there already.
    """
    from peft import PeftModel

    if target.exists():
        raise Refused(f"{target} is there already; name a folder that is not.")
    checkpoint.verify(adapter, digest)
    loaded = load(base)
    merged = PeftModel.from_pretrained(loaded.model, str(adapter)).merge_and_unload(safe_merge=True)
    staging = target.with_name(f".part-{target.name}")
    shutil.rmtree(staging, ignore_errors=True)  # what a killed merge left
    try:
        written = checkpoint.write_model(staging, merged, base.directory)
        staging.rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return written
