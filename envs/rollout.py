"""Plays jobs: the fixed parts of a rollout, and the call that turns jobs into episodes.

``envs.turns`` is one episode, ``envs.schedule`` many at once, ``envs.meter`` what is counted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import cast

from envs import schedule
from envs.chat import ChatFormat
from envs.meter import Meter
from envs.prompts import Prompt
from envs.sampling import Generated, Key, Sampler
from envs.schedule import Environments, Playable
from envs.turns import Diverged, Job, Limits, Play
from jaxcredit.episodes import Episode, Status

__all__ = ["Diverged", "Generated", "Job", "Key", "Limits", "Meter", "Player", "Sampler"]


@dataclasses.dataclass(frozen=True)
class Player:
    """The fixed parts of a rollout."""

    chat: ChatFormat
    prompt: Prompt
    limits: Limits

    def collect(
        self,
        sampler: Sampler,
        pool: Environments,
        jobs: Sequence[Job],
        *,
        iteration: int = 0,
        policy_version: int = 0,
        meter: Meter | None = None,
        progress: Callable[[Meter], None] | None = None,
    ) -> list[Episode]:
        """Plays every job once and returns the episodes in the order of the jobs.

        Args:
          sampler: holds the policy.
          pool: holds the environments; its tickets are used from 0 on.
          jobs: what to play.
          iteration: part of every sampling key.
          policy_version: written into the episodes.
          meter: counts, for the caller to read.
          progress: called with the meter whenever an episode finishes.
        """
        meter = Meter() if meter is None else meter
        done: dict[int, Episode] = {}

        def finished(playable: Playable, status: Status) -> None:
            play = cast(Play, playable)
            done[play.ticket] = play.finish(status, policy_version)
            meter.done, meter.shortened = len(done), meter.shortened + play.shortened
            if progress is not None:
                progress(meter)

        meter.begin(len(jobs), sampler.slots, sampler.work)
        schedule.play(
            [
                Play(self.chat, self.prompt, self.limits, job, ticket, iteration)
                for ticket, job in enumerate(jobs)
            ],
            sampler,
            pool,
            retries=self.limits.retries,
            meter=meter,
            finished=finished,
        )
        return [done[ticket] for ticket in range(len(jobs))]
