"""How XLA compiles on CPU: a flag that must be set before jax starts its backend, and options for single programs."""

import importlib.metadata
import os

_CPU_FUSIONS = "--xla_cpu_experimental_ynn_fusion_type"


def tune_cpu() -> None:
    """Turns XLA's YNNPACK fusions off on CPU, unless XLA_FLAGS says something about them already.

    Two cores, jaxlib 0.10.2, a gradient with them and without, in seconds: autoencoder 0.74 and 0.37, teacher forcing
    1.14 and 0.93, flow matching 0.173 and 0.145. XLA stops at a flag that it does not know, so this leaves versions
    alone in which the flag has not been seen.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if _CPU_FUSIONS not in flags and importlib.metadata.version("jaxlib").startswith("0.10."):
        os.environ["XLA_FLAGS"] = f"{flags} {_CPU_FUSIONS}=".strip()


def quick_compile(platform: str) -> dict[str, int] | None:
    """Compiler options for what runs a few times only.

    On CPU optimising the code of such a program takes longer than it saves: unoptimised it compiles in half the time
    and runs at a third of the speed. Elsewhere None, the defaults.
    """
    return {"xla_backend_optimization_level": 0} if platform == "cpu" else None
