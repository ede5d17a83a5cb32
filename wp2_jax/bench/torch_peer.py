"""The same work in PyTorch, in a process of its own: diffusers' and transformers' modules with our weights.

Started by `peer.Peer` as `python -m wp2_jax.bench.torch_peer FOLDER`. FOLDER/job.json says what a part is made of;
each line on standard input, "PART" or "PART compiled", is one timed run, answered by a line of JSON.
"""

# pyright: reportMissingImports=false

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Run = Callable[..., torch.Tensor]


def _dit(config: dict[str, Any], weights: dict[str, torch.Tensor], arrays: dict[str, torch.Tensor]) -> tuple[Any, Run]:
    from diffusers import WanTransformer3DModel

    module = WanTransformer3DModel(
        patch_size=(1, config["patch"], config["patch"]),
        num_attention_heads=config["num_heads"],
        attention_head_dim=config["dim"] // config["num_heads"],
        in_channels=config["in_channels"],
        out_channels=config["latent_channels"],
        text_dim=config["text_dim"],
        freq_dim=config["freq_dim"],
        ffn_dim=config["ffn_dim"],
        num_layers=config["num_layers"],
        eps=config["eps"],
    )
    module.load_state_dict(weights)
    x = torch.cat([arrays["noisy"], arrays["y"]], -1).permute(0, 4, 1, 2, 3).contiguous()

    def run(module=module) -> torch.Tensor:
        (out,) = module(x, arrays["t"], arrays["contexts"], return_dict=False)
        return out.permute(0, 2, 3, 4, 1)

    return module, run


def _text(config: dict[str, Any], weights: dict[str, torch.Tensor], arrays: dict[str, torch.Tensor]) -> tuple[Any, Run]:
    from transformers import UMT5Config, UMT5EncoderModel

    module = UMT5EncoderModel(
        UMT5Config(
            vocab_size=config["vocab_size"],
            d_model=config["dim"],
            d_kv=config["attention_dim"] // config["num_heads"],
            d_ff=config["ffn_dim"],
            num_layers=config["num_layers"],
            num_heads=config["num_heads"],
            relative_attention_num_buckets=config["num_buckets"],
            relative_attention_max_distance=config["max_distance"],
            feed_forward_proj="gated-gelu",
            layer_norm_epsilon=config["eps"],
        )
    )
    weights["encoder.embed_tokens.weight"] = weights["shared.weight"]
    module.load_state_dict(weights)
    ids = arrays["ids"].long()
    return module, lambda module=module: module(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state


def _vae(way: str, config: dict[str, Any], weights: dict[str, torch.Tensor], arrays: dict[str, torch.Tensor]):
    """The next chunk of a stream, by the loop over latents that the module itself has, from caches that one latent
    has filled before."""
    from diffusers import AutoencoderKLWan

    names = {"dim": "base_dim", "temporal_downsample": "temperal_downsample"}  # the module's own spelling
    settings = {names.get(key, key): value for key, value in config.items() if key not in ("mean", "std")}
    module = AutoencoderKLWan(**settings)
    module.load_state_dict(weights)
    mean, std = (torch.tensor(config[name])[None, :, None, None, None] for name in ("mean", "std"))
    first, x = (arrays[name].permute(0, 4, 1, 2, 3).contiguous() for name in ("first", "x"))
    decoding = way == "decode"
    half, size = (module.decoder, 1) if decoding else (module.encoder, 4)
    module.clear_cache()
    caches = module._feat_map if decoding else module._enc_feat_map
    if decoding:
        module.decoder(module.post_quant_conv(first * std + mean), feat_cache=caches, feat_idx=[0], first_chunk=True)
    else:
        module.encoder(first, feat_cache=caches, feat_idx=[0])

    def run(module=module) -> torch.Tensor:
        now = list(caches)
        z = module.post_quant_conv(x * std + mean) if decoding else x
        parts = [
            half(z[:, :, start : start + size], feat_cache=now, feat_idx=[0]) for start in range(0, z.shape[2], size)
        ]
        out = torch.cat(parts, 2)
        out = out if decoding else (module.quant_conv(out)[:, : len(config["mean"])] - mean) / std
        return out.permute(0, 2, 3, 4, 1)

    return module, run


_MAKERS = {
    "dit": _dit,
    "text": _text,
    "vae_decode": lambda *given: _vae("decode", *given),
    "vae_encode": lambda *given: _vae("encode", *given),
}


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.set_grad_enabled(False)
    made: dict[str, tuple[Any, Run]] = {}
    for line in sys.stdin:
        part, *compiled = line.split()
        if part not in made:
            config = json.loads((folder / f"{part}.json").read_text())
            weights, arrays = (load_file(folder / f"{part}.{kind}") for kind in ("weights", "arrays"))
            module, run = _MAKERS[part](config, weights, arrays)
            module.eval()
            made[part] = module, run
            save_file({"out": run().contiguous()}, folder / f"{part}.out")
        module, run = made[part]
        if compiled:
            if f"{part} compiled" not in made:
                quick = torch.compile(module)
                made[f"{part} compiled"] = quick, lambda run=run, quick=quick: run(quick)
                run(quick)
            run = made[f"{part} compiled"][1]
        before = time.perf_counter()
        run()
        print(json.dumps({"seconds": time.perf_counter() - before}), flush=True)


if __name__ == "__main__":
    main()
