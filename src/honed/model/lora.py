"""Low-rank adapters (LoRA, Hu et al. 2021) by PEFT, tensors named as PEFT exports them. For files see checkpoint.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from honed.config import Settings
from honed.errors import ConfigError

if TYPE_CHECKING:  # the settings are read by processes that never load torch
    from torch import Tensor

ALL_LINEAR = "all-linear"


class LoraSettings(Settings):
    """[lora]: which linears get an adapter, and how large."""

    rank: int = Field(default=16, ge=1)
    """Rank r of the update B A."""
    alpha: float = Field(default=32.0, gt=0)
    """The update is scaled by alpha / rank."""
    targets: tuple[str, ...] = (ALL_LINEAR,)
    """Names of linears, or "all-linear": every linear but the output head."""


def attach(model: Any, settings: LoraSettings) -> Any:
    """A PeftModel over `model`, whose own weights are frozen: A drawn by torch's generator (Kaiming uniform), B zero.

    Raises ConfigError for a target that the model has not.
    """
    import torch
    from peft import LoraConfig, get_peft_model

    targets: Any = ALL_LINEAR if settings.targets == (ALL_LINEAR,) else list(settings.targets)
    config = LoraConfig(
        r=settings.rank, lora_alpha=settings.alpha, lora_dropout=0.0, bias="none", task_type="CAUSAL_LM",
        target_modules=targets,
    )  # fmt: skip
    try:
        peft = get_peft_model(model, config)
    except ValueError as error:
        raise ConfigError(f"lora.targets = {list(settings.targets)}: {error}") from error
    # PEFT keeps adapters in fp32 only if asked to; a bf16 adapter would lose small updates.
    for parameter in tensors(peft).values():
        parameter.data = parameter.data.to(torch.float32 if parameter.dtype != torch.float64 else torch.float64)
    return peft


def tensors(peft: Any) -> dict[str, Tensor]:
    """The trained parameters by exported name (...lora_A.weight [r, in], ...lora_B.weight [out, r]), sorted."""
    found = {name.replace(".default.", "."): value for name, value in peft.named_parameters() if ".lora_" in name}
    return dict(sorted(found.items()))
