"""DPM-Solver++(2M), midpoint form, predicting x0 (arXiv 2211.01095; golden/README.md 22, 39).

With alpha = 1 - sigma, lambda = log(alpha / sigma), h_i = lambda_{i+1} - lambda_i and r = h_{i-1} / h_i:

    x_{i+1} = (sigma_{i+1} / sigma_i) x_i - alpha_{i+1} (e^{-h_i} - 1) (m_i + (m_i - m_{i-1}) / (2 r))

The first step has no earlier prediction and the last is of first order on purpose; both leave the difference
out.
"""

import numpy as np

from wp2_jax.diffusion import flow, samplers


def schedule(steps: int, shift: float) -> samplers.Schedule:
    """The table of `steps` steps: linspace(1, 0, steps + 1) without its last level, shifted, then 0.

    Raises ValueError for steps < 1 or shift <= 0.
    """
    samplers.check(steps, shift)
    exact = flow.shift(np.linspace(1.0, 0.0, steps + 1)[:-1], shift)
    # The levels the model and the sample really have are float32; the coefficients belong to those.
    sigma = np.append(exact, 0.0).astype(np.float32).astype(np.float64)
    alpha = 1.0 - sigma
    with np.errstate(divide="ignore"):
        # -inf at pure noise, +inf at 0: the limits below are the right ones
        lam = np.log(alpha) - np.log(sigma)
    h = np.diff(lam)

    corrector = np.zeros((steps, 5))
    corrector[:, 0] = 1.0
    predictor = np.zeros((steps, 3))
    for i in range(steps):
        scale = -alpha[i + 1] * np.expm1(-h[i])
        slope = 0.0 if i in (0, steps - 1) else 0.5 * h[i] / h[i - 1]
        predictor[i] = sigma[i + 1] / sigma[i], scale * (1.0 + slope), -scale * slope
    timesteps = (flow.TIMESTEPS * exact).astype(np.int64)
    return samplers.Schedule(timesteps, sigma, corrector, predictor)
