"""The repository as a whole: what its files may hold, and what the wheel holds."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Hosts of package registries and folders of one machine make a checkout fail elsewhere. Each
# pattern is written in two parts so that this file does not match itself.
FORBIDDEN = [
    re.compile(first + second, re.IGNORECASE)
    for first, second in [
        ("pypi", r"\.org"),
        ("pythonhosted", r"\.org"),
        ("(--)?(extra-)?index", r"-url[ =]+\S*://"),
        ("file:", "///"),
        (r"(?<![\w.])/", r"(work|root|home/\w+)/"),
        ("find-", r"links[ =]+\S*/"),
    ]
]


def tracked_files() -> list[Path]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    return [path for path in paths if path.is_file()]


def test_no_file_names_an_index_or_a_machines_folder() -> None:
    found = []
    for path in tracked_files():
        data = path.read_bytes()
        if b"\0" in data:
            continue
        text = data.decode("utf-8")  # every text file is UTF-8
        for number, line in enumerate(text.splitlines(), start=1):
            if any(pattern.search(line) for pattern in FORBIDDEN):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}")
    assert not found, "\n".join(found)


def test_the_patterns_find_what_they_are_for() -> None:
    for line in (
        "see https://pypi" + ".org/simple",
        "--index" + "-url https://host/simple",
        "file:" + "///opt/wheels",
        "open('/wo" + "rk/x')",
        "cd /ro" + "ot/x",
    ):
        assert any(pattern.search(line) for pattern in FORBIDDEN), line
    for line in ("models/work/x", "a root/b", "--no-emit-index" + "-url", "https://a.b/root/"):
        assert not any(pattern.search(line) for pattern in FORBIDDEN), line


def test_every_locked_package_has_hashes() -> None:
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    entries = re.split(r"\n(?=\S)", lock.strip())
    names = set()
    for entry in entries:
        head, *hashes = entry.splitlines()
        pinned = re.match(r"([a-z0-9-]+)==(\S+) ; \S", head)
        assert pinned, head
        names.add(pinned[1])
        assert hashes, head
        for line in hashes:
            assert re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}( \\)?", line), line
    assert "torch" not in names


def test_the_lock_covers_what_the_project_declares() -> None:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    locked = ("stack", "alfworld", "scienceworld", "dev")
    declared = [*project["dependencies"], *(name for extra in locked for name in extras[extra])]
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    pins: dict[str, set[str]] = {}
    for name, version in re.findall(r"^([a-z0-9-]+)==(\S+)", lock, re.MULTILINE):
        pins.setdefault(name, set()).add(version)
    for text in declared:
        requirement = Requirement(text)
        versions = pins.get(canonicalize_name(requirement.name))
        assert versions, f"{requirement.name} is not in requirements.lock; run make lock"
        for version in versions:
            assert requirement.specifier.contains(version), f"{text}: locked {version}"


def test_the_library_imports_alone() -> None:
    """``import jaxcredit`` needs neither the other rooms nor their packages."""
    code = (
        "import sys, jaxcredit\n"
        "banned = {'models', 'envs', 'launch', 'alfworld', 'pydantic', 'scipy', 'tokenizers',\n"
        "          'transformers', 'typer', 'yaml', 'matplotlib', 'torch'}\n"
        "print(sorted(banned & {name.split('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    imported = set(done.stdout.strip("[]\n").replace("'", "").split(", ")) - {""}
    # jax and flax themselves bring some of these along; the project's own rooms never.
    assert not imported & {"models", "envs", "launch", "alfworld", "pydantic", "typer", "torch"}


TOKEN_FIELDS = {"tokens", "kind", "step", "episode", "position", "segment", "trainable"}
# Who may look at a batch's token fields. Stages get tokens from ``masks`` alone: its masks, and its
# one broadcast. ``token_flow`` makes a signal, before any estimator; the others ask for a shape.
TOKEN_READERS = {
    ("masks.py", None): TOKEN_FIELDS,
    ("tracing.py", "token_flow"): {"kind", "episode", "step"},
    ("algebra.py", "_start"): {"tokens"},
    ("algebra.py", "_check_signals"): {"tokens"},
    ("placement.py", "like"): {"tokens"},
}


def test_credit_reaches_tokens_through_the_masks_alone() -> None:
    found, credit = set(), ROOT / "jaxcredit" / "credit"
    for path in sorted(credit.rglob("*.py")):
        for outer in ast.parse(path.read_text(encoding="utf-8")).body:
            name = None if path.name == "masks.py" else getattr(outer, "name", None)
            for node in ast.walk(outer):
                if not isinstance(node, ast.Attribute) or node.attr not in TOKEN_FIELDS:
                    continue
                if isinstance(node.value, ast.Name) and node.value.id in ("batch", "given"):
                    where = (path.relative_to(credit).as_posix(), name)
                    assert node.attr in TOKEN_READERS.get(where, ()), (*where, node.attr)
                    found.add(where)
    assert found == TOKEN_READERS.keys()  # else the list above, or this test, is out of date


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT],
        check=True,
        capture_output=True,
        timeout=300,
    )
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.slow
def test_the_wheel_holds_the_library_alone(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    (info,) = (top for top in tops if top.endswith(".dist-info"))
    assert tops == {"jaxcredit", info}
    assert {"jaxcredit/py.typed", "jaxcredit/credit/__init__.py"} <= set(names)
    metadata = zipfile.ZipFile(wheel).read(f"{info}/METADATA").decode()
    required = {
        re.split(r"[<>=!~;\[ ]", line.removeprefix("Requires-Dist: "))[0]
        for line in metadata.splitlines()
        if line.startswith("Requires-Dist: ") and "extra ==" not in line
    }
    assert required == {"jax", "flax", "optax", "orbax-checkpoint", "numpy", "jaxtyping"}


# Two attempts of three and two steps; every signal there is, each step one token.
EVERY_METHOD = """
import importlib.util
import jax, numpy as np
from jaxcredit import credit
from jaxcredit.episodes import SIGNAL_AXES

