"""Eight virtual CPU devices and strict dtype promotion for every test."""

import getpass
import os
import tempfile
from pathlib import Path

# Both are read when jax starts its backend, so they come before any import of it.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(Path(tempfile.gettempdir()) / f"wp2_jax_cache_{getpass.getuser()}")
)
# Commands keep compiled programs in the user's cache: not in that of who runs the tests.
os.environ["XDG_CACHE_HOME"] = os.environ["JAX_COMPILATION_CACHE_DIR"]

import jax
import pytest

from wp2_jax import allocator, xla_flags
from wp2_jax.inference import aot

xla_flags.tune_cpu()
allocator.keep_memory()
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


@pytest.fixture(scope="module", autouse=True)
def _forget_programs():
    """Compiled programs hold memory maps (tests of Stable Forcing alone 16,000), and a process may have 65,530: past
    that XLA crashes. What a later module needs again comes from the compilation cache."""
    yield
    jax.clear_caches()


@pytest.fixture(autouse=True)
def _programs_in_memory(request, monkeypatch):
    """Commands share the compiled programs of the process, but for the tests of those on disk."""
    if request.module.__name__ != "test_aot":
        monkeypatch.setattr(aot, "kept", lambda programs, folder: programs)


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of golden tensors; its README says what each one is."""
    return Path(__file__).parent / "golden"
