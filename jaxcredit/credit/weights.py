"""Stages that say how much a token's loss counts. They multiply: any number may be chained."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import jax.numpy as jnp
from jaxtyping import Array

from jaxcredit.credit import masks, segments
from jaxcredit.credit.algebra import Flow, Stage, stage
from jaxcredit.credit.checks import between, choice, positive
from jaxcredit.credit.tracing import step_throughput
from jaxcredit.episodes import EpisodeBatch, Signals

_FIELDS = ["token_weight"]


def ratio_mask(low: float = 0.7, high: float = 6.0) -> Stage:
    """w_u <- 0 where exp(log pi(y_u) - log mu(y_u)) lies outside [low, high].

    pi is the trainer's policy (``logp``), mu the policy that sampled (``behaviour_logp``); the
    bounds count as inside (AttnSR, asynchronous configuration). Advantages stay as they are.
    """
    between("low", low, 0.0, 1.0)
    between("high", high, 1.0, float("inf"))

    def apply(batch: EpisodeBatch, signals: Signals, flow: Flow) -> Flow:
        assert signals.logp is not None
        mask = masks.action_tokens(batch)
        log_ratio = jnp.where(mask, signals.logp - batch.behaviour_logp, 0.0)
        below = mask & (log_ratio < jnp.log(low))
        above = mask & (log_ratio > jnp.log(high))
        outside = below | above
        return replace(flow, token_weight=jnp.where(outside, 0.0, flow.token_weight)).note(
            ratio_masked=_share(outside, mask), ratio_above=_share(above, mask)
        )

    needs = ["logp", "behaviour_logp"]
    return stage("ratio_mask", apply, needs=needs, reads=_FIELDS, writes=_FIELDS)


def flow_weight(*, share: float = 0.4, weight: float = 1.5) -> Stage:
    """w_u <- weight w_u on the ceil(share n_i) of an episode's n_i action tokens that carry
    most flow (FlowTracer); among equals the earlier token comes first.

    ``token_flow`` is made by ``tracing.token_flow``. A token without flow is never raised.
    """
    ratio = _fraction(share)
    positive("weight", weight)

    def apply(batch: EpisodeBatch, signals: Signals, flow: Flow) -> Flow:
        assert signals.token_flow is not None
        ids = masks.step_of_token(batch).reshape(-1)
        carried, mask = signals.token_flow.reshape(-1), masks.action_tokens(batch)
        chosen = segments.largest(
            carried, mask.reshape(-1), ids // batch.step_mask.shape[1], ids, ratio
        )
        raised = (chosen & (carried > 0)).reshape(mask.shape)
        return _raise(flow, raised, mask, weight)

    return stage("flow_weight", apply, needs=["token_flow"], reads=_FIELDS, writes=_FIELDS)


def step_flow_weight(*, share: float = 0.4, weight: float = 1.5, source: str = "all") -> Stage:
    """w_u <- weight w_u on the tokens of the ceil(share K_i) of an episode's K_i steps that
    carry most flow in the step graph; among equals the earlier step comes first.

    ``source`` as in ``tracing.step_throughput``. A step without flow is never raised.
    """
    ratio = _fraction(share)
    positive("weight", weight)
    choice("source", source, ("all", "first"))

    def apply(batch: EpisodeBatch, signals: Signals, flow: Flow) -> Flow:
        assert signals.step_graph is not None
        valid = masks.valid_steps(batch)
        carried = step_throughput(batch, signals.step_graph, source=source)
        # The graph is K x K as it is, so a step's rank can be counted: who carries more, or comes
        # first among equals.
        mine, other = carried[:, :, None], carried[:, None, :]
        before = (other > mine) | ((other == mine) & jnp.tri(valid.shape[1], k=-1, dtype=bool))
        rank = (before & valid[:, None, :]).sum(axis=2)
        count = valid.sum(axis=1, keepdims=True)
        raised = valid & (rank * ratio.denominator < count * ratio.numerator) & (carried > 0)
        tokens = masks.broadcast_steps(batch, raised.astype(carried.dtype)) > 0
        return _raise(flow, tokens, masks.action_tokens(batch), weight)

    return stage("step_flow_weight", apply, needs=["step_graph"], reads=_FIELDS, writes=_FIELDS)


def _raise(flow: Flow, raised: Array, mask: Array, weight: float) -> Flow:
    token_weight = jnp.where(raised, weight * flow.token_weight, flow.token_weight)
    return replace(flow, token_weight=token_weight).note(flow_raised=_share(raised, mask))


def _share(part: Array, mask: Array) -> Array:
    return part.sum() / jnp.maximum(mask.sum(), 1)


def _fraction(share: float) -> Fraction:
    """The share as a ratio of small integers, so that 0.4 of 5 is exactly 2."""
    between("share", share, 0.0, 1.0)
    return Fraction(share).limit_denominator(1000)
