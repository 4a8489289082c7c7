"""ALFWorld engine: equality with the stock engine, progress, expert, tasks."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("alfworld", reason="the alfworld extra is not installed")

from envs.alfworld.engine import Alfworld, make
from envs.alfworld.progress import GoalChecks, parse
from envs.alfworld.tasks import KINDS, game_path, list_tasks
from envs.household import solve
from envs.household.generate import _draw_all, generate
from envs.household.problem import STATIONS
from envs.protocol import task_list_hash

# The stock engine, untouched, in a process of its own: replays actions, prints what it says.
STOCK = """
import json, os, sys
real = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
import textworld
from textworld.envs import PddlEnv
from alfworld.agents.environment.alfred_tw_env import AlfredDemangler, AlfredInfos
infos = textworld.EnvInfos(won=True, admissible_commands=True)
env = AlfredInfos(AlfredDemangler(PddlEnv(infos), shuffle=False))
for path, actions in json.load(sys.stdin):
    env.load(path)
    state = env.reset()
    said = [[state["feedback"], state["admissible_commands"], 0, False]]
    for action in actions:
        state, score, done = env.step(action)
        said.append([state["feedback"], state["admissible_commands"], score, bool(state["won"])])
    print(json.dumps(said), file=real, flush=True)
"""


@pytest.fixture(scope="session")
def games(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("household")
    generate(out, "train", 12, seed=3, receptacles=6, distractors=6)
    return out


@pytest.fixture(scope="session")
def env(games: Path) -> Alfworld:
    return make({"data": str(games)})


def transcript(env: Alfworld, task: str, actions: list[str] | None, seed: int, steps: int):
    """Play `actions`, or random ones with some invalid; returns the actions and what was said."""
    rng = random.Random(seed)
    seen = env.reset(task)
    played, said = [], [[seen.text, seen.info.admissible, 0, False]]
    for index in range(steps if actions is None else len(actions)):
        if actions is not None:
            action = actions[index]
        elif rng.random() < 0.1:
            action = rng.choice(["", "fly", "go to moon 1", "take mug 1", "{o}", "#task#"])
        else:
            action = rng.choice(seen.info.admissible)
        played.append(action)
        seen = env.step(action)
        said.append([seen.text, seen.info.admissible, seen.reward, seen.info.success])
        if seen.done:
            break
    return played, said


def stock_transcripts(cases: list[tuple[str, list[str]]]) -> list[list[list[object]]]:
    done = subprocess.run(
        [sys.executable, "-c", STOCK],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_transcripts_equal_the_stock_engine(games: Path, env: Alfworld) -> None:
    tasks = list_tasks(games, "train")
    cases, ours = [], []
    for index, task in enumerate(tasks[::2]):
        played, said = transcript(env, task.id, None, index, 25)
        cases.append((str(game_path(games, task.id)), played))
        ours.append(said)
    for task in tasks[1::6]:
        path = game_path(games, task.id)
        played, said = transcript(env, task.id, json.loads(path.read_text())["walkthrough"], 0, 0)
        assert said[-1][2:] == [1.0, True]
        cases.append((str(path), played))
        ours.append(said)
    assert stock_transcripts(cases) == ours
    texts = {row[0] for said in ours for row in said}
    assert "Nothing happens." in texts
    assert len(texts) > 60


def test_a_real_game_equals_the_stock_engine(tmp_path: Path) -> None:
    given = os.environ.get("JAXCREDIT_ALFWORLD_GAME")
    if not given:
        pytest.skip("JAXCREDIT_ALFWORLD_GAME names no folder of a real ALFWorld game")
    task = "valid_seen/pick_heat_then_place_in_recep-Potato-None-SinkBasin-14/trial_real"
    shutil.copytree(given, game_path(tmp_path, task).parent)
    env = make({"data": str(tmp_path)})
    played, said = transcript(env, task, None, 1, 12)
    assert stock_transcripts([(str(game_path(tmp_path, task)), played)]) == [said]
    seen = env.reset(task, expert=True)
    trace = [seen.info.progress]
    while not seen.done and len(trace) < 60:
        assert seen.info.expert is not None
        seen = env.step(seen.info.expert)
        trace.append(seen.info.progress)
    assert seen.info.success
    assert trace[0] == 0.0
    assert trace[-1] == 1.0
    assert 0.5 in trace


def test_interleaved_instances_do_not_disturb_each_other(games: Path, env: Alfworld) -> None:
    first, second = (task.id for task in list_tasks(games, "train")[:2])
    alone = [transcript(env, task, None, 5, 10) for task in (first, second)]
    other = make({"data": str(games)})
    pair = [env.reset(first), other.reset(second)]
    for step in range(10):
        for index, instance in enumerate((env, other)):
            actions, said = alone[index]
            if step < len(actions):
                assert pair[index].info.admissible == said[step][1]
                pair[index] = instance.step(actions[step])
                assert pair[index].text == said[step + 1][0]


def test_engine_leaves_the_process_alone(games: Path) -> None:
    code = (
        "import os, sys; a = list(sys.argv); o = sys.stdout\n"
        "from envs.alfworld.engine import make\n"
        f"env = make({{'data': {str(games)!r}}})\n"
        f"env.reset({list_tasks(games, 'train')[0].id!r})\n"
        "assert 'ALFWORLD_DATA' not in os.environ\n"
        "assert sys.argv == a and sys.stdout is o and 'jax' not in sys.modules\n"
    )
    subprocess.run(
        [sys.executable, "-c", code, "x"],
        check=True,
        cwd=Path(__file__).parent.parent,
        env={k: v for k, v in os.environ.items() if k != "ALFWORLD_DATA"},
    )


def test_progress_of_winning_plans(games: Path, env: Alfworld) -> None:
    for task in list_tasks(games, "train"):
        plan = json.loads(game_path(games, task.id).read_text())["walkthrough"]
        seen = env.reset(task.id)
        trace = [seen.info.progress]
        for command in plan:
            assert not seen.done
            seen = env.step(command)
            trace.append(seen.info.progress)
        assert trace[0] == 0.0
        assert max(trace[:-1]) < 1.0
        assert trace[-1] == 1.0
        assert seen.done
        assert seen.info.success
        assert seen.reward == 1.0
        # placed | held, lamp on, at the lamp | property, placed | first, second
        parts = {"pick_and_place_simple": 1, "look_at_obj_in_light": 3}.get(task.kind, 2)
        assert {round(x * parts, 9) for x in trace} == set(range(parts + 1))


def test_progress_by_hand() -> None:
    goal = """(define (problem p) (:goal (and (exists (?r - receptacle) (exists (?a - object)
      (and (objectType ?a MugType) (receptacleType ?r DeskType) (inReceptacle ?a ?r) ; comment )
        (exists (?b - object) (and (not (= ?a ?b)) (objectType ?b MugType)
          (receptacleType ?r DeskType) (inReceptacle ?b ?r))))))))) """
    checks = GoalChecks.from_problem(goal)
    fixed = {
        "objecttype": {("m1", "mugtype"), ("m2", "mugtype"), ("p1", "pentype")},
        "receptacletype": {("d1", "desktype"), ("d2", "desktype"), ("b1", "bedtype")},
    }
    cases = [
        (set(), 0),
        ({("m1", "b1"), ("m2", "b1")}, 0),
        ({("m1", "d1"), ("p1", "d1")}, 1),
        ({("m1", "d1"), ("m2", "d2")}, 1),  # two desks: only one of them counts
        ({("m1", "d2"), ("m2", "d2")}, 2),
    ]
    assert checks.total == 2
    for inside, expected in cases:
        assert checks.satisfied({**fixed, "inreceptacle": inside}) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(define (:init))", "no :goal"),
        ("(define (:goal (and (objectType ?o MugType))))", "no condition"),
        ("(define (:goal (or (isHot ?o) (isCool ?o))))", "'or'"),
        ("(define", "open"),
        ("(define))", "closes"),
    ],
)
def test_goals_that_cannot_be_checked(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GoalChecks.from_problem(text)
    assert parse("(a (B c)) ; d") == [["a", ["b", "c"]]]


def test_expert_wins_and_recovers_from_an_agent(games: Path, env: Alfworld) -> None:
    won: Counter[str] = Counter()
    helped = 0
    tasks = list_tasks(games, "train")
    for index, task in enumerate(tasks):
        for drift in (0, 12):  # the first `drift` steps are an agent's random ones
            rng = random.Random(index)
            seen = env.reset(task.id, expert=True)
            for step in range(50 + drift):
                assert seen.info.expert in seen.info.admissible
                choice = rng.choice(seen.info.admissible) if step < drift else seen.info.expert
                seen = env.step(choice)
                if seen.done:
                    break
            if drift:
                helped += seen.info.success
            else:
                won[task.kind] += seen.info.success
    assert won == dict.fromkeys(KINDS, 2)
    assert helped >= 11
    assert env.reset(tasks[0].id).info.expert is None


def test_expert_takes_back_what_an_agent_left_too_early(games: Path, env: Alfworld) -> None:
    kinds = [k for k in KINDS if k in STATIONS]
    for task in list_tasks(games, "train", kinds=kinds):
        plan = json.loads(game_path(games, task.id).read_text())["walkthrough"]
        seen = env.reset(task.id, expert=True)
        for command in plan:
            if command.split()[0] not in ("clean", "heat", "cool"):
                seen = env.step(command)
        assert not seen.done
        for _ in range(50):
            seen = env.step(seen.info.expert or "look")
            if seen.done:
                break
        assert seen.info.success, task.id


def test_expert_sees_receptacles_that_share_a_place(tmp_path: Path) -> None:
    kinds = ["pick_clean_then_place_in_recep"]
    generate(tmp_path, "train", 4, seed=1, kinds=kinds, receptacles=14, distractors=4)
    env = make({"data": str(tmp_path)})
    examined = 0
    for task in list_tasks(tmp_path, "train"):
        seen = env.reset(task.id, expert=True)
        for _ in range(50):
            examined += str(seen.info.expert).startswith("examine")
            seen = env.step(seen.info.expert or "look")
            if seen.done:
                break
        assert seen.info.success, task.id
    assert examined > 0


def test_expert_is_a_function_of_the_trajectory(games: Path, env: Alfworld) -> None:
    task = list_tasks(games, "train")[3].id

    def play() -> list[str | None]:
        random.random()  # the global generator must not matter
        seen, out = env.reset(task, expert=True), []
        for _ in range(12):
            out.append(seen.info.expert)
            if seen.done:
                break
            seen = env.step(seen.info.expert or "look")
        return out

    assert play() == play()


def test_invalid_actions_and_the_end(games: Path, env: Alfworld) -> None:
    task = list_tasks(games, "train")[0]
    start = env.reset(task.id)
    assert start.info.task_id == task.id
    assert start.info.valid
    assert start.info.goal in start.text
    bad = env.step("eat everything")
    assert (bad.text, bad.info.valid, bad.info.admissible) == (
        "Nothing happens.",
        False,
        start.info.admissible,
    )
    for command in json.loads(game_path(games, task.id).read_text())["walkthrough"]:
        last = env.step(f" {command}\n")
    assert last.done
    with pytest.raises(RuntimeError, match="episode is over"):
        env.step("look")


def test_options_and_missing_games(games: Path, env: Alfworld, monkeypatch) -> None:
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    with pytest.raises(ValueError, match="'dta'; did you mean 'data'"):
        make({"dta": "x"})
    with pytest.raises(ValueError, match="ALFWORLD_DATA"):
        make({})
    with pytest.raises(FileNotFoundError, match="no game 'train/nothing/here'"):
        env.reset("train/nothing/here")
    with pytest.raises(ValueError, match="no path below"):
        env.reset("../secret")


def test_task_lists(games: Path) -> None:
    tasks = list_tasks(games, "train")
    assert len(tasks) == 12
    assert list(tasks) == sorted(tasks, key=lambda t: t.id)
    assert {task.kind for task in tasks} == set(KINDS)
    two = list_tasks(games, "train", kinds=["pick_two_obj_and_place"])
    assert len(two) == 2
    assert set(two) < set(tasks)
    assert task_list_hash(tasks) == task_list_hash(list_tasks(games, "train"))
    assert task_list_hash(tasks) != task_list_hash(tasks[::-1])
    with pytest.raises(FileNotFoundError, match="python -m launch games"):
        list_tasks(games, "valid_seen")
    with pytest.raises(ValueError, match="split = 'test'"):
        list_tasks(games, "test")
    with pytest.raises(ValueError, match="kinds has fly"):
        list_tasks(games, "train", kinds=["fly"])


def test_plans_use_names_of_the_engine(games: Path, env: Alfworld) -> None:
    problem = _draw_all("train", 1, 3, list(KINDS), 6, 6, 1)[0]
    env.reset(f"train/{problem.folder}")
    assert set(solve.names(problem).values()) <= set(env.names().values())
