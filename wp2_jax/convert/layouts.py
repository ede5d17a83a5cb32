"""What a PyTorch-side file of weights is, told from the names and shapes in its header.

A layout is a table of names (`checkpoints/names_*.py`) with a mark by which it is known and the sizes that its shapes
show. What shapes do not show (heads, for one) comes from a config or is the published value; `Found.assumed` lists it.
"""

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from wp2_jax.checkpoints import names_diffusers, names_dit, names_umt5, names_vae, torch_names
from wp2_jax.checkpoints.orbax_io import CheckpointError
from wp2_jax.checkpoints.tensor_file import Spec
from wp2_jax.checkpoints.torch_names import Rule, flatten
from wp2_jax.models import autoencoder, passes, umt5
from wp2_jax.models.dit import DiTConfig
from wp2_jax.models.memory import MemoryConfig
from wp2_jax.models.umt5 import Umt5Config
from wp2_jax.models.vae_tiny import TinyVae, TinyVaeConfig
from wp2_jax.models.vae_wan import WanVae, WanVaeConfig

EXPERT, WAN_VAE, TINY_VAE, TEXT = "expert", "Wan autoencoder", "causal tiny autoencoder", "text encoder"
PUBLISHED, WAN, DIFFUSERS = "published", "wan", "diffusers"
LAYOUTS = (PUBLISHED, WAN, DIFFUSERS)
"""published: all that WorldPlay2 adds to Wan2.2, too; wan: the backbone as Wan names it, the autoencoders and the text
encoder alike; diffusers: as diffusers and transformers name them."""
HEAD_SIZE = 128
"""Of every published Wan model."""

Config = DiTConfig | WanVaeConfig | TinyVaeConfig | Umt5Config
Shape = Callable[[str], tuple[int, ...]]


def expert_rules(layout: str, config: Any) -> list[Rule]:
    """The table of an expert in a layout; the backbone's alone where the layout knows no more."""
    if layout == DIFFUSERS:
        return names_diffusers.dit_rules(config)
    rules = names_dit.rules(config)
    return names_diffusers.backbone(rules) if layout == WAN else rules


def text_rules(layout: str, config: Any) -> list[Rule]:
    return (names_diffusers.umt5_rules if layout == DIFFUSERS else names_umt5.rules)(config.num_layers)


def wan_vae_rules(layout: str, config: Any) -> list[Rule]:
    return (names_diffusers.wan_rules if layout == DIFFUSERS else names_vae.wan_rules)(config)


def tiny_vae_rules(layout: str, config: Any) -> list[Rule]:
    return names_vae.tiny_rules(config)


RULES = {EXPERT: expert_rules, WAN_VAE: wan_vae_rules, TINY_VAE: tiny_vae_rules, TEXT: text_rules}
"""The table of names of a kind: (layout, config) -> rules."""
MARKS = (
    (r"^memory_compress\.|^action_in_|\.img_action_mlp\.|^head\.(block_|pdd_)", EXPERT, PUBLISHED),
    (r"\.self_attn\.|\.cross_attn\.", EXPERT, WAN),
    (r"^condition_embedder\.|\.attn1\.|\.attn2\.", EXPERT, DIFFUSERS),
    (r"\.up_blocks\.|\.down_blocks\.|^(post_)?quant_conv\.", WAN_VAE, DIFFUSERS),
    (r"coder\.(up|down)samples\.", WAN_VAE, WAN),
    (r"^enc\.encoder\.|^dec\.decoder\.", TINY_VAE, PUBLISHED),
    (r"\.SelfAttention\.|\.DenseReluDense\.", TEXT, DIFFUSERS),
    (r"\.pos_embedding\.|^token_embedding\.", TEXT, WAN),
)
"""By which names a kind and layout are known; the first that is found counts."""
_BANK_NAMES = {part: [f"head.{name}{part}" for name in ("", "pdd_", "head.")] for part in ("weight", "bias")}
_TIED = "encoder.embed_tokens.weight"


