"""FlowTracer: how much of the flow from sources to sinks passes through each node.

Nodes 0..M-1 in order of time; G[j, k], k < j, is the attention that node j pays to node k, so
information runs from k to j. With e the indicator of the sinks, in which every path ends,

    h_k = e_k + (1 - e_k) sum_{j>k} G[j, k] h_j              attention mass that reaches a sink
    P[k, j] = G[j, k] h_j / h_k                              Doob's h-transform: rows sum to 1
    x_j = s_j h_j / sum_i s_i h_i + sum_{k<j} x_k P[k, j]    throughput

where s marks the sources. A super-source with one edge of capacity 1 to each source belongs to
the graph, so the transform also says how its unit of flow is split. No inner node gains or
loses flow, and what arrives in the sinks sums to 1. Dong et al., arXiv 2606.10646.

Reconstructed from a digest of the paper: everything that the words "Doob-h reweighting so that
flow from prompt to answer is conserved; throughput" leave open: absorbing sinks, the split of the
unit of flow over the sources, and the step form as a whole.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxcredit.credit import masks
from jaxcredit.credit.attention import relevance
from jaxcredit.credit.checks import choice
from jaxcredit.episodes import EpisodeBatch, Kind


def reach(graph: Float[Array, "N M M"], sink: Bool[Array, "N M"]) -> Float[Array, "N M"]:
    """h: 1 at the sinks, elsewhere the total weight of the paths that lead to one.

    ``graph`` must be 0 wherever k >= j or a node does not exist.
    """
    return relevance(_ending(graph, sink)[:, None], sink, 1.0)[:, 0]


def reweight(graph: Float[Array, "N M M"], sink: Bool[Array, "N M"]) -> Float[Array, "N M M"]:
    """P[k, j], the share of node k's flow that goes on to node j.

    A row sums to 1 if its node reaches a sink and is none; other rows are 0.
    """
    h = reach(graph, sink)
    flow = jnp.swapaxes(_ending(graph, sink), 1, 2) * h[:, None, :]
    return jnp.where(h[..., None] > 0, flow / jnp.where(h > 0, h, 1.0)[..., None], 0.0)


def throughput(
    graph: Float[Array, "N M M"], source: Bool[Array, "N M"], sink: Bool[Array, "N M"]
) -> Float[Array, "N M"]:
    """x, in [0, 1]: the share of the flow that passes through each node; 0 without any flow.

    Computed as x_j = g_j h_j / sum_i s_i h_i with g_j = s_j + sum_{k<j} G[j, k] g_k, the weight of
    the paths that come from a source: the same recurrence in the reversed graph.
    """
    h = reach(graph, sink)
    back = jnp.flip(jnp.swapaxes(_ending(graph, sink), 1, 2), axis=(1, 2))
    g = jnp.flip(relevance(back[:, None], jnp.flip(source, 1), 1.0)[:, 0], 1)
    total = jnp.where(source, h, 0.0).sum(axis=1, keepdims=True)
    return jnp.where(total > 0, g * h / jnp.where(total > 0, total, 1.0), 0.0)


def token_flow(batch: EpisodeBatch, attention: Float[Array, "B T T"]) -> Float[Array, "B T"]:
    """The signal ``token_flow``: throughput of every token, from the prompt to the answer.

    Args:
      batch: rows should be whole conversations; in a window all of a message is answer.
      attention: [query, key], a mean over heads and layers; only keys before their query are
        looked at, and neither padding nor spoiled episodes.

    Reconstructed: the prompt is what precedes a row's first message, the answer the action tokens
    of its last one.
    """
    action = masks.action_tokens(batch)
    message = (batch.kind == Kind.ACTION) & (batch.episode >= 0)
    real = batch.kind != Kind.PAD
    begun = jnp.cumsum(message, axis=1) > 0
    last = jnp.where(action, batch.step, -1).max(axis=1, keepdims=True)
    size = real.shape[1]
    edge = real[:, :, None] & real[:, None, :] & jnp.tri(size, k=-1, dtype=bool)
    graph = jnp.where(edge, attention, 0.0)
    return throughput(graph, real & ~begun, action & (batch.step == last))


def step_throughput(
    batch: EpisodeBatch, step_graph: Float[Array, "N L 2 K K"], *, source: str = "all"
) -> Float[Array, "N K"]:
    """Throughput of every step, on G = the layers' mean of 0.5 G_AA + 0.5 G_AO.

    The sink is the last step. The prompt is no step; it feeds "all" steps alike, or the "first"
    one alone.
    """
    choice("source", source, ("all", "first"))
    valid = masks.valid_steps(batch)
    k = valid.shape[1]
    edge = valid[:, :, None] & valid[:, None, :] & jnp.tri(k, k=-1, dtype=bool)
    # Summed slice by slice: on a CPU a mean over inner axes takes seven times as long.
    slices = step_graph.reshape(len(valid), -1, k, k)
    size = slices.shape[1]
    graph = jnp.where(edge, sum(slices[:, i] for i in range(size)) / size, 0.0)
    start = valid if source == "all" else valid & (jnp.arange(k) == 0)
    return throughput(graph, start, masks.last_step(batch))


def _ending(graph: Float[Array, "N M M"], sink: Bool[Array, "N M"]) -> Float[Array, "N M M"]:
    """The graph without the edges that leave a sink."""
    return jnp.where(sink[:, None, :], 0.0, graph)
