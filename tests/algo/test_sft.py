import msgspec
import pytest

from honed.algo.sft import Sft, SftSettings, from_ids
from honed.errors import Refused
from honed.types import Fault, Group

from .traces import group, trace, turn


def test_a_demonstration_without_logprobs_is_imitated_on_its_outputs() -> None:
    shown = trace("d", turn("a", (1, 2), (3, 4), logprobs=()), turn("b", (5,), (6, 7), "a", logprobs=()))
    (sample,) = Sft()([Group(id="g", task="", traces=(shown,))])
    assert sample.weights.tolist() == [0, 0, 0.25, 0.25, 0, 0.25, 0.25]
    assert sample.advantages is None
    assert sample.temperature == 1.0


def test_one_mean_over_all_tokens_of_the_batch() -> None:
    samples = Sft()([group([None, None])])
    assert [float(sample.weights.sum()) for sample in samples] == pytest.approx([0.4, 0.6])
    by_sequence = Sft(SftSettings(average="sequence"))([group([None, None])])
    assert [float(sample.weights.sum()) for sample in by_sequence] == pytest.approx([0.5, 0.5])


def test_a_message_counts_as_it_weighs() -> None:
    """Two tokens at weight 1, two at 3, two at 0: 1/8 and 3/8 a token; a trace that only reads teaches nothing."""
    said = [turn(id, (9,), (3, 4), parent, logprobs=()) for id, parent in (("a", None), ("b", "a"), ("c", "b"))]
    for index, weight in enumerate((1.0, 3.0, 0.0)):
        reply = msgspec.structs.replace(said[index].reply, weight=weight)
        said[index] = msgspec.structs.replace(said[index], reply=reply)
    shown = trace("d", *said)
    (sample,) = Sft().samples([shown])
    assert sample.weights.tolist() == [0, 0.125, 0.125, 0, 0.375, 0.375, 0, 0, 0]
    mute = trace("m", msgspec.structs.replace(said[2], parent=None))
    samples = Sft(SftSettings(average="sequence")).samples([shown, mute, *group([None]).traces])
    assert [float(each.weights.sum()) for each in samples] == pytest.approx([0.5, 0.5])


def test_faults_and_low_scores_are_not_imitated() -> None:
    faulty = trace("f", turn("f", (1,), (2,)), fault=Fault(boundary="engine", kind="x", message="m"))
    wanted = Sft(SftSettings(min_score=0.5)).samples([faulty, *group([1.0, 0.2, None]).traces])
    assert [sample.branch for sample in wanted] == ["u0", "u2"]


def test_text_only_is_refused_by_name() -> None:
    with pytest.raises(Refused, match="trace t9"):
        Sft().samples([trace("t9", turn("a", (), (), fidelity="text"))])


def test_nothing_gives_nothing() -> None:
    assert Sft()([]) == []


def test_tokenised_rows() -> None:
    samples = from_ids([([1, 2, 3], [False, True, True]), ([1, 2], [False, True])])
    assert samples[0].weights.tolist() == pytest.approx([0, 1 / 3, 1 / 3])
    assert samples[1].tokens.tolist() == [1, 2]
    with pytest.raises(Refused, match="row 0"):
        from_ids([([1, 2], [True, True])])
