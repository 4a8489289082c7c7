"""The samples of the docs print what the docs say; the worked example is the library's."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from credit_cases import low_effort_compilation  # noqa: F401

from jaxcredit import credit
from jaxcredit.credit import (
    AttentionConfig,
    attention,
    broadcast,
    discounted_return,
    estimator,
    hindsight_ratio,
    outcome_reward,
    plain_return,
    progress_reward,
    temporal_smoothing,
)

DOCS = Path(__file__).resolve().parent.parent / "docs"
SAMPLE = re.compile(r"```python\n(.*?)```\n+(?:```text\n(.*?)```)?", re.DOTALL)
PAGES = ["credit.md", "estimator.md", "worked-example.md"]


def samples(page: str) -> list[tuple[str, str]]:
    return SAMPLE.findall((DOCS / page).read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES)
def test_samples_print_what_the_page_says(page: str):
    assert samples(page)
    for code, text in samples(page):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, page, "exec"), {"__name__": page})
        assert printed.getvalue() == text


def tables(page: str) -> dict[str, np.ndarray]:
    """The number tables of a page, by section and by what their corner says."""
    section, found = "", {}
    for line in (DOCS / page).read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            section = line[3:]
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `"):
            name = f"{section}/{cells[0].strip('`')}"
            found[name] = []
        elif re.match(r"\| [123] \| -?[\d.]+ \|", line):
            found[name].append([float(cell) for cell in cells[1:]])
    return {key: np.array(rows) for key, rows in found.items()}


def worked_example() -> dict[str, np.ndarray]:
    """What the page's tables should hold, from the page's own arrays."""
    page: dict = {}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(samples("worked-example.md")[0][0], page)
    group, graph = page["group"], page["step_graph"]
    states = {"state": page["state"], "success": page["success"]}
    hindsight = {"logp": page["logp"], "hindsight_logp": page["hindsight_logp"]}

    def found(method, **signals):
        return credit.assign(method, **group, **signals)

    def returned(*stages, **signals):
        chain = [outcome_reward(), *stages, plain_return(), broadcast()]
        return found(estimator("returns", *chain), **signals).step_advantage

    weighted = [discounted_return(0.6), hindsight_ratio()]
    unit = returned(discounted_return(1.0), hindsight_ratio(), **hindsight)
    # Attempts without outcome have no return to weigh: there the ratio is read with R = 1.
    paid = {**group, "outcome": [1.0, 1.0, 1.0]}
    chain = [outcome_reward(), discounted_return(1.0), hindsight_ratio(), plain_return()]
    rho = credit.assign(estimator("rho", *chain, broadcast()), **paid, **hindsight).step_advantage
    np.testing.assert_allclose(rho[2], unit[2])

    progress = {"progress": page["progress"]}
    reward = credit.add(outcome_reward(), progress_reward(0.5))
    chain = [reward, discounted_return(1.0), plain_return(), broadcast()]
    attnsr = found("attnsr", step_graph=graph, value=np.zeros((3, 3)))
    grpo, gigpo = found("grpo").step_advantage, found("gigpo", **states).step_advantage
    relace = found("relace", **states, **hindsight).step_advantage
    last = jnp.arange(3) == jnp.full((3, 1), 2)
    halved = jnp.asarray(graph.sum(axis=2) / 2, jnp.float32)
    return {
        "GRPO/A": grpo,
        "GiGPO/G": returned(discounted_return(0.95)),
        "GiGPO/A_S": gigpo - grpo,
        "GiGPO/A": gigpo,
        "ProCredit/r": found("procredit", **progress).step_reward,
        "ProCredit/G": found(estimator("returns", *chain), **progress).step_advantage,
        "ProCredit/A": found("procredit", **progress).step_advantage,
        "RELACE/rho": rho,
        "RELACE/QH": returned(*weighted, temporal_smoothing(0.5), **hindsight),
        "RELACE/A_H": relace - grpo,
        "RELACE/A": relace,
        "AttnSR/a": attention.relevance(halved, last, 0.9)[:, 0],
        "AttnSR/p": shares(graph),
        "AttnSR/r": attnsr.step_reward,
        "AttnSR/A": attnsr.step_advantage,
    }


def shares(graph: np.ndarray) -> np.ndarray:
    """The allocation as a stage sees it: paid out with C = 1 and a budget of 1."""
    config = AttentionConfig(confidence="const")
    budget = credit.attention_budget(config, beta=1.0)
    method = estimator("shares", budget, discounted_return(0.0), plain_return(), broadcast())
    # Two batches in one: with R = 1 and a twin of R = 0 the baseline is 1/2 and the budget too.
    twice = np.concatenate([graph, graph])
    outcome = np.repeat([1.0, 0.0], 3)
    paid = credit.assign(
        method, task=np.zeros(6, int), outcome=outcome, n_steps=np.full(6, 3), step_graph=twice
    )
    return 2 * np.asarray(paid.step_reward)[:3]


def test_the_worked_example_is_what_the_library_computes():
    stated, computed = tables("worked-example.md"), worked_example()
    assert stated.keys() == computed.keys()
    for name, numbers in computed.items():
        np.testing.assert_allclose(stated[name], numbers, atol=5.1e-4, err_msg=name)