for absent in ("models", "envs", "launch", "transformers", "torch", "pydantic", "pytest"):
    assert importlib.util.find_spec(absent) is None, absent
sizes = {"N": 2, "K": 3, "K+1": 4, "L": 2, "2": 2, "B": 2, "T": 3}
rng = np.random.default_rng(0)
signals = {k: rng.random([sizes[a] for a in axes.split()]) for k, axes in SIGNAL_AXES.items()}
tables = dict(
    success=[True, False], state=[[0, 1, 0], [0, 1, 1]], action=[[0, 1, 1], [1, 0, 0]],
    action_valid=np.ones((2, 3), bool), progress=rng.random((2, 4)),
    step_reward=rng.random((2, 3)), behaviour_logp=-rng.random((2, 3)),
)
for name in credit.METHODS:
    found = credit.assign(
        name, task=[0, 0], outcome=[1.0, 0.0], n_steps=[3, 2], **tables, **signals
    )
    assert found.step_advantage.shape == (2, 3), name
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found)), name
    assert np.asarray(found.step_advantage).any(), name
print(len(credit.METHODS))
"""


@pytest.mark.slow
def test_the_wheel_alone_runs_every_estimator(wheel: Path, tmp_path: Path) -> None:
    """Installs the wheel, and what it declares, into a bare environment with pip as configured."""
    from jaxcredit.credit import METHODS

    python = tmp_path / "bare" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "bare"], check=True, timeout=120)
    for command in (
        ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel],
        ["-c", EVERY_METHOD],
    ):
        done = subprocess.run(
            [python, *command],
            cwd=tmp_path,
            env={k: v for k, v in os.environ.items() if not k.startswith("PYTHON")},
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(METHODS)
