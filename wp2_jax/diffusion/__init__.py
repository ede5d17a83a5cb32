"""Noise levels, conversions and samplers. Nothing here knows a model: a sampler is handed a predict
function."""

from collections.abc import Callable, Mapping

from wp2_jax.diffusion import dpm, unipc
from wp2_jax.diffusion.samplers import Schedule

# Solver names as the published configuration spells them -> schedule(steps, shift).
SOLVERS: Mapping[str, Callable[[int, float], Schedule]] = {"unipc": unipc.schedule, "dpm++": dpm.schedule}


def solver_schedule(solver: str, steps: int, shift: float) -> Schedule:
    """The table of a solver by its name ("unipc" or "dpm++"); ValueError for any other name."""
    if solver not in SOLVERS:
        raise ValueError(f"sampler.solver={solver!r}: choose one of {', '.join(SOLVERS)}")
    return SOLVERS[solver](steps, shift)