@dataclasses.dataclass(frozen=True)
class Found:
    """A file that was recognised.

    `specs` has canonical names, `stored` the file's own name of each; `assumed` are the sizes that nothing told.
    """

    kind: str
    layout: str
    config: Config
    rules: list[Rule]
    specs: dict[str, Spec]
    stored: dict[str, str]
    assumed: dict[str, Any]

    def check(self) -> None:
        """Raises ValueError that lists all tensors that do not fit the model."""
        torch_names.check(self.rules, self.specs, {path: spec.shape for path, spec in self.own_specs().items()})

    def own_specs(self) -> dict[str, Spec]:
        """Our parameters that this file fills: shapes of the model, dtypes of the file."""
        filled = {rule.ours for rule in self.rules}
        dtypes = {path: spec.dtype for path, spec in torch_names.own(self.rules, self.specs).items()}
        return {
            path: Spec(shape, dtypes.get(path, "float32"))
            for path, shape in shapes(self.config).items()
            if path in filled
        }


@functools.cache
def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Path -> shape of the parameters of a config's model; nothing is made."""
    key = jax.random.key(0)
    if isinstance(config, DiTConfig):
        tree = jax.eval_shape(lambda: passes.init(config, key))
    elif isinstance(config, Umt5Config):
        tree = jax.eval_shape(lambda: umt5.init(config, key))
    else:
        model = WanVae(config) if isinstance(config, WanVaeConfig) else TinyVae(config)
        tree = jax.eval_shape(lambda: autoencoder.init_params(model, key))
    return {path: tuple(leaf.shape) for path, leaf in flatten(tree).items()}


def kind_of(specs: Iterable[str]) -> tuple[str, str]:
    """(kind, layout) of tensors by name. CheckpointError for names of no known layout."""
    names = sorted(specs)
    for mark, kind, layout in MARKS:
        if any(re.search(mark, name) for name in names):
            return kind, layout
    few = ", ".join(names[:4])
    raise CheckpointError(f"no known layout has the names of these {len(names)} tensors ({few}, ...)")


def recognise(specs: Mapping[str, Spec], given: Mapping[str, Any] | None = None) -> Found:
    """What tensors by name are. `given` holds fields of the kind's config that are known from elsewhere.

    Raises:
      CheckpointError: names of no known layout.
      ValueError: tensors that sizes are read from are missing (listed), or sizes that cannot be.
    """
    kind, layout = kind_of(specs)
    stored = _canonical(kind, specs)
    named = {name: specs[theirs] for name, theirs in stored.items()}
    structure = _STRUCTURE[kind](layout, named)
    fields = {**structure, **(given or {})}
    sizes = {**_sizes(kind, layout, named, fields), **fields}
    config, assumed = _CONFIG[kind](sizes)
    if kind == EXPERT and layout == PUBLISHED and "memory" not in (given or {}):
        assumed["memory.attention_heads"] = config.memory.attention_heads  # pyright: ignore[reportAttributeAccessIssue]
    return Found(kind, layout, config, RULES[kind](layout, config), named, stored, assumed)


