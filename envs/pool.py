"""A pool of worker processes that play episodes side by side.

A *ticket* is the caller's number for one running episode. `reset` and `step` send and return
at once; `poll` and `wait` hand back answers. A worker that dies, hangs past the deadline of a
message, or breaks the protocol is killed and replaced; its episodes, and only those, answer
`EnvFailure`, which says whether the fault was the episode's own. An environment that raises or
answers garbage spoils its own episode alone.
"""

from __future__ import annotations

import dataclasses
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from envs.protocol import EnvFailure, EnvSpec, Observation, from_json

ROOT = Path(__file__).resolve().parent.parent
# A task stays with the worker that has it cached unless that worker is this many episodes
# busier than the idlest one.
SLACK = 4


class TaskMismatch(RuntimeError):
    """An environment answered for another task than the one asked for."""


@dataclasses.dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    incoming: bytes = b""
    outgoing: bytes = b""
    started: int = 0
    tickets: set[int] = dataclasses.field(default_factory=set)
    # message id -> (ticket, time at which we give up)
    pending: dict[int, tuple[int, float]] = dataclasses.field(default_factory=dict)

    @property
    def out(self) -> int:
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    @property
    def to(self) -> int:
        assert self.process.stdin is not None
        return self.process.stdin.fileno()


def _spawn(spec: EnvSpec) -> _Worker:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    log = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the worker)
    process = subprocess.Popen(
        [
            spec.python or sys.executable,
            "-m",
            "envs.worker",
            spec.name,
            json.dumps(dict(spec.options)),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        bufsize=0,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    worker = _Worker(process, log)
    os.set_blocking(worker.out, False)
    os.set_blocking(worker.to, False)
    return worker


def _rss_mb(pid: int) -> float:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


class Pool:
    """Worker processes of one environment; use it as a context manager.

    Args:
      spec: the environment and its options.
      workers: number of processes.
      deadline_s: seconds that one message may take before its worker counts as hung; messages
        that wait behind it in the same worker do not count as taking that time.
      max_episodes_per_worker: a worker that has started this many episodes takes no new ones and
        is replaced.
      max_rss_mb: the same, above this resident memory (engines leak).

    Raises:
      ValueError: `workers` below 1 or a deadline that is not positive.
      TypeError: an option that is not JSON.
      RuntimeError: workers that die before they answer anything, again and again.
    """

    def __init__(
        self,
        spec: EnvSpec,
        workers: int,
        deadline_s: float = 120.0,
        max_episodes_per_worker: int = 5000,
        max_rss_mb: float = 2000.0,
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers = {workers}: a pool needs at least one worker process")
        if deadline_s <= 0:
            raise ValueError(f"deadline_s = {deadline_s}: give a positive number of seconds")
        self._spec = spec
        self._deadline = deadline_s
        self._max_episodes = max_episodes_per_worker
        self._max_rss = max_rss_mb
        self._selector = selectors.DefaultSelector()
        self._workers: list[_Worker] = []
        self._draining: list[_Worker] = []
        self._owner: dict[int, _Worker] = {}  # ticket -> worker
        self._task: dict[int, str] = {}  # ticket -> task asked for
        self._failed: dict[int, EnvFailure] = {}  # ticket -> why its episode cannot go on
        self._opening: set[int] = set()  # tickets whose reset is not answered yet
        self._busy: dict[int, int] = {}  # ticket -> message in flight
        self._home: dict[str, _Worker] = {}  # task -> worker that has it cached
        self._ready: dict[int, Observation | EnvFailure] = {}
        self._next = 0
        self._barren = 0  # workers lost since the last answer of any
        self._closed = False
        for _ in range(workers):
            self._workers.append(self._start())

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()

    @property
    def pids(self) -> list[int]:
        """Process ids of the live workers."""
        return [w.process.pid for w in [*self._workers, *self._draining]]

    def worker_of(self, ticket: int) -> int | None:
        """Process id of the worker that plays `ticket`, or None."""
        worker = self._owner.get(ticket)
        return worker.process.pid if worker else None

    # ------------------------------------------------------------------ requests

    def reset(self, ticket: int, task_id: str, expert: bool = False) -> None:
        """Start an episode of `task_id` as `ticket`; does not wait."""
        self._check_idle(ticket)
        self.close(ticket)
        worker = self._choose(task_id)
        worker.started += 1
        worker.tickets.add(ticket)
        self._owner[ticket] = worker
        self._task[ticket] = task_id
        self._home[task_id] = worker
        self._opening.add(ticket)
        self._send(ticket, {"op": "reset", "task": task_id, "expert": expert})

    def step(self, ticket: int, action: str) -> None:
        """Act in the episode `ticket`; does not wait."""
        self._check_idle(ticket)
        if ticket in self._failed:
            self._ready[ticket] = self._failed[ticket]
            return
        if ticket not in self._owner:
            raise ValueError(f"ticket {ticket} has no episode; call reset(ticket, task_id) first")
        self._send(ticket, {"op": "step", "action": action})

    def close(self, ticket: int) -> None:
        """End the episode `ticket` (if there is one) and free its environment for reuse."""
        worker = self._owner.pop(ticket, None)
        self._task.pop(ticket, None)
        self._opening.discard(ticket)
        broken = self._failed.pop(ticket, None) is not None
        self._ready.pop(ticket, None)
        message = self._busy.pop(ticket, None)
        if worker is None:
            return
        worker.tickets.discard(ticket)
        if message is not None and message in worker.pending:
            # The late answer is dropped, but the worker still owes it within the deadline.
            worker.pending[message] = (-1, worker.pending[message][1])
        self._write(worker, {"op": "release", "env": ticket, "broken": broken})
        self._retire()

    # ------------------------------------------------------------------ answers

    def poll(self, timeout: float = 0.0) -> dict[int, Observation | EnvFailure]:
        """All answers that are ready; waits up to `timeout` seconds for the first."""
        until = time.monotonic() + timeout
        self._pump(0.0)
        while not self._ready and self._busy and (left := until - time.monotonic()) > 0:
            self._pump(left)
        ready, self._ready = self._ready, {}
        return ready

    def wait(self, tickets: Iterable[int]) -> dict[int, Observation | EnvFailure]:
        """The answers of all `tickets`, each of which must have a request in flight or ready."""
        wanted = list(dict.fromkeys(tickets))
        for ticket in wanted:
            if ticket not in self._busy and ticket not in self._ready:
                raise ValueError(f"ticket {ticket} waits for nothing; call reset or step first")
        while any(ticket not in self._ready for ticket in wanted):
            self._pump(1.0)
        return {ticket: self._ready.pop(ticket) for ticket in wanted}

    def shutdown(self) -> None:
        """End every worker. No child process is left when this returns."""
        if self._closed:
            return
        self._closed = True
        everyone = [*self._workers, *self._draining]
        for worker in everyone:
            self._forget(worker)
            assert worker.process.stdin is not None
            worker.process.stdin.close()
        patience = time.monotonic() + 2.0
        for worker in everyone:
            try:
                worker.process.wait(max(0.0, patience - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
            self._release(worker)
        self._workers, self._draining = [], []
        self._owner, self._busy, self._ready = {}, {}, {}
        self._selector.close()

    # ------------------------------------------------------------------ inside

    def _check_idle(self, ticket: int) -> None:
        if self._closed:
            raise RuntimeError("the pool is closed")
        if ticket < 0:
            raise ValueError(f"ticket {ticket}: tickets are numbers from 0 on")
        if ticket in self._busy:
            raise ValueError(f"ticket {ticket} still waits for an answer; call wait or poll first")

    def _start(self) -> _Worker:
        worker = _spawn(self._spec)
        self._selector.register(worker.out, selectors.EVENT_READ, worker)
        return worker

    def _choose(self, task_id: str) -> _Worker:
        idlest = min(self._workers, key=lambda w: (len(w.tickets), w.started))
        home = self._home.get(task_id)
        if home is not None and home in self._workers:
            shared = any(self._task.get(t) == task_id for t in home.tickets)
            if shared or len(home.tickets) <= len(idlest.tickets) + SLACK:
                return home
        return idlest

    def _send(self, ticket: int, message: dict[str, Any]) -> None:
        worker = self._owner[ticket]
        self._next += 1
        self._busy[ticket] = self._next
        worker.pending[self._next] = (ticket, time.monotonic() + self._deadline)
        self._write(worker, {"id": self._next, "env": ticket, **message})

    def _write(self, worker: _Worker, message: dict[str, Any]) -> None:
        worker.outgoing += json.dumps(message).encode() + b"\n"
        self._flush(worker)

    def _flush(self, worker: _Worker) -> None:
        waiting = worker.to in self._selector.get_map()
        try:
            while worker.outgoing:
                worker.outgoing = worker.outgoing[os.write(worker.to, worker.outgoing) :]
        except BlockingIOError:
            if not waiting:
                self._selector.register(worker.to, selectors.EVENT_WRITE, worker)
            return
        except BrokenPipeError:
            worker.outgoing = b""  # the end of its output reports the death
        if waiting:
            self._selector.unregister(worker.to)

    def _pump(self, timeout: float) -> None:
        """Move bytes for up to `timeout` seconds, then look at the deadlines."""
        now = time.monotonic()
        pending = [w.pending for w in [*self._workers, *self._draining]]
        deadlines = [end for messages in pending for _, end in messages.values()]
        if deadlines:
            timeout = min(timeout, max(0.0, min(deadlines) - now))
        for key, _ in self._selector.select(timeout):
            worker: _Worker = key.data
            if worker not in self._workers and worker not in self._draining:
                continue  # replaced while this batch of events was handled
            if key.fd == worker.out:
                self._read(worker)
            else:
                self._flush(worker)
        now = time.monotonic()
        for worker in [*self._workers, *self._draining]:
            if any(end <= now for _, end in worker.pending.values()):
                self._replace(worker, f"no answer within {self._deadline:g} s; worker killed")
        self._retire()

    def _read(self, worker: _Worker) -> None:
        try:
            data = os.read(worker.out, 1 << 20)
        except BlockingIOError:
            return
        if not data:
            self._replace(worker, "worker died")
            return
        *lines, worker.incoming = (worker.incoming + data).split(b"\n")
        for line in lines:
            self._receive(worker, line)

    def _receive(self, worker: _Worker, line: bytes) -> None:
        try:
            reply = json.loads(line)
            ticket, _ = worker.pending.pop(reply["id"])
        except (ValueError, KeyError, TypeError):
            return  # not an answer to us: chatter; a lost answer meets its deadline
        until = time.monotonic() + self._deadline
        worker.pending = {m: (t, max(end, until)) for m, (t, end) in worker.pending.items()}
        if ticket < 0:
            return
        self._busy.pop(ticket, None)
        if "error" in reply:
            self._fail(ticket, str(reply["error"]))
            return
        self._barren = 0
        try:
            observation = from_json(reply.get("observation"))
        except (TypeError, ValueError) as error:
            self._fail(ticket, f"the environment answered garbage: {error}")
            return
        if observation.info.task_id != self._task[ticket]:
            mismatch = (
                f"ticket {ticket}: asked for task {self._task[ticket]!r}, "
                f"the environment plays {observation.info.task_id!r}"
            )
            if ticket not in self._opening:
                self._fail(ticket, mismatch)
                return
            raise TaskMismatch(mismatch)
        self._opening.discard(ticket)
        self._ready[ticket] = observation

    def _fail(self, ticket: int, reason: str) -> None:
        self._failed[ticket] = self._ready[ticket] = EnvFailure(ticket, reason)

    def _retire(self) -> None:
        """Replace workers that are old or fat; they finish their episodes first."""
        for index, worker in enumerate(self._workers):
            old = worker.started >= self._max_episodes
            if old or (worker.started and _rss_mb(worker.process.pid) > self._max_rss):
                self._draining.append(worker)
                self._workers[index] = self._start()
        for worker in [w for w in self._draining if not w.tickets]:
            self._stop(worker)
            self._release(worker)

    def _replace(self, worker: _Worker, reason: str) -> None:
        position = self._workers.index(worker) if worker in self._workers else None
        self._stop(worker)
        code = worker.process.returncode
        last_words = worker_tail(worker.log)
        # Messages are answered in order: the oldest is the one that it broke on.
        culprit = worker.pending[min(worker.pending)][0] if worker.pending else -1
        for ticket in sorted(worker.tickets):
            text = f"{reason} (task {self._task[ticket]}, exit {code}){last_words}"
            self._owner.pop(ticket)
            self._failed[ticket] = EnvFailure(ticket, text, own=ticket == culprit)
            if self._busy.pop(ticket, None) is not None:
                self._ready[ticket] = self._failed[ticket]
        self._release(worker)
        self._barren += 1
        if self._barren > 4 + 2 * len(self._workers):
            if position is not None:
                self._workers.pop(position)
            raise RuntimeError(
                f"{self._barren} workers of {self._spec.name!r} were lost without one answer in "
                f"between; the last: {reason}, exit {code}{last_words}"
            )
        if position is not None:
            self._workers[position] = self._start()

    def _stop(self, worker: _Worker) -> None:
        self._forget(worker)
        worker.process.kill()
        worker.process.wait()
        if worker in self._draining:
            self._draining.remove(worker)

    def _forget(self, worker: _Worker) -> None:
        for fd in (worker.out, worker.to):
            if fd in self._selector.get_map():
                self._selector.unregister(fd)

    def _release(self, worker: _Worker) -> None:
        for stream in (worker.process.stdin, worker.process.stdout, worker.log):
            assert stream is not None
            if not stream.closed:
                stream.close()


def worker_tail(log: IO[bytes], size: int = 800) -> str:
    """The end of a worker's stderr, for the reason of a failure."""
    end = log.seek(0, os.SEEK_END)
    log.seek(max(0, end - size))
    text = log.read().decode(errors="replace").strip()
    return f"; its last words: {text}" if text else ""
