"""Methods by name."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from jaxcredit.credit import methods
from jaxcredit.credit.algebra import CreditEstimator

METHODS: dict[str, Callable[..., CreditEstimator]] = {
    "ppo": methods.ppo,
    "grpo": methods.grpo,
    "gigpo": methods.gigpo,
    "attnsr": methods.attnsr,
    "attnsr_async": methods.attnsr_async,
    "attnsr_grpo": methods.attnsr_grpo,
    "linear": methods.linear,
    "procredit": methods.procredit,
    "relace": methods.relace,
    "dr_grpo": methods.dr_grpo,
    "rloo": methods.rloo,
    "dapo": methods.dapo,
    "reinforce_pp": methods.reinforce_pp,
    "hgpo": methods.hgpo,
    "graphgpo": methods.graphgpo,
    "ecpo": methods.ecpo,
    "empg": methods.empg,
    "verl_agent_grpo": methods.verl_agent_grpo,
    "verl_agent_gigpo": methods.verl_agent_gigpo,
    "poad": methods.poad,
    "archer": methods.archer,
    "vineppo": methods.vineppo,
    "rudder": methods.rudder,
    "spa_rl": methods.spa_rl,
    "istar": methods.istar,
    "agentprm": methods.agentprm,
    "hcapo": methods.hcapo,
    "flowtracer": methods.flowtracer,
    "flowtracer_step": methods.flowtracer_step,
    "tarl": methods.tarl,
}


def make(name: str, **hyperparameters: Any) -> CreditEstimator:
    """The method called ``name`` with these hyperparameters.

    Raises ValueError for a method or hyperparameter that does not exist (naming the nearest
    that does) and for a value out of range.
    """
    if name not in METHODS:
        raise ValueError(f"no credit method {name!r}{_nearest(name, METHODS)}")
    known = inspect.signature(METHODS[name]).parameters
    for key in hyperparameters:
        if key not in known:
            raise ValueError(f"method {name!r} has no hyperparameter {key!r}{_nearest(key, known)}")
    return METHODS[name](**hyperparameters)


def _nearest(word: str, known: Iterable[str]) -> str:
    options = sorted(known)
    near = difflib.get_close_matches(word, options, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ";"
    return f"{hint} there are {', '.join(options)}"
