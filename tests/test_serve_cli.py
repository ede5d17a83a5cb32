"""`wp2 serve` as a process: weights that ship, a port of its own, a chunk, and a clean end."""

import os
import re
import signal
import subprocess
import sys

import pytest

from wp2_jax import cli
from wp2_jax.serve.client import Client


def test_a_process_serves_and_stops():
    command = [sys.executable, "-m", "wp2_jax", "serve", "--port", "0", "--chunks", "4"]
    environment = {**os.environ, "XLA_FLAGS": ""}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            said = _until_open(process.stdout)
            assert "stage stable_forcing" in said and "memory:" in said
            found = re.search(r"open http://(127\.0\.0\.1:\d+)$", said, re.MULTILINE)
            assert found
            with Client(f"ws://{found[1]}/play", timeout=300) as client:
                names = [place.name for place in client.hello.gallery]
                assert names == ["orange room", "red room"] and "Tiny weights" in client.hello.expect
                client.start("red room", "fps", seed=0, paused=True)
                chunk, pictures = client.step(["w"])
                assert pictures.shape == (13, 64, 64, 3) and pictures.std() > 20 and chunk.actions == "w"
                process.send_signal(signal.SIGTERM)
                _, log = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode in (0, -signal.SIGTERM)
    assert '"message": "stopped"' in log and "Traceback" not in log


def _until_open(stream) -> str:
    lines = []
    for line in stream:
        lines.append(line)
        if line.startswith("open "):
            break
    return "".join(lines)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--chunks", "0"), "--chunks 0: give a number from 1"),
        (("--worlds", "0"), "--worlds 0"),
        (("--port", "70000"), "--port 70000"),
        (("--keep-seconds", "0"), "--keep-seconds 0"),
        (("--idle-seconds", "nan"), "--idle-seconds nan"),
        (("--checkpoint", "/nowhere"), "/nowhere"),
        (("--gallery", "/nowhere.json"), "/nowhere.json"),
    ],
)
def test_wrong_options(words, said, capsys):
    assert cli.main(["serve", *words]) == 2
    assert said in capsys.readouterr().err
