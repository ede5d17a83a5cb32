"""`wp2 generate`: worlds from an input file, as videos and contact sheets."""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

HELP = "generate videos from a checkpoint and an input file"
COMPUTES = True
EXAMPLE = """\
example:
  wp2 generate --checkpoint runs/quickstart --input launch/example/input.json --output runs/quickstart/generated \\
      --mode few_step --seed 0

The input file is a JSON list of objects with image_path, perspective (fps or tps), action ("w-8,right-4", in latent
frames of 4 pictures), prompt_event ("prompt-8,prompt2-4"), prompt* and optionally output_name. One saved by
`wp2 serve` also has rows (in place of action or beside it), seed, capacity and fit.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLE
    parser.add_argument(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help="workdir of a curriculum, one stage's folder, or packed weights (default: the tiny weights that ship)",
    )
    parser.add_argument("--input", type=Path, required=True, metavar="FILE", help="JSON file with the worlds to make")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder for NAME.mp4 and NAME.png")
    parser.add_argument(
        "--mode",
        choices=("bi", "ar", "few_step"),
        default="few_step",
        help="bi: the bidirectional teacher; ar: the autoregressive model, many steps; "
        "few_step: the student, 4 passes a chunk (default)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=None,
        help="0 to 2147483647 (default: drawn and printed); a world of the "
        "input file that has a seed of its own keeps it",
    )
    parser.add_argument(
        "--fit",
        choices=("stretch", "crop"),
        default="stretch",
        help="how the start picture gets the world's shape (default stretch)",
    )
    speed = "degrees a latent frame (default: that of the training data if the checkpoint says, else 3)"
    parser.add_argument("--yaw-degrees", type=float, default=None, metavar="X", help=f"left and right turn, {speed}")
    parser.add_argument("--pitch-degrees", type=float, default=None, metavar="Y", help=f"up and down turn, {speed}")
    parser.add_argument("--steps", type=int, default=None, metavar="N", help="sampling steps of bi and ar mode")
    parser.add_argument(
        "--negative-prompt", default="", metavar="TEXT", help="caption to keep away from in bi and ar mode"
    )
    parser.add_argument(
        "--precision",
        default=None,
        metavar="NAME",
        help="full: as trained; bf16; int8, fp8: large matrices in eight bits; int8-w8a8, fp8-w8a8: what they are "
        "multiplied with too, where the hardware can (default: as the checkpoint is)",
    )
    parser.add_argument(
        "--devices",
        type=int,
        default=1,
        metavar="N",
        help="cut every pass over N devices: tokens (attention by heads where N divides them), pictures in bands of "
        "rows (default 1)",
    )
    parser.add_argument("--shard-weights", action="store_true", help="cut the weights over the devices too")
    parser.add_argument("--raw-weights", action="store_true", help="the trained weights instead of their average")


def run(args: argparse.Namespace) -> int:
    from wp2_jax import sharding
    from wp2_jax.controls.inputs import load_inputs
    from wp2_jax.inference import aot, footprint, generate, load
    from wp2_jax.rng import drawn_seed

    mesh = sharding.first_devices(args.devices) if args.devices != 1 else None
    source = load.locate(args.checkpoint or load.shipped(), args.mode, args.precision)
    items = load_inputs(args.input, generate.input_options(source, args.yaw_degrees, args.pitch_degrees))
    generate.stream_spec(source, 1, args.steps)
    seed = generate.check_seed(drawn_seed(args.seed))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        requests = generate.prepare(
            source, source.tokenizer(), items, fit=args.fit, negative_prompt=args.negative_prompt
        )
    for warning in said:
        print(f"warning: {warning.message}", file=sys.stderr)
    for request in requests:
        print(request.timeline)
    print(f"mode {source.mode}: stage {source.stage}, step {source.step} of {source.workdir}", flush=True)
    rules = sharding.one_world(args.shard_weights)
    specs = [generate.stream_spec(source, world.chunks, args.steps, capacity=world.capacity) for world in requests]
    spec = max(specs, key=lambda spec: spec.capacity)
    needed = footprint.of(source, spec, generate.condition_frames(spec), mesh, rules)
    print(f"memory: {needed}", flush=True)
    needed.check()
    loaded = load.load(source, ema=not args.raw_weights, mesh=mesh, rules=rules)
    programs = aot.kept(generate.PROGRAMS, aot.default_folder())
    for request in requests:
        own = seed if request.seed is None else request.seed
        written = generate.write(loaded, request, own, args.output, steps=args.steps, programs=programs)
        print(f"{written.video} and {written.sheet.name}, {written.seconds_a_chunk:.2f} s a chunk", flush=True)
    return 0
