"""`wp2 data`: record a dataset from the game engine, tell what is in one, check every record."""

from __future__ import annotations

import argparse
import collections
import json
import sys
from pathlib import Path

HELP = "record clips from a game engine; describe or check a dataset"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    record = actions.add_parser("record", help="play ViZDoom on maps made from seeds and write a TFDS dataset")
    record.add_argument("--output", type=Path, required=True, help="folder for the dataset; OUTPUT/vizdoom/VERSION")
    record.add_argument("--seed", type=int, default=0, help="decides everything that is recorded (default 0)")
    record.add_argument("--clips", type=int, default=160, help="how many clips (default 160)")
    record.add_argument("--maps", type=int, default=40, help="how many maps they are spread over (default 40)")
    record.add_argument("--test-maps", type=int, default=4, help="so many of them are held out: split test (default 4)")
    record.add_argument("--latents", type=int, default=40, help="latent frames a clip, 4n (default 40, 10 s)")
    record.add_argument("--width", type=int, default=64, help="picture width, a multiple of 64 (default 64)")
    record.add_argument("--height", type=int, default=64, help="picture height, a multiple of 64 (default 64)")
    record.add_argument(
        "--engine-width",
        type=int,
        default=320,
        choices=(160, 320, 640, 800),
        help="width of the 4:3 picture that is averaged down (default 320)",
    )
    record.add_argument("--yaw-degrees", type=float, default=5.625, help="turn a latent frame (default 5.625)")
    record.add_argument("--pitch-degrees", type=float, default=2.8125, help="look a latent frame (default 2.8125)")
    record.add_argument("--step", type=float, default=4.0, help="map units a picture, 32 are a metre (default 4)")
    record.add_argument("--workers", type=int, default=None, help="processes (default: all processors)")
    for name, what in (("info", "what a dataset holds"), ("check", "validate every record, list the bad ones")):
        action = actions.add_parser(name, help=what)
        action.add_argument("directory", type=Path, help="the dataset's folder or one above it")
        if name == "check":
            action.add_argument("--list", type=Path, default=None, help="write bad records and reasons to this file")
            action.add_argument(
                "--fault-budget", type=int, default=0, help="bad records that are still fine (default 0); more: exit 1"
            )


def run(args: argparse.Namespace) -> int:
    try:
        return {"record": _record, "info": _info, "check": _check}[args.action](args)
    except ValueError as error:
        print(f"wp2 data {args.action}: {error}", file=sys.stderr)
        return 2


def _record(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    from data_pipelines.doom import CameraConfig
    from data_pipelines.kinematics import MotionConfig
    from data_pipelines.record import RecordConfig, record
    from data_pipelines.script import ScriptConfig

    camera = CameraConfig(args.width, args.height, args.engine_width, args.engine_width * 3 // 4)
    motion = MotionConfig(yaw_degrees=args.yaw_degrees, pitch_degrees=args.pitch_degrees, step=args.step)
    script = ScriptConfig(latents=args.latents, motion=motion)
    config = RecordConfig(args.seed, args.clips, args.maps, args.test_maps, camera, script)
    with tqdm(total=args.clips, unit="clip", desc="recording") as bar:

        def progress(done: int, total: int) -> None:
            bar.update(done - bar.n)

        directory = record(config, args.output, args.workers, progress)
    print(f"seed {args.seed}: {directory}")
    return 0


def _all_records(directory: Path):
    from data_pipelines.tfds_builder import Records

    first = Records(directory, "train")
    for split in first.splits:
        records = first if split == "train" else Records(directory, split)
        for index in range(len(records)):
            yield split, records[index]


def _info(args: argparse.Namespace) -> int:
    import numpy as np

    from data_pipelines.schema import read_caption
    from data_pipelines.tfds_builder import Records

    records = Records(args.directory, "train")
    print(f"{records.directory}\nsplits: {json.dumps(records.splits)}")
    print(f"settings: {json.dumps(records.settings.get('config', records.settings))}")
    counts, events = collections.Counter(), collections.Counter()
    worlds: dict[str, set[str]] = collections.defaultdict(set)
    seconds = pictures = moving = rows = 0.0
    shape = None
    for split, record in _all_records(args.directory):
        counts[record["kind"], record["perspective"]] += 1
        worlds[split].add(record["world"])
        shape = record["pictures"].shape[1:3]
        pictures += len(record["pictures"])
        seconds += len(record["pictures"]) / float(record["picture_rate"])
        rows += len(record["actions"])
        moving += float(np.any(record["actions"][:, 2:4] != 0, axis=1).sum())
        events.update(i.event for i in read_caption(record).dynamic_interactions if i.event)
    print(f"pictures: {int(pictures)} of {shape[1]}x{shape[0]}, {seconds:.0f} s" if shape else "no clips")
    print(f"worlds: {', '.join(f'{len(names)} in {split}' for split, names in worlds.items())}")
    print(f"clips: {', '.join(f'{count} {kind} ({who})' for (kind, who), count in sorted(counts.items()))}")
    print(f"latent frames that walk: {moving / max(rows, 1):.0%}; events: {sum(events.values())}")
    return 0


def _check(args: argparse.Namespace) -> int:
    from data_pipelines import schema

    bad: dict[str, list[str]] = {}
    where: dict[str, set[str]] = collections.defaultdict(set)
    total = 0
    for split, record in _all_records(args.directory):
        total += 1
        reasons = schema.faults(record)
        where[record["world"]].add(split)
        if len(where[record["world"]]) > 1:
            reasons.append(f"world {record['world']} is in more than one split")
        if reasons:
            bad[record["id"]] = reasons
            print(f"{record['id']}: {'; '.join(reasons)}")
    print(f"{total} records, {total - len(bad)} good, {len(bad)} bad")
    if args.list is not None:
        args.list.write_text(json.dumps(bad, indent=1))
    return 1 if len(bad) > args.fault_budget else 0
