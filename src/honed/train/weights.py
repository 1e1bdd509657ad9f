"""What a trainer changes: an adapter over a frozen model, or every weight of it. Both write what others can load."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from honed.errors import CorruptData
from honed.model import checkpoint, lora
from honed.model.load import Loaded, Prepared, load
from honed.protocols import Snapshot
from honed.types import VersionKind


class Weights(Protocol):
    """The trained part of `causal`, a transformers model. `parameters` by name, in a fixed order, are what learns."""

    kind: VersionKind
    causal: Any
    parameters: dict[str, Tensor]
    config: dict[str, Any]

    def tensors(self) -> dict[str, Tensor]:
        """What an engine needs to serve them."""
        ...

    def fresh(self) -> dict[str, Tensor]:
        """What the parameters were before anything was learned."""
        ...

    def write(self, folder: Path) -> str:
        """Writes them as a checkpoint; its digest."""
        ...

    def read(self, snapshot: Snapshot) -> dict[str, Tensor]:
        """A checkpoint's parameters, verified first. Raises CorruptData, also where they are another model's."""
        ...


class AdapterWeights:
    """A LoRA adapter, in PEFT's layout. `seed` decides its random half."""

    kind: VersionKind = "adapter"

    def __init__(self, loaded: Loaded, settings: lora.LoraSettings, seed: int) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            peft = lora.attach(loaded.model, settings)
        peft.eval()  # dropout would differ between samples that share a prefix
        self.config: dict[str, Any] = _plain(peft.peft_config["default"].to_dict())
        self.causal = peft.get_base_model()
        self.parameters = lora.tensors(peft)
        self._fresh = copies(self.parameters)

    def tensors(self) -> dict[str, Tensor]:
        """The adapter."""
        return self.parameters

    def fresh(self) -> dict[str, Tensor]:
        """The seeded A and a zero B."""
        return self._fresh

    def write(self, folder: Path) -> str:
        """Writes adapter_config.json and adapter_model.safetensors."""
        return checkpoint.write_adapter(folder, self.parameters, self.config)

    def read(self, snapshot: Snapshot) -> dict[str, Tensor]:
        """A snapshot's tensors. Raises CorruptData."""
        tensors, _ = checkpoint.read_adapter(Path(snapshot.uri), snapshot.digest)
        if not _alike(tensors, self.parameters):
            raise CorruptData(
                f"{snapshot.uri} is an adapter of other modules or another rank than this trainer's; "
                "set [lora] to what it was made with, or start a new line."
            )
        return tensors


class FullWeights:
    """Every parameter of the model that learns, in Hugging Face's layout with the tokenizer beside it."""

    kind: VersionKind = "full"

    def __init__(self, loaded: Loaded) -> None:
        self.causal = loaded.model.eval()
        self.config: dict[str, Any] = {}
        # tied ones once; what transformers itself keeps fixed, as the bias that balances experts, stays so
        named = sorted(loaded.model.named_parameters())
        self.parameters = {name: parameter for name, parameter in named if parameter.requires_grad}
        self._source = Prepared(directory=loaded.directory, digest=loaded.digest, source=str(loaded.directory))

    def tensors(self) -> dict[str, Tensor]:
        """The whole model."""
        return dict(self.causal.named_parameters())

    def fresh(self) -> dict[str, Tensor]:
        """Read again from where the model came from: a copy kept in memory would be as large as the model."""
        return self._read(self._source)

    def write(self, folder: Path) -> str:
        """Writes config.json, *.safetensors, and the source's other .json and .jinja files (tokenizer, template)."""
        return checkpoint.write_model(folder, self.causal, self._source.directory)

    def read(self, snapshot: Snapshot) -> dict[str, Tensor]:
        """A snapshot's parameters. Raises CorruptData."""
        folder = Path(snapshot.uri)
        checkpoint.verify(folder, snapshot.digest)
        tensors = self._read(Prepared(directory=folder, digest=snapshot.digest, source=snapshot.uri))
        if not _alike(tensors, self.parameters):
            raise CorruptData(f"{snapshot.uri} is a model of another shape than this trainer's; start a new line.")
        return tensors

    def _read(self, prepared: Prepared) -> dict[str, Tensor]:
        first = next(iter(self.parameters.values()))
        dtype = str(first.dtype).removeprefix("torch.")
        model = load(prepared, dtype=dtype, device=str(first.device)).model
        return {name: each.detach() for name, each in model.named_parameters() if each.requires_grad}


def copies(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The values now, on the CPU."""
    return {name: parameter.detach().cpu().clone() for name, parameter in parameters.items()}


def _alike(tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> bool:
    return {name: t.shape for name, t in tensors.items()} == {name: t.shape for name, t in like.items()}


def _plain(value: Any) -> Any:
    """PEFT's config as JSON has it: sets sorted into lists, enumerations by their value."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return getattr(value, "value", value)
