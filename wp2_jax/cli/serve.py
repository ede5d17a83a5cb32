"""`wp2 serve`: worlds to play, in the browser or from a program."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "serve worlds to play, in the browser and to programs"
COMPUTES = True
EXAMPLE = """\
example:
  wp2 serve --checkpoint runs/quickstart --port 8000

and open http://127.0.0.1:8000. Without --checkpoint the tiny weights play that ship; docs/serving.md has the protocol.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLE
    parser.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="as for wp2 generate (default: the tiny weights that ship)"
    )
    parser.add_argument("--mode", choices=("ar", "few_step"), default="few_step", help="default few_step")
    parser.add_argument("--precision", default=None, metavar="NAME", help="as for wp2 generate")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen at (default 127.0.0.1: this machine only)"
    )
    parser.add_argument("--port", type=int, default=8000, help="0: any that is free (default 8000)")
    parser.add_argument(
        "--token",
        default=None,
        metavar="TEXT",
        help="what clients have to know, also from WP2_TOKEN (default: none at the loopback address, elsewhere one is "
        "drawn and printed)",
    )
    parser.add_argument(
        "--allow-origin", action="append", default=[], metavar="URL", help="a further page that may connect; repeatable"
    )
    parser.add_argument(
        "--chunks",
        type=int,
        default=64,
        metavar="N",
        help="chunks of about a second that a world can have (default 64)",
    )
    parser.add_argument("--worlds", type=int, default=4, metavar="N", help="worlds that take turns (default 4)")
    parser.add_argument("--queue", type=int, default=16, metavar="N", help="players who may wait (default 16)")
    parser.add_argument(
        "--idle-seconds", type=float, default=600, metavar="S", help="a silent player's world ends (default 600)"
    )
    parser.add_argument(
        "--keep-seconds", type=float, default=60, metavar="S", help="a lost player's world waits (default 60)"
    )
    parser.add_argument("--open", action="store_true", help="open the page in a browser, where there is a display")
    parser.add_argument(
        "--gallery",
        type=Path,
        default=None,
        metavar="FILE",
        help="input file whose worlds are the starting points (default: launch/example/input.json where it is)",
    )


def run(args: argparse.Namespace) -> int:
    import functools
    import os
    import secrets
    import socket
    import sys
    import webbrowser

    try:
        from wp2_jax.serve import server
    except ModuleNotFoundError as error:
        raise ValueError(f"wp2 serve needs {error.name}: pip install 'wp2_jax[serve]'") from error
    from wp2_jax.inference import footprint, generate, load
    from wp2_jax.inference.spec import capacity_for
    from wp2_jax.serve import logs, pictures
    from wp2_jax.serve.engine import Engine
    from wp2_jax.serve.game import Game
    from wp2_jax.serve.stepper import Weights
    from wp2_jax.serve.world import Limits

    for name, least, most in (("chunks", 1, 1024), ("worlds", 1, 1024), ("queue", 0, 10_000), ("port", 0, 65_535)):
        if not least <= getattr(args, name) <= most:
            raise ValueError(f"--{name} {getattr(args, name)}: give a number from {least} to {most}")
    for name in ("idle_seconds", "keep_seconds"):
        if not getattr(args, name) > 0:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)}: give a number above 0")
    source = load.locate(args.checkpoint or load.shipped(), args.mode, args.precision)
    capacity = capacity_for(args.chunks + 1)
    spec = generate.stream_spec(source, 1, capacity=capacity)
    needed = footprint.of(source, spec, generate.condition_frames(spec)).times(args.worlds)
    print(f"memory: {needed}", flush=True)
    needed.check()
    example = Path(__file__).parents[2] / "launch" / "example" / "input.json"
    gallery_file = args.gallery or (example if example.is_file() else None)
    gallery = pictures.read_gallery(gallery_file, generate.input_options(source)) if gallery_file else ()
    limits = Limits(
        worlds=args.worlds, queue=args.queue, idle_seconds=args.idle_seconds, keep_seconds=args.keep_seconds
    )
    token = args.token or os.environ.get("WP2_TOKEN") or None
    if token is None and not server.is_loopback(args.host):
        token = secrets.token_urlsafe(16)
    # Bound before anything is loaded: a port that is taken is told at once.
    bound = socket.create_server((args.host, args.port), family=socket.AF_INET6 if ":" in args.host else socket.AF_INET)
    logs.set_up()
    engine = Engine(functools.partial(Weights.of, source, capacity, args.worlds), limits)
    game = Game.of(engine, source, capacity, gallery)
    app = server.application(game, server.Access(args.host, token, tuple(args.allow_origin)))
    engine.start()
    everywhere = args.host in ("", "0.0.0.0", "::")
    shown = socket.gethostname() if everywhere else f"[{args.host}]" if ":" in args.host else args.host
    fragment = f"/#token={token}" if token else ""
    print(f"playing: {game.weights}", flush=True)
    address = f"http://{shown}:{bound.getsockname()[1]}{fragment}"
    print(f"open {address}", flush=True)
    if args.open and (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY") or sys.platform == "darwin"):
        webbrowser.open(address)
    server.server(app).run(sockets=[bound])
    return 0
