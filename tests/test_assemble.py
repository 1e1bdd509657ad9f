"""The composition root: one file becomes objects, and what is wrong with the file is said by its keys."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from algo.traces import group

import honed
from honed import __version__
from honed.algo.dpo import Dpo
from honed.algo.grpo import Grpo
from honed.assemble import Config, build_loop, given_lessons, load_config, open_store, recipe, verify_version
from honed.assemble.config import check
from honed.assemble.loop import environment, source_digest, suite_tasks
from honed.assemble.practice import flat_by, practice_phase
from honed.errors import ConfigError, CorruptData, Refused
from honed.testing import FakeEnvironment, fake_task
from honed.types import Version

PLUGINS = """
from honed.testing import fake_task, make_fake_task, FakeEnvironment
from honed.types import Message

def sealed():
    return [fake_task(f"refund sealed {i}", suite="refunds", split="holdout") for i in range(3)]

def open_tasks():
    return [fake_task("refund open", split="train")]

def lessons():
    right = [Message(role="assistant", content="right")]
    return [fake_task("refund one", split="train"), (fake_task("refund two", split="train"), right)]

def nothing():
    return []

maker = make_fake_task
place = FakeEnvironment()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with plug-ins under a name of its own, so that no other test's are taken."""
    (tmp_path / f"plugs_{tmp_path.name}.py").write_text(PLUGINS)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def write(folder: Path, text: str) -> Path:
    path = folder / "honed.toml"
    path.write_text(text.replace("PLUGS", f"plugs_{folder.name}"))
    return path


SCRIPTED = """
[model]
source = "scripted"
line = "support"
[store]
root = "kept"
[curate]
maker = "PLUGS:maker"
[tasks]
suites = ["PLUGS:sealed"]
"""


def test_paths_are_relative_to_the_file_and_its_folder_is_importable(folder: Path) -> None:
    config = load_config(write(folder, SCRIPTED + '[prices]\nbook = "book.toml"\n'))
    assert Path(config.store.root) == folder / "kept"
    assert config.prices.book == str(folder / "book.toml")
    assert str(folder) in sys.path
    assert Config().model.source == "smollm2"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[lern]\nsteps = 1", "unknown key 'lern' (did you mean 'learn'?)"),
        ("[learn]\nstep = 1", "unknown key 'learn.step' (did you mean 'steps'?)"),
        ("[learn]\ngroup_size = 1", "learn.group_size"),
        ("[learn]\ngroups_per_step = 500", "learn.groups_per_step"),
        ("[sft]\nbatch_size = 5000", "sft.batch_size"),
        ("[rollout]\ntemperature = 0.0", "rollout.temperature"),
        ("[rollout]\ntop_p = 0.9", "rollout.top_p"),
        ('[curate]\nmaker = "no_such_module:maker"', "no_such_module"),
        ("[learn", "is not TOML"),
    ],
)
def test_a_wrong_file_is_refused_by_its_keys(folder: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(folder, text))
    assert message in str(caught.value)


def test_the_loop_is_joined_without_a_model(folder: Path) -> None:
    config = load_config(write(folder, SCRIPTED))
    loop = build_loop(config)
    assert loop.line == "support"
    assert loop.base == "scripted"
    assert loop.recipe == recipe(config)
    assert loop.maker is not None
    assert len(loop.store.tasks.list(split="holdout", suite="refunds")) == 3
    assert loop.drain is not None
    assert loop.drain() == 0
    assert len(build_loop(config).store.tasks.list()) == 3


def test_a_loops_manifest_holds_the_config_and_the_code(folder: Path) -> None:
    config = load_config(write(folder, SCRIPTED))
    manifest = build_loop(config).manifest
    assert manifest["config"] == config.model_dump(mode="json")
    assert manifest["code"] == {"version": __version__, "digest": source_digest(Path(honed.__file__).parent)}


