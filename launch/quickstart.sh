#!/usr/bin/env bash
# From nothing to a video: environment, a small recorded dataset, every stage of the curriculum in its quick form,
# videos generated from launch/example/input.json, by what was just trained and by the shipped weights of the full tiny
# recipe, and a report. Result: runs/quickstart. Run again to continue.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
echo "quickstart: about 15 minutes on two cores, installation included; it can be stopped and started again"
. launch/environment.sh
out=${1:-runs/quickstart}
.venv/bin/wp2 curriculum --config experiments/tiny.py:quick --workdir "$out"
videos() { .venv/bin/wp2 generate --input launch/example/input.json --mode few_step --seed 0 "$@"; }
videos --checkpoint "$out" --output "$out/generated/trained_here"
videos --output "$out/generated/full_recipe"
.venv/bin/wp2 report --workdir "$out"
cp "$out/generated/trained_here/video.mp4" "$out/video.mp4"
cat "$out"/*/metrics.jsonl > "$out/metrics.jsonl"
echo "done: $out/video.mp4, $out/report.html"
