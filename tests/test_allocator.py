"""Freed memory stays in the process on CPU: seen in what the kernel says of it; the user's own settings win."""

import subprocess
import sys

import pytest

from wp2_jax import allocator

_PROGRAM = """
import ctypes, resource
from wp2_jax import allocator
allocator.keep_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
def once():
    place = libc.malloc(1 << 26)
    ctypes.memset(place, 1, 1 << 26)
    libc.free(place)
once()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(8):
    once()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"JAX_PLATFORMS": "cpu"}, True),
        ({"JAX_PLATFORMS": "cpu", "MALLOC_MMAP_MAX_": "65536"}, False),
        ({"JAX_PLATFORMS": "cuda,cpu"}, False),
    ],
)
def test_memory_taken_again_brings_no_page_faults(settings, kept):
    # Without transparent huge pages 64 MiB are 16,384 faults, with them 32.
    found = subprocess.run([sys.executable, "-c", _PROGRAM], env=settings, capture_output=True, text=True, check=True)
    assert (int(found.stdout) < 8 * 16) is kept


def test_an_accelerator_is_left_alone(monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(allocator.importlib.metadata, "entry_points", lambda group: ["a plugin"])
    assert not allocator._on_cpu()
    monkeypatch.setattr(allocator.importlib.metadata, "entry_points", lambda group: [])
    monkeypatch.setattr(allocator.importlib.util, "find_spec", lambda name: name == "libtpu" or None)
    assert not allocator._on_cpu()
    monkeypatch.setattr(allocator.importlib.util, "find_spec", lambda name: None)
    assert allocator._on_cpu()
