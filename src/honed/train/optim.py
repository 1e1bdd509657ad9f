"""AdamW over named tensors: clipped, refusing what is not finite, its state a flat dict of named tensors."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from honed.errors import CorruptData
from honed.train.settings import TrainSettings

MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimiser:
    """torch's AdamW (Loshchilov & Hutter 2019) over named parameters, in a fixed order."""

    def __init__(self, parameters: dict[str, Tensor], settings: TrainSettings) -> None:
        self.parameters, self._settings = parameters, settings
        self._adam = self._fresh()

    def reset(self) -> None:
        """Forgets moments, step count and gradients."""
        self._adam = self._fresh()
        self.clear()

    def clear(self) -> None:
        """Forgets the gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def step(self, learning_rate: float) -> tuple[float, str]:
        """One update. Returns the gradient's norm before clipping, and why nothing was applied ("" = applied).

        The gradients are gone afterwards either way.
        """
        if all(parameter.grad is None for parameter in self.parameters.values()):
            return 0.0, "no gradient was accumulated"
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters.values(), self._settings.max_grad_norm))
        if not math.isfinite(norm):
            self.clear()
            return norm, f"the gradient's norm is {norm}"
        for group in self._adam.param_groups:
            group["lr"] = learning_rate
        self._adam.step()
        self.clear()
        return norm, ""

    def state(self) -> dict[str, Tensor]:
        """The moments of each parameter ("<name>.exp_avg", "<name>.exp_avg_sq") and "steps"; copies, on the CPU."""
        steps = 0
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            state = self._adam.state.get(parameter)
            if state:
                steps = int(state["step"])
                tensors |= {f"{name}.{key}": state[key].detach().cpu().clone() for key in MOMENTS}
        return {"steps": torch.tensor([steps], dtype=torch.int64), **tensors}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of `state`. Raises CorruptData when the tensors belong to other parameters."""
        self.reset()
        tensors = dict(tensors)
        steps = int(tensors.pop("steps", torch.zeros(1)).item())
        names = {f"{name}.{key}" for name in self.parameters for key in MOMENTS}
        if tensors and set(tensors) != names:
            odd = ", ".join(sorted(set(tensors) ^ names)[:3])
            raise CorruptData(f"the optimiser state belongs to other weights ({odd}, ...); restore without it.")
        for name, parameter in self.parameters.items() if tensors else ():
            state = {key: tensors[f"{name}.{key}"] for key in MOMENTS}
            if any(value.shape != parameter.shape for value in state.values()):
                raise CorruptData(f"the optimiser state of {name} has another shape; restore without it.")
            moved = {key: value.to(parameter.device, parameter.dtype).clone() for key, value in state.items()}
            self._adam.state[parameter] = {"step": torch.tensor(float(steps)), **moved}

    def _fresh(self) -> torch.optim.AdamW:
        settings = self._settings
        return torch.optim.AdamW(
            list(self.parameters.values()),
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            weight_decay=settings.weight_decay,
        )
