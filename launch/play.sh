#!/usr/bin/env bash
# A world to play in the browser: environment, server, and its address, opened where that can be done.
#   bash launch/play.sh [OPTIONS OF wp2 serve]
# Without --checkpoint the newest local run of a whole curriculum plays, or the tiny weights that ship.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. launch/environment.sh serve
given=("$@")
case " $* " in *" --checkpoint"*) ;; *)
  newest=$(ls -td runs/*/stable_forcing/checkpoints 2>/dev/null | head -n 1 || true)
  if [ -n "$newest" ]; then given+=(--checkpoint "${newest%/stable_forcing/checkpoints}"); fi ;;
esac
exec .venv/bin/wp2 serve --open "${given[@]}"
