"""Credit as a small algebra: stages over a flow, joined by ``chain``, ``add`` and ``scale``.

A stage reads some fields of a ``Flow`` and writes others. ``chain(a, b)`` runs a, then b.
``add(a, b)`` runs each on the same incoming flow and sums what they produce; ``scale(c, a)``
multiplies it. ``estimator(name, *stages)`` closes a chain into a ``CreditEstimator``. What
a composition needs from batch and model is the union of what its stages need. A composition
that cannot be right is refused when it is built, and the message names the stage.

What a stage or composition *produces* is the last field it writes in the order
step_reward, step_return, step_advantage, token_reward, token_advantage.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from jaxcredit.credit import masks, placement
from jaxcredit.episodes import SIGNAL_AXES, Credit, EpisodeBatch, Signals

PRODUCTS = ("step_reward", "step_return", "step_advantage", "token_reward", "token_advantage")
SIDE_PRODUCTS = ("token_weight", "token_target", "step_target", "reward_slope")
SIGNALS = tuple(SIGNAL_AXES)
TABLES = ("success", "state", "action", "action_valid", "progress", "step_reward", "behaviour_logp")
STARTED = frozenset({"token_weight"})
"""Fields that are worth reading before any stage wrote them."""


@struct.dataclass
class Flow:
    """What passes from stage to stage. Every array starts at zero, ``token_weight`` at one
    on action tokens, ``step_target`` without entries. Whoever writes ``token_advantage`` keeps
    ``step_advantage`` equal to its mean over the step's action tokens."""

    step_reward: Float[Array, "N K"]
    step_return: Float[Array, "N K"]
    step_advantage: Float[Array, "N K"]
    token_reward: Float[Array, "B T"]
    token_advantage: Float[Array, "B T"]
    token_weight: Float[Array, "B T"]
    token_target: Float[Array, "B T"]
    reward_slope: Float[Array, "B T"]
    step_target: dict[str, Float[Array, "N K ..."]] = struct.field(default_factory=dict)
    diagnostics: dict[str, Array] = struct.field(default_factory=dict)

    def note(self, **scalars: Array) -> Flow:
        """This flow with diagnostics added; a name that is taken gets a number."""
        noted = dict(self.diagnostics)
        for name, value in scalars.items():
            noted[_free(name, noted)] = value
        return dataclasses.replace(self, diagnostics=noted)


Apply = Callable[[EpisodeBatch, Signals, Flow, Any], tuple[Flow, Any]]


@dataclasses.dataclass(frozen=True)
class Stage:
    """One step of an estimator: a pure function of (batch, signals, flow, state).

    Attributes:
      name: appears in error messages.
      needs: names among TABLES and SIGNALS that it looks at.
      reads, writes: the flow fields it uses and sets. A stage that writes a field without
        reading it is a source; one that does both is a transformation.
      init: makes its state, a pytree.
      apply: gets a batch whose masked entries are zero.
      members: the stages it is made of, for messages.
    """

    name: str
    needs: frozenset[str]
    reads: frozenset[str]
    writes: frozenset[str]
    init: Callable[[], Any]
    apply: Apply
    members: tuple[Stage, ...] = ()


@dataclasses.dataclass(frozen=True)
class CreditEstimator:
    """A closed composition. ``estimate`` is pure and can be jitted; ``state`` is a pytree.

    ``stage`` is the open composition: ``add``, ``scale`` and ``chain`` accept an estimator
    wherever they accept a stage.
    """

    name: str
    needs: frozenset[str]
    init: Callable[[], Any]
    estimate: Callable[[EpisodeBatch, Signals, Any], tuple[Credit, Any]]
    stage: Stage


def stage(
    name: str,
    function: Callable[[EpisodeBatch, Signals, Flow], Flow],
    *,
    needs: Iterable[str] = (),
    reads: Iterable[str] = (),
    writes: Iterable[str],
) -> Stage:
    """A stage without state."""

    def apply(batch: EpisodeBatch, signals: Signals, flow: Flow, state: Any) -> tuple[Flow, Any]:
        return function(batch, signals, flow), state

    return stateful(name, apply, lambda: (), needs=needs, reads=reads, writes=writes)


def stateful(
    name: str,
    apply: Apply,
    init: Callable[[], Any],
    *,
    needs: Iterable[str] = (),
    reads: Iterable[str] = (),
    writes: Iterable[str],
) -> Stage:
    """A stage with state. Raises ValueError for a field or need that does not exist."""
    made = Stage(name, frozenset(needs), frozenset(reads), frozenset(writes), init, apply)
    for field in made.reads | made.writes:
        if field not in PRODUCTS + SIDE_PRODUCTS:
            raise ValueError(
                f"stage {name!r}: no flow field {field!r}; there are {PRODUCTS + SIDE_PRODUCTS}"
            )
    for need in made.needs:
        if need not in SIGNALS + TABLES:
            raise ValueError(f"stage {name!r}: no signal {need!r}; there are {SIGNALS + TABLES}")
    return made


