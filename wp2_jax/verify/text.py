"""Check of the text encoder against golden items of kind j."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from wp2_jax.checkpoints import names_umt5
from wp2_jax.checkpoints.torch_names import flatten, to_tree
from wp2_jax.models import umt5
from wp2_jax.verify.core import Result, compare, failed
from wp2_jax.verify.golden import below, load

TOLERANCE = 1e-5


def config_of(sidecar: dict) -> umt5.Umt5Config:
    """The encoder that an item's sidecar describes. ValueError for a layout that we do not have."""
    sizes = sidecar["config"]
    if sizes["shared_pos"]:
        raise ValueError("shared_pos=true: this encoder has one position table a layer")
    return umt5.Umt5Config(
        vocab_size=sizes["vocab"],
        dim=sizes["dim"],
        attention_dim=sizes["dim_attn"],
        ffn_dim=sizes["dim_ffn"],
        num_heads=sizes["num_heads"],
        num_layers=sizes["num_layers"],
        num_buckets=sizes["num_buckets"],
    )


def check_text(folder: str | Path, name: str) -> list[Result]:
    """An item of kind j: padded hidden states, every trimmed context, and the buckets of relative positions."""
    sidecar, tensors = load(folder, name)
    config = config_of(sidecar)
    template = jax.eval_shape(lambda: umt5.init(config, jax.random.key(0)))
    shapes = {path: leaf.shape for path, leaf in flatten(template).items()}
    params = to_tree(names_umt5.rules(config.num_layers), below(tensors, "w."), shapes)
    encoder = umt5.Umt5Encoder(config)
    ids, mask = jnp.asarray(tensors["in.ids"], jnp.int32), jnp.asarray(tensors["in.mask"] != 0)
    hidden = jax.jit(encoder.apply)({"params": params}, ids, mask)
    results = [compare(f"{name}/hidden", hidden, tensors["out.hidden"], TOLERANCE)]

    contexts = np.asarray(umt5.encode(encoder, params, ids, mask))
    lengths = tensors["in.mask"].sum(axis=1).tolist()
    if lengths != sidecar["lens"]:
        results.append(failed(f"{name}/lens", f"the mask has lengths {lengths}, the sidecar {sidecar['lens']}"))
    for i, length in enumerate(lengths):
        item = f"{name}/trimmed{i}"
        results.append(compare(item, contexts[i, :length], tensors[f"out.trimmed{i}"], TOLERANCE))
        if contexts[i, length:].any():
            results.append(failed(item, "rows past the true length are not zero"))

    reach = (tensors["out.buckets"].size - 1) // 2
    buckets = umt5.relative_buckets(np.arange(-reach, reach + 1), config.num_buckets, config.max_distance)
    results.append(compare(f"{name}/buckets", buckets, tensors["out.buckets"], 0.0))
    return results
