"""What the trainer can be told: the optimiser, the losses' constants, how much runs at once."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from honed.config import Settings


class PolicySettings(Settings):
    """[train.policy]: the policy-gradient loss. What each paper sets is in docs/algorithms.md."""

    objective: Literal["ppo", "gspo", "cispo"] = "ppo"
    """Clipped ratios of tokens (PPO), clipped ratios of whole sequences (GSPO), or clipped ratios as plain weights of
    the log-probabilities (CISPO)."""
    clip_low: float = Field(default=0.2, ge=0, le=1)
    """Ratios are clipped below 1 - clip_low (gspo takes 3e-4, cispo 1)."""
    clip_high: float = Field(default=0.2, ge=0)
    """Ratios are clipped above 1 + clip_high (DAPO takes .28, gspo 4e-4, cispo 4)."""
    dual_clip: float | None = Field(default=None, gt=1)
    """With ppo: a token of negative advantage A loses at most dual_clip |A|, however large its ratio."""
    correction: Literal["truncate", "icepop", "sequence_mask"] = "truncate"
    """Where the trainer's own log-probabilities are the anchor, how a token is weighted by w = exp(old - sampled), the
    sampler's error: min(w, high); w where low <= w <= high and 0 elsewhere; or w where the geometric mean of its
    sequence's w lies within, 0 for the whole sequence elsewhere."""
    correction_low: float = Field(default=0.0, ge=0)
    """The lower bound of icepop (.5) and sequence_mask (.999)."""
    correction_high: float = Field(default=2.0, gt=0)
    """The upper bound of every correction (icepop takes 5, sequence_mask 1.002)."""
    kl: float = Field(default=0.0, ge=0)
    """Coefficient of the divergence from the version that the turn began with."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """lp - ref, (lp - ref)^2 / 2, or exp(ref - lp) - 1 - (ref - lp)."""

    @model_validator(mode="after")
    def _said(self) -> PolicySettings:
        if self.objective == "gspo" and max(self.clip_low, self.clip_high) > 0.05:
            raise ValueError(
                f"objective = 'gspo' with clip_low = {self.clip_low} and clip_high = {self.clip_high} clips nothing: "
                "ratios of whole sequences stay near 1. Its paper takes 3e-4 and 4e-4"
            )
        if self.objective != "ppo" and self.dual_clip is not None:
            raise ValueError(f"dual_clip belongs to objective = 'ppo', not {self.objective!r}; leave it out")
        if self.kl == 0 and self.kl_estimator != "k3":
            raise ValueError(f"kl_estimator = {self.kl_estimator!r} does nothing while kl = 0; set kl or leave it out")
        if self.correction == "truncate" and self.correction_low:
            raise ValueError("correction_low does nothing with correction = 'truncate'; leave it out")
        if self.correction != "truncate" and not 0 < self.correction_low < self.correction_high:
            usual = {"icepop": ".5 and 5", "sequence_mask": ".999 and 1.002"}[self.correction]
            raise ValueError(
                f"correction = {self.correction!r} needs 0 < correction_low < correction_high; its users take {usual}"
            )
        return self


class PreferenceSettings(Settings):
    """[train.preference]: the loss over pairs."""

    kind: Literal["dpo", "ipo", "simpo"] = "dpo"
    """DPO (Rafailov et al. 2023), IPO (Azar et al. 2024), or SimPO (Meng et al. 2024), which needs no reference."""
    beta: float = Field(default=0.1, gt=0)
    """How sharply a margin counts; for ipo the strength of the pull to the reference. simpo wants 2 to 2.5."""
    margin: float = Field(default=0.0, ge=0)
    """With simpo: gamma, how much better than the rejected side the chosen one must be (1 beside beta = 2)."""

    @model_validator(mode="after")
    def _said(self) -> PreferenceSettings:
        if self.kind != "simpo" and self.margin:
            raise ValueError(f"margin belongs to kind = 'simpo', not {self.kind!r}; leave it out")
        return self


class TrainSettings(Settings):
    """Settings of a LocalTrainer. The learning rate comes with each step; the one here is for who gives none."""

    method: Literal["lora", "full"] = "lora"
    """Whether a LoRA adapter learns (see [lora]) or every weight of the model: full versions, as large as the model,
    with twice that in optimiser state, and a learning rate that is usually a tenth to a hundredth of LoRA's."""
    autocast: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of the layers' products where every weight learns (weights and optimiser are in float32); auto =
    bfloat16 on a GPU, float32 on a CPU."""
    learning_rate: float = Field(default=1e-4, gt=0)
    """AdamW's rate where `step` is given none."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's decay of the mean gradient."""
    beta2: float = Field(default=0.99, ge=0, lt=1)
    """AdamW's decay of the mean squared gradient."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decoupled decay of the trained weights."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this norm."""
    policy: PolicySettings = PolicySettings()
    """[train.policy]: the policy-gradient loss."""
    preference: PreferenceSettings = PreferenceSettings()
    """[train.preference]: the preference loss."""
    micro_tokens: int = Field(default=1024, ge=1)
    """Tokens that run at once, shared prefixes counted once; a longer sample runs alone."""
    checkpoint: bool = False
    """Keep only each layer's input for the backward pass and compute the rest again: a third more time, much less
    memory; the gradient is the same."""
    logit_rows: int = Field(default=256, ge=1)
    """Rows of [vocabulary] logits that exist at once."""
    threads: int = Field(default=0, ge=0)
    """CPU threads of a pass; 0 leaves torch's own number. The same weights bit for bit need the same number."""
    seed: int = 0
    """Seed of a fresh adapter's random half."""

    @model_validator(mode="after")
    def _said(self) -> TrainSettings:
        if self.autocast != "auto" and self.method != "full":
            raise ValueError(f"autocast = {self.autocast!r} does nothing with method = {self.method!r}; leave it out")
        return self
