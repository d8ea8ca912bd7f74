"""Every example as a user runs it: one command, on one worker and on two."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from examples.nmt.data import docstring_pairs

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


WORKERS = ["1", "2"]
SHORT = {("sgd", "2"), ("adam", "1")}


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


@pytest.mark.parametrize("workers", [pytest.param("1", marks=pytest.mark.long), "2"])
def test_linear_regression_finds_the_line(workers: str) -> None:
    output = run("examples.linear_regression.train", "--workers", workers)
    slope, intercept = re.findall(r"found.*y = ([-\d.]+) x ([-+\d.]+)", output)[0]
    assert float(slope) == pytest.approx(10, abs=0.1)
    assert float(intercept) == pytest.approx(-5, abs=0.1)


@pytest.mark.long
@pytest.mark.parametrize("workers", WORKERS)
def test_the_residual_network_learns(workers: str, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    flags = ["--data", "digits", "--data-dir", str(tmp_path), "--blocks", "1", "--width", "8"]
    output = run("examples.resnet.train", "--workers", workers, "--steps", "40", *flags)
    assert float(re.findall(r"test accuracy *│ *([\d.]+)%", output)[0]) > 60


MODELS = [
    pytest.param(
        optimizer, workers, marks=[] if (optimizer, workers) in SHORT else pytest.mark.long
    )
    for optimizer in ("sgd", "adagrad", "adam")
    for workers in ("1", "2")
]


@pytest.mark.parametrize(("optimizer", "workers"), MODELS)
def test_the_language_model_runs(workers: str, optimizer: str, tmp_path: Path) -> None:
    text = tmp_path / "text.py"
    text.write_text((Path(sysconfig.get_paths()["stdlib"]) / "argparse.py").read_text())
    flags = ["--text", str(text), "--data-dir", str(tmp_path), "--optimizer", optimizer]
    output = run("examples.lm.train", "--workers", workers, *SMALL_LM, *flags)
    assert float(re.findall(r"full softmax\) *│ *([\d.,]+)", output)[0].replace(",", "")) < 500
    assert "softmax_weight" in output, "the plan is printed"


@pytest.mark.long
@pytest.mark.parametrize("workers", WORKERS)
def test_the_vgg_network_learns(workers: str, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    flags = ["--data", "digits", "--data-dir", str(tmp_path), "--depth", "11", "--width", "8"]
    sizes = ["--features", "64", "--dropout", "0", "--steps", "80"]
    output = run("examples.vgg.train", "--workers", workers, *flags, *sizes)
    assert float(re.findall(r"test accuracy *│ *([\d.]+)%", output)[0]) > 50
    assert "classifier.0.weight" in output, "the plan is printed"


@pytest.mark.long
@pytest.mark.parametrize("workers", WORKERS)
def test_the_translator_runs(workers: str, tmp_path: Path) -> None:
    text = tmp_path / "pairs.tsv"
    names = [(" ".join(code.split()[1:6]), said) for code, said in docstring_pairs(1_000_000)]
    text.write_text("\n".join("\t".join(pair) for pair in names), encoding="utf-8")
    flags = ["--text", str(text), "--data-dir", str(tmp_path)]
    sizes = ["--vocab=500", "--longest=8", "--embedding=8", "--hidden=16", "--layers=1"]
    steps = ["--batch=8", "--steps=30", "--dropout=0"]
    output = run("examples.nmt.train", "--workers", workers, *flags, *sizes, *steps)
    assert float(re.findall(r"held-out perplexity *│ *([\d.,]+)", output)[0].replace(",", "")) < 500
    assert "target_embedding" in output, "the plan is printed"
    assert re.search(r"^(\[worker 0\] )?translated ", output, re.M)


@pytest.mark.long
@pytest.mark.parametrize("workers", WORKERS)
def test_the_recommendation_model_learns(workers: str, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    flags = ["--data", "cells", "--data-dir", str(tmp_path), "--rows", "500", "--features", "8"]
    sizes = ["--bottom", "32", "--top", "32", "--batch", "16", "--epochs", "4"]
    output = run("examples.dlrm.train", "--workers", workers, *flags, *sizes)
    assert float(re.findall(r"test AUC *│ *([\d.]+)", output)[0]) > 0.95
    assert "tables.25.weight" in output, "the plan is printed"
