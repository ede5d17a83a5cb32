"""The other process of a comparison: PyTorch's modules with the same weights and threads, one run at a time."""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from wp2_jax.bench.parts import Part
from wp2_jax.checkpoints import names_diffusers
from wp2_jax.checkpoints.torch_names import from_tree
from wp2_jax.inference.world import World

PARTS = ("dit", "text", "vae_decode", "vae_encode")
"""What PyTorch has modules for; the Wan autoencoder alone, not the tiny one."""


class PeerError(ValueError):
    """The PyTorch process ended, with what it said last."""


class Peer:
    """A context: the process lives until its end. `threads` are PyTorch's."""

    def __init__(self, world: World, threads: int):
        self._world = world
        self._folder = tempfile.TemporaryDirectory()
        # Threads that wait must not take time from the other process.
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "wp2_jax.bench.torch_peer", self._folder.name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
            )

    @property
    def _errors(self) -> Path:
        return Path(self._folder.name) / "errors"

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._folder.cleanup()

    def has(self, part: Part) -> bool:
        """Whether PyTorch has a module for a part of this world."""
        return part.name in PARTS and (not part.name.startswith("vae") or self._world.autoencoder_kind == "wan")

    def give(self, part: Part) -> np.ndarray:
        """Hand over weights and inputs, and run once; returns what PyTorch makes of them."""
        folder = Path(self._folder.name)
        config, rules, weights = self._job(part)
        (folder / f"{part.name}.json").write_text(json.dumps(config))
        save_file(from_tree(rules, weights), folder / f"{part.name}.weights")
        arrays = {name: np.ascontiguousarray(array) for name, array in part.arrays.items()}
        save_file(arrays, folder / f"{part.name}.arrays")
        self.once(part)
        return load_file(folder / f"{part.name}.out")["out"]

    def once(self, part: Part, *, compiled: bool = False) -> float:
        """Seconds of one run. PeerError where the process has ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(f"{part.name}{' compiled' if compiled else ''}\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            last = self._errors.read_text().strip().splitlines()[-3:]
            raise PeerError(f"the PyTorch process ended at {part.name}: {' / '.join(last)}")
        return float(json.loads(answer)["seconds"])

    def _job(self, part: Part) -> tuple[dict[str, Any], list, Any]:
        """(config, table of names, our tree) of a part."""
        world = self._world
        if part.name == "dit":
            config = dataclasses.asdict(world.dit) | {"in_channels": world.dit.in_channels}
            return config, names_diffusers.dit_rules(world.dit), names_diffusers.without_extensions(part.weights)
        if part.name == "text":
            return dataclasses.asdict(world.text), names_diffusers.umt5_rules(world.text.num_layers), part.weights
        config = world.autoencoder.config
        return dataclasses.asdict(config), names_diffusers.wan_rules(config), part.weights
