"""Checks golden items of the autoencoders: kinds h (Wan2.1 VAE) and i (causal tiny autoencoder).

Configuration, weights, recipe and list of tensors come from the sidecar; the splits of the streaming items come from
the tensor names. Golden layouts are channels first; ours are channels last.
"""

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from wp2_jax import xla_flags
from wp2_jax.checkpoints.names_vae import tiny_rules, wan_rules
from wp2_jax.checkpoints.torch_names import flatten, from_tree, to_tree
from wp2_jax.models.autoencoder import init_params
from wp2_jax.models.vae_tiny import TinyVae, TinyVaeConfig
from wp2_jax.models.vae_wan import WanVae, WanVaeConfig
from wp2_jax.verify import golden
from wp2_jax.verify.core import Result, compare, failed
from wp2_jax.verify.experts import weights_named

TOLERANCE_WAN = 1e-5
TOLERANCE_TINY = 3e-5


def tiny_config(sidecar: Mapping) -> TinyVaeConfig:
    """The widths named in a sidecar (`config` or `tae_config`); the published size where none are."""
    config = sidecar.get("tae_config") or sidecar.get("config")
    if config is None:
        return TinyVaeConfig()
    return TinyVaeConfig(int(config["encoder_width"]), tuple(config["decoder_widths"]))


def tiny_weights_from_recipe(sidecar: Mapping) -> dict[str, np.ndarray]:
    """Published name -> float32 weights of the tiny autoencoder, drawn by the recipe in a sidecar.

    Parameter i of the sorted names is RandomState(base + i).standard_normal, times 0.1 for a vector and
    gain / sqrt(fan in) otherwise, in float64; then the last convolution is scaled and its bias set. Raises ValueError
    where base or gain cannot be read.
    """
    recipe = sidecar["weights_recipe"]
    base = re.search(r"RandomState\(\s*(\d+)\s*\+\s*i\s*\)", recipe)
    scales = re.search(r"\(\s*([\d.eE+-]+)\s+if\s+1-D\s+else\s+([\d.eE+-]+)\s*/\s*sqrt", recipe)
    if base is None or scales is None:
        raise ValueError(f"weights_recipe without 'RandomState(<n>+i)' or '(<a> if 1-D else <gain>/sqrt': {recipe!r}")
    vector, gain = float(scales[1]), float(scales[2])
    weights = {}
    for index, (name, shape) in enumerate(sorted(_tiny_shapes(tiny_config(sidecar)).items())):
        drawn = np.random.RandomState(int(base[1]) + index).standard_normal(math.prod(shape)).reshape(shape)
        scale = vector if len(shape) == 1 else gain / math.sqrt(math.prod(shape[1:]))
        weights[name] = (drawn * scale).astype(np.float32)
    last = sidecar["dec_last_conv"]
    weights[last["weight_key"]] *= np.float32(last["weight_scale"])
    weights[last["bias_key"]][:] = last["bias_value"]
    return weights


def tiny_model(sidecar: Mapping) -> tuple[TinyVae, dict]:
    """(model, float32 params) of the tiny autoencoder that a sidecar describes by config and recipe."""
    config = tiny_config(sidecar)
    model = TinyVae(config)
    return model, to_tree(tiny_rules(config), tiny_weights_from_recipe(sidecar), _shapes(model))


def wan_config(sidecar: Mapping) -> WanVaeConfig:
    """The Wan2.1 VAE's sizes in a sidecar, which spells them as the published code does."""
    config = sidecar["config"]
    return WanVaeConfig(
        dim=config["dim"],
        z_dim=config["z_dim"],
        dim_mult=tuple(config["dim_mult"]),
        num_res_blocks=config["num_res_blocks"],
        temporal_downsample=tuple(config["temperal_downsample"]),
    )


def wan_model(folder: Path, name: str = "weights_vae") -> tuple[WanVae, dict]:
    """(model, float32 params) of the Wan2.1 VAE stored as golden item `name` (tensors `w.*`)."""
    sidecar, tensors = golden.load(folder, name)
    config = wan_config(sidecar)
    model = WanVae(config)
    weights = {key.removeprefix("w."): value for key, value in tensors.items()}
    return model, to_tree(wan_rules(config), weights, _shapes(model))


def check_wan(folder: Path, name: str = "h_vae") -> list[Result]:
    """Checks every tensor of an item of kind h. A folder that cannot be read or weights that do not fit raise."""
    sidecar, tensors = golden.load(folder, name)
    model, params = wan_model(folder, next(iter(weights_named(sidecar)), "weights_vae"))
    apply = _applier(model, params)
    video, z = _first(tensors["in.video"]), _first(tensors["in.z"])

    def compute(what: str) -> jax.Array | None:
        if what in ("mean", "std"):
            return jnp.asarray(getattr(model.config, what))
        if what in ("decode_raw", "decode_clamped"):
            return _golden(apply("decode_raw" if what == "decode_raw" else "decode", z))
        if match := re.fullmatch(r"encode(\d+)", what):
            return _golden(apply("encode", video[:, : int(match[1])]))
        if match := re.fullmatch(r"stream_(encode|decode)_(.+)", what):
            return _golden(_stream(model, apply, match[1], video if match[1] == "encode" else z, match[2]))
        return None

    return _check(name, tensors, r"video|z", compute, TOLERANCE_WAN)


