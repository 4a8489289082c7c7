"""``python -m launch doctor [CONFIG]``: what a run needs, checked before it starts.

Every check that imports something heavy or looks for accelerators does so in a process of its
own with a deadline, so a broken driver or package cannot take this command down with it.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from packaging.requirements import Requirement

from launch.config import ScienceWorldConfig, TrainConfig
from launch.errors import UserError, one_line

ROOT = Path(__file__).resolve().parent.parent
GIB = 1024**3
DISK_GIB = 2.0  # the least free space for games, checkpoints and metrics of a small run
MEMORY_GIB = 2.0  # the same for memory


@dataclasses.dataclass(frozen=True)
class Check:
    """One line of the report. ``needed`` is False for what is only good to know."""

    name: str
    ok: bool
    detail: str
    fix: str = ""
    needed: bool = True


def main(config: TrainConfig | None = None) -> None:
    """Prints one line per check. Raises ``UserError`` if something needed is missing."""
    missing: list[str] = []
    for check in checks(config):
        state = "ok" if check.ok else "missing" if check.needed else "absent"
        fix = f" -> {check.fix}" if check.fix and not check.ok else ""
        print(f"{state:8}{check.name:14}{check.detail}{fix}", flush=True)
        if check.needed and not check.ok:
            missing.append(check.name)
    if missing:
        raise UserError(f"doctor: missing {', '.join(missing)}; the lines above say the fixes")
    print("everything that is needed is here")


def checks(config: TrainConfig | None = None) -> Iterator[Check]:
    """Runs the checks in order, cheap ones first, accelerators last."""
    yield check_python(sys.version_info[:2])
    yield from check_packages(declared_requirements())
    yield check_compiler()
    interpreter = str(config.env.python) if config and config.env.python else sys.executable
    name = config.env.name if config else None
    if name != "scienceworld":
        yield check_alfworld(interpreter)
        yield check_data(config)
    if name != "alfworld":
        options = (config.env.scienceworld if config else None) or ScienceWorldConfig()
        yield check_scienceworld(interpreter, options, needed=config is not None)
    if config is not None and config.policy.path is not None:
        yield check_policy(config.policy.path)
    yield check_disk(config.run if config else Path.cwd())
    yield check_memory(Path("/proc/meminfo"))
    yield check_devices()


def check_python(version: tuple[int, int]) -> Check:
    """The interpreter's version is one that the locked packages exist for."""
    return Check(
        "python",
        (3, 11) <= version < (3, 14),
        f"{version[0]}.{version[1]} ({sys.executable})",
        "use Python 3.11, 3.12 or 3.13, such as `make install PYTHON=python3.12`",
    )


def declared_requirements() -> tuple[Requirement, ...]:
    """The library's and the stack's dependencies, from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = [*project["dependencies"], *project["optional-dependencies"]["stack"]]
    return tuple(Requirement(name) for name in names)


def check_packages(requirements: Sequence[Requirement]) -> Iterator[Check]:
    """Each package is installed in a version of the declared range; one line if all are."""
    found = 0
    for requirement in requirements:
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            version = "not installed"
        if version != "not installed" and requirement.specifier.contains(version, prereleases=True):
            found += 1
            continue
        yield Check(
            requirement.name,
            False,
            f"{version}, needed {requirement.specifier}",
            "run `make install`",
        )
    yield Check("packages", True, f"{found} of {len(requirements)} in range", needed=False)


def check_compiler() -> Check:
    """A C++ compiler; packages without a ready-made wheel are built while installing."""
    found = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    return Check(
        "compiler",
        found is not None,
        found or "no c++, g++ or clang++ on PATH (only an install needs one)",
        "install a C++ compiler, such as the package g++",
        needed=False,
    )


def check_alfworld(interpreter: str, deadline_s: float = 120.0) -> Check:
    """ALFWorld's engine and planner import under the interpreter of the workers."""
    code = "import textworld.envs.pddl, fast_downward, alfworld; print(alfworld.__file__)"
    ok, output = _run([interpreter, "-c", code], deadline_s)
    detail = f"imports under {interpreter}" if ok else f"{interpreter}: {output}"
    fix = "run `make install`, or set env.python to an interpreter that has the alfworld extra"
    return Check("alfworld", ok, detail, fix)


