"""``python -m launch COMMAND``: parses the command line and calls one command's ``main``.

Command modules are imported when their command runs, so ``--help`` and mistakes in a config
cost no start of JAX. Mistakes of the user end in one line on stderr and exit status 2.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from launch.errors import UserError, one_line

app = typer.Typer(
    name="launch",
    help="Train and evaluate long-horizon language-model agents with step-level credit.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML config file")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a dotted key; may be repeated"),
]


def _keep_freed_memory() -> None:
    """Makes glibc reuse large blocks: fresh pages for each CPU program cost a third of its time."""
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return  # another C library
    trim_threshold, mmap_max = -1, -4  # names and numbers of <malloc.h>
    mallopt(mmap_max, 0)
    mallopt(trim_threshold, 2**31 - 1)


def _call(command: str, *args: Any) -> None:
    _keep_freed_memory()
    # A program that was compiled before is read from here, also by the next process.
    cache = Path.home() / ".cache" / "jaxcredit"
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")
    importlib.import_module(f"launch.{command}").main(*args)


def _train_config(path: Path, overrides: Sequence[str] | None) -> Any:
    from launch.config import TrainConfig
    from launch.loading import load_config

    return load_config(TrainConfig, path, overrides or ())


@app.command()
def train(config: ConfigFile, overrides: Overrides = None) -> None:
    """Train a policy, or go on with the run that the config names."""
    _call("train", _train_config(config, overrides))


@app.command()
def evaluate(
    config: ConfigFile,
    policy: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Policy to play; default: the run's newest"),
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Play frozen task lists and report success rates with intervals."""
    _call("evaluate", _train_config(config, overrides), policy)


@app.command()
def play(
    config: ConfigFile,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="New folder for the result")],
    policy: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Policy; default: the config's")
    ] = None,
    task: Annotated[str | None, typer.Option(help="Part of a task id; default: the first")] = None,
    overrides: Overrides = None,
) -> None:
    """Play one game and write its transcript and step graph."""
    _call("play", _train_config(config, overrides), policy, task, out)


@app.command()
def sft(config: ConfigFile, overrides: Overrides = None) -> None:
    """Train a policy on the hand-coded expert's actions."""
    from launch.config import SftConfig
    from launch.loading import load_config

    _call("sft", load_config(SftConfig, config, overrides or ()))


@app.command()
def games(
    out: Annotated[Path, typer.Argument(help="Folder to create, in ALFWorld's layout")],
    workers: Annotated[int, typer.Option(min=1, help="Processes")] = 2,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="train, valid_seen, valid_unseen, receptacles, distractors, kinds, seed",
        ),
    ] = None,
) -> None:
    """Generate household games, each proven solvable."""
    from launch.config import GamesConfig
    from launch.loading import apply_override, validate

    chosen: dict[str, Any] = {}
    for override in overrides or ():
        apply_override(chosen, override)
    _call("games", out, validate(GamesConfig, chosen, "games"), workers)


@app.command()
def score(
    folder: Annotated[Path, typer.Argument(help="Policy folder in Hugging Face's layout")],
    ids: Annotated[
        str | None, typer.Option(help="Token ids: '1,2,3', a JSON list, or a file that holds one")
    ] = None,
    text: Annotated[str | None, typer.Option(help="Text to tokenize instead of --ids")] = None,
    spans: Annotated[
        str | None,
        typer.Option(
            help='Messages as JSON, or a file: [["action", 1, 3, 9], ["observation", 1, 9, 20]] '
            "(kind, step from 1, first token, end)"
        ),
    ] = None,
    layers: Annotated[
        str | None, typer.Option(help="Layers whose step graph is printed: '8,10,12'")
    ] = None,
) -> None:
    """Print the log-probabilities, and the step graph, of given tokens."""
    if (ids is None) == (text is None):
        raise UserError("score: give exactly one of --ids and --text")
    _call(
        "score",
        folder,
        None if ids is None else _integers("--ids", ids),
        text,
        None if spans is None else _spans(spans),
        None if layers is None else _integers("--layers", layers),
    )


