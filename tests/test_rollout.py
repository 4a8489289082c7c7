"""The rollout against scripted policies and a small counting world, ids and all."""

from __future__ import annotations

import dataclasses
import types

import numpy as np
import pytest

from envs.chat import chat_format
from envs.pool import Pool
from envs.prompts import Prompt
from envs.protocol import EnvSpec, Info, Observation, Task
from envs.rollout import Diverged, Job, Limits, Player
from envs.tokenizer import word_tokenizer
from jaxcredit.batching import batch_episodes, episode_rows
from jaxcredit.episodes import Kind, Status

WORDS = "you are at room floor . , : your task is to reach go nothing happens up down 0 1 2 3 4 5 6"
TOKENIZER = word_tokenizer(WORDS.split())
CHAT = chat_format(TOKENIZER)
PROMPT = Prompt(template="bare", think=False, show_admissible=False)
LIMITS = Limits(max_steps=6, max_context=200, max_response=8)


class Stairs:
    """Floors 0 to 6; the task "room N" is solved on floor N. "down" on floor 0 raises."""

    def __init__(self, options):
        self.floor, self.goal, self.task = 0, 0, ""

    def _observe(self, text, valid=True):
        won = self.floor == self.goal
        info = Info(
            admissible=["go up", "go down"],
            progress=self.floor / self.goal,
            state=f"floor {self.floor}",
            success=won,
            valid=valid,
            goal=f"reach floor {self.goal}",
            task_id=self.task,
        )
        return Observation(text, float(won), won, info)

    def reset(self, task_id, expert=False):
        self.task, self.goal, self.floor = task_id, int(task_id.split()[1]), 0
        return self._observe(f"You are at floor 0. Your task is to: reach floor {self.goal}")

    def step(self, action):
        if action not in ("go up", "go down"):
            return self._observe("Nothing happens.", valid=False)
        self.floor += 1 if action == "go up" else -1
        if self.floor < 0:
            raise OSError("fell out of the house")
        return self._observe(f"You are at floor {self.floor}.")

    def close(self):
        pass


def make(options):
    return Stairs(options)


class Scripted:
    """Answers turn t of (task, replica) with ``reply(task, replica, t)``; remembers its caches."""

    def __init__(self, reply, slots=3, waves=2):
        self.settings = types.SimpleNamespace(slots=slots, waves=waves)
        self.reply = reply
        self.cache = {(w, s): [] for w in range(waves) for s in range(slots)}
        self.keys = []
        self.finished = []

    def lengths(self, wave):
        return np.array([len(self.cache[wave, s]) for s in range(self.settings.slots)])

    def reset(self, wave, slot):
        if self.cache[wave, slot]:
            self.finished.append(self.cache[wave, slot])
        self.cache[wave, slot] = []

    def extend(self, wave, requests):
        for slot, ids in requests.items():
            self.cache[wave, slot].extend(int(i) for i in ids)

    def generate(self, wave, requests):
        out = {}
        for slot, (key, most) in requests.items():
            self.keys.append(key)
            text, stop = self.reply(key[1], key[2], key[3])
            ids = CHAT.encode(text)[:most]
            if stop == "stop":
                ids = np.append(ids, CHAT.end_id)
            self.cache[wave, slot].extend(int(i) for i in ids)
            logp = -np.arange(1, len(ids) + 1, dtype=np.float32)
            out[slot] = types.SimpleNamespace(ids=ids, logp=logp, stop=stop)
        return out


def up(group, replica, turn):
    return "<action> go up </action>", "stop"


def collect(reply, jobs, *, prompt=PROMPT, limits=LIMITS, workers=2, slots=3, iteration=0):
    sampler = Scripted(reply, slots)
    with Pool(EnvSpec("test_rollout:make"), workers, deadline_s=30) as pool:
        player = Player(CHAT, prompt, limits)
        return player.collect(sampler, pool, jobs, iteration=iteration), sampler


