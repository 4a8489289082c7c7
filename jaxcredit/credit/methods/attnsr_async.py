"""AttnSR on stale data: tokens that the policy has moved away from are left out of the loss."""

from __future__ import annotations

from jaxcredit.credit.algebra import CreditEstimator, estimator
from jaxcredit.credit.methods.attnsr import attnsr
from jaxcredit.credit.weights import ratio_mask


def attnsr_async(
    *,
    low: float = 0.7,
    high: float = 6.0,
    beta: float = 0.25,
    decay: float = 0.99,
    rho: float = 0.9,
    eta: float = 0.5,
    temperature: float = 1.0,
    confidence: str = "focus",
    m_target: float = 0.2,
    phi_target: float = 0.2,
    kappa_target: float = 0.9,
    gamma: float = 1.0,
    eps: float = 1e-6,
) -> CreditEstimator:
    """AttnSR's advantage with weight w_u = [low <= exp(log pi(y_u) - log mu(y_u)) <= high].

        A: ``attnsr`` with lambda_i = 1 - 1 / (1.5 n_i) for the actor, 1 for the critic

    pi is the trainer's policy, mu the one that sampled, n_i the number of action tokens of the
    episode; GAE passes observations by. arXiv 2611.07932, Appendix F, asynchronous configuration.
    The state is (Rbar, count). A token of weight 0 is in neither actor's nor critic's loss, but
    its advantage still enters the whitening.

    The configuration also sets what is no part of an estimator: a replay queue, two critic passes
    per actor pass, critic LoRA on MLP projections only with a trained value head, and the ratio
    of the loss taken to the sampling policy (here ``loss.old_logp: sampler``).

    Args:
      low, high: bounds of the ratio, as printed.
      beta, decay, rho, eta, temperature, confidence, m_target, phi_target, kappa_target, gamma,
        eps: as in ``attnsr``.

    Reconstructed: the ratio is taken once per batch, before its update; gamma is not printed; and
    all that ``attnsr`` lists.
    """
    shaped = attnsr(
        beta=beta,
        decay=decay,
        rho=rho,
        eta=eta,
        temperature=temperature,
        confidence=confidence,
        m_target=m_target,
        phi_target=phi_target,
        kappa_target=kappa_target,
        gamma=gamma,
        lam="length",
        critic_lam=1.0,
        eps=eps,
    )
    return estimator("attnsr_async", shaped, ratio_mask(low, high))
