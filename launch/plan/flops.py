"""Floating-point operations of a traced program, counted before any compiler sees it.

Products of matrices alone, two operations per multiply-add: they are what the peak rate of a
device means. The number is that of the whole program on all devices together. Both sides of a
conditional are looked at and the larger one counts, so a step graph of few layers counts as one
of all layers.
"""

from __future__ import annotations

import math
from typing import Any

from jax.extend import core


def count(jaxpr: Any, *, loop_trips: int = 1) -> float:
    """Operations of a (closed) jaxpr.

    Args:
      jaxpr: such as ``jitted.trace(*args).jaxpr``.
      loop_trips: how often a ``while`` runs: only the data decides.
    """
    if isinstance(jaxpr, core.ClosedJaxpr):
        jaxpr = jaxpr.jaxpr
    return sum(_equation(equation, loop_trips) for equation in jaxpr.eqns)


def _equation(equation: Any, loop_trips: int) -> float:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        return _dot(equation)
    if name.startswith("dot_product_attention"):
        return _fused(equation)
    if name == "pallas_call":
        return _splash(equation)
    inner = [count(j, loop_trips=loop_trips) for j in _jaxprs(params)]
    if not inner:
        return 0.0
    if name == "cond":
        return max(inner)
    if name == "scan":
        return float(params["length"]) * sum(inner)
    if name == "while":
        return loop_trips * sum(inner)
    if name == "shard_map":  # its body is what one device does
        axes = params.get("newly_manual_axes", params.get("manual_axes"))  # by version of jax
        return sum(inner) * math.prod(params["mesh"].shape[axis] for axis in axes)
    if name.startswith("custom_vjp") or name.startswith("custom_jvp"):
        return inner[0]
    return sum(inner)


def _jaxprs(params: dict[str, Any]) -> list[Any]:
    found = []
    for value in params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, (core.ClosedJaxpr, core.Jaxpr)):
                found.append(item)
    return found


def _dot(equation: Any) -> float:
    (contract, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    out = equation.outvars[0].aval.shape
    return 2.0 * math.prod(out) * math.prod(left[axis] for axis in contract)


def _fused(equation: Any) -> float:
    """cuDNN's attention, causal: half of T x T; two products forward, five backward."""
    B, T, H, h = equation.invars[0].aval.shape
    products = 5 if "bwd" in equation.primitive.name else 2
    return products * 2.0 * B * H * h * T * T / 2


def _splash(equation: Any) -> float:
    """A kernel of splash attention, causal; any other kernel counts nothing.

    The forward kernel makes two products, that of dq three and that of dk and dv four.
    """
    name = str(equation.params.get("name") or equation.params.get("name_and_src_info") or "")
    products = next((n for part, n in (("dkv", 4), ("dq", 3), ("fwd", 2)) if part in name), 0)
    arrays = (*equation.invars, *equation.outvars)  # the largest has all query heads
    shapes = [v.aval.shape for v in arrays if len(v.aval.shape) >= 3]
    if not products or "splash" not in name or not shapes:
        return 0.0
    *rows, T, h = max(shapes, key=math.prod)
    return products * 2.0 * math.prod(rows) * h * T * T / 2