def test_the_codes_digest_follows_every_source_file_and_its_name(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "one.py").write_text("a = 1")
    (tmp_path / "deep" / "two.py").write_text("b = 2")
    first = source_digest(tmp_path)
    (tmp_path / "notes.txt").write_text("not code")
    (tmp_path / "one.pyc").write_bytes(b"compiled")
    assert source_digest(tmp_path) == first
    (tmp_path / "deep" / "two.py").write_text("b = 3")
    changed = source_digest(tmp_path)
    (tmp_path / "deep" / "two.py").rename(tmp_path / "deep" / "three.py")
    assert len({first, changed, source_digest(tmp_path)}) == 3


def test_a_suite_of_tasks_to_learn_from_is_refused(folder: Path) -> None:
    config = load_config(write(folder, SCRIPTED.replace("PLUGS:sealed", "PLUGS:open_tasks")))
    with pytest.raises(ConfigError, match="1 tasks of split train"):
        suite_tasks(config)


def test_a_recipe_is_what_decides_learning_and_nothing_else(folder: Path) -> None:
    one = load_config(write(folder, SCRIPTED))
    assert recipe(one) == recipe(load_config(write(folder, SCRIPTED + "[capture]\nmin_failures = 99\n")))
    assert recipe(one) != recipe(load_config(write(folder, SCRIPTED + "[grpo]\nlearning_rate = 0.5\n")))


def test_lessons_are_tasks_with_or_without_what_solves_them(folder: Path) -> None:
    config = load_config(write(folder, SCRIPTED))
    given = given_lessons(config, build_loop(config), f"plugs_{folder.name}:lessons")
    assert [task.prompt[0].content for task in given.tasks] == ["refund one", "refund two"]
    (shown,) = given.demonstrations
    assert shown.task == given.tasks[1].id
    assert shown.turns[0].output == (*b"right", 257)
    with pytest.raises(Refused, match="yields no lessons"):
        given_lessons(config, build_loop(config), f"plugs_{folder.name}:nothing")


def test_environments_are_made_once_by_name(folder: Path) -> None:
    load_config(write(folder, SCRIPTED))
    assert environment("honed.testing:FakeEnvironment") is environment("honed.testing:FakeEnvironment")
    assert isinstance(environment(f"plugs_{folder.name}:place"), FakeEnvironment)


def test_algorithms_by_name() -> None:
    assert isinstance(practice_phase(Config()).algorithm, Grpo)
    pairs = practice_phase(Config.model_validate({"learner": {"algorithm": "dpo"}, "dpo": {"learning_rate": 3e-5}}))
    assert isinstance(pairs.algorithm, Dpo)
    assert pairs.learning_rate == 3e-5
    with pytest.raises(ConfigError, match="Did you mean 'grpo'"):
        practice_phase(Config.model_validate({"learner": {"algorithm": "gpro"}}))


def test_a_group_of_one_is_refused_only_where_attempts_are_compared() -> None:
    alone = {"learn": {"group_size": 1}}
    with pytest.raises(ConfigError, match="a group of one"):
        check(Config.model_validate(alone))
    teachers = {"distill": {"teachers": {"*": "m@1"}}, "learner": {"algorithm": "distill"}}
    check(Config.model_validate({**alone, **teachers}))


def test_which_groups_are_waste_is_the_algorithms_to_say() -> None:
    """All right and unequally long: flat for plain GRPO, not where length costs, never for distillation."""
    alike = group([1, 1, 1, 1])
    length = {"grpo": {"overlong_start": 2, "overlong_limit": 4}}
    teachers = {"distill": {"teachers": {"*": "m@1"}}, "learner": {"algorithm": "distill"}}
    assert [flat_by(Config.model_validate(keys))(alike) for keys in ({}, length, teachers)] == [True, False, False]
    assert not flat_by(Config())(group([1, 0]))