@app.command()
def audit(
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="New folder for JSON, tables and picture")
    ] = None,
    methods: Annotated[
        str | None, typer.Option(metavar="NAMES", help="'ppo,grpo'; default: all")
    ] = None,
    problems: Annotated[
        str | None, typer.Option(metavar="NAMES", help="'key_door,detour'; default: all")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of episodes and signals")] = 0,
    noise: Annotated[
        float, typer.Option(min=0.0, help="Standard deviation of the errors of learned models")
    ] = 0.1,
) -> None:
    """Compare credit estimators with the truth on small problems."""
    _call("audit", out, _names("--methods", methods), _names("--problems", problems), seed, noise)


@app.command()
def plan(
    config: ConfigFile,
    topology: Annotated[
        list[str],
        typer.Option(help="h200x8, b200x16, v5p:2x2x4, v5e:4x4, cpu:8, ...; may be repeated"),
    ],
    memory: Annotated[
        float | None,
        typer.Option(metavar="GIB", min=1e-6, help="Memory per device in place of the known one"),
    ] = None,
    phase: Annotated[
        list[str] | None,
        typer.Option(help="Only programs of rollout, score or update; may be repeated"),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write JSON here")] = None,
    overrides: Overrides = None,
) -> None:
    """Compile a run's programs for hardware that is not here and say whether it fits."""
    _call("plan", _train_config(config, overrides), topology, memory, out, phase)


@app.command()
def doctor(
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG]", help="YAML config")] = None,
    overrides: Overrides = None,
) -> None:
    """Check what a run needs, before it starts."""
    if config is None and overrides:
        raise UserError("doctor: --set needs a CONFIG to override")
    _call("doctor", None if config is None else _train_config(config, overrides))


def _names(option: str, value: str | None) -> tuple[str, ...] | None:
    if value is None:
        return None
    names = tuple(dict.fromkeys(value.replace(",", " ").split()))
    if not names:
        raise UserError(f"{option}: {value!r} holds no name")
    return names


def _integers(option: str, value: str) -> tuple[int, ...]:
    items = _json_list(option, value if value.lstrip().startswith("[") else f"[{value}]", value)
    if not all(type(item) is int for item in items):
        raise UserError(f"{option}: {value!r} is not a list of integers such as 1,2,3")
    return tuple(items)


def _spans(value: str) -> tuple[tuple[str, int, int, int], ...]:
    items = _json_list("--spans", value, value)
    for item in items:
        kinds = [type(part) for part in item] if isinstance(item, list) else []
        if kinds != [str, int, int, int]:
            raise UserError(
                f"--spans: {json.dumps(item)} is not [kind, step, start, end], such as "
                '["action", 1, 3, 9]'
            )
    return tuple(tuple(item) for item in items)


def _json_list(option: str, text: str, value: str) -> list[Any]:
    """The JSON list that ``text`` is, or that the file named ``value`` holds."""
    try:
        if Path(value).is_file():
            text = Path(value).read_text(encoding="utf-8")
        found = json.loads(text)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{option}: {value!r} is neither a JSON list nor a file that holds one: "
            f"{one_line(error)}"
        ) from error
    if not isinstance(found, list):
        raise UserError(f"{option}: {value!r} holds a {type(found).__name__}, not a list")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status (2 for a mistake of the user's)."""
    try:
        return app(args=arguments, prog_name="python -m launch", standalone_mode=False) or 0
    except UserError as error:
        message = one_line(error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        # The parser's own errors (unknown command or option, missing argument) know how to
        # word themselves; whatever else arrives here is a fault and keeps its traceback.
        words = getattr(error, "format_message", None)
        if not callable(words):
            raise
        message = f"{one_line(words()).rstrip('.')}. See `python -m launch --help`."
    print(f"error: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
