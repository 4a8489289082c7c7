"""FlowTracer: tokens, or steps, that carry the flow from prompt to answer weigh more."""

from __future__ import annotations

from jaxcredit.credit.algebra import CreditEstimator, estimator
from jaxcredit.credit.methods.grpo import grpo
from jaxcredit.credit.weights import flow_weight, step_flow_weight


def flowtracer(
    *,
    share: float = 0.4,
    weight: float = 1.5,
    std: str | None = "sample",
    eps: float = 1e-6,
) -> CreditEstimator:
    """A_u = A_i of GRPO with weight w_u = ``weight`` on the tokens that carry most flow, else 1.

    The ceil(share n_i) action tokens of largest throughput x_u in the attention graph of the
    episode; see ``jaxcredit.credit.tracing`` for x. Dong et al., arXiv 2606.10646.

    Args:
      share, weight: 0.4 and 1.5 as published.
      std, eps: as in ``grpo``.

    Reconstructed: the paper was read in a digest. Ours are the ranking within the episode, that
    the weight multiplies the loss of right and wrong answers alike, and what ``tracing`` lists.
    """
    return estimator("flowtracer", grpo(std=std, eps=eps), flow_weight(share=share, weight=weight))


def flowtracer_step(
    *,
    share: float = 0.4,
    weight: float = 1.5,
    source: str = "all",
    std: str | None = "sample",
    eps: float = 1e-6,
) -> CreditEstimator:
    """A_u = A_i of GRPO with weight w_u = ``weight`` on the tokens of the steps that carry most
    flow, else 1.

    The ceil(share K_i) steps of largest throughput in the step graph G[j, k]: the recurrences of
    ``flowtracer`` with steps for tokens. After Dong et al., arXiv 2606.10646.

    Args:
      share, weight, std, eps: as in ``flowtracer``.
      source: the prompt feeds "all" steps alike, or the "first" one alone.

    Reconstructed: the step form is not in the paper; and all that ``flowtracer`` lists.
    """
    return estimator(
        "flowtracer_step",
        grpo(std=std, eps=eps),
        step_flow_weight(share=share, weight=weight, source=source),
    )
