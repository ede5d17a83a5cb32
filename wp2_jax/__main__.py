"""`python -m wp2_jax` is the command `wp2`."""

import sys

from wp2_jax.cli import main

if __name__ == "__main__":
    sys.exit(main())
