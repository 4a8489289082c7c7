"""An audit as tables, a picture and a file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from launch.audit.run import NOISE, TRUTH

COLUMNS = {
    "rank": "rank",
    "sign": "sign",
    "bias2": "bias^2",
    "variance": "variance",
    "cosine": "cosine",
    "cosine_mean": "cosine of mean",
}
Numbers = Sequence[float | None]


def rounded(x: Any) -> Any:
    """``x`` with every float at six significant digits: enough to read, stable to compare."""
    if isinstance(x, float):
        return float(f"{x:.6g}")
    if isinstance(x, dict):
        return {key: rounded(value) for key, value in x.items()}
    return [rounded(value) for value in x] if isinstance(x, (list, tuple)) else x


def summary(found: dict[str, Any], problems: Sequence[str]) -> str:
    """A Markdown table: one line per method, means over ``problems``, best cosine first."""
    sizes = [str(n) for n in found["settings"]["curve"]]
    heads = ["method", *COLUMNS.values(), *(f"SNR {n}" for n in sizes)]
    rows = []
    for name in ordered(found, problems):
        values = [found["methods"][name][p] for p in problems]
        cells = [mean(v[key] for v in values) for key in COLUMNS]
        cells += [mean(v["snr"][n] for v in values) for n in sizes]
        rows.append([name, *(text(cell) for cell in cells)])
    return table(heads, rows)


def ordered(found: dict[str, Any], problems: Sequence[str]) -> list[str]:
    """The references, then the methods by their mean cosine."""
    methods = found["methods"]
    names = sorted(
        (name for name in methods if name not in (TRUTH, NOISE)),
        key=lambda name: -(mean(methods[name][p]["cosine"] for p in problems) or 0.0),
    )
    return [TRUTH, *names, NOISE]


def mean(values: Iterable[float | None]) -> float | None:
    """The mean of those that are known, None if none is."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def text(x: float | None) -> str:
    return "-" if x is None else f"{x:.1f}" if abs(x) >= 10 else f"{x + 0.0:.2f}"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown with columns of equal width, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        first = cells[0].ljust(widths[0])
        rest = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        return f"| {' | '.join([first, *rest])} |"

    rule = [":" + "-" * (widths[0] - 1), *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join(line(cells) for cells in (heads, rule, *rows))


def markdown(found: dict[str, Any]) -> str:
    """The summary and one table per problem."""
    problems = list(found["problems"])
    parts = [f"## Mean over {', '.join(problems)}\n\n{summary(found, problems)}"]
    if len(problems) > 1:
        parts += [f"## {p}\n\n{summary(found, [p])}" for p in problems]
    return "\n\n".join(parts) + "\n"


def write(found: dict[str, Any], out: Path) -> None:
    """``audit.json``, ``audit.md`` and ``audit.png`` in a new folder."""
    out.mkdir(parents=True)
    (out / "audit.json").write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")
    (out / "audit.md").write_text(markdown(found))
    draw(found, out / "audit.png")


def draw(found: dict[str, Any], image: Path) -> None:
    """Rank and cosine of every method by problem; its SNR by episodes and by horizon."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    problems = list(found["problems"])
    names = ordered(found, problems)
    methods = found["methods"]
    figure, axes = pyplot.subplots(
        1,
        4,
        figsize=(15, 1.6 + 0.27 * len(names)),
        sharey=True,
        layout="constrained",
        width_ratios=(3, 3, 2, 3),
    )
    for axis, key in zip(axes[:2], ("rank", "cosine"), strict=True):
        for i, problem in enumerate(problems):
            x = [methods[name][problem][key] for name in names]
            x = [np.nan if value is None else value for value in x]
            axis.plot(x, range(len(names)), "o", ms=5, alpha=0.8, color=f"C{i}", label=problem)
        axis.axvline(0, color="0.6", lw=0.8)
        axis.grid(axis="y", alpha=0.25)
    axes[0].set(title="rank correlation with A")
    axes[1].set(title=f"cosine with the gradient, N = {max(found['settings']['curve'])}")
    axes[0].legend(frameon=False, fontsize=8)
    sizes = [str(n) for n in found["settings"]["curve"]]
    by_episodes = [
        [mean(methods[name][p]["snr"][n] for p in problems) for n in sizes] for name in names
    ]
    swept = {p: methods[TRUTH][p]["snr_by_horizon"] for p in problems}
    ends = [(p, h) for p in problems for h in swept[p] if len(swept[p]) > 1]
    by_horizon = [[methods[name][p]["snr_by_horizon"][h] for p, h in ends] for name in names]
    _heat(axes[2], by_episodes, sizes, "SNR by episodes N")
    _heat(axes[3], by_horizon, [f"{p}\n{h}" for p, h in ends], "SNR by horizon")
    axes[0].set_yticks(range(len(names)), names)
    axes[0].set_ylim(len(names) - 0.5, -0.5)
    figure.savefig(image, dpi=110)
    pyplot.close(figure)


def _heat(axis: Any, rows: Sequence[Numbers], columns: Sequence[str], title: str) -> None:
    axis.set_title(title)
    axis.set_xticks(range(len(columns)), columns, fontsize=7)
    if not columns:
        return
    known = np.array([[np.nan if x is None else x for x in row] for row in rows])
    shade = np.log10(np.maximum(known, 1e-2))
    axis.imshow(shade, cmap="viridis", vmin=-2, vmax=2.5, aspect="auto")
    for (y, x), level in np.ndenumerate(shade):
        ink = "k" if level > 1.2 else "w"
        axis.text(x, y, text(rows[y][x]), ha="center", va="center", fontsize=7, color=ink)
