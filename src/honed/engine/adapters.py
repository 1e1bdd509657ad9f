"""Turns PEFT's tensors and config into an adapter that the serving model can add, refusing what it would get wrong."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from honed.errors import ConfigError, CorruptData
from honed.model.linear import Adapter, Serving, lay_out

_NAME = re.compile(r"^(?:base_model\.model\.)?(?P<path>.+)\.lora_(?P<side>[AB])(?:\.[^.]+)?\.weight$")
_keys = itertools.count(1)


def build(
    serving: Serving, name: str, digest: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any]
) -> Adapter:
    """An Adapter of tensors named "base_model.model.<module>.lora_A.weight" [r, in] and "...lora_B.weight" [out, r].

    Raises ConfigError for kinds of LoRA that are not supported here, CorruptData for a value that is not finite.
    """
    scaling = _scaling(name, config)
    found: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        match = _NAME.match(key)
        if match is None:
            raise ConfigError(f"the adapter {name!r} holds {key!r}; the local engine knows only lora_A and lora_B.")
        if not bool(torch.isfinite(tensor).all()):
            raise CorruptData(f"the adapter {name!r} has a value that is not finite in {key!r}; train it again.")
        found.setdefault(match["path"], {})[match["side"]] = tensor.detach()
    halves = [path for path, pair in found.items() if len(pair) != 2]
    if halves or not found:
        raise CorruptData(f"the adapter {name!r} lacks half of: {', '.join(halves) or 'everything'}.")
    pairs = {path: (pair["A"], pair["B"]) for path, pair in found.items()}
    return lay_out(serving, Adapter(name, digest, f"{name}#{next(_keys)}"), pairs, scaling)


def _scaling(name: str, config: Mapping[str, Any]) -> float:
    """alpha / r, or alpha / sqrt(r) for rank-stabilised LoRA (Kalajdzievski 2023)."""
    for key in ("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "layer_replication", "lora_bias"):
        if config.get(key):
            raise ConfigError(f"the adapter {name!r} uses {key}, which the local engine does not support.")
    if config.get("bias", "none") != "none":
        raise ConfigError(f"the adapter {name!r} trains biases, which the local engine does not support.")
    if not config.get("r") or "lora_alpha" not in config:
        raise ConfigError(f"the config of the adapter {name!r} lacks r or lora_alpha.")
    rank, alpha = int(config["r"]), float(config["lora_alpha"])
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
