"""Plays episodes: a host pool of environments against a sampler with live caches.

Slots are visited wave by wave. While one wave's environments step, the next wave decodes. A wave
waits for all of its own answers before it decodes, so the schedule, and with it every float,
depends on the episodes alone and not on how fast a worker was: the same seed gives the same
episodes for any number of workers, and a resumed run repeats itself bit for bit.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from envs.chat import ChatFormat
from envs.pool import Pool
from envs.prompts import Prompt, scene
from envs.protocol import EnvFailure, Observation, Task
from jaxcredit.episodes import Episode, Status, Step

# What a response is sampled under: (iteration, group, replica, turn).
Key = tuple[int, int, int, int]


class Generated(Protocol):
    """A sampled response.

    Attributes:
      ids: at least one id; a stop id only as the last one.
      logp: log-probability of each id as it was sampled.
      stop: "stop" if the last id is a stop id, else "length".
    """

    @property
    def ids(self) -> np.ndarray: ...

    @property
    def logp(self) -> np.ndarray: ...

    @property
    def stop(self) -> str: ...


class SamplerSettings(Protocol):
    """How many rows a sampler holds: ``waves`` groups of ``slots`` each."""

    @property
    def waves(self) -> int: ...

    @property
    def slots(self) -> int: ...


class Sampler(Protocol):
    """What a rollout needs of whatever samples: rows of ids in slots, grouped in waves.

    ``models.sampler`` implements it in this process, ``envs.engine`` with a server.
    """

    @property
    def settings(self) -> SamplerSettings: ...

    def lengths(self, wave: int) -> np.ndarray:
        """Tokens in each slot of a wave, [slots]."""
        ...

    def reset(self, wave: int, slot: int) -> None:
        """Empties a slot."""
        ...

    def extend(self, wave: int, requests: Mapping[int, np.ndarray]) -> None:
        """Appends ids to slots."""
        ...

    def generate(
        self, wave: int, requests: Mapping[int, tuple[Key, int]]
    ) -> Mapping[int, Generated]:
        """Samples one response per requested slot and appends its ids to the slot.

        ``requests`` maps a slot to the key of its response and the largest number of tokens. What
        is sampled depends on the slot's ids and the key, not on the slot or its company.
        """
        ...


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
      max_context: tokens per row, the response included (status CONTEXT_LIMIT).
      max_response: tokens per response.
      end_on_format_error: end with FORMAT_ERROR and outcome 0, as AttnSR does, instead of
        answering with a reminder.
      retries: how often an episode that an environment error spoiled starts again.
    """

    max_steps: int
    max_context: int
    max_response: int
    end_on_format_error: bool = False
    retries: int = 1


@dataclasses.dataclass
class _Run:
    """An episode being played."""

    job: Job
    ticket: int
    attempt: int = 0
    first: Observation | None = None
    now: Observation | None = None
    text: str = ""  # the observation to show next
    steps: list[Step] = dataclasses.field(default_factory=list)
    history: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    offered: list[list[str]] = dataclasses.field(default_factory=list)  # admissible, per step
    injected: list[int] = dataclasses.field(default_factory=list)
    context: tuple[np.ndarray, tuple[int, int]] | None = None
    waiting: bool = True  # for the environment


