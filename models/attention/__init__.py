"""Causal grouped-query attention: an ordered list of implementations, each accepts or refuses.

For query t, head n and its key-value head g = n // (H / G), with scores in float32,

    p[t, s] = softmax_s(q_t . k_s / sqrt(h)),  s <= t,  segment[s] = segment[t] != 0
    out[t]  = sum_s p[t, s] v_s
    mass[t, m] = mean_n sum_{s : message[s] = m} p[t, s]

``mass`` is the attention of AttnSR (arXiv 2611.07932, Section 3.1) before it is averaged over
the query tokens of a step: attention whose values are one-hot message indicators, sharing the
softmax of the values. It carries no gradient. Queries of segment 0 (padding) return zero.

Shapes: q, out [B, T, H, h]; k, v [B, T, G, h]; segments, messages [B, T]; mass [B, T, M].
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from models.attention import chunked, fused, plain, splash
from models.attention.case import Case, Implementation, Messages
from models.attention.mesh import attend_on_mesh, divisible_heads

IMPLEMENTATIONS = (
    Implementation("cudnn", fused.accepts_cudnn, fused.attend_cudnn),
    Implementation("splash", splash.accepts, splash.attend),
    Implementation("chunked", lambda case: None, chunked.attend),
    Implementation("xla", lambda case: None, plain.attend),
)


def select(case: Case, name: str = "auto") -> Implementation:
    """The first implementation that accepts ``case``, or the named one.

    Raises:
      ValueError: the name is unknown, or the named implementation refuses the case.
    """
    if name == "auto":
        return next(i for i in IMPLEMENTATIONS if i.accepts(case) is None)
    for implementation in IMPLEMENTATIONS:
        if implementation.name == name:
            reason = implementation.accepts(case)
            if reason is not None:
                raise ValueError(f"attention {name!r} refuses: {reason}; use 'auto'")
            return implementation
    names = ["auto", *(i.name for i in IMPLEMENTATIONS)]
    raise ValueError(f"attention is {name!r}; expected one of {names}")


def attend(
    q: Float[Array, "B T H h"],
    k: Float[Array, "B T G h"],
    v: Float[Array, "B T G h"],
    segments: Int[Array, "B T"],
    messages: Int[Array, "B T"] | None = None,
    n_messages: int = 0,
    *,
    name: str = "auto",
    packed: bool = True,
    backend: str | None = None,
) -> tuple[Float[Array, "B T H h"], Float[Array, "B T M"] | None]:
    """Attention as in the module docstring; under a mesh, as in ``models.attention.mesh``.

    Args:
      q, k, v: queries, keys (both already rotated) and values.
      segments: equal non-zero ids attend to each other, causally by index; 0 is padding.
      messages: message id of each key token in [0, M), or -1 for none.
      n_messages: M (static).
      name: "auto" or the name of an implementation.
      packed: False promises one segment per row with padding on the right only, which the fused
        GPU kernel needs; nothing can check it at run time.
      backend: "cpu", "gpu" or "tpu" of the devices that will run this; None: JAX's default.

    Returns:
      ``(out, mass)``; mass (float32) is None without ``messages``.
    """
    B, T, H, h = q.shape
    G = k.shape[2]
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        devices = mesh.shape["tensor"] * mesh.shape["context"]
        copies, per_head = divisible_heads(H, G, devices)
        rows = mesh.shape["data"] if B % mesh.shape["data"] == 0 else 1
        B, H, G = B // rows, G * per_head // devices, G * copies // devices
    case = Case(
        shape=(B, T, H, h),
        kv_heads=G,
        dtype=q.dtype,
        backend=backend or jax.default_backend(),
        packed=packed,
        n_messages=0 if messages is None else n_messages,
    )
    kernel = functools.partial(select(case, name).attend, case)
    asked = None
    if messages is not None:
        heads = q.shape[2]
        asked = Messages(ids=messages, weight=jnp.full(heads, 1 / heads), n=n_messages)
    if mesh.empty:
        return kernel(q, k, v, segments, asked)
    return attend_on_mesh(kernel, mesh, q, k, v, segments, asked)
