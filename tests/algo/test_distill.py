import msgspec
import numpy as np
import pytest

from honed.algo.distill import Distill, DistillSettings
from honed.errors import Refused
from honed.protocols import Algorithm, Distillation
from honed.types import Fault, Group, Sampling

from .traces import group, trace, turn

TEACHERS = DistillSettings(teachers={"refund": "support@3", "*": "support@2"})


def test_an_advantage_is_what_the_teacher_would_rather_have_said() -> None:
    """Sampled at -.5 a token; the teacher says -.2 and -1.5: advantages .3 and -1, twice that at strength 2."""
    one = Group(id="g", task="t", traces=(trace("a", turn("a", (1, 2), (3, 4)), reward=1.0),))
    (sample,) = Distill()([one])
    assert sample.advantages is None
    taught = msgspec.structs.replace(sample, reference=np.array([0, -9, -0.2, -1.5], np.float32))
    (done,) = Distill().complete([taught])
    assert done.advantages.tolist() == pytest.approx([0, 0, 0.3, -1.0])
    assert done.weights.tolist() == [0, 0, 0.5, 0.5]
    assert done.reference is None
    (twice,) = Distill(DistillSettings(strength=2.0)).complete([taught])
    assert twice.advantages.tolist() == pytest.approx([0, 0, 0.6, -2.0])


def test_attempts_teach_whatever_they_scored_and_faults_do_not() -> None:
    faulty = trace("f", turn("f", (1,), (2,)), fault=Fault(boundary="tool", kind="x", message="m"))
    mixed = Group(id="g", task="t", traces=(*group([0, 0, None]).traces, faulty))
    samples = Distill()([mixed])
    assert [sample.branch for sample in samples] == ["u0", "u1", "u2"]
    assert sum(float(sample.weights.sum()) for sample in samples) == pytest.approx(1.0)


def test_teachers_are_named_by_kind() -> None:
    assert [Distill(TEACHERS).teacher(kind) for kind in ("refund", "cancel", "")] == [
        "support@3", "support@2", "support@2",
    ]  # fmt: skip
    with pytest.raises(Refused, match="no version teaches tasks of kind 'cancel'"):
        Distill(DistillSettings(teachers={"refund": "support@3"})).teacher("cancel")


def test_what_the_policy_did_not_sample_is_refused() -> None:
    greedy = trace("t9", turn("x", (1,), (2,), sampling=Sampling(temperature=0.0)))
    with pytest.raises(Refused, match="t9"):
        Distill()([Group(id="g", task="t", traces=(greedy,))])


def test_it_is_an_algorithm_with_teachers() -> None:
    assert isinstance(Distill(), Algorithm)
    assert isinstance(Distill(), Distillation)
    assert Distill().needs == {"teacher"}
