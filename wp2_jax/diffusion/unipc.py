"""UniPC of order 2 (arXiv 2302.04867), B2(h) variant, predicting x0 (golden/README.md 22, 39).

With alpha = 1 - sigma, lambda = log(alpha / sigma) and h = lambda_t - lambda_s, a step from level s to t
starts from the exact solution for a constant prediction m_s, and adds differences of predictions weighted by
`B = e^-h - 1`:

    base      = (sigma_t / sigma_s) c_s - alpha_t B m_s
    predictor = base - alpha_t B (1/2) D
    corrector = base - alpha_t B (rho_1 D + rho_2 (m_t - m_s))

with D = (m_{s-1} - m_s) / r and r = (lambda_{s-1} - lambda_s) / h.
rho solves the order conditions  rho_1 + rho_2 = b_1,  r rho_1 + rho_2 = b_2  of the paper. The first and the
last predictor are of order 1 (no D), the corrector from the second step on has the order of the predictor it
corrects.
"""

import numpy as np

from wp2_jax.diffusion import flow, samplers

# The published schedule rounds this level to float32 and goes on in float64; the golden sigmas show it.
FIRST_LEVEL = float(np.float32(0.999))


def schedule(steps: int, shift: float) -> samplers.Schedule:
    """The table of `steps` steps: linspace(0.999, 0, steps + 1) without its last level, shifted, then 0.

    Raises ValueError for steps < 1 or shift <= 0.
    """
    samplers.check(steps, shift)
    exact = flow.shift(np.linspace(FIRST_LEVEL, 0.0, steps + 1)[:-1], shift)
    # The levels the model and the sample really have are float32; the coefficients belong to those.
    sigma = np.append(exact, 0.0).astype(np.float32).astype(np.float64)
    alpha = 1.0 - sigma
    with np.errstate(divide="ignore"):
        lam = np.log(alpha) - np.log(sigma)

    corrector = np.zeros((steps, 5))
    predictor = np.zeros((steps, 3))
    corrector[0, 0] = 1.0
    for i in range(steps):
        if i:
            corrector[i] = _corrector(sigma, alpha, lam, i, order=min(2, i))
        predictor[i] = _predictor(sigma, alpha, lam, i, order=1 if i in (0, steps - 1) else 2)
    timesteps = (flow.TIMESTEPS * exact).astype(np.int64)
    return samplers.Schedule(timesteps, sigma, corrector, predictor)


def _predictor(sigma, alpha, lam, i: int, order: int) -> tuple[float, float, float]:
    """Weights of (c_i, m_i, m_{i-1}) in the sample at level i + 1."""
    h = lam[i + 1] - lam[i]
    scale = -alpha[i + 1] * np.expm1(-h)
    keep = sigma[i + 1] / sigma[i]
    if order == 1:
        return keep, scale, 0.0
    slope = 0.5 / ((lam[i - 1] - lam[i]) / h)
    return keep, scale * (1.0 - slope), scale * slope


def _corrector(sigma, alpha, lam, i: int, order: int) -> tuple[float, float, float, float, float]:
    """Weights of (x_i, c_{i-1}, m_i, m_{i-1}, m_{i-2}) in the corrected sample at level i."""
    h = lam[i] - lam[i - 1]
    b = np.expm1(-h)
    scale = -alpha[i] * b
    keep = sigma[i] / sigma[i - 1]
    if order == 1:
        return 0.0, keep, scale * 0.5, scale * 0.5, 0.0
    r = (lam[i - 2] - lam[i - 1]) / h
    phi1 = b / -h - 1.0
    phi2 = phi1 / -h - 0.5
    rho1, rho2 = np.linalg.solve([[1.0, 1.0], [r, 1.0]], [phi1 / b, 2.0 * phi2 / b])
    slope = rho1 / r
    return 0.0, keep, scale * rho2, scale * (1.0 - slope - rho2), scale * slope
