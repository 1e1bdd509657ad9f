"""Values computed by hand from the formulas: lo = [-1, -2], lp = [-.9, -2.5], so r = [1.1051709, .6065307]."""

import numpy as np
import pytest
import torch

from honed.config import parse
from honed.errors import ConfigError, Refused
from honed.train.policy import policy_gradient
from honed.train.settings import PolicySettings

from .packs import NEW, OLD, SAMPLED, constant, packed

DEFAULT = PolicySettings()


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
    assert policy_gradient(lp, batch, PolicySettings(clip_high=0.28))[0].item() == pytest.approx(-1.25)


def test_truncated_importance_sampling() -> None:
    """w = min(exp(old - sampled), 2) = [1.2214028, .3678794] on the clipped terms: mean -.7864945."""
    batch = packed(NEW, advantages=constant(1.0), logprobs=SAMPLED, old_logprobs=OLD)
    loss, facts = policy_gradient(NEW, batch, DEFAULT)
    assert loss.item() == pytest.approx(-0.7864945, abs=1e-7)
    assert facts["corrected"] == 0
    capped, facts = policy_gradient(NEW, batch, PolicySettings(correction_high=1.0))
    assert capped.item() == pytest.approx(-(1.1051709 * 1.0 + 0.6065307 * 0.3678794) / 2, abs=1e-7)
    assert facts["corrected"] == 1


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


def test_dual_clip_bounds_what_one_token_loses() -> None:
    """r = [exp 3, .6065307], A = -1: min(r A, clip(r) A) = [-20.08, -.8]; with c = 3 the first is -3."""
    lp = torch.tensor([2.0, -2.5], dtype=torch.float64, requires_grad=True)
    batch = packed(lp, advantages=constant(-1.0), logprobs=OLD)
    assert policy_gradient(lp, batch, DEFAULT)[0].item() == pytest.approx((20.0855369 + 0.8) / 2, abs=1e-7)
    loss, facts = policy_gradient(lp, batch, PolicySettings(dual_clip=3.0))
    assert loss.item() == pytest.approx((3 + 0.8) / 2)
    assert facts["clipped"] == 2
    loss.backward()
    assert lp.grad.tolist() == [0.0, 0.0]
    gains = packed(lp, advantages=constant(1.0), logprobs=OLD)
    assert policy_gradient(lp, gains, PolicySettings(dual_clip=3.0))[0].item() == pytest.approx(-(1.2 + 0.6065307) / 2)


GSPO = PolicySettings(objective="gspo", clip_low=3e-4, clip_high=4e-4)


@pytest.mark.parametrize(("advantage", "expected"), [(1.0, -0.8187308), (-1.0, 0.9997)])
def test_a_sequence_has_one_ratio(advantage: float, expected: float) -> None:
    """s = exp((.1 - .5) / 2) = .8187308, clipped from below at .9997 where that lowers the gain."""
    batch = packed(NEW, advantages=constant(advantage), logprobs=OLD)
    assert policy_gradient(NEW, batch, GSPO)[0].item() == pytest.approx(expected, abs=1e-7)


def test_the_gradient_of_a_sequence_ratio() -> None:
    """d(-s A)/dlp_t = -s A / |o| for each of the two tokens; the other sequence's ratio is its own."""
    lp = torch.tensor([-0.9, -2.5, -1.0], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-1.0, -2.0, -1.0], dtype=torch.float64)
    weights = torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64)
    batch = packed(lp, owner=[0, 0, 1], advantages=torch.ones(3), logprobs=old, weights=weights)
    loss, _ = policy_gradient(lp, batch, GSPO)
    assert loss.item() == pytest.approx(-(0.8187308 + 1) / 2, abs=1e-7)
    loss.backward()
    assert lp.grad.tolist() == pytest.approx([-0.8187308 / 4, -0.8187308 / 4, -0.5], abs=1e-7)


@pytest.mark.parametrize(("low", "high", "expected"), [(1.0, 4.0, 1.2554903), (0.2, 0.2, 1.4973269)])
def test_clipped_ratios_as_weights(low: float, high: float, expected: float) -> None:
    """-clip(r) A lp: [.9946538, 1.5163266] within [0, 5]; within [.8, 1.2] the second is .8 x 2.5 = 2."""
    lp = NEW.clone().requires_grad_(True)
    batch = packed(lp, advantages=constant(1.0), logprobs=OLD)
    loss, _ = policy_gradient(lp, batch, PolicySettings(objective="cispo", clip_low=low, clip_high=high))
    assert loss.item() == pytest.approx(expected, abs=1e-7)
    loss.backward()
    assert lp.grad.tolist() == pytest.approx([-1.1051709 / 2, -max(0.6065307, 1 - low) / 2], abs=1e-7)