def _sizes(kind: str, layout: str, specs: Mapping[str, Spec], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes that a kind reads from the shapes of our arrays."""
    if kind not in _SIZES:
        return {}
    rules = RULES[kind](layout, _Fields(fields))
    by_path = {rule.ours: rule for rule in rules}

    def shape(path: str) -> tuple[int, ...]:
        """Ours of the shape that most of a rule's tensors have."""
        rule = by_path[path]
        there = Counter(specs[name].shape for name in rule.names() if name in specs)
        if there:
            like = {name: Spec(there.most_common(1)[0][0], "float32") for name in rule.names()}
            if path in (made := torch_names.own([rule], like)):
                return made[path].shape
        torch_names.check(rules, specs)
        raise ValueError(f"{rule.theirs} has shape {there.most_common(1)[0][0]}, from which no size can be read")

    return _SIZES[kind](shape, fields)


class _Fields:
    """Fields of a config as far as they are known: what the tables need of one."""

    def __init__(self, fields: Mapping[str, Any]):
        self.__dict__.update(fields)


def _canonical(kind: str, specs: Mapping[str, Spec]) -> dict[str, str]:
    """Name in our tables -> name in the file, where files differ among themselves."""
    stored = {name: name for name in specs}
    if kind == TEXT and _TIED in stored:
        stored.setdefault("shared.weight", _TIED)
        del stored[_TIED]
    weight = next((name for name in _BANK_NAMES["weight"] if name in specs and len(specs[name].shape) == 3), None)
    if kind == EXPERT and weight is not None:
        for part, names in _BANK_NAMES.items():
            if (there := weight.removesuffix("weight") + part) in stored:
                del stored[there]
                stored[names[0]] = there
    return stored


def _count(names: Mapping[str, Any], pattern: str) -> int:
    """One more than the largest number that stands in the group of a pattern."""
    return 1 + max((int(match[1]) for name in names if (match := re.match(pattern, name))), default=-1)


def _expert_structure(layout: str, specs: Mapping[str, Spec]) -> dict[str, Any]:
    form = "velocity"
    if layout == PUBLISHED and ("head.block_weight" in specs or "head.block_bias" in specs):
        form = "fused"
    elif layout == PUBLISHED and ("head.weight" in specs or "head.bias" in specs):
        form = "bank"
    fields: dict[str, Any] = {"head": form, "num_layers": _count(specs, r"blocks\.(\d+)\.")}
    if layout != PUBLISHED:
        return fields | {"memory": MemoryConfig()}
    stages = range(_count(specs, r"memory_compress\.blocks\.(\d+)\."))
    marks = {"spatial_down": "resample.1.weight", "temporal_down": "time_conv.weight"}
    down = {
        field: tuple(int(f"memory_compress.blocks.{stage}.{mark}" in specs) for stage in stages)
        for field, mark in marks.items()
    }
    widths = [specs[n].shape[0] for n in ("memory_compress.input_layer.weight",) if n in specs]
    convs = [specs.get(f"memory_compress.blocks.{stage}.conv.bias") for stage in stages]
    widths += [spec.shape[0] for spec in convs if spec is not None]
    if len(widths) != len(stages) + 1:  # what is missing is listed against the published sizes
        return fields | {"memory": MemoryConfig()}
    attention = _count(specs, r"memory_compress\.attn_blocks\.(\d+)\.")
    heads = next(n for n in (MemoryConfig().attention_heads, 4, 2, 1) if widths[-1] % n == 0)
    return fields | {
        "memory": MemoryConfig(tuple(widths), **down, attention_blocks=attention, attention_heads=heads),
    }


def _expert_sizes(shape: Shape, fields: Mapping[str, Any]) -> dict[str, Any]:
    patch, _, channels, _ = shape("patch_kernel")
    form = fields["head"]
    head = shape("head/kernel")
    out = head[-1] // (2 if form == "fused" else 1)
    sizes = {
        "dim": shape("blocks/self_attention/q/bias")[-1],
        "ffn_dim": shape("blocks/ffn/layer_0/bias")[-1],
        "freq_dim": shape("time_embedding/layer_0/kernel")[0],
        "text_dim": shape("text_embedding/layer_0/kernel")[0],
        "patch": patch,
        "latent_channels": out // patch**2,
        "condition_channels": channels - out // patch**2,
    }
    if form == "bank":
        sizes["intervals"] = head[0]
    if form == "fused":
        # Fused heads do not show of how many intervals they were made.
        sizes |= {"blocks": head[0], "intervals": head[0]}
    return sizes


def _expert_config(sizes: Mapping[str, Any]) -> tuple[DiTConfig, dict[str, Any]]:
    sizes, assumed = dict(sizes), {}
    if "num_heads" not in sizes:
        if sizes["dim"] % HEAD_SIZE:
            raise ValueError(
                f"no config says how many heads the width {sizes['dim']} has, and the published head size {HEAD_SIZE} "
                "does not divide it: give --config.model.num_heads=N"
            )
        sizes["num_heads"] = assumed["num_heads"] = sizes["dim"] // HEAD_SIZE
    return DiTConfig(**sizes), assumed


def _text_structure(layout: str, specs: Mapping[str, Spec]) -> dict[str, Any]:
    return {"num_layers": _count(specs, r"(?:encoder\.block|blocks)\.(\d+)\.")}


def _text_sizes(shape: Shape, fields: Mapping[str, Any]) -> dict[str, Any]:
    vocabulary, dim = shape("token_embedding/embedding")
    buckets, heads = shape("blocks/attention/position_bias")[-2:]
    return {
        "vocab_size": vocabulary,
        "dim": dim,
        "attention_dim": shape("blocks/attention/q/kernel")[-1],
        "ffn_dim": shape("blocks/ffn/up/kernel")[-1],
        "num_heads": heads,
        "num_buckets": buckets,
    }


def _wan_structure(layout: str, specs: Mapping[str, Spec]) -> dict[str, Any]:
    """The encoder's entries in a row: residual blocks, and a downsampling after those of every level but the last."""
    names = r"encoder\.down_blocks\.(\d+)\." if layout == DIFFUSERS else r"encoder\.downsamples\.(\d+)\."
    stem = "encoder.down_blocks" if layout == DIFFUSERS else "encoder.downsamples"
    last = "conv2.bias" if layout == DIFFUSERS else "residual.6.bias"
    first = specs.get("encoder.conv_in.bias" if layout == DIFFUSERS else "encoder.conv1.bias")
    latent = specs.get("post_quant_conv.bias" if layout == DIFFUSERS else "conv2.bias")
    if first is None or latent is None:
        return {}
    dim, levels, temporal = first.shape[0], [[]], []
    for index in range(_count(specs, names)):
        if f"{stem}.{index}.resample.1.weight" in specs:
            levels.append([])
            temporal.append(f"{stem}.{index}.time_conv.weight" in specs)
        elif (spec := specs.get(f"{stem}.{index}.{last}")) is not None:
            levels[-1].append(spec.shape[0] // dim)
    if not all(levels):
        return {}
    return {
        "dim": dim,
        "z_dim": latent.shape[0],
        "dim_mult": tuple(Counter(level).most_common(1)[0][0] for level in levels),
        "num_res_blocks": max(map(len, levels)),
        "temporal_downsample": tuple(temporal),
    }


def _tiny_structure(layout: str, specs: Mapping[str, Spec]) -> dict[str, Any]:
    """The encoder's last entry tells how many blocks a level has, the decoder's convolutions their widths."""
    blocks = max(1, (_count(specs, r"enc\.encoder\.(\d+)\.") - 3) // 3 - 2)
    ends = [
        "dec.decoder.1.bias",
        *(f"dec.decoder.{3 + level * (blocks + 3) + blocks + 2}.weight" for level in range(3)),
    ]
    first, pictures = specs.get("enc.encoder.0.weight"), specs.get(f"enc.encoder.{2 + 3 * (blocks + 2)}.bias")
    widths = [specs[name].shape[0] for name in ends if name in specs]
    if first is None or pictures is None or len(widths) != 4:
        return {"blocks": blocks}
    return {
        "blocks": blocks,
        "encoder_width": first.shape[0],
        "decoder_widths": tuple(widths),
        "latent_channels": pictures.shape[0],
        "patch": {3: 1, 12: 2, 48: 4}.get(first.shape[1], 1),
        "shortcut": any(name.startswith("linear_") for name in specs),
    }


_STRUCTURE = {EXPERT: _expert_structure, TEXT: _text_structure, WAN_VAE: _wan_structure, TINY_VAE: _tiny_structure}
_SIZES = {EXPERT: _expert_sizes, TEXT: _text_sizes}
_CONFIG: dict[str, Callable[[Mapping[str, Any]], tuple[Config, dict[str, Any]]]] = {
    EXPERT: _expert_config,
    TEXT: lambda sizes: (Umt5Config(**sizes), {}),
    WAN_VAE: lambda sizes: (WanVaeConfig(**sizes), {}),
    TINY_VAE: lambda sizes: (TinyVaeConfig(**sizes), {}),
}
