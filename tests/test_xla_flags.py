"""Flags for XLA: ours only where nothing is set, and only for a jaxlib in which the flag is known to exist."""

import importlib.metadata
import os

import pytest

from wp2_jax import xla_flags


@pytest.mark.parametrize(
    ("version", "before", "after"),
    [
        ("0.10.2", "", "--xla_cpu_experimental_ynn_fusion_type="),
        ("0.10.2", "--xla_a=1", "--xla_a=1 --xla_cpu_experimental_ynn_fusion_type="),
        ("0.10.2", "--xla_cpu_experimental_ynn_fusion_type=X", "--xla_cpu_experimental_ynn_fusion_type=X"),
        ("0.12.0", "--xla_a=1", "--xla_a=1"),
    ],
)
def test_tune_cpu(monkeypatch, version, before, after):
    monkeypatch.setenv("XLA_FLAGS", before)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    xla_flags.tune_cpu()
    xla_flags.tune_cpu()
    assert os.environ["XLA_FLAGS"] == after
