"""One episode as ids: observations in, turns to sample and actions out, an ``Episode`` at the end.

A conversation is one growing row, to which a turn adds ids. A window is a fresh row per step.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from envs.chat import ChatFormat
from envs.prompts import Prompt, scene
from envs.protocol import Observation, Task
from envs.sampling import Generated
from envs.schedule import Next, Turn
from jaxcredit.episodes import Episode, Status, Step


@dataclasses.dataclass(frozen=True)
class Job:
    """One attempt at a task. ``group`` is the task's number in the iteration.

    ``prefix`` holds steps of an earlier attempt at the same task: they are taken again, and the
    policy goes on from there.
    """

    task: Task
    group: int
    replica: int = 0
    prefix: tuple[Step, ...] = ()


class Diverged(RuntimeError):
    """Steps of an earlier attempt were taken again and something else was shown."""


@dataclasses.dataclass(frozen=True)
class _Repeated:
    """A response that was sampled before."""

    ids: np.ndarray
    logp: np.ndarray
    stop: str


@dataclasses.dataclass(frozen=True)
class Limits:
    """When an episode is cut, and what a reply without an action costs.

    Attributes:
      max_steps: steps per episode (status STEP_LIMIT).
      max_context: tokens per row, the response included.
      max_response: tokens per response.
      end_on_format_error: end with FORMAT_ERROR and outcome 0, as AttnSR does, instead of
        answering with a reminder.
      retries: how often an episode that an environment error spoiled starts again.
      overlength: a prompt that leaves no room for a response within max_context: "stop" ends the
        episode (status CONTEXT_LIMIT); "drop" first leaves out the oldest steps that a window
        shows. A conversation is one row and cannot drop anything.
    """

    max_steps: int
    max_context: int
    max_response: int
    end_on_format_error: bool = False
    retries: int = 1
    overlength: str = "stop"

    def __post_init__(self) -> None:
        if self.overlength not in ("stop", "drop"):
            raise ValueError(f"overlength is {self.overlength!r}; expected 'stop' or 'drop'")


@dataclasses.dataclass
class Play:
    """An episode being played (``envs.schedule.Playable``)."""

    chat: ChatFormat
    prompt: Prompt
    limits: Limits
    job: Job
    ticket: int
    iteration: int
    shortened: int = 0  # windows that lost history; not forgotten by a restart

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.first: Observation | None = None
        self.now: Observation | None = None
        self.text = ""  # the observation to show next
        self.steps: list[Step] = []
        self.history: list[tuple[str, str]] = []
        self.offered: list[list[str]] = []  # admissible actions, per step
        self.shown: list[int] = []  # past steps in each step's window
        self.row = 0  # ids in the slot
        self.rest = np.zeros(0, np.int32)  # recorded, but not yet in the slot
        self.context: tuple[np.ndarray, tuple[int, int]] = (np.zeros(0, np.int32), (0, 0))

    @property
    def task_id(self) -> str:
        return self.job.task.id

    def observe(self, observation: Observation) -> Next:
        self.now = observation
        if self.first is None:
            self.first, self.text = observation, scene(observation.text)
        else:
            self.text = observation.text
            self.steps[-1] = dataclasses.replace(
                self.steps[-1],
                reward=0.0 if observation.done else observation.reward,
                progress=observation.info.progress,
                valid=observation.info.valid,
            )
        if observation.info.success:
            return Status.SUCCESS
        if observation.done:
            return Status.FAILURE
        return self._next()

    def respond(self, generated: Generated) -> Next:
        self.row += len(generated.ids)
        return self._record(generated)

    def _record(self, generated: Generated) -> Next:
        assert self.now is not None
        ids = np.asarray(generated.ids, np.int32)
        logp = np.asarray(generated.logp, np.float32)
        sampled = np.ones(len(ids), bool)
        if ids[-1] != self.chat.end_id:
            # The template ends every message; an end that was not sampled is never trained on.
            self.rest = np.append(self.rest, np.int32(self.chat.end_id))
            ids, logp = np.append(ids, self.chat.end_id), np.append(logp, np.float32(0.0))
            sampled = np.append(sampled, False)
        spoken = generated.ids[:-1] if generated.stop == "stop" else generated.ids
        action = self.prompt.action(self.chat.decode(spoken))
        context, span = self.context
        self.steps.append(
            Step(
                context_ids=context,
                response_ids=ids.astype(np.int32),
                behaviour_logp=logp,
                sampled=sampled,
                stop=generated.stop,
                observation_span=span,
                action=action,
                valid=action is not None,
                progress=self.now.info.progress,
                state=self.now.info.state,
                observation=self.text,
            )
        )
        self.offered.append(self.now.info.admissible)
        self.history.append((self.text, action if action is not None else "(no action)"))
        if action is not None:
            return action
        self.text = self.prompt.reminder
        return Status.FORMAT_ERROR if self.limits.end_on_format_error else self._next()

    def _next(self) -> Next:
        """The next turn, unless a limit is reached. Steps of the prefix are taken at once: their
        responses are prefilled with the first turn that is sampled."""
        if len(self.steps) >= self.limits.max_steps:
            return Status.STEP_LIMIT
        if self.prompt.context == "window":
            context, span, fits = self._window()
        else:
            context, span, fits = self._grow()
        if not fits:
            if not self.steps:
                raise ValueError(
                    f"task {self.task_id}: the first prompt and a response need "
                    f"{len(context) + self.limits.max_response} tokens, prompt.max_context is "
                    f"{self.limits.max_context}; raise it"
                )
            return Status.CONTEXT_LIMIT
        self.context = (context, span)
        if len(self.steps) < len(self.job.prefix):
            repeated = self._repeat()
            self.rest = np.concatenate([self.rest, context, repeated.ids])
            return self._record(repeated)
        window = self.prompt.context == "window"
        fresh = window or self.row == 0
        ids = context if window else np.concatenate([self.rest, context])
        self.rest = np.zeros(0, np.int32)
        self.row = len(ids) if fresh else self.row + len(ids)
        key = (self.iteration, self.job.group, self.job.replica, len(self.steps))
        return Turn(ids=ids, fresh=fresh, key=key, most=self.limits.max_response)

    def _repeat(self) -> _Repeated:
        """The prefix's next response, if its context is what was shown then."""
        number = len(self.steps)
        step = self.job.prefix[number]
        if not np.array_equal(self.context[0], step.context_ids):
            raise Diverged(
                f"task {self.task_id}: the first {number} steps of an attempt were taken again "
                "and something else was shown; this needs an environment that repeats itself"
            )
        chosen = step.sampled
        return _Repeated(step.response_ids[chosen], step.behaviour_logp[chosen], step.stop)

    def _grow(self) -> tuple[np.ndarray, tuple[int, int], bool]:
        """The ids that continue a conversation, and whether there is room for them."""
        assert self.now is not None
        info = self.now.info
        if self.steps:
            ids, span = self.chat.turn(self.prompt.turn(self.text, info.admissible))
            before = self.row + len(self.rest)
        else:
            messages = self.prompt.opening(info.goal, self.text, info.admissible)
            ids, span, before = self.chat.opening(messages), (0, 0), 0
        total = before + len(ids) + self.limits.max_response
        return ids, span, total <= self.limits.max_context

    def _window(self) -> tuple[np.ndarray, tuple[int, int], bool]:
        """A window with as much history as is configured, or as fits."""
        assert self.now is not None
        info, step = self.now.info, len(self.steps)
        most = min(self.prompt.history, step)
        room = self.limits.max_context - self.limits.max_response
        for shown in range(most, -1, -1):
            history = self.history[step - shown :]
            ids = self.chat.opening(
                self.prompt.window(info.goal, history, self.text, info.admissible, step)
            )
            if len(ids) <= room or self.limits.overlength == "stop":
                break
        self.shown.append(shown)
        self.shortened += shown < most and len(ids) <= room
        return ids, (0, 0), len(ids) <= room

    def finish(self, status: Status, policy_version: int) -> Episode:
        """The record of the episode."""
        success = status == Status.SUCCESS
        steps = self._with_hindsight(self.text) if self.steps else []
        return Episode(
            task_id=self.job.task.id,
            group=self.job.group,
            replica=self.job.replica,
            steps=tuple(steps),
            outcome=float(success),
            success=success,
            status=status,
            initial_progress=self.first.info.progress if self.first is not None else 0.0,
            final_observation=self.text,
            goal=self.first.info.goal if self.first is not None else "",
            context=self.prompt.context,
            policy_version=policy_version,
        )

    def _with_hindsight(self, final: str) -> list[Step]:
        """Adds the outcome-augmented contexts (RELACE, Appendix D.3)."""
        assert self.first is not None
        goal = self.prompt.hindsight_goal(final)
        if self.prompt.context == "conversation":
            messages = self.prompt.opening(goal, scene(self.first.text), self.offered[0])
            first = dataclasses.replace(self.steps[0], hindsight_ids=self.chat.opening(messages))
            return [first, *self.steps[1:]]
        out = []
        for k, step in enumerate(self.steps):
            history = self.history[k - self.shown[k] : k]
            messages = self.prompt.window(goal, history, self.history[k][0], self.offered[k], k)
            out.append(dataclasses.replace(step, hindsight_ids=self.chat.opening(messages)))
        return out
