"""A version that is a whole model: beside the engine's first one, of the same shapes under other weights."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from honed.engine.runner import Runner, Servings
from honed.errors import ConfigError, CorruptData
from honed.model import checkpoint
from honed.model.load import Prepared, load
from honed.types import Precision

_keys = itertools.count(1)


@dataclass(frozen=True, eq=False)
class FullModel:
    """A model that serves under `name`, in each precision; `key` tells its cached keys and values from all others."""

    name: str
    digest: str
    key: str
    runners: dict[Precision, Runner]


class FullModels:
    """Makes them, for the shapes of `model`, of which it keeps no weights.

    `servings` says how each precision's copy for serving is made.
    """

    def __init__(self, model: nn.Module, servings: Servings, dtype: torch.dtype, device: str) -> None:
        self._servings, self._dtype, self._device = servings, dtype, device
        bare: dict[int, Any] = {id(parameter): _bare(parameter) for parameter in model.parameters()}
        self._skeleton = copy.deepcopy(model, bare)

    def of_tensors(self, name: str, digest: str, tensors: Mapping[str, Tensor]) -> FullModel:
        """A model of the parameters by name. Raises ConfigError for those of another model, CorruptData for a value
        that is not finite."""
        self._check(name, tensors)
        whole: dict[int, Any] = {
            id(parameter): nn.Parameter(tensors[path].to(self._device, self._dtype), requires_grad=False)
            for path, parameter in self._skeleton.named_parameters()
        }
        model = copy.deepcopy(self._skeleton, whole)
        return FullModel(name, digest, f"{name}#full{next(_keys)}", self._servings.runners(model))

    def of_folder(self, name: str, digest: str, folder: Path) -> FullModel:
        """A model from a checkpoint in Hugging Face's layout, verified first. Raises CorruptData and ConfigError."""
        checkpoint.verify(folder, digest)
        prepared = Prepared(directory=folder, digest=digest, source=str(folder))
        model = load(prepared, dtype=str(self._dtype).removeprefix("torch."), device=self._device).model
        return self.of_tensors(name, digest, dict(model.named_parameters()))

    def _check(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        wanted = {path: parameter.shape for path, parameter in self._skeleton.named_parameters()}
        odd = sorted(
            path for path in {*wanted, *tensors} if path not in tensors or wanted.get(path) != tensors[path].shape
        )
        if odd:
            raise ConfigError(
                f"{name} is a model of another shape than the one that this engine runs: {', '.join(odd[:3])}."
            )
        for path, tensor in tensors.items():
            if not bool(torch.isfinite(tensor).all()):
                raise CorruptData(f"{name} has a value that is not finite in {path!r}; train it again.")


def _bare(parameter: Tensor) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