@pytest.fixture(autouse=True)
def _workers_find_this_file(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(__import__("pathlib").Path(__file__).parent))


def jobs_for(*floors, replicas=1):
    return [
        Job(Task(f"room {floor}", "stairs"), group, replica)
        for group, floor in enumerate(floors)
        for replica in range(replicas)
    ]


def test_rows_are_exactly_what_the_sampler_saw():
    def mixed(group, replica, turn):
        if turn == 1:
            return "go up go up go up go up go up", "length"  # cut, no action
        return ("<action> go down </action>" if turn == 2 else "<action> go up </action>"), "stop"

    episodes, sampler = collect(mixed, jobs_for(3, 4, 2, replicas=2), slots=2)
    for row in (c for c in sampler.cache.values() if c):
        sampler.finished.append(row)
    rows = [episode_rows(e)[0].tokens.tolist() for e in episodes]
    # The very last end-of-message may be injected only into the record: nothing was fed after it.
    assert sorted(rows) == sorted(sampler.finished)
    for episode in episodes:
        cut = episode.steps[1]
        assert cut.stop == "length"
        assert cut.action is None
        assert not cut.valid
        assert cut.response_ids[-1] == CHAT.end_id
        assert cut.sampled.tolist() == [True] * (len(cut.sampled) - 1) + [False]
        assert cut.behaviour_logp[-1] == 0


def test_the_conversation_reads_as_it_should():
    (episode,), _ = collect(up, jobs_for(2))
    text = CHAT.decode(episode_rows(episode)[0].tokens)
    assert text == (
        "<|im_start|> user you are at floor 0 . your task is to : reach floor 2 <|im_end|> "
        "<|im_start|> assistant <action> go up </action> <|im_end|> "
        "<|im_start|> user you are at floor 1 . <|im_end|> "
        "<|im_start|> assistant <action> go up </action> <|im_end|>"
    )
    batch = batch_episodes([episode], max_steps=3)
    seen = batch.kind[0] == Kind.OBSERVATION
    assert CHAT.decode(batch.tokens[0][seen]) == "you are at floor 1 ."
    assert (batch.step[0][seen] == 0).all(), "an observation belongs to the step that caused it"
    acted = batch.kind[0] == Kind.ACTION
    assert CHAT.decode(batch.tokens[0][acted]) == "<action> go up </action> <|im_end|> " + (
        "<action> go up </action> <|im_end|>"
    )


def test_statuses_and_step_tables():
    def reply(group, replica, turn):
        return {
            0: "<action> go up </action>",
            1: "<action> go sideways </action>",
            2: "up",
        }[group], "stop"

    won, refused, broken = collect(reply, jobs_for(3, 3, 3))[0]
    assert (won.status, won.outcome, won.success) == (Status.SUCCESS, 1.0, True)
    assert [s.progress for s in won.steps] == pytest.approx([1 / 3, 2 / 3, 1])
    assert [s.state for s in won.steps] == ["floor 0", "floor 1", "floor 2"]
    assert [s.reward for s in won.steps] == [0, 0, 0], "the outcome is given once, apart"
    for failed, action in ((refused, "go sideways"), (broken, None)):
        # "sideways" is no word of the tokenizer, so it decodes as unknown.
        assert failed.status == Status.STEP_LIMIT
        assert len(failed.steps) == LIMITS.max_steps
        assert failed.outcome == 0
        assert not any(s.valid for s in failed.steps)
        if action is None:
            assert all(s.action is None for s in failed.steps)


@pytest.mark.parametrize("context", ["conversation", "window"])
def test_an_episode_keeps_its_goal_and_what_was_shown(context):
    def reply(group, replica, turn):
        return ("no action" if turn == 1 else "<action> go up </action>"), "stop"

    prompt = dataclasses.replace(PROMPT, context=context)
    (episode,), _ = collect(reply, jobs_for(2), prompt=prompt)
    assert episode.goal == "reach floor 2"
    assert [step.observation for step in episode.steps] == [
        "You are at floor 0.",
        "You are at floor 1.",
        "Nothing happens.",  # the reminder
    ]
    assert episode.final_observation == "You are at floor 2."


