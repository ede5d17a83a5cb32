# Makes the environment .venv in the project's root and installs the project into it. Sourced by the other scripts:
#   . launch/environment.sh [EXTRA]        EXTRA such as test
# An existing environment is used as it is when it was made from the same requirements.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
extra=${1:-}
python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'; then
  echo "wp2_jax needs Python 3.11 to 3.13; found $("$python" --version). Set PYTHON=/path/to/python3.11" >&2
  exit 2
fi
stamp=$(cat requirements.txt pyproject.toml | cksum | cut -d' ' -f1)
mark=.venv/.wp2-$stamp
if [ ! -e "$mark" ] || { [ -n "$extra" ] && [ ! -e "$mark-$extra" ]; }; then
  [ -x .venv/bin/python ] || "$python" -m venv .venv
  echo "installing into .venv (1 to 3 minutes)"
  .venv/bin/python -m pip install --quiet --disable-pip-version-check uv
  .venv/bin/python -m uv pip install --quiet --python .venv/bin/python -e ".${extra:+[$extra]}"
  touch "$mark${extra:+-$extra}"
  touch "$mark"
fi
# Compiled programs are kept between runs.
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/wp2_jax/xla}
# Huge pages for the memory that wp2_jax/allocator.py keeps; read when a process starts, and so not set there (two cores,
# both together, a step of the quick action stage, two pairs of runs: 0.214 and 0.157 s, 0.165 and 0.127 s).
export GLIBC_TUNABLES=${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}
