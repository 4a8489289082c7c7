"""The repository as a whole: what its files may hold, and what the wheel holds."""

from __future__ import annotations

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


@pytest.mark.slow
def test_the_wheel_holds_the_library_alone(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, ROOT],
        check=True,
        capture_output=True,
        timeout=300,
    )
    (wheel,) = tmp_path.glob("*.whl")
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
