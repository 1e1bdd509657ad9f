"""Rewards of a group to advantages. Each takes float64 [n >= 2] of valid rewards and returns float64 [n]; pure."""

from __future__ import annotations

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


def is_flat(rewards: np.ndarray, tolerance: float = 1e-9) -> bool:
    """Whether a group teaches nothing: all rewards equal up to rounding."""
    return float(rewards.max() - rewards.min()) <= tolerance * max(1.0, float(np.abs(rewards).max()))
