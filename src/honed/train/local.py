"""The trainer on this machine: one model in memory, its adapter or all of it trained in a thread of its own.

It knows three losses and nothing of algorithms; gradients of any number of passes add up until `step`. The same groups
and the same seed give the same weights bit for bit on one machine with one number of threads. What it does not do:
several devices, deciding what to train on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch

from honed.errors import Refused
from honed.log import log
from honed.model import lora
from honed.model.load import Loaded
from honed.model.threads import apart
from honed.model.tree_model import TreeModel
from honed.protocols import Channel, Loss, Scores, Snapshot, StepResult
from honed.train import passes, snapshots
from honed.train.optim import Optimiser
from honed.train.settings import TrainSettings
from honed.train.weights import AdapterWeights, FullWeights, Weights, copies
from honed.types import Sample

T = TypeVar("T")


class LocalTrainer:
    """Implements protocols.Trainer over `loaded`, whose model it owns from now on.

    `blobs` is the folder that snapshots go to, `channel` the way to the rollout engine beside it. Seconds in results
    are CPU seconds of the process, so nothing else should compute in it meanwhile. `config` is the adapter's, as PEFT's
    adapter_config.json has it; empty where all weights are trained.
    """

    def __init__(
        self,
        loaded: Loaded,
        adapter: lora.LoraSettings,
        settings: TrainSettings,
        blobs: Path,
        channel: Channel | None = None,
    ) -> None:
        self._settings, self._blobs, self._channel = settings, Path(blobs), channel
        full = settings.method == "full"
        self._weights: Weights = FullWeights(loaded) if full else AdapterWeights(loaded, adapter, settings.seed)
        self.config, self.kind = self._weights.config, self._weights.kind
        self._model = TreeModel(self._weights.causal)
        if settings.checkpoint:
            self._model.checkpoint()
        on_gpu = not self._model.device.startswith("cpu")
        if full and (settings.autocast == "bfloat16" or (settings.autocast == "auto" and on_gpu)):
            self._model.autocast = torch.bfloat16
        self._parameters = self._weights.parameters
        self._is_fresh = True
        self._optimiser = Optimiser(self._parameters, settings)
        self._waste = ""
        self._thread = ThreadPoolExecutor(1, "trainer")

    async def forward_backward(self, samples: Sequence[Sample], loss: Loss) -> StepResult:
        """Adds the gradient of `loss` over `samples`. Skipped, with the reason, when it would teach nothing.

        Raises Refused for malformed samples and for samples that lack what the loss needs.
        """
        return await self._run(lambda: self._forward_backward(samples, loss))

    async def step(self, learning_rate: float | None = None) -> StepResult:
        """One AdamW step over what has been accumulated, which is gone afterwards, applied or skipped."""
        return await self._run(lambda: self._step(learning_rate))

    async def logprobs(self, samples: Sequence[Sample]) -> list[Scores]:
        """Per sample the log-probability of each token, at its temperature; position 0 is 0.0."""
        return await self._run(lambda: passes.logprobs(self._model, samples, self._settings))

    async def snapshot(self, name: str) -> Snapshot:
        """Writes the weights and the optimiser's state as the folder `name`; idempotent by content."""
        return await self._run(
            lambda: snapshots.write(self._blobs, name, self._weights.write, self._optimiser.state(), self.kind)
        )

    async def restore(self, snapshot: Snapshot | None, *, optimiser: bool = True) -> None:
        """Takes a snapshot's weights (None: those of the beginning) and optimiser state (False: a fresh one).

        Verified before anything is touched; raises CorruptData, Refused for an adapter where all weights are trained
        and the other way round. Accumulated gradients are dropped.
        """
        await self._run(lambda: self._restore(snapshot, optimiser))

    async def publish(self, version: str) -> None:
        """Hands a copy of the current weights to the channel under this version's name."""
        if self._channel is None:
            raise Refused(f"there is no channel to publish {version!r} through; give the trainer one.")
        tensors = await self._run(lambda: copies(self._weights.tensors()))
        await self._channel.publish(version, tensors)

    async def close(self) -> None:
        """Waits for the running pass and stops the thread."""
        await asyncio.to_thread(self._thread.shutdown, wait=True, cancel_futures=True)

    async def _run(self, work: Callable[[], T]) -> T:
        """One at a time, each on a thread of its own: between them all cores are the engine's."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._alone, work)

    @apart
    def _alone(self, work: Callable[[], T]) -> T:
        if self._settings.threads:  # OpenMP keeps the number for each calling thread
            torch.set_num_threads(self._settings.threads)
        return work()

    def _forward_backward(self, samples: Sequence[Sample], loss: Loss) -> StepResult:
        try:
            result = passes.forward_backward(self._model, samples, loss, self._settings)
        except Exception as error:  # the boundary of a pass: half of its gradient may be there, so no step may use it
            self._waste = f"a pass failed: {error}"
            raise
        if result.skipped and result.skipped != passes.NOTHING:
            self._waste = result.skipped
        if result.skipped:
            log("train.skipped", reason=result.skipped, samples=len(samples), loss=loss)
        return result

    def _step(self, learning_rate: float | None) -> StepResult:
        started = time.process_time()
        waste, self._waste = self._waste, ""
        if waste:
            self._optimiser.clear()
            return StepResult(skipped=waste)
        norm, skipped = self._optimiser.step(self._settings.learning_rate if learning_rate is None else learning_rate)
        self._is_fresh = self._is_fresh and bool(skipped)
        if skipped:
            log("train.skipped", reason=skipped)
        return StepResult(grad_norm=norm, skipped=skipped, seconds=time.process_time() - started)

    def _restore(self, snapshot: Snapshot | None, optimiser: bool) -> None:
        state = None
        if snapshot is not None:
            self._refuse_another_kind(snapshot)
            tensors = self._weights.read(snapshot)
            state = snapshots.read_optimiser(snapshot) if optimiser else None
        else:
            tensors = {} if self._is_fresh else self._weights.fresh()
        if state is not None:
            self._optimiser.load(state)  # refuses a foreign state before the weights change
        else:
            self._optimiser.reset()
        self._waste = ""
        self._is_fresh = snapshot is None
        with torch.no_grad():
            for name, tensor in tensors.items():
                self._parameters[name].copy_(tensor)

    def _refuse_another_kind(self, snapshot: Snapshot) -> None:
        if snapshot.kind == self.kind:
            return
        method = self._settings.method
        raise Refused(
            f"{snapshot.uri} is {_KINDS[snapshot.kind]}, and train.method = {method!r} goes on from "
            f"{_KINDS[self.kind]}: set train.method to what it was made by, or start a new line with model.source = "
            f"{'its folder' if snapshot.kind == 'full' else 'a merged copy of it (honed versions merge)'}."
        )


_KINDS = {"adapter": "an adapter", "full": "a whole model"}
