import pytest
import torch

from honed.config import parse
from honed.errors import ConfigError, Refused
from honed.train.preference import preference
from honed.train.settings import PreferenceSettings

from .packs import NEW, OLD, packed

DPO = PreferenceSettings()


def test_dpo() -> None:
    """beta .1, pi_c - pi_r = 2, ref_c - ref_r = .5: -log sigmoid(.15) = .6209570."""
    lp = torch.tensor([-1.0, -1.0, -3.0, -1.0], dtype=torch.float64)
    reference = torch.tensor([-1.0, -1.25, -2.0, -0.75], dtype=torch.float64)
    weights = torch.ones(4, dtype=torch.float64)
    batch = packed(lp, owner=[0, 0, 1, 1], pairs=[(0, 1)], reference=reference, weights=weights)
    loss, facts = preference(lp, batch, DPO)
    assert loss.item() == pytest.approx(0.6209570, abs=1e-7)
    assert (facts["pairs"], facts["pairs_right"]) == (1, 1)
    halved = packed(lp, owner=[0, 0, 1, 1], pairs=[(0, 1)], reference=reference, weights=weights / 2)
    assert preference(lp, halved, DPO)[0].item() == pytest.approx(0.6209570 / 2, abs=1e-7)


def test_ipo() -> None:
    """h = 2 - .5 = 1.5, 1 / (2 x .1) = 5: (1.5 - 5)^2 = 12.25."""
    lp = torch.tensor([-1.0, -1.0, -3.0, -1.0], dtype=torch.float64)
    reference = torch.tensor([-1.0, -1.25, -2.0, -0.75], dtype=torch.float64)
    weights = torch.ones(4, dtype=torch.float64)
    batch = packed(lp, owner=[0, 0, 1, 1], pairs=[(0, 1)], reference=reference, weights=weights)
    assert preference(lp, batch, PreferenceSettings(kind="ipo"))[0].item() == pytest.approx(12.25)


def test_simpo_takes_means_and_no_reference() -> None:
    """Means -1 and -2 over two tokens and one: 2 (-1 + 2) - 1 = 1, -log sigmoid(1) = .3132617."""
    lp = torch.tensor([-0.5, -1.5, -2.0], dtype=torch.float64)
    batch = packed(lp, owner=[0, 0, 1], pairs=[(0, 1)], weights=torch.ones(3, dtype=torch.float64))
    settings = PreferenceSettings(kind="simpo", beta=2.0, margin=1.0)
    assert preference(lp, batch, settings)[0].item() == pytest.approx(0.3132617, abs=1e-7)


def test_what_is_missing_or_contradicts_is_refused() -> None:
    with pytest.raises(Refused, match="in pairs"):
        preference(NEW, packed(NEW, reference=OLD), DPO)
    with pytest.raises(Refused, match="no reference"):
        preference(NEW, packed(NEW, owner=[0, 1], pairs=[(0, 1)]), DPO)
    with pytest.raises(ConfigError, match="margin belongs to kind = 'simpo'"):
        parse(PreferenceSettings, {"margin": 1.0})
