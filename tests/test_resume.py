"""A run that was stopped, killed or moved equals the run that never was."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_program
from toy_program import HELD_OUT, Numbers, TwoLosses

from wp2_jax import tree
from wp2_jax.checkpoints import orbax_io
from wp2_jax.sharding import MeshConfig
from wp2_jax.train import loop

STEPS = 11


def run(workdir, *, program=None, loader=None, **changes):
    return loop.run(
        program or TwoLosses(), loader or Numbers(), workdir, toy_program.config(STEPS, **changes), held_out=HELD_OUT
    )


def numbers(x):
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


def assert_equal(a, b):
    for (name, x), y in zip(tree.named_leaves(a).items(), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(numbers(x), numbers(y), err_msg=name)


def lines(workdir):
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != "time"} for row in rows]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The run that never stopped: its final state and folder."""
    workdir = tmp_path_factory.mktemp("straight")
    result = run(workdir)
    assert not result.stopped and int(result.state.step) == STEPS
    return result.state, workdir


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_saves_and_the_resumed_run_is_bit_equal(straight, tmp_path, number):
    before = signal.getsignal(number)
    stopped = run(tmp_path, loader=Numbers(before={5: lambda: os.kill(os.getpid(), number)}))
    assert stopped.stopped and 4 <= int(stopped.state.step) <= 6
    assert signal.getsignal(number) is before
    assert orbax_io.steps(tmp_path / "checkpoints")[-1] == int(stopped.state.step)
    assert orbax_io.load_metadata(tmp_path / "checkpoints")["loader"] == str(int(stopped.state.step)).encode()

    loader = Numbers()
    resumed = run(tmp_path, loader=loader)
    assert_equal(resumed.state, straight[0])
    assert loader.index == STEPS
    # The lines agree too, but for the one that the stop cut in two.
    evals = [row for row in lines(straight[1]) if "eval/student_loss" in row]
    assert [row["step"] for row in evals] == [0, 4, 8, 11]
    assert [row for row in lines(tmp_path) if "eval/student_loss" in row] == evals
    assert lines(tmp_path)[-2:] == lines(straight[1])[-2:]


def test_a_crash_goes_back_to_the_checkpoint_and_its_lines_are_cut(straight, tmp_path):
    def crash():
        raise OSError("disk gone")

    with pytest.raises(OSError, match="disk gone"):
        run(tmp_path, loader=Numbers(before={9: crash}), log_every=1)
    assert orbax_io.steps(tmp_path / "checkpoints") == [3, 6]
    assert lines(tmp_path)[-1]["step"] > 6
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "train/stu')  # killed while writing
    resumed = run(tmp_path, log_every=1)
    assert_equal(resumed.state, straight[0])
    steps = [row["step"] for row in lines(tmp_path) if "train/student_loss" in row]
    assert steps == list(range(1, STEPS + 1))


def test_a_finished_run_does_nothing(straight):
    state, workdir = straight
    before = (workdir / "metrics.jsonl").read_bytes()
    result = run(workdir)
    assert_equal(result.state, state)
    assert (workdir / "metrics.jsonl").read_bytes() == before and not result.stopped


def test_on_another_mesh_the_same_batches_and_losses(straight, tmp_path):
    run(tmp_path, loader=Numbers(before={5: lambda: os.kill(os.getpid(), signal.SIGTERM)}), log_every=1)
    begun = int(orbax_io.load_metadata(tmp_path / "checkpoints")["step"])
    loader = Numbers()
    resumed = run(tmp_path, program=TwoLosses(MeshConfig(data=1, fsdp=2, seq=2, tensor=2)), loader=loader, log_every=1)
    alone = tmp_path / "alone"
    run(alone, log_every=1)
    one, other = ([row for row in lines(w) if "train/student_loss" in row] for w in (alone, tmp_path))
    assert loader.index == STEPS
    np.testing.assert_allclose(other[begun]["train/student_loss"], one[begun]["train/student_loss"], rtol=1e-5)
    np.testing.assert_allclose(
        [row["train/critic_loss"] for row in other], [row["train/critic_loss"] for row in one], rtol=1e-3
    )
    assert_equal(resumed.state.key, straight[0].key)


def start(workdir, seconds, *processes, devices=8):
    command = [sys.executable, toy_program.__file__, str(workdir), str(STEPS), str(seconds), *map(str, processes)]
    root = str(Path(__file__).parents[1])
    # Strict promotion as in the tests, so that both compile the same program.
    env = {**os.environ, "PYTHONPATH": root, "JAX_NUMPY_DTYPE_PROMOTION": "strict"}
    env["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    return subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)


def has_checkpoint(workdir, step):
    """Whether the checkpoint is there or being written."""
    folder = workdir / "checkpoints"
    return folder.is_dir() and any(p.name.startswith(str(step)) for p in folder.iterdir())


def wait_for(condition, process):
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_process_that_is_killed_resumes_bit_equal(straight, tmp_path, number):
    process = start(tmp_path, seconds=0.3)
    wait_for(lambda: has_checkpoint(tmp_path, 3), process)
    process.send_signal(number)
    _, text = process.communicate(timeout=120)
    if number == signal.SIGTERM:
        assert process.returncode == 0, text
        assert "asked to stop; saved at step" in text
        assert 3 <= orbax_io.steps(tmp_path / "checkpoints")[-1] < STEPS
    else:
        assert process.returncode == -signal.SIGKILL
    assert_equal(run(tmp_path).state, straight[0])


@pytest.mark.slow
def test_two_processes_stop_together_and_one_goes_on(straight, tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    both = [start(tmp_path, 0.5, process, 2, port, devices=4) for process in range(2)]
    wait_for(lambda: has_checkpoint(tmp_path, 3), both[0])
    both[1].send_signal(signal.SIGTERM)  # one is told, both save the same step
    for process in both:
        _, text = process.communicate(timeout=120)
        assert process.returncode == 0 and "asked to stop; saved at step" in text, text
    begun = orbax_io.load_metadata(tmp_path / "checkpoints")["step"]
    assert 3 <= begun < STEPS
    loader = Numbers()
    run(tmp_path, loader=loader, log_every=1)
    assert loader.index == STEPS
    alone = tmp_path / "alone"
    run(alone, log_every=1)
    one, other = ([row for row in lines(w) if "train/critic_loss" in row] for w in (alone, tmp_path))
    assert [row["step"] for row in other] == [row["step"] for row in one] == list(range(1, STEPS + 1))
    assert other[begun]["train/critic_loss"] == pytest.approx(one[begun]["train/critic_loss"], rel=1e-5)
    for name in ("train/critic_loss", "train/student_loss"):
        np.testing.assert_allclose([r[name] for r in other], [r[name] for r in one], rtol=1e-3)