def test_a_format_error_can_end_the_episode():
    limits = dataclasses.replace(LIMITS, end_on_format_error=True)
    (episode,), _ = collect(lambda *a: ("up", "stop"), jobs_for(3), limits=limits)
    assert episode.status == Status.FORMAT_ERROR
    assert len(episode.steps) == 1
    assert episode.outcome == 0


def test_a_full_context_ends_the_episode_truncated():
    (episode,), _ = collect(up, jobs_for(6), limits=dataclasses.replace(LIMITS, max_context=64))
    assert episode.status == Status.CONTEXT_LIMIT
    assert 0 < len(episode.steps) < 6
    row = episode_rows(episode)[0].tokens
    assert len(row) <= 64
    with pytest.raises(ValueError, match=r"room 6.*max_context is 20"):
        collect(up, jobs_for(6), limits=dataclasses.replace(LIMITS, max_context=20))


def test_an_environment_error_costs_its_episode_alone():
    def reply(group, replica, turn):
        return ("<action> go down </action>" if group == 1 else "<action> go up </action>"), "stop"

    episodes, sampler = collect(reply, jobs_for(2, 2, 2))
    assert [e.status for e in episodes] == [Status.SUCCESS, Status.ENV_ERROR, Status.SUCCESS]
    first_turns = [key for key in sampler.keys if key[1] == 1 and key[3] == 0]
    assert len(first_turns) == 2, "tried twice"
    batch = batch_episodes(episodes, max_steps=6)
    assert batch.weight.tolist() == [1, 0, 1]


def test_same_episodes_for_any_number_of_workers_and_slots():
    def reply(group, replica, turn):
        word = "up" if (group + replica + turn) % 3 else "down"
        return f"<action> go {word if turn else 'up'} </action>", "stop"

    jobs = jobs_for(2, 3, 1, 4, replicas=3)
    want = None
    for workers, slots in ((1, 1), (1, 4), (3, 2)):
        episodes, sampler = collect(reply, jobs, workers=workers, slots=slots, iteration=5)
        assert len(set(sampler.keys)) == len(sampler.keys)
        assert {key[0] for key in sampler.keys} == {5}
        found = [
            (e.task_id, e.group, e.replica, e.status, [s.response_ids.tolist() for s in e.steps])
            for e in episodes
        ]
        want = want or found
        assert found == want
    assert [(e[1], e[2]) for e in want] == [(j.group, j.replica) for j in jobs]


def stumble(group, replica, turn):
    """Down on the way, a turn without an action, then up."""
    if turn == 2:
        return "go up go up go up go up go up", "length"
    return f"<action> go {'down' if turn == 1 else 'up'} </action>", "stop"