@pytest.mark.parametrize(
    ("sections", "needs"),
    [
        ({}, set()),
        ({"grpo": {"anchor": "trainer"}}, {"old_logprobs"}),
        ({"train": {"policy": {"kl": 0.1}}}, {"reference"}),
        ({"learner": {"algorithm": "dpo"}}, {"reference"}),
        ({"learner": {"algorithm": "distill"}}, {"teacher"}),
        ({"learner": {"algorithm": "dpo"}, "train": {"preference": {"kind": "simpo", "beta": 2.0}}}, set()),
    ],
)
def test_the_loss_decides_what_an_algorithm_needs(sections: dict, needs: set) -> None:
    assert practice_phase(Config.model_validate(sections)).algorithm.needs == needs


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        (
            {"train": {"policy": {"objective": "gspo", "clip_low": 3e-4, "clip_high": 4e-4}}},
            r"grpo\.average = 'sequence'",
        ),
        (
            {"train": {"policy": {"correction": "icepop", "correction_low": 0.5, "correction_high": 5.0}}},
            r"Set grpo\.anchor = 'trainer'",
        ),
        ({"train": {"policy": {"kl": 0.1}}, "learner": {"algorithm": "dpo"}}, r"\[train\.policy\] is read by"),
        ({"train": {"preference": {"kind": "ipo"}}}, r"\[train\.preference\] is read by"),
        ({"learner": {"algorithm": "distill"}}, r"without distill\.teachers: nobody teaches"),
        (
            {
                "learner": {"algorithm": "distill"},
                "distill": {"teachers": {"*": "m@1"}},
                "train": {"policy": {"kl": 0.1}},
            },
            "the teacher is the reference",
        ),
        (
            {
                "learner": {"algorithm": "distill"},
                "distill": {"teachers": {"*": "m@1"}},
                "train": {"policy": {"objective": "gspo", "clip_low": 3e-4, "clip_high": 4e-4}},
            },
            "a ratio of whole sequences has no place",
        ),
        ({"train": {"policy": {"correction_high": 3.0}}}, r"Set grpo\.anchor = 'trainer'"),
        ({"rollout": {"precision": "int8"}}, r"weighs each token by how far the two differ"),
        (
            {"engine": {"precision": "int8"}, "grpo": {"anchor": "trainer"}, "train": {"policy": {"kl": 0.1}}},
            r"train\.policy\.kl with engine\.precision = 'int8'",
        ),
        (
            {"engine": {"precision": "int8"}, "learner": {"algorithm": "dpo"}},
            r"train\.preference\.kind = 'dpo' with engine\.precision = 'int8'",
        ),
        (
            {
                "rollout": {"precision": "int8"},
                "learner": {"algorithm": "distill"},
                "distill": {"teachers": {"*": "m@1"}},
            },
            "which int8 blurs",
        ),
        ({"train": {"method": "full"}, "lora": {"rank": 8}}, r"\[lora\] does nothing with train\.method = 'full'"),
        ({"learner": {"algorithm": "dpo"}, "grpo": {"scale": "std"}}, r"\[grpo\] is read by"),
        ({"distill": {"teachers": {"*": "m@1"}}}, r"\[distill\] is read by"),
        (
            {"sft": {"batch_size": 64, "passes": 5}, "curate": {"max_demonstrations": 24, "replay": 64}},
            r"spread over sft\.passes = 5",
        ),
    ],
)
def test_what_cannot_work_together_is_refused(sections: dict, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check(Config.model_validate(sections))


def test_practice_in_int8_is_corrected_for_and_asked_for() -> None:
    config = Config.model_validate({"rollout": {"precision": "int8"}, "grpo": {"anchor": "trainer"}})
    check(config)
    assert config.rollout.sampling(1).precision == "int8"
    assert Config().rollout.sampling(1).precision == ""


def test_a_version_without_whole_files_is_not_released(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"half")
    with pytest.raises(CorruptData, match="half-written"):
        verify_version(Version(line="m", number=1, uri=str(tmp_path), digest="d"))


def test_blobs_on_a_bucket_are_refused_for_learning_here(folder: Path) -> None:
    text = SCRIPTED.replace('root = "kept"', 'root = "kept"\nblobs = "memory://bucket"')
    with pytest.raises(ConfigError, match=r"store\.blobs"):
        build_loop(load_config(write(folder, text)))


def test_the_store_lies_under_the_root(folder: Path) -> None:
    config = load_config(write(folder, SCRIPTED))
    open_store(config).tasks.put([fake_task("refund 1")])
    assert (folder / "kept" / "honed.db").exists()