@dataclasses.dataclass(frozen=True)
class Player:
    """The fixed parts of a rollout."""

    chat: ChatFormat
    prompt: Prompt
    limits: Limits

    def collect(
        self,
        sampler: Sampler,
        pool: Pool,
        jobs: Sequence[Job],
        *,
        iteration: int = 0,
        policy_version: int = 0,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Episode]:
        """Plays every job once and returns the episodes in the order of the jobs.

        Args:
          sampler: holds the policy.
          pool: holds the environments; its tickets are used from 0 on.
          jobs: what to play.
          iteration: part of every sampling key.
          policy_version: written into the episodes.
          progress: called with (finished, all) whenever episodes finish.
        """
        waves, slots = sampler.settings.waves, sampler.settings.slots
        queue = collections.deque(enumerate(jobs))
        done: dict[int, Episode] = {}
        live: list[dict[int, _Run]] = [{} for _ in range(waves)]

        def refill(wave: int) -> None:
            for slot in range(slots):
                if slot not in live[wave] and queue:
                    ticket, job = queue.popleft()
                    live[wave][slot] = _Run(job, ticket)
                    sampler.reset(wave, slot)
                    pool.reset(ticket, job.task.id)

        for wave in range(waves):
            refill(wave)
        while any(live):
            for wave in range(waves):
                runs = live[wave]
                if not runs:
                    continue
                answers = pool.wait([r.ticket for r in runs.values() if r.waiting])
                for slot, run in list(runs.items()):
                    answer = answers.get(run.ticket)
                    if isinstance(answer, EnvFailure):
                        status = self._fail(run, pool, sampler, wave, slot)
                    else:
                        status = self._observe(run, answer, sampler.lengths(wave)[slot])
                    if status is not None:
                        done[run.ticket] = self._finish(run, status, policy_version)
                        pool.close(run.ticket)
                        del runs[slot]
                        if progress is not None:
                            progress(len(done), len(jobs))
                ready = {slot: run for slot, run in runs.items() if run.context is not None}
                self._act(sampler, pool, wave, ready, iteration)
                refill(wave)
        return [done[i] for i in range(len(jobs))]

    def _fail(self, run: _Run, pool: Pool, sampler: Sampler, wave: int, slot: int) -> Status | None:
        """Starts a spoiled episode again, or gives it up."""
        if run.attempt >= self.limits.retries:
            return Status.ENV_ERROR
        run.attempt += 1
        run.first = run.now = run.context = None
        run.steps, run.history, run.offered, run.injected = [], [], [], []
        sampler.reset(wave, slot)
        pool.close(run.ticket)
        pool.reset(run.ticket, run.job.task.id)
        run.waiting = True
        return None

    def _observe(self, run: _Run, answer: Observation | None, length: int) -> Status | None:
        """Takes an answer in; returns a status if the episode is over, else sets its context."""
        if answer is not None:
            run.waiting = False
            run.now = answer
            if run.first is None:
                run.first, run.text = answer, scene(answer.text)
            else:
                run.text = answer.text
                run.steps[-1] = dataclasses.replace(
                    run.steps[-1],
                    reward=0.0 if answer.done else answer.reward,
                    progress=answer.info.progress,
                    valid=answer.info.valid,
                )
            if answer.info.success:
                return Status.SUCCESS
            if answer.done:
                return Status.FAILURE
        assert run.now is not None and run.first is not None
        if run.steps and run.steps[-1].action is None and self.limits.end_on_format_error:
            return Status.FORMAT_ERROR
        if len(run.steps) >= self.limits.max_steps:
            return Status.STEP_LIMIT
        info = run.now.info
        if self.prompt.context == "window":
            messages = self.prompt.window(
                info.goal, run.history, run.text, info.admissible, len(run.steps)
            )
            run.context = (self.chat.opening(messages), (0, 0))
            length = 0
        elif not run.steps:
            messages = self.prompt.opening(info.goal, run.text, info.admissible)
            run.context = (self.chat.opening(messages), (0, 0))
        else:
            ids, span = self.chat.turn(self.prompt.turn(run.text, info.admissible))
            run.context = (ids, span)
        size = length + len(run.injected) + len(run.context[0]) + self.limits.max_response
        if size > self.limits.max_context:
            if not run.steps:
                raise ValueError(
                    f"task {run.job.task.id}: the first prompt and a response need {size} tokens, "
                    f"prompt.max_context is {self.limits.max_context}; raise it"
                )
            run.context = None
            return Status.CONTEXT_LIMIT
        return None

    def _act(
        self, sampler: Sampler, pool: Pool, wave: int, ready: dict[int, _Run], iteration: int
    ) -> None:
        """Prefills the new ids of the ready slots, samples, and sends the actions.

        Responses of a prefix are prefilled too, instead of sampled.
        """
        if not ready:
            return
        repeated = {slot: _repeat(run) for slot, run in ready.items() if _repeats(run)}
        extend = {}
        for slot, run in ready.items():
            assert run.context is not None
            if self.prompt.context == "conversation":
                again = [repeated[slot].ids] if slot in repeated else []
                parts = [np.asarray(run.injected, np.int32), run.context[0], *again]
                extend[slot] = np.concatenate(parts).astype(np.int32)
            elif slot not in repeated:
                sampler.reset(wave, slot)
                extend[slot] = run.context[0]
        sampler.extend(wave, extend)
        asked: dict[int, tuple[Key, int]] = {
            slot: (
                (iteration, run.job.group, run.job.replica, len(run.steps)),
                self.limits.max_response,
            )
            for slot, run in ready.items()
            if slot not in repeated
        }
        sampled = sampler.generate(wave, asked) if asked else {}
        outputs: dict[int, Generated] = {**sampled, **repeated}
        for slot, run in ready.items():
            self._record(run, outputs[slot])
            action = run.steps[-1].action
            if action is None:
                run.text = self.prompt.reminder
            else:
                pool.step(run.ticket, action)
                run.waiting = True

    def _record(self, run: _Run, output: Generated) -> None:
        assert run.context is not None and run.now is not None
        ids, logp = np.asarray(output.ids, np.int32), np.asarray(output.logp, np.float32)
        sampled = np.ones(len(ids), bool)
        run.injected = []
        if ids[-1] != self.chat.end_id:
            # The template ends every message; an end that was not sampled is never trained on.
            run.injected = [self.chat.end_id]
            ids, logp = np.append(ids, self.chat.end_id), np.append(logp, np.float32(0.0))
            sampled = np.append(sampled, False)
        text = self.chat.decode(output.ids[:-1] if output.stop == "stop" else output.ids)
        action = self.prompt.action(text)
        run.steps.append(
            Step(
                context_ids=run.context[0],
                response_ids=ids.astype(np.int32),
                behaviour_logp=logp,
                sampled=sampled,
                stop=output.stop,
                observation_span=run.context[1],
                action=action,
                valid=action is not None,
                progress=run.now.info.progress,
                state=run.now.info.state,
                observation=run.text,
            )
        )
        run.offered.append(run.now.info.admissible)
        run.history.append((run.text, action if action is not None else "(no action)"))
        run.context = None

    def _finish(self, run: _Run, status: Status, policy_version: int) -> Episode:
        success = status == Status.SUCCESS
        steps = run.steps
        final = run.text
        if run.first is not None and steps:
            steps = self._with_hindsight(run, final)
        return Episode(
            task_id=run.job.task.id,
            group=run.job.group,
            replica=run.job.replica,
            steps=tuple(steps),
            outcome=float(success),
            success=success,
            status=status,
            initial_progress=run.first.info.progress if run.first is not None else 0.0,
            final_observation=final,
            goal=run.first.info.goal if run.first is not None else "",
            context=self.prompt.context,
            policy_version=policy_version,
        )

    def _with_hindsight(self, run: _Run, final: str) -> list[Step]:
        """Adds the outcome-augmented contexts (RELACE, Appendix D.3)."""
        assert run.first is not None
        goal = self.prompt.hindsight_goal(final)
        if self.prompt.context == "conversation":
            messages = self.prompt.opening(goal, scene(run.first.text), run.offered[0])
            first = dataclasses.replace(run.steps[0], hindsight_ids=self.chat.opening(messages))
            return [first, *run.steps[1:]]
        out = []
        for k, step in enumerate(run.steps):
            messages = self.prompt.window(
                goal, run.history[:k], run.history[k][0], run.offered[k], k
            )
            out.append(dataclasses.replace(step, hindsight_ids=self.chat.opening(messages)))
        return out


def _repeats(run: _Run) -> bool:
    return len(run.steps) < len(run.job.prefix)


def _repeat(run: _Run) -> _Repeated:
    """The prefix's next response, if its context is what was shown then."""
    assert run.context is not None
    number = len(run.steps)
    step = run.job.prefix[number]
    if not np.array_equal(run.context[0], step.context_ids):
        raise Diverged(
            f"task {run.job.task.id}: the first {number} steps of an attempt were taken again and "
            "something else was shown; this needs an environment that repeats itself"
        )
    return _Repeated(step.response_ids[step.sampled], step.behaviour_logp[step.sampled], step.stop)
