import pytest

from honed.train.losses import compute, cross_entropy, mismatch
from honed.train.settings import TrainSettings

from .packs import NEW, OLD, constant, packed


def test_cross_entropy() -> None:
    loss, facts = cross_entropy(NEW, packed(NEW))
    assert loss.item() == pytest.approx(1.7)
    assert facts["nll"] == pytest.approx(3.4)


def test_mismatch() -> None:
    """R - 1 - log R = [.0051709, .1065307]; the gaps are .1 and .5."""
    facts = mismatch(NEW, OLD)
    assert facts["k3"] == pytest.approx(0.0051709 + 0.1065307, abs=1e-7)
    assert facts["gap"] == pytest.approx(0.6)
    assert facts["gap_max"] == pytest.approx(0.5)
    assert mismatch(NEW[:0], OLD[:0]) == {}


def test_each_name_is_its_loss() -> None:
    """[-.9, -2.5]: mean nll 1.7; PPO with A = 1 .8558508; a pair of equal gaps log 2."""
    settings, old = TrainSettings(), {"logprobs": OLD, "reference": OLD}
    batch = packed(NEW, owner=[0, 1], pairs=[(0, 1)], advantages=constant(1.0), **old)
    assert compute("cross_entropy", NEW, batch, settings)[0].item() == pytest.approx(1.7)
    assert compute("policy_gradient", NEW, batch, settings)[0].item() == pytest.approx(-0.8558508, abs=1e-7)
    assert compute("preference", OLD, batch, settings)[0].item() == pytest.approx(0.6931472 / 2, abs=1e-7)
