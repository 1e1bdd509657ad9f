"""Settings of the local engine."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from honed.config import Settings
from honed.types import Precision


class EngineSettings(Settings):
    """How much the local engine holds at once, and on what it runs. Sizes are in tokens."""

    slots: int = Field(default=32, ge=1, le=1024)
    """Requests that run at the same time; more wait."""
    capacity: int | None = Field(default=None, ge=16)
    """Tokens of keys and values held: what running requests may reach, plus what is kept for reuse. None: 32768, or
    what memory_gb has room for."""
    memory_gb: float | None = Field(default=None, gt=0)
    """The most that keys and values may take, in GB (1e9 bytes): takes the place of `capacity`, and where freed memory
    does not go back to the system, lowers `slots` to what fits. None: no limit but the sizes above."""
    context: int = Field(default=2048, ge=2)
    """Longest prompt + output; lowered to what the model was made for."""
    prefill_chunk: int = Field(default=256, ge=1)
    """Prompt tokens read per step beside the tokens being sampled."""
    threads: int = Field(default=0, ge=0)
    """Threads of a product; 0 = as many as there are cores."""
    device: str = "cpu"
    """Where the model runs: "cpu", "cuda", ..."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of the weights; auto = float32 on a CPU, bfloat16 elsewhere."""
    precision: Precision = "full"
    """Products in `dtype`, or in int8 on a CPU: weights a channel, activations a token, large channels kept in full."""
    deterministic: bool = False
    """Whether a request's tokens and log-probabilities are the same bits whatever runs beside it, however its prompt
    was read, and when they are asked for again: products and attention in tiles of a fixed size, at the price of speed.
    On one machine with one number of threads; not for mixtures of experts."""
    prefix: bool = True
    """Whether prompts that begin alike share the work."""
    stall_seconds: float = Field(default=60.0, gt=0)
    """An engine process that makes no progress for this long while there is work is killed, and a new one begins. More
    than the longest step; reading weights doesn't count."""

    @model_validator(mode="after")
    def _said(self) -> EngineSettings:
        if self.memory_gb is not None and self.capacity is not None:
            raise ValueError("capacity and memory_gb both say how many tokens are held; set one of them")
        if self.precision == "int8" and self.dtype not in ("auto", "float32"):
            raise ValueError(f"precision = 'int8' wants the rest in float32, not dtype = {self.dtype!r}; leave one out")
        return self