def test_icepop_drops_tokens_on_which_sampler_and_trainer_disagree() -> None:
    """w = [1.2214028, .3678794] within [.5, 5]: the second is dropped, the mean still over two: -.6749294."""
    settings = PolicySettings(correction="icepop", correction_low=0.5, correction_high=5.0)
    batch = packed(NEW, advantages=constant(1.0), logprobs=SAMPLED, old_logprobs=OLD)
    loss, facts = policy_gradient(NEW, batch, settings)
    assert loss.item() == pytest.approx(-0.6749294, abs=1e-7)
    assert facts["corrected"] == 1


def test_a_sequence_is_dropped_by_its_geometric_mean() -> None:
    """exp((.2 - 1) / 2) = .6703200: dropped outside [.999, 1.002]; within [.5, 2] each token keeps its own w."""
    batch = packed(NEW, advantages=constant(1.0), logprobs=SAMPLED, old_logprobs=OLD)
    strict = PolicySettings(correction="sequence_mask", correction_low=0.999, correction_high=1.002)
    loss, facts = policy_gradient(NEW, batch, strict)
    assert loss.item() == 0
    assert facts["corrected"] == 2
    wide = PolicySettings(correction="sequence_mask", correction_low=0.5, correction_high=2.0)
    expected = -(1.1051709 * 1.2214028 + 0.6065307 * 0.3678794) / 2
    assert policy_gradient(NEW, batch, wide)[0].item() == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize(("estimator", "expected"), [("k1", 0.5), ("k2", 0.125), ("k3", 0.1065307)])
def test_estimators_of_the_divergence(estimator: str, expected: float) -> None:
    """lp = -1, ref = -1.5."""
    lp = torch.tensor([-1.0], dtype=torch.float64)
    batch = packed(lp, advantages=torch.zeros(1), logprobs=lp, reference=torch.tensor([-1.5], dtype=torch.float64))
    settings = PolicySettings(kl=0.5, kl_estimator=estimator)
    assert policy_gradient(lp, batch, settings)[0].item() == pytest.approx(0.5 * expected, abs=1e-7)


@pytest.mark.parametrize(("estimator", "slope"), [("k1", 0.5), ("k2", 0.5), ("k3", 1 - 0.6065307)])
def test_every_estimator_pulls_towards_the_reference(estimator: str, slope: float) -> None:
    """lp - ref = .5 above the reference: k1 and k2 have the slope .5, k3 1 - exp(-.5); at it all have 0."""
    settings, none = PolicySettings(kl=1.0, kl_estimator=estimator), torch.zeros(1)
    for reference, expected in ((-1.5, slope), (-1.0, 0.0)):
        lp = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
        batch = packed(
            lp, advantages=none, logprobs=lp.detach(), reference=torch.tensor([reference], dtype=torch.float64)
        )
        policy_gradient(lp, batch, settings)[0].backward()
        assert lp.grad.item() == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"objective": "gspo"}, "clip_high = 0.2 clips nothing.*3e-4 and 4e-4"),
        ({"objective": "cispo", "clip_low": 1.0, "clip_high": 4.0, "dual_clip": 3.0}, "dual_clip belongs to"),
        ({"kl_estimator": "k1"}, "does nothing while kl = 0"),
        ({"correction_low": 0.5}, "does nothing with correction = 'truncate'"),
        ({"correction": "icepop"}, "needs 0 < correction_low < correction_high.*.5 and 5"),
        ({"correction": "sequence_mask", "correction_low": 2.0, "correction_high": 1.0}, ".999 and 1.002"),
    ],
)
def test_settings_that_contradict_are_refused(keys: dict, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse(PolicySettings, keys)


def test_a_loss_says_which_array_is_missing() -> None:
    with pytest.raises(Refused, match="no advantages"):
        policy_gradient(NEW, packed(NEW, logprobs=OLD), DEFAULT)
    with pytest.raises(Refused, match="no logprobs"):
        policy_gradient(NEW, packed(NEW, advantages=constant(1.0)), DEFAULT)
    with pytest.raises(Refused, match="no reference"):
        policy_gradient(NEW, packed(NEW, advantages=constant(1.0), logprobs=OLD), PolicySettings(kl=0.1))
