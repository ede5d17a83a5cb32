"""Chips and their arrangement, by name: "v5p:4x4x4", "v6e:2x4", "h100:8" (one host), "h100:4x8" (four hosts)."""

import dataclasses
import math
import os
from typing import Any

from jax.experimental import topologies


@dataclasses.dataclass(frozen=True)
class Chip:
    """Of one device: memory in bytes, bfloat16 products in FLOP/s, memory traffic in bytes/s, as its maker states."""

    memory: int
    flops: float
    bandwidth: float
    gpu: str = ""  # what the compiler asks of a GPU, as a text proto

    @property
    def platform(self) -> str:
        return "cuda" if self.gpu else "tpu"

    @property
    def compiler_options(self) -> dict[str, bool]:
        """Triton's products are chosen by trying them on the chip; without it XLA takes tiles that small ones fail
        with. cuBLAS needs no trying."""
        return {"xla_gpu_enable_triton_gemm": False} if self.gpu else {}


# NVIDIA H100 SXM: what its data sheet and the CUDA programming guide (compute capability 9.0) say.
_H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_block_limit: 65536 registers_per_core_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 device_memory_size: 84942979072
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""

CHIPS = {
    "v5e": Chip(16 * 2**30, 197e12, 819e9),
    "v5p": Chip(95 * 2**30, 459e12, 2765e9),
    "v6e": Chip(32 * 2**30, 918e12, 1640e9),
    "h100": Chip(84_942_979_072, 989e12, 3352e9, _H100),
}


@dataclasses.dataclass(frozen=True)
class Target:
    """`count` chips of one kind, laid out as `shape` says."""

    name: str
    chip: Chip
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    def devices(self) -> list[Any]:
        """The devices for a mesh to compile for.

        Raises ValueError where the compiler for this platform is not installed, with what to install.
        """
        if self.chip.platform == "tpu":
            # libtpu otherwise asks the cloud where it is.
            for name, value in (
                ("TPU_SKIP_MDS_QUERY", "1"),
                ("TPU_ACCELERATOR_TYPE", f"{self.name.split(':')[0]}-8"),
                ("TPU_WORKER_HOSTNAMES", "localhost"),
                ("TPU_WORKER_ID", "0"),
            ):
                os.environ.setdefault(name, value)
        size = "x".join(map(str, self.shape))
        try:
            if self.chip.gpu:
                topology = f"1x{self.shape[0]}" if len(self.shape) == 1 else size
                found = topologies.get_topology_desc(
                    platform="cuda", topology_name="", topology=f"1x{topology}", target_config=self.chip.gpu
                )
            else:
                kind = self.name.split(":")[0]
                found = topologies.get_topology_desc(platform="tpu", topology_name=f"{kind}:{size}")
        except (NotImplementedError, RuntimeError, ValueError) as error:
            wanted = (
                "jax-cuda13-plugin jax-cuda13-pjrt (of jax's version, --no-deps)" if self.chip.gpu else "'jax[tpu]'"
            )
            raise ValueError(
                f"target {self.name}: no compiler for it answers here ({error}); "
                f"pip install {wanted}, of jax's version, in an environment of its own"
            ) from error
        return list(found.devices)


def target(name: str) -> Target:
    """The target of a name. ValueError for an unknown chip or an arrangement that is none."""
    kind, colon, size = name.partition(":")
    if kind not in CHIPS or not colon:
        raise ValueError(f"target {name!r}: write CHIP:SHAPE, as v5p:4x4x4 or h100:8; chips: {', '.join(CHIPS)}")
    parts = size.split("x")
    if not all(part.isdigit() and int(part) for part in parts):
        raise ValueError(f"target {name!r}: {size!r} is no shape; write whole numbers with an x between, as 4x4x4")
    shape = tuple(map(int, parts))
    most = 2 if CHIPS[kind].gpu else 3
    if len(shape) > most:
        raise ValueError(f"target {name!r}: {kind} is laid out in at most {most} dimensions")
    return Target(name, CHIPS[kind], shape)
