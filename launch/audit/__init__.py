"""``python -m launch audit``: credit estimators on problems where the true advantage is known."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jaxcredit.credit import METHODS
from jaxcredit.credit.checks import choice
from launch import progress
from launch.audit import report
from launch.audit.problems import PROBLEMS
from launch.audit.run import Settings, audit
from launch.errors import UserError, user_errors


def main(
    out: Path | None,
    methods: Sequence[str] | None,
    problems: Sequence[str] | None,
    seed: int,
    noise: float,
) -> None:
    """Prints the summary; with ``out`` also writes JSON, all tables and a picture there."""
    if out is not None and out.exists():
        raise UserError(f"--out: {out} exists; name a new folder")
    with user_errors("--problems"):
        for name in problems or ():
            choice("problem", name, PROBLEMS)
    settings = Settings(
        methods=tuple(methods or METHODS),
        problems=tuple(problems or PROBLEMS),
        seed=seed,
        noise=noise,
    )
    with progress.bar("audit") as update:
        found = report.rounded(audit(settings, update))
    print(report.summary(found, list(found["problems"])))
    if out is not None:
        report.write(found, out)
        print(f"see {out}")