def check_tiny(folder: Path, name: str = "i_tae_tiny") -> list[Result]:
    """Checks every tensor of an item of kind i. A folder that cannot be read or weights that do not fit raise."""
    sidecar, tensors = golden.load(folder, name)
    model, params = tiny_model(sidecar)
    apply = _applier(model, params)
    video = jnp.moveaxis(jnp.asarray(tensors["in.x"]), 2, -1) * 2.0 - 1.0
    z = jnp.moveaxis(jnp.asarray(tensors["in.z"]), 2, -1)

    def compute(what: str) -> jax.Array | None:
        if what == "encode_video":
            return jnp.moveaxis(apply("encode", video), -1, 2)
        if what == "decode_video":
            return (jnp.moveaxis(apply("decode", z), -1, 2) + 1.0) / 2.0
        if what == "adapter_encode":
            return _golden(apply("encode", video[:1]))
        if what == "adapter_decode":
            return _golden(apply("decode", z[:1]))
        if match := re.fullmatch(r"adapter_stream_(encode|decode)_(.+)", what):
            if match[1] == "decode":
                return _golden(_stream(model, apply, "decode", z[:1], match[2]))
            # A stream may have its own input, named by its length.
            clip = tensors.get(f"in.clip{sum(int(n) for n in re.findall(r'[0-9]+', match[2]))}")
            return _golden(_stream(model, apply, "encode", video[:1] if clip is None else _first(clip), match[2]))
        return None

    return _check(name, tensors, r"x|z|clip\d+", compute, TOLERANCE_TINY)


def _check(
    name: str,
    tensors: Mapping[str, np.ndarray],
    inputs: str,
    compute: Callable[[str], jax.Array | None],
    tolerance: float,
) -> list[Result]:
    """One result for each tensor but the inputs whose name matches; `compute` gives None for what it does not know."""
    results = []
    for key in sorted(tensors):
        if re.fullmatch(rf"in\.({inputs})", key):
            continue
        item = f"{name}/{key}"
        try:
            actual = compute(key.removeprefix("out.")) if key.startswith("out.") else None
        except ValueError as error:  # a split or an input that the model cannot take
            results.append(failed(item, str(error)))
            continue
        if actual is None:
            results.append(failed(item, "unknown tensor"))
        else:
            results.append(compare(item, actual, tensors[key], tolerance))
    return results


def _stream(model: WanVae | TinyVae, apply: Callable, way: str, x: jax.Array, splits: str) -> jax.Array:
    """Encodes or decodes x [1, F, ...] chunk by chunk; `splits` is "2_1_2" or "2_rest"."""
    parts, at = splits.split("_"), 0
    pixels = 1 if way == "encode" else 8
    init = model.init_encode_state if way == "encode" else model.init_decode_state
    state, outputs = init(x.shape[0], x.shape[2] * pixels, x.shape[3] * pixels), []
    for part in parts:
        size = x.shape[1] - at if part == "rest" else int(part)
        state, y = apply(f"{way}_chunk", state, x[:, at : at + size], at == 0)
        outputs.append(y)
        at += size
    return jnp.concatenate(outputs, axis=1)


def _applier(model: nn.Module, params: dict) -> Callable:
    """`apply(method, *arrays or state, [first])`, compiled once a method and shape, in full float32."""
    compiled: dict[str, Callable] = {}

    def apply(method: str, *args):
        if method not in compiled:
            static = (3,) if method.endswith("_chunk") else ()
            compiled[method] = jax.jit(
                lambda params, *args: model.apply({"params": params}, *args, method=method),
                static_argnums=static,
                # Each program runs once on tiny tensors: compiling is what takes time.
                compiler_options=xla_flags.quick_compile(jax.default_backend()),
            )
        with jax.default_matmul_precision("highest"):
            return compiled[method](params, *args)

    return apply


def _first(array: np.ndarray) -> jax.Array:
    """Golden [C, F, H, W] -> ours [1, F, H, W, C]."""
    return jnp.moveaxis(jnp.asarray(array), 0, -1)[None]


def _golden(array: jax.Array) -> jax.Array:
    """Ours [1, F, H, W, C] -> golden [C, F, H, W]."""
    return jnp.moveaxis(array[0], -1, 0)


def _shapes(model: WanVae | TinyVae) -> dict[str, tuple[int, ...]]:
    tree = jax.eval_shape(lambda: init_params(model, jax.random.key(0)))
    return {path: leaf.shape for path, leaf in flatten(tree).items()}


def _tiny_shapes(config: TinyVaeConfig) -> dict[str, tuple[int, ...]]:
    """Published name -> shape at these widths."""
    tree = jax.eval_shape(lambda: init_params(TinyVae(config), jax.random.key(0)))
    # Only shapes matter here: empty arrays of one element broadcast to the shape take no memory.
    arrays = jax.tree.map(lambda leaf: np.broadcast_to(np.float32(0), leaf.shape), tree)
    return {name: array.shape for name, array in from_tree(tiny_rules(config), arrays).items()}
