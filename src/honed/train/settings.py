"""What the trainer can be told: the optimiser, the three losses' constants, how much runs at once."""

from __future__ import annotations

from pydantic import Field

from honed.config import Settings


class TrainSettings(Settings):
    """Settings of a LocalTrainer. The learning rate comes with each step; the one here is for who gives none."""

    learning_rate: float = Field(default=1e-4, gt=0)
    """AdamW's rate where `step` is given none."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's decay of the mean gradient."""
    beta2: float = Field(default=0.99, ge=0, lt=1)
    """AdamW's decay of the mean squared gradient."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decoupled decay of the adapter's weights."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this norm."""
    clip_low: float = Field(default=0.2, ge=0, lt=1)
    """Policy gradient: the ratio is clipped below 1 - clip_low (PPO, eq. 7)."""
    clip_high: float = Field(default=0.2, ge=0)
    """Policy gradient: the ratio is clipped above 1 + clip_high (DAPO takes .28)."""
    importance_cap: float = Field(default=2.0, gt=0)
    """Policy gradient with old_logprobs: the cap C of the weight min(exp(old - sampled), C)."""
    kl: float = Field(default=0.0, ge=0)
    """Policy gradient: coefficient of the k3 estimate of the divergence from `reference`."""
    dpo_beta: float = Field(default=0.1, gt=0)
    """Preference: beta of DPO (eq. 7)."""
    micro_tokens: int = Field(default=1024, ge=1)
    """Tokens that run at once, shared prefixes counted once; a longer sample runs alone."""
    logit_rows: int = Field(default=256, ge=1)
    """Rows of [vocabulary] logits that exist at once."""
    threads: int = Field(default=0, ge=0)
    """CPU threads of a pass; 0 leaves torch's own number. The same weights bit for bit need the same number."""
    seed: int = 0
    """Seed of a fresh adapter's random half."""
