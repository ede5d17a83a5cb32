"""Shape letters and array aliases used in signatures across the library.

| letter | meaning                                   | letter | meaning                                      |
|--------|-------------------------------------------|--------|----------------------------------------------|
| B      | batch                                     | L      | tokens of a sequence                         |
| F      | pictures of a video, 4 (T - 1) + 1        | D      | width of the model                           |
| T      | latent frames                             | N      | attention heads                              |
| H W    | picture height and width                  | K      | size of a head, D / N                        |
| h w    | latent height and width, H / 8, W / 8     | C      | captions of a batch entry                    |
| S      | text tokens of a caption                  | M      | chunks of a rollout                          |

Arrays are channels-last. The aliases only document: nothing is checked at run time.
"""

from typing import Any, TypeAlias

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt8

ArrayTree: TypeAlias = Any
"""A nested dict (or any pytree) of arrays."""
Params: TypeAlias = dict[str, Any]
"""Weights: nested dicts of arrays, by role at the top (`{"high": ..., "low": ...}` or `{"all": ...}`)."""
Batch: TypeAlias = dict[str, Any]
"""What a loader yields: named arrays with a leading batch axis, and host-side lists such as `key`."""
Metrics: TypeAlias = dict[str, Any]
"""Scalars on the device by name."""
PRNGKey: TypeAlias = jax.Array
"""A typed key (`jax.random.key`)."""
Scalar: TypeAlias = Float[Array, ""]

Video: TypeAlias = Float[Array, "B F H W 3"]
"""Pictures in [-1, 1]."""
Pictures: TypeAlias = UInt8[np.ndarray, "F H W 3"]
"""Pictures as stored and shown, 0..255."""
Latents: TypeAlias = Float[Array, "B T h w 16"]
ImageCondition: TypeAlias = Float[Array, "B T h w 20"]
"""y: 4 mask channels and 16 channels of the start picture's latent (SPEC section 3)."""
Actions: TypeAlias = Float[Array, "B T 6"]
"""Rows [pitch deg, yaw deg, forward, lateral, perspective, jump] (SPEC section 2)."""
CaptionIds: TypeAlias = Int[Array, "B C S"]
"""Text token ids, 0 past the end."""
Contexts: TypeAlias = Float[Array, "B C S text_dim"]
"""Encoded captions, zeros past the true length."""
CaptionIndex: TypeAlias = Int[Array, "B T"]
"""Which of the C captions a latent frame is under."""
Tokens: TypeAlias = Float[Array, "B L D"]
Heads: TypeAlias = Float[Array, "B L N K"]
Mask: TypeAlias = Bool[Array, "B L L"]
