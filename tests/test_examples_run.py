"""Every example as a user runs it: one command, on one worker and on two."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SMALL_LM = [
    "--vocab=500",
    "--embedding=16",
    "--hidden=24",
    "--projection=16",
    "--sampled=32",
    "--batch=8",
    "--unroll=5",
    "--steps=4",
]


def run(module: str, *flags: str) -> str:
    """The output of ``python -m module flags``, which must succeed."""
    done = subprocess.run(
        [sys.executable, "-m", module, *flags],
        cwd=ROOT,
        # One worker alone would take all cores, and waits for them where tests run side by side.
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.parametrize("workers", ["1", "2"])
def test_linear_regression_finds_the_line(workers: str) -> None:
    output = run("examples.linear_regression.train", "--workers", workers)
    slope, intercept = re.findall(r"found.*y = ([-\d.]+) x ([-+\d.]+)", output)[0]
    assert float(slope) == pytest.approx(10, abs=0.1)
    assert float(intercept) == pytest.approx(-5, abs=0.1)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_the_residual_network_learns(workers: str, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    flags = ["--data", "digits", "--data-dir", str(tmp_path), "--blocks", "1", "--width", "8"]
    output = run("examples.resnet.train", "--workers", workers, "--steps", "40", *flags)
    assert float(re.findall(r"test accuracy *│ *([\d.]+)%", output)[0]) > 60


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
def test_the_language_model_runs(workers: str, optimizer: str, tmp_path: Path) -> None:
    text = tmp_path / "text.py"
    text.write_text((Path(sysconfig.get_paths()["stdlib"]) / "argparse.py").read_text())
    flags = ["--text", str(text), "--data-dir", str(tmp_path), "--optimizer", optimizer]
    output = run("examples.lm.train", "--workers", workers, *SMALL_LM, *flags)
    assert float(re.findall(r"full softmax\) *│ *([\d.,]+)", output)[0].replace(",", "")) < 500
    assert "softmax_weight" in output, "the plan is printed"
