"""`wp2 plan`: does it fit on chips that are not here?"""

import argparse

OVERRIDES = True
HELP = "compile for chips that are not here: memory, traffic, operations"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = (
        "Compiles for a target what one update of a training stage runs (--config), or the streaming step of a world\n"
        "(--size), with the very functions that training, generation and play call, and prints of each program what\n"
        "it holds on one device (GiB), its operations, the results of its collectives on one device (GiB) and the\n"
        "time that the chips' stated speeds allow at best. Nothing runs.\n\n"
        "On GPUs attention is XLA's, with its scores in memory: cuDNN's, which keeps them on the chip, cannot be had\n"
        "without one.\n\n"
        "The compiler of the target has to be installed, in an environment of its own: 'jax[tpu]' for TPUs;\n"
        "jax-cuda13-plugin and jax-cuda13-pjrt (--no-deps) for NVIDIA. No chip is needed."
    )
    parser.epilog = (
        "example:\n  wp2 plan --target v5p:4x4x4 --config experiments/a14b.py:teacher_forcing\n"
        "  wp2 plan --target h100:8 --size full --chunks 64 --precision bf16 --shard-weights"
    )
    parser.add_argument("--target", required=True, metavar="CHIP:SHAPE", help="v5e, v5p, v6e or h100: v6e:2x4, h100:8")
    parser.add_argument("--config", metavar="FILE.py:STAGE", help="a stage; its mesh is laid over all chips")
    parser.add_argument("--size", choices=("tiny", "mid", "full"), default="full", help="default full: as published")
    parser.add_argument("--mode", choices=("bi", "ar", "few_step"), default="few_step", help="default few_step")
    parser.add_argument("--chunks", type=int, default=64, metavar="N", help="length of the world (default 64)")
    parser.add_argument("--precision", default="bf16", metavar="NAME", help="full, bf16 (default), int8 or fp8")
    parser.add_argument("--shard-weights", action="store_true", help="weights cut over the devices, not whole on each")


def run(args: argparse.Namespace) -> int:
    import os

    # The chips are not here: nothing is asked of those that are.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from wp2_jax.bench import sizes
    from wp2_jax.inference import precision
    from wp2_jax.plan import fit, stream, targets, training
    from wp2_jax.train import config as configs

    if args.overrides and not args.config:
        raise ValueError(f"{args.overrides[0]} changes a value of --config, which is not given")
    target = targets.target(args.target)
    if args.config:
        config = configs.load(args.config, args.overrides).config
        programs = training.programs(config, target.devices(), target.chip.compiler_options)
    else:
        preset = precision.preset(args.precision)
        world = sizes.world(args.size)
        programs = stream.programs(world, target, args.mode, args.chunks, preset, args.shard_weights)
    fits = []
    for found in programs:
        print(f"{found.name}: compiled in {found.seconds:.0f} s, peak {found.peak / 2**30:.2f} GiB", flush=True)
        fits.append(found)
    print(fit.table(fits, target))
    over = [found.name for found in fits if found.peak > target.chip.memory]
    if over:
        print(
            f"too much for {target.name}: {', '.join(over)}; try more chips, "
            + ("or a larger mesh.seq" if args.config else "--shard-weights, --precision int8 or fewer --chunks")
        )
    return 1 if over else 0
