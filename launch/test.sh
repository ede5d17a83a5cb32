#!/usr/bin/env bash
# Makes the environment with the test extras, checks style and types, and runs the tests: the short form (under half an
# hour on two cores), or with --all every test, quick curriculum included.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. launch/environment.sh test
select=(-m "not slow")
if [ "${1:-}" = --all ]; then
  select=()
  shift
fi
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/pyright
exec .venv/bin/python -m pytest -n "${WP2_TEST_WORKERS:-2}" --dist loadfile "${select[@]}" "$@"
