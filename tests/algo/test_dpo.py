import pytest

from honed.algo.dpo import Dpo, DpoSettings, pair_samples
from honed.errors import Refused

from .traces import group, trace, turn


def test_best_against_worst_each_in_one_pair() -> None:
    pairs = Dpo().pairs(group([0, 1, 0.2, 0.9, None]))
    assert [(chosen.id, rejected.id) for chosen, rejected in pairs] == [("t1", "t0"), ("t3", "t2")]


def test_too_small_a_gap_makes_no_pair() -> None:
    assert Dpo().pairs(group([1, 0.8])) == []
    assert len(Dpo(DpoSettings(min_gap=0.1)).pairs(group([1, 0.8]))) == 1
    assert len(Dpo(DpoSettings(max_pairs=1)).pairs(group([1, 1, 0, 0]))) == 1


def test_samples_come_in_named_sides_and_average_over_pairs() -> None:
    samples = Dpo()([group([1, 0]), group([0, 1])])
    assert [sample.pair for sample in samples] == ["0-t0:chosen", "0-t0:rejected", "1-t1:chosen", "1-t1:rejected"]
    assert samples[0].weights.tolist() == [0, 0, 0, 0.5, 0.5]
    assert Dpo().needs == {"reference"}
    assert Dpo(reference=False).needs == set()


def test_a_branched_side_is_refused() -> None:
    branched = trace("b", turn("a", (1,), (2,)), turn("b", (3,), (4,), "a"), turn("c", (5,), (6,), "a"))
    with pytest.raises(Refused, match="trace b has 2 branches"):
        pair_samples([(branched, group([0]).traces[0])])
