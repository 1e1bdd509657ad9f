from pathlib import Path

import pytest
from pydantic import Field, ValidationError, model_validator

from honed.config import Settings, parse, read_toml, recipe_digest
from honed.errors import ConfigError


class Rollout(Settings):
    num_attempts: int = Field(default=8, ge=2)
    """How many attempts at a task."""


class Whole(Settings):
    rollout: Rollout = Rollout()
    line: str
    num_steps: int = 4

    @model_validator(mode="after")
    def _steps(self) -> "Whole":
        if self.num_steps > 100:
            raise ValueError("num_steps and line do not fit.")
        return self


def test_a_field_has_its_docstring_as_description() -> None:
    assert Rollout.model_fields["num_attempts"].description == "How many attempts at a task."


def test_toml_is_read_and_parsed(tmp_path: Path) -> None:
    path = tmp_path / "honed.toml"
    path.write_text('line = "support"\n[rollout]\nnum_attempts = 4\n')
    assert parse(Whole, read_toml(path)) == Whole(line="support", rollout=Rollout(num_attempts=4))


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Rollout().num_attempts = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"line": "a", "num_step": 1}, "unknown key 'num_step' (did you mean 'num_steps'?)"),
        (
            {"line": "a", "rollout": {"num_attempt": 1}},
            "unknown key 'rollout.num_attempt' (did you mean 'num_attempts'?)",
        ),
        ({"line": "a", "zzz": 1}, "unknown key 'zzz' (known: line, num_steps, rollout)"),
        ({}, "'line' is missing"),
        ({"line": "a", "rollout": {"num_attempts": 1}}, "'rollout.num_attempts' = 1: Input should be"),
        ({"line": "a", "num_steps": "many"}, "'num_steps' = 'many': Input should be a valid integer"),
        ({"line": "a", "num_steps": 101}, "'the file': num_steps and line do not fit."),
    ],
)
def test_a_wrong_config_names_its_keys(data: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(Whole, data, source="honed.toml")
    assert str(caught.value).startswith("honed.toml: ")
    assert message in str(caught.value)
    assert not str(caught.value).endswith("..")


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(ConfigError, match=r"'x'.*'y'.*'line'|'line'.*'x'.*'y'"):
        parse(Whole, {"x": 1, "y": 2})


def test_files_that_are_missing_or_no_toml_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config file .*nothing\.toml"):
        read_toml(tmp_path / "nothing.toml")
    for content in (b"line = ", b"\xff\xfe"):
        (tmp_path / "bad.toml").write_bytes(content)
        with pytest.raises(ConfigError, match=r"bad\.toml is not TOML"):
            read_toml(tmp_path / "bad.toml")


def test_a_folder_instead_of_a_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_toml(tmp_path)


def test_the_recipe_digest_holds_the_defaults_too() -> None:
    assert recipe_digest(Whole(line="a")) == recipe_digest(Whole(line="a", num_steps=4))
    assert recipe_digest(Whole(line="a")) != recipe_digest(Whole(line="a", num_steps=5))