def check_scienceworld(
    interpreter: str, config: ScienceWorldConfig, deadline_s: float = 120.0, *, needed: bool = True
) -> Check:
    """ScienceWorld's engine starts a task under the interpreter of the workers."""
    code = (
        "import importlib.metadata as m, sys; sys.path.insert(0, sys.argv[1]); "
        "from envs.scienceworld.engine import make; from envs.scienceworld.jvm import find_java; "
        "make({'jvm': sys.argv[2:]}).reset('boil/0'); print(m.version('scienceworld'), find_java())"
    )
    ok, output = _run([interpreter, "-c", code, str(ROOT), *config.jvm], deadline_s)
    version, _, java = output.partition(" ")
    detail = f"{version} starts a task with {java}" if ok else f"{interpreter}: {output}"
    fix = "run `make install`, or set env.python to an interpreter with the scienceworld extra"
    return Check("scienceworld", ok, detail, fix, needed)


def check_data(config: TrainConfig | None) -> Check:
    """A folder of games exists, or the config says how to generate one."""
    fix = "make one with `python -m launch games FOLDER`, then set env.data or ALFWORLD_DATA to it"
    if config is not None:
        try:
            folder = config.env.data_folder()
        except UserError as error:
            return Check("data", False, one_line(error))
    elif variable := os.environ.get("ALFWORLD_DATA"):
        folder = Path(variable)
    else:
        return Check("data", False, "ALFWORLD_DATA is not set, no config given", fix, needed=False)
    games = folder / "json_2.1.1"
    if games.is_dir():
        splits = sorted(entry.name for entry in games.iterdir() if entry.is_dir())
        return Check("data", bool(splits), f"{games}: {', '.join(splits) or 'no split'}", fix)
    if config is not None and config.env.generate is not None:
        return Check("data", True, f"{folder} will be generated (env.generate)")
    return Check("data", False, f"{games} is not a folder", fix, needed=config is not None)


def check_policy(folder: Path) -> Check:
    """The policy folder holds a config and weights."""
    weights = folder.is_dir() and any(folder.glob("*.safetensors"))
    ok = weights and (folder / "config.json").is_file()
    detail = str(folder) if ok else f"{folder} lacks config.json or *.safetensors"
    fix = "set policy.path to a Hugging Face folder of dense Qwen2.5 or Qwen3, or use policy.init"
    return Check("policy", ok, detail, fix)


def check_disk(folder: Path, least_gib: float = DISK_GIB) -> Check:
    """Free space where the run's folder is or will be."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free / GIB
    fix = "free some space, or put the run elsewhere with --set run=FOLDER"
    detail = f"{free:.1f} GiB free at {place}, needed {least_gib:g}"
    return Check("disk", free >= least_gib, detail, fix)


def check_memory(meminfo: Path, least_gib: float = MEMORY_GIB) -> Check:
    """Memory that can be had without swapping, from a file in /proc/meminfo's format."""
    try:
        lines: Iterable[str] = meminfo.read_text(encoding="ascii").splitlines()
    except OSError:
        return Check("memory", False, f"{meminfo} cannot be read", needed=False)
    for line in lines:
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) / 1024**2  # the file counts in KiB
            detail = f"{free:.1f} GiB available, needed {least_gib:g}"
            return Check("memory", free >= least_gib, detail, "end other programs")
    return Check("memory", False, f"{meminfo} has no MemAvailable", needed=False)


def check_devices(deadline_s: float = 180.0) -> Check:
    """What JAX computes on, asked in a process of its own."""
    code = (
        "import json, jax; d = jax.devices(); "
        "print(json.dumps([jax.__version__, d[0].platform, d[0].device_kind, len(d)]))"
    )
    ok, output = _run([sys.executable, "-c", code], deadline_s)
    if not ok:
        fix = "check the driver, or run on the CPU with JAX_PLATFORMS=cpu"
        return Check("devices", False, output, fix)
    version, platform, kind, count = json.loads(output)
    return Check("devices", True, f"jax {version}: {count} x {kind} ({platform})")


def _run(command: Sequence[str], deadline_s: float) -> tuple[bool, str]:
    """Runs a command; returns whether it succeeded, and its last line of output or error."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=deadline_s)
    except subprocess.TimeoutExpired:
        return False, f"no answer within {deadline_s:g} s"
    except OSError as error:
        return False, f"cannot be started: {error.strerror}"
    text = done.stdout if done.returncode == 0 else done.stderr or done.stdout
    lines = text.strip().splitlines()
    last = one_line(lines[-1]) if lines else f"exit status {done.returncode}"
    return done.returncode == 0, last