def chain(*stages: Stage | CreditEstimator) -> Stage:
    """Runs the stages one after the other.

    Raises ValueError if a source overwrites what an earlier stage of this chain wrote
    (join the two with ``add``), or if a step-level stage follows a token-level one.
    """
    parts = tuple(_open(s) for s in stages)
    if not parts:
        raise ValueError("chain() needs at least one stage")
    writer: dict[str, str] = {}
    outside: set[str] = set()
    token_stage = ""
    for part in parts:
        outside |= part.reads - writer.keys()
        for field in sorted(part.writes & writer.keys() - part.reads):
            raise ValueError(
                f"stage {part.name!r} overwrites {field} of stage {writer[field]!r} without "
                f"reading it; to sum the two write add({writer[field]}, {part.name})"
            )
        if _is_token_level(part):
            token_stage = part.name
        elif token_stage:
            raise ValueError(
                f"stage {part.name!r} works on steps but comes after {token_stage!r}, which "
                f"already works on tokens; put {part.name!r} before it"
            )
        writer |= dict.fromkeys(part.writes, part.name)

    def init() -> Any:
        return tuple(part.init() for part in parts)

    def apply(batch: EpisodeBatch, signals: Signals, flow: Flow, state: Any) -> tuple[Flow, Any]:
        states = []
        for part, own in zip(parts, state, strict=True):
            flow, own = part.apply(batch, signals, flow, own)
            states.append(own)
        return flow, tuple(states)

    return Stage(
        " > ".join(part.name for part in parts),
        frozenset().union(*(part.needs for part in parts)),
        frozenset(outside),
        frozenset(writer),
        init,
        apply,
        parts,
    )


def add(*stages: Stage | CreditEstimator) -> Stage:
    """Sums what the stages produce; each starts from the same incoming flow.

    All must produce the same field. Token-level sums also sum the step advantages behind
    them. Other fields stay private to their branch, except that the first branch's rewards
    and returns are kept for the record, and that the one branch that sets token weights or
    targets hands them on. Raises ValueError if products differ or two branches set
    weights or targets.
    """
    parts = tuple(_open(s) for s in stages)
    if not parts:
        raise ValueError("add() needs at least one stage")
    product = _product(parts[0])
    for part in parts[1:]:
        if _product(part) != product:
            raise ValueError(
                f"add() cannot sum {product} (of {parts[0].name!r}) and {_product(part)} "
                f"(of {part.name!r}); bring both to the same field first"
            )
    side: dict[str, int] = {}
    for index, part in enumerate(parts):
        for field in sorted(part.writes & set(SIDE_PRODUCTS)):
            if field in side:
                raise ValueError(
                    f"add(): both {parts[side[field]].name!r} and {part.name!r} set {field}; "
                    "only one branch may"
                )
            side[field] = index
    summed = _linear(product)

    def init() -> Any:
        return tuple(part.init() for part in parts)

    def apply(batch: EpisodeBatch, signals: Signals, flow: Flow, state: Any) -> tuple[Flow, Any]:
        branches, states = [], []
        for part, own in zip(parts, state, strict=True):
            out, own = part.apply(batch, signals, flow, own)
            branches.append(out)
            states.append(own)
        changes = {f: sum(getattr(b, f) for b in branches[1:]) for f in summed}
        first = branches[0]
        changes = {f: getattr(first, f) + rest for f, rest in changes.items()}
        changes |= {f: getattr(branches[i], f) for f, i in side.items()}
        out = dataclasses.replace(first, **changes)
        for branch in branches[1:]:
            fresh = {k: v for k, v in branch.diagnostics.items() if k not in flow.diagnostics}
            out = out.note(**fresh)
        return out, tuple(states)

    return Stage(
        f"add({', '.join(part.name for part in parts)})",
        frozenset().union(*(part.needs for part in parts)),
        frozenset().union(*(part.reads for part in parts)),
        frozenset({*summed, *side}),
        init,
        apply,
        parts,
    )


def scale(factor: float, inner: Stage | CreditEstimator) -> Stage:
    """Multiplies what ``inner`` produces by ``factor``; targets and weights stay as they are."""
    part = _open(inner)
    scaled = _linear(_product(part))

    def apply(batch: EpisodeBatch, signals: Signals, flow: Flow, state: Any) -> tuple[Flow, Any]:
        out, state = part.apply(batch, signals, flow, state)
        return dataclasses.replace(out, **{f: factor * getattr(out, f) for f in scaled}), state

    return dataclasses.replace(
        part, name=f"scale({factor}, {part.name})", apply=apply, members=(part,)
    )


