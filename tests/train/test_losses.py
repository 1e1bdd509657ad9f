"""Values computed by hand from the formulas: lo = [-1, -2], lp = [-.9, -2.5], so r = [1.1051709, .6065307]."""

import numpy as np
import pytest
import torch

from honed.errors import Refused
from honed.model.tree import build
from honed.train.losses import cross_entropy, mismatch, policy_gradient, preference
from honed.train.pack import Packed
from honed.train.settings import TrainSettings

NEW = torch.tensor([-0.9, -2.5], dtype=torch.float64)
OLD = torch.tensor([-1.0, -2.0], dtype=torch.float64)
SAMPLED = torch.tensor([-1.2, -1.0], dtype=torch.float64)
DEFAULT = TrainSettings()


def packed(lp: torch.Tensor, owner: list[int] | None = None, pairs: list | None = None, **arrays: object) -> Packed:
    size = len(lp)
    owner = owner or [0] * size
    fields = {"advantages": None, "logprobs": None, "old_logprobs": None, "reference": None}
    weights = torch.full((size,), 1.0 / size, dtype=torch.float64)
    blank = torch.zeros(size, dtype=torch.int64)
    return Packed(
        tree=build([np.array([0])]),
        rows=blank,
        targets=blank,
        temperatures=torch.ones(size),
        owner=torch.tensor(owner),
        pairs=torch.tensor(pairs or [], dtype=torch.int64).reshape(-1, 2),
        num_samples=max(owner) + 1,
        **{**fields, "weights": weights, **arrays},
    )


def constant(value: float) -> torch.Tensor:
    return torch.full((2,), value, dtype=torch.float64)


@pytest.mark.parametrize(("advantage", "expected"), [(1.0, -0.8558508), (-1.0, 0.9525855)])
def test_clipped_ratio_mean(advantage: float, expected: float) -> None:
    loss, facts = policy_gradient(NEW, packed(NEW, advantages=constant(advantage), logprobs=OLD), DEFAULT)
    assert loss.item() == pytest.approx(expected, abs=1e-7)
    assert facts["clipped"] == (1 if advantage < 0 else 0)


def test_a_higher_upper_clip() -> None:
    """r = 1.25, A = 1: -1.2 with .2, -1.25 with .28."""
    lp = torch.tensor([np.log(1.25)], dtype=torch.float64)
    batch = packed(lp, advantages=torch.ones(1), logprobs=torch.zeros(1, dtype=torch.float64))
    assert policy_gradient(lp, batch, DEFAULT)[0].item() == pytest.approx(-1.2)
    assert policy_gradient(lp, batch, TrainSettings(clip_high=0.28))[0].item() == pytest.approx(-1.25)


def test_truncated_importance_sampling() -> None:
    """w = min(exp(old - sampled), 2) = [1.2214028, .3678794] on the clipped terms: mean -.7864945."""
    batch = packed(NEW, advantages=constant(1.0), logprobs=SAMPLED, old_logprobs=OLD)
    loss, facts = policy_gradient(NEW, batch, DEFAULT)
    assert loss.item() == pytest.approx(-0.7864945, abs=1e-7)
    assert facts["capped"] == 0
    capped, facts = policy_gradient(NEW, batch, TrainSettings(importance_cap=1.0))
    assert capped.item() == pytest.approx(-(1.1051709 * 1.0 + 0.6065307 * 0.3678794) / 2, abs=1e-7)
    assert facts["capped"] == 1


def test_k3_to_the_reference() -> None:
    """lp = -1, ref = -1.5: .1065307 a token."""
    lp = torch.tensor([-1.0], dtype=torch.float64)
    batch = packed(lp, advantages=torch.zeros(1), logprobs=lp, reference=torch.tensor([-1.5], dtype=torch.float64))
    loss, facts = policy_gradient(lp, batch, TrainSettings(kl=0.5))
    assert loss.item() == pytest.approx(0.5 * 0.1065307, abs=1e-7)
    assert facts["reference_k3"] == pytest.approx(0.1065307, abs=1e-7)


def test_on_policy_gradient_is_the_plain_policy_gradient() -> None:
    lp = NEW.clone().requires_grad_(True)
    advantages = torch.tensor([2.0, -3.0], dtype=torch.float64)
    policy_gradient(lp, packed(lp, advantages=advantages, logprobs=NEW), DEFAULT)[0].backward()
    assert lp.grad.tolist() == [-1.0, 1.5]


def test_clipped_tokens_have_no_gradient() -> None:
    lp = torch.tensor([0.5, -0.5], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, -1.0], dtype=torch.float64)
    batch = packed(lp, advantages=advantages, logprobs=torch.zeros(2, dtype=torch.float64))
    policy_gradient(lp, batch, DEFAULT)[0].backward()
    assert lp.grad.tolist() == [0.0, 0.0]


def test_an_absurd_gap_stays_finite() -> None:
    lp = torch.tensor([-1.0, -500.0], dtype=torch.float32, requires_grad=True)
    sampled = torch.tensor([-500.0, -1.0])
    batch = packed(lp, advantages=torch.tensor([-1.0, -1.0]), logprobs=sampled)
    loss, _ = policy_gradient(lp, batch, DEFAULT)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(lp.grad).all()


def test_cross_entropy() -> None:
    loss, facts = cross_entropy(NEW, packed(NEW), DEFAULT)
    assert loss.item() == pytest.approx(1.7)
    assert facts["nll"] == pytest.approx(3.4)


def test_preference() -> None:
    """beta .1, pi_c - pi_r = 2, ref_c - ref_r = .5: -log sigmoid(.15) = .6209570."""
    lp = torch.tensor([-1.0, -1.0, -3.0, -1.0], dtype=torch.float64)
    reference = torch.tensor([-1.0, -1.25, -2.0, -0.75], dtype=torch.float64)
    weights = torch.ones(4, dtype=torch.float64)
    batch = packed(lp, owner=[0, 0, 1, 1], pairs=[(0, 1)], reference=reference, weights=weights)
    loss, facts = preference(lp, batch, DEFAULT)
    assert loss.item() == pytest.approx(0.6209570, abs=1e-7)
    assert (facts["pairs"], facts["pairs_right"]) == (1, 1)
    halved = packed(lp, owner=[0, 0, 1, 1], pairs=[(0, 1)], reference=reference, weights=weights / 2)
    assert preference(lp, halved, DEFAULT)[0].item() == pytest.approx(0.6209570 / 2, abs=1e-7)


def test_mismatch() -> None:
    """R - 1 - log R = [.0051709, .1065307]; the gaps are .1 and .5."""
    facts = mismatch(NEW, OLD)
    assert facts["k3"] == pytest.approx(0.0051709 + 0.1065307, abs=1e-7)
    assert facts["gap"] == pytest.approx(0.6)
    assert facts["gap_max"] == pytest.approx(0.5)
    assert mismatch(NEW[:0], OLD[:0]) == {}


def test_a_loss_says_which_array_is_missing() -> None:
    with pytest.raises(Refused, match="no advantages"):
        policy_gradient(NEW, packed(NEW, logprobs=OLD), DEFAULT)
    with pytest.raises(Refused, match="no logprobs"):
        policy_gradient(NEW, packed(NEW, advantages=constant(1.0)), DEFAULT)
    with pytest.raises(Refused, match="no reference"):
        policy_gradient(NEW, packed(NEW, advantages=constant(1.0), logprobs=OLD), TrainSettings(kl=0.1))
    with pytest.raises(Refused, match="in pairs"):
        preference(NEW, packed(NEW, reference=OLD), DEFAULT)