@pytest.mark.parametrize("context", ["conversation", "window"])
@pytest.mark.parametrize("k", [1, 3, 4])
def test_an_attempt_from_a_step_repeats_what_came_before_and_samples_the_rest(context, k):
    prompt = dataclasses.replace(PROMPT, context=context, history=1)
    (job,) = jobs_for(2)
    (whole,), _ = collect(stumble, [job], prompt=prompt)
    assert len(whole.steps) == 5
    # Replica 7 of the same policy does the same, so the whole episode must come out again.
    again = dataclasses.replace(job, replica=7, prefix=whole.steps[:k])
    (episode, other), sampler = collect(
        lambda *key: stumble(*key) if key[1] == 7 else up(*key),
        [again, dataclasses.replace(again, replica=8)],
        prompt=prompt,
    )
    assert sorted({key[3] for key in sampler.keys if key[2] == 7}) == list(range(k, 5))
    rows = [row.tokens for row in episode_rows(episode)]
    for row, expected in zip(rows, episode_rows(whole), strict=True):
        np.testing.assert_array_equal(row, expected.tokens)
    for step, expected in zip(episode.steps, whole.steps, strict=True):
        np.testing.assert_array_equal(step.behaviour_logp, expected.behaviour_logp)
        np.testing.assert_array_equal(step.sampled, expected.sampled)
        assert (step.action, step.stop, step.progress) == (
            expected.action,
            expected.stop,
            expected.progress,
        )
    assert episode.status == whole.status == Status.SUCCESS
    # Another replica goes its own way from there on, and what it saw is what is recorded.
    for step, expected in zip(other.steps[:k], whole.steps[:k], strict=True):
        np.testing.assert_array_equal(step.response_ids, expected.response_ids)
    assert [s.action for s in other.steps[k:]] == ["go up"] * len(other.steps[k:])
    if context == "conversation":
        seen = [c for c in [*sampler.finished, *sampler.cache.values()] if c]
        for e in (episode, other):
            assert episode_rows(e)[0].tokens.tolist() in seen


def test_an_environment_that_does_not_repeat_itself_is_found_out():
    (whole,), _ = collect(up, jobs_for(3))
    wrong = dataclasses.replace(whole.steps[1], context_ids=whole.steps[1].context_ids[::-1])
    job = dataclasses.replace(jobs_for(3)[0], prefix=(whole.steps[0], wrong))
    with pytest.raises(Diverged, match=r"room 3: the first 1 steps .* something else was shown"):
        collect(up, [job])


@pytest.mark.parametrize("context", ["conversation", "window"])
def test_hindsight_contexts_name_the_end_and_keep_the_rest(context):
    prompt = dataclasses.replace(PROMPT, context=context)
    (episode,), _ = collect(up, jobs_for(3), prompt=prompt)
    plain, hindsight = episode_rows(episode), episode_rows(episode, hindsight=True)
    assert len(plain) == len(hindsight) == (1 if context == "conversation" else 3)
    for a, b in zip(plain, hindsight, strict=True):
        np.testing.assert_array_equal(a.tokens[a.sampled], b.tokens[b.sampled])
        assert "reach floor 3" in CHAT.decode(a.tokens)
        text = CHAT.decode(b.tokens)
        assert "reach floor 3" not in text
        assert "your task is to : you are at floor 3 ." in text


def test_window_rows_show_the_last_steps():
    prompt = dataclasses.replace(PROMPT, context="window", history=1)
    (episode,), _ = collect(up, jobs_for(3), prompt=prompt)
    rows = [CHAT.decode(row.tokens) for row in episode_rows(episode)]
    assert rows[2] == (
        "<|im_start|> user your task is to : reach floor 3 you are at floor 1 . go up "
        "you are at floor 2 . <|im_end|> <|im_start|> assistant <action> go up </action> <|im_end|>"
    )


@pytest.mark.parametrize(
    ("text", "think", "action"),
    [
        ("<action> go up </action>", False, "go up"),
        ("well <action>go\n up</action> then", False, "go up"),
        ("<action> </action>", False, None),
        ("<action> a </action> <action> b </action>", False, None),
        ("go up", False, None),
        ("<action> go up </action>", True, None),
        ("<think> is <action> a </action> best </think> <action> b </action>", True, "b"),
        ("<think> unfinished <action> b </action>", True, None),
    ],
)
def test_reading_an_action(text, think, action):
    assert Prompt(template="bare", think=think).action(text) == action


def test_a_template_that_rewrites_history_is_refused():
    tokenizer = word_tokenizer(WORDS.split())
    tokenizer.chat_template = (
        "{% for m in messages %}{% if loop.last or m['role'] == 'user' %}"
        "{{ m['role'] + m['content'] + '<|im_end|>' }}{% endif %}{% endfor %}assistant"
    )
    with pytest.raises(ValueError, match=r"prompt\.context=window"):
        chat_format(tokenizer)
