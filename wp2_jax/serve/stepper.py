"""What the engine drives: worlds of a checkpoint, a chunk at a time."""

from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from wp2_jax.inference import aot, generate, video
from wp2_jax.inference.load import Loaded, Source, load
from wp2_jax.serve.world import Start


class Stepper(Protocol):
    """Makes chunks. A state belongs to the stepper that made it, and is used up by `make`."""

    chunk: int
    """Latent frames of a chunk."""
    longest: int
    """Chunks that a world can have."""

    def begin(self, start: Start) -> Any:
        """The state of a new world."""
        ...

    def make(self, state: Any, rows: np.ndarray, caption: str, first: bool) -> tuple[Any, np.ndarray]:
        """The next state, and the chunk's pictures uint8 [F, H, W, 3]; rows float32 [C, 6]."""
        ...

    def copy(self, state: Any) -> Any: ...

    def size(self, state: Any) -> int:
        """Bytes of a state."""
        ...

    def check(self) -> None:
        """Makes two chunks of an idle world: compiles what there is to compile, and fails if the device does."""
        ...


class Weights:
    """A stepper of trained weights. Worlds are laid out for `capacity` chunks, one of `spec.CAPACITIES`.

    ValueError: a capacity that there is not.
    """

    def __init__(self, loaded: Loaded, capacity: int, worlds: int = 4):
        self.loaded = loaded
        spec = generate.stream_spec(loaded.source, 1, capacity=capacity)
        programs = aot.kept(generate.PROGRAMS, aot.default_folder())
        # Each world may go to and fro between two captions.
        self._player = generate.Player(loaded, spec, programs, kept_captions=2 * worlds + 2)
        self.capacity, self.chunk = capacity, spec.chunk
        self.longest = min(capacity, loaded.world.longest)
        self._null_ids = loaded.tokenizer.encode([loaded.world.config.negative_prompt])

    @classmethod
    def of(cls, source: Source, capacity: int, worlds: int = 4) -> "Weights":
        """Reads the weights of a source. Errors: those of `load.load`, and of the class."""
        return cls(load(source), capacity, worlds)

    def begin(self, start: Start) -> Any:
        return self._player.start(start.image, self._null_ids, start.seed)

    def make(self, state: Any, rows: np.ndarray, caption: str, first: bool) -> tuple[Any, np.ndarray]:
        said = self._player.caption(self.loaded.tokenizer.encode([caption])[0])
        state, made = self._player.emit(state, rows, said, first=first)
        # The memory takes the chunk in while its pictures are on their way.
        state = self._player.absorb(state, made, first=first)
        return state, video.to_uint8(np.asarray(made.video)[0])

    def copy(self, state: Any) -> Any:
        return jax.tree.map(jnp.copy, state)

    def size(self, state: Any) -> int:
        return sum(leaf.nbytes for leaf in jax.tree.leaves(state))

    def check(self) -> None:
        idle = generate.idle_request(self.loaded.source, 2)
        state = self.begin(Start(b"", idle.image, idle.fit, "fps", 0))
        for first in (True, False):
            rows = idle.rows[: self.chunk]
            state, _ = self.make(self.copy(state), rows, idle.captions[0], first)
        jax.block_until_ready(state)
