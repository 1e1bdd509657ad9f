"""Rewards of a group to advantages. Each takes float64 [n >= 2] of valid rewards and returns float64 [n]; pure."""

from __future__ import annotations

import math

import numpy as np


def centred(rewards: np.ndarray) -> np.ndarray:
    """r - mean (Dr. GRPO, Liu et al. 2025, eq. 3): no division, so no group counts more for being nearly uniform."""
    return rewards - rewards.mean()


def standardised(rewards: np.ndarray, floor: float) -> np.ndarray:
    """(r - mean) / max(std, floor), std with ddof 1 (GRPO, Shao et al. 2024, section 4.1.2).

    The floor bounds what rounding residue or a nearly uniform group can become: |A| <= range / floor.
    """
    return centred(rewards) / max(float(rewards.std(ddof=1)), floor)


def leave_one_out(rewards: np.ndarray) -> np.ndarray:
    """r - mean of the others (RLOO, Ahmadian et al. 2024, section 3.1): centred times n / (n - 1)."""
    return centred(rewards) * (len(rewards) / (len(rewards) - 1))


def over_mean(rewards: np.ndarray) -> np.ndarray:
    """(r - mean) / mean (MaxRL, Tajwar et al. 2026): rare successes count by how rare they are; 0 where mean <= 0."""
    mean = float(rewards.mean())
    return centred(rewards) / mean if mean > 0 else np.zeros_like(rewards)


def whitened(values: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Advantages of a whole batch to mean 0 and variance 1 over tokens, `sizes` tokens each (REINFORCE++, Hu et al.
    2025, global normalisation): (A - mean) / sqrt(max(variance, 1e-8))."""
    mean = np.average(values, weights=sizes)
    variance = np.average((values - mean) ** 2, weights=sizes)
    return (values - mean) / math.sqrt(max(float(variance), 1e-8))


def overlong(length: int, start: int, limit: int) -> float:
    """What a reward loses for length: 0 up to `start` tokens, then linearly to 1 at `limit` and beyond (DAPO, Yu et al.
    2025, eq. 13)."""
    return min(max(length - start, 0) / (limit - start), 1.0)


def is_flat(rewards: np.ndarray, tolerance: float = 1e-9) -> bool:
    """Whether a group teaches nothing: all rewards equal up to rounding."""
    return float(rewards.max() - rewards.min()) <= tolerance * max(1.0, float(np.abs(rewards).max()))