def estimator(name: str, *stages: Stage | CreditEstimator) -> CreditEstimator:
    """Closes a chain into an estimator.

    Raises ValueError, naming the stage, if a stage reads a field that nothing wrote before
    it, or if the chain produces no token advantages. ``estimate`` raises ValueError, naming
    estimator and signal, if a needed signal is absent.
    """
    body = chain(*stages)
    for field in sorted(body.reads - STARTED):
        raise ValueError(
            f"estimator {name!r}: stage {_reader(body, field)!r} reads {field}, "
            "which no stage before it writes"
        )
    if "token_advantage" not in body.writes:
        raise ValueError(
            f"estimator {name!r} ends with {body.members[-1].name!r} and gives no token "
            "advantages; end it with broadcast() or gae()"
        )

    def estimate(batch: EpisodeBatch, signals: Signals, state: Any) -> tuple[Credit, Any]:
        _check_signals(name, body.needs, batch, signals)
        given = batch
        batch, signals = masks.clean(*placement.whole((batch, signals)))
        with jax.named_scope(f"credit_{name}"):
            flow, state = body.apply(batch, signals, _start(batch), state)
        steps, tokens = masks.valid_steps(batch), masks.action_tokens(batch)
        credit = Credit(
            step_reward=jnp.where(steps, flow.step_reward, 0.0),
            step_advantage=jnp.where(steps, flow.step_advantage, 0.0),
            token_advantage=jnp.where(tokens, flow.token_advantage, 0.0),
            token_weight=jnp.where(tokens, flow.token_weight, 0.0),
            token_target=(
                jnp.where(tokens, flow.token_target, 0.0) if "token_target" in body.writes else None
            ),
            step_target=(
                {name: masks.per_step(steps, x) for name, x in flow.step_target.items()}
                if "step_target" in body.writes
                else None
            ),
            reward_slope=(
                jnp.where(tokens, flow.reward_slope, 0.0) if "reward_slope" in body.writes else None
            ),
            diagnostics=flow.diagnostics,
        )
        return jax.lax.stop_gradient((placement.like(credit, given), state))

    return CreditEstimator(name, body.needs, body.init, estimate, body)


def _start(batch: EpisodeBatch) -> Flow:
    step, token = jnp.zeros(batch.step_mask.shape), jnp.zeros(batch.tokens.shape)
    weight = jnp.where(masks.action_tokens(batch), 1.0, 0.0)
    return Flow(step, step, step, token, token, weight, token, token)


def _check_signals(name: str, needs: frozenset[str], batch: EpisodeBatch, signals: Signals) -> None:
    (n, k), (b, t) = batch.step_mask.shape, batch.tokens.shape
    sizes = {"N": n, "K": k, "K+1": k + 1, "B": b, "T": t, "2": 2}
    for need in sorted(needs & set(SIGNALS)):
        value = getattr(signals, need)
        if value is None:
            raise ValueError(f"estimator {name!r} needs the signal {need!r}, which is missing")
        problem = shape_problem(value.shape, SIGNAL_AXES[need], sizes)
        if problem:
            raise ValueError(f"estimator {name!r}: signal {need!r} {problem}")


def shape_problem(shape: tuple[int, ...], axes: str, sizes: dict[str, int]) -> str | None:
    """What is wrong with ``shape``, or None. ``axes`` are letters, of which ``sizes`` may be
    known: ("N K", {"N": 2}) fits every [2, K]."""
    letters = axes.split()
    fits = len(letters) == len(shape) and all(
        sizes.get(letter, size) == size for letter, size in zip(letters, shape, strict=True)
    )
    if fits:
        return None
    expected = [f"{x}={sizes[x]}" if x in sizes and not x.isdigit() else x for x in letters]
    return f"has shape {list(shape)}, expected [{', '.join(expected)}]"


def _open(stage_or_estimator: Stage | CreditEstimator) -> Stage:
    if isinstance(stage_or_estimator, CreditEstimator):
        return stage_or_estimator.stage
    if isinstance(stage_or_estimator, Stage):
        return stage_or_estimator
    raise ValueError(
        f"{stage_or_estimator!r} is neither a Stage nor a CreditEstimator; "
        "if it is a function, call it: outcome_reward()"
    )


def _product(part: Stage) -> str:
    written = [field for field in PRODUCTS if field in part.writes]
    if not written:
        raise ValueError(f"stage {part.name!r} produces nothing that can be summed or scaled")
    return written[-1]


def _linear(product: str) -> tuple[str, ...]:
    return ("step_advantage", product) if product == "token_advantage" else (product,)


def _is_token_level(part: Stage) -> bool:
    return any(field.startswith("token_") for field in part.writes)


def _reader(part: Stage, field: str) -> str:
    for member in part.members:
        if field in member.reads:
            return _reader(member, field)
    return part.name


def _free(name: str, taken: dict[str, Array]) -> str:
    free, count = name, 1
    while free in taken:
        count += 1
        free = f"{name}/{count}"
    return free
