#!/usr/bin/env bash
# From nothing to a video: environment, a small recorded dataset, every stage of the curriculum in its quick form, a
# video generated from launch/example/input.json, and a report. Result: runs/quickstart. Run again to continue.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
echo "quickstart: about 25 minutes on two cores, installation included; it can be stopped and started again"
. launch/environment.sh
out=${1:-runs/quickstart}
.venv/bin/wp2 curriculum --config experiments/tiny.py:quick --workdir "$out"
.venv/bin/wp2 generate --checkpoint "$out" --input launch/example/input.json --output "$out/generated" --mode few_step --seed 0
.venv/bin/wp2 report --workdir "$out"
first=$(ls "$out"/generated/*.mp4 | head -n 1)
cp "$first" "$out/video.mp4"
cat "$out"/*/metrics.jsonl > "$out/metrics.jsonl"
echo "done: $out/video.mp4, $out/report.html"
