"""Fixtures for tests that train: the corpus, built once, and ``megatron-det verify`` as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


@dataclass(frozen=True)
class Verdict:
    """What one call of ``verify`` gave."""

    code: int
    output: str
    out: Path

    @property
    def json(self) -> dict[str, Any]:
        return json.loads((self.out / "verify.json").read_text())

    def arms(self) -> dict[str, str]:
        return {arm["name"]: arm["result"] for arm in self.json["arms"]}


def environment() -> dict[str, str]:
    """The user's environment, with our commands on the path and nothing left over of torchrun or of a built model."""
    left = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
    kept = {k: v for k, v in os.environ.items() if k not in left and not k.startswith("NVTE_")}
    return {**kept, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "100"}


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Megatron indexed dataset of real text, 1 MB, and its index cache beside it."""
    prefix = tmp_path_factory.mktemp("corpus") / "text"
    command = [sys.executable, "scripts/build_corpus.py", "--out", str(prefix), "--max-bytes", "1000000"]
    subprocess.run(command, cwd=ROOT, check=True, stdin=subprocess.DEVNULL, timeout=120)
    return prefix


@pytest.fixture
def launch(corpus: Path):
    """``launch(nproc, config, *flags)``: the command a user would type after ``verify --``."""

    def build(nproc: int, config: str, *flags: str) -> list[str]:
        return [
            "torchrun", "--standalone", "--nproc-per-node", str(nproc), "scripts/pretrain_gpt.py",
            f"@configs/{config}.args", "--data-path", str(corpus), "--data-cache-path", str(corpus.parent / "cache"),
            *flags,
        ]  # fmt: skip

    return build


@pytest.fixture
def verify(tmp_path: Path):
    """``verify(options, command)``: runs ``megatron-det verify`` on the CPU stand-in, in fresh processes."""

    def run(options: list[str], command: list[str], timeout: float = 800) -> Verdict:
        out = tmp_path / "verify"
        call = ["megatron-det", "verify", "--out", str(out), "--device", "cpu", *options, "--", *command]
        done = subprocess.run(
            call, cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, text=True, timeout=timeout,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        return Verdict(done.returncode, done.stdout, out)

    return run
