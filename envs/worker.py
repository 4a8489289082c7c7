"""Worker process: hosts interleaved environments, one JSON message per line.

`python -m envs.worker NAME OPTIONS_JSON`. Requests on stdin:

    {"id": 7, "op": "reset", "env": 3, "task": "...", "expert": false}
    {"id": 8, "op": "step", "env": 3, "action": "look"}
    {"op": "release", "env": 3, "broken": false}    (no answer; a broken one is not reused)

Answers on stdout: {"id": 7, "env": 3, "observation": {...}} or {"id": 7, "env": 3, "error": "..."}.
An error spoils one environment, never the worker. The end of stdin ends the process.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

from envs.protocol import Environment, Observation, to_json

BUILTIN = {
    "alfworld": "envs.alfworld.engine:make",
    "scienceworld": "envs.scienceworld.engine:make",
}


def factory(name: str) -> Callable[[Mapping[str, Any]], Environment]:
    """The function that builds environment `name`. Raises ValueError for an unknown name."""
    target = BUILTIN.get(name, name)
    module, _, function = target.partition(":")
    if not function:
        known = ", ".join(sorted(BUILTIN))
        raise ValueError(
            f"environment name {name!r} is neither built in ({known}) nor 'module:function'"
        )
    made: Callable[[Mapping[str, Any]], Environment] = getattr(
        importlib.import_module(module), function
    )
    return made


def _claim_stdout() -> BinaryIO:
    """Keep the protocol's pipe for ourselves; whatever a library prints goes nowhere."""
    sys.stdout.flush()
    protocol = os.fdopen(os.dup(1), "wb", buffering=0)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    return protocol


def _answer(
    message: Mapping[str, Any],
    make: Callable[[], Environment],
    live: dict[int, Environment],
    free: list[Environment],
) -> Observation:
    env = int(message["env"])
    if message["op"] == "reset":
        if env not in live:
            live[env] = free.pop() if free else make()
        return live[env].reset(message["task"], expert=bool(message.get("expert", False)))
    if message["op"] == "step":
        if env not in live:
            raise KeyError(f"env {env} takes no step: it was never reset, or failed before")
        return live[env].step(message["action"])
    raise ValueError(f"unknown op {message['op']!r}; expected reset, step or release")


def serve(name: str, options: Mapping[str, Any], requests: BinaryIO, replies: BinaryIO) -> None:
    """Answer requests until they end."""
    live: dict[int, Environment] = {}
    free: list[Environment] = []

    def make() -> Environment:
        return factory(name)(options)

    for line in iter(requests.readline, b""):
        message = json.loads(line)
        env = int(message["env"])
        if message["op"] == "release":
            if env in live and not message.get("broken"):
                free.append(live.pop(env))
            elif env in live:
                with contextlib.suppress(Exception):
                    live.pop(env).close()
            continue
        reply: dict[str, Any] = {"id": message["id"], "env": env}
        try:
            reply["observation"] = to_json(_answer(message, make, live, free))
            data = json.dumps(reply).encode() + b"\n"
        except Exception as error:
            reply.pop("observation", None)
            # The instance may be in any state now, so it is not reused.
            reply["error"] = f"{type(error).__name__}: {error}"
            broken = live.pop(env, None)
            if broken is not None:
                try:
                    broken.close()
                except Exception as second:
                    reply["error"] += f" (and close: {second})"
            data = json.dumps(reply).encode() + b"\n"
        # One write per line: with unbuffered pipes a partial write returns a short count.
        while data:
            data = data[replies.write(data) :]
    for environment in [*live.values(), *free]:
        environment.close()


def main() -> None:
    """Entry point of `python -m envs.worker`."""
    if len(sys.argv) != 3:
        raise SystemExit("usage: python -m envs.worker NAME OPTIONS_JSON")
    name, options = sys.argv[1], json.loads(sys.argv[2])
    with _claim_stdout() as replies:
        serve(name, options, sys.stdin.buffer, replies)


if __name__ == "__main__":
    main()
