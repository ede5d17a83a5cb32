"""Whether programs fit on a target, and what they would cost there."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax

from wp2_jax.bench import flops
from wp2_jax.plan import hlo
from wp2_jax.plan.targets import Target

_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Fit:
    """One compiled program. Bytes on one device; `peak` holds arguments and temporaries together; seconds to compile;
    `flops` of all devices together; `times` that it runs in one update."""

    name: str
    arguments: int
    temporaries: int
    peak: int
    moved: dict[str, int]
    flops: int
    seconds: float
    times: int = 1

    def step_seconds(self, target: Target) -> float:
        """A lower bound: products at the chips' stated speed, or all that is held read once, whichever takes longer."""
        return max(self.flops / target.count / target.chip.flops, self.peak / target.chip.bandwidth)


def compiled(name: str, traced: Any, options: dict[str, bool]) -> tuple[Fit, Any]:
    """Compile a traced program (jax.stages.Traced) with compiler options; its results come as shapes with shardings."""
    lowered, before = traced.lower(), time.monotonic()
    executable = lowered.compile(compiler_options=options)
    seconds = time.monotonic() - before
    memory = executable.memory_analysis()
    moved = hlo.collectives(executable.as_text())
    sizes = memory.argument_size_in_bytes, memory.temp_size_in_bytes, memory.peak_memory_in_bytes
    results = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), traced.out_info, executable.output_shardings
    )
    return Fit(name, *sizes, moved, flops.of(traced.jaxpr.jaxpr), seconds), results


def table(fits: Sequence[Fit], target: Target) -> str:
    """A Markdown table of programs on a target."""
    head = (
        "program",
        "times",
        "arguments",
        "temporaries",
        "peak",
        "of memory",
        "TFLOP",
        "at best, s",
        "moved",
        "compile, s",
    )
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for fit in fits:
        moved = ", ".join(f"{kind} {size / _GIB:.2f}" for kind, size in fit.moved.items())
        cells = (
            fit.name,
            str(fit.times),
            *(f"{size / _GIB:.2f}" for size in (fit.arguments, fit.temporaries, fit.peak)),
            f"{fit.peak / target.chip.memory:.0%}",
            f"{fit.flops / 1e12:.3g}" if fit.flops else "",
            f"{fit.step_seconds(target):.3g}" if fit.flops else "",
            moved,
            f"{fit.seconds:.0f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
