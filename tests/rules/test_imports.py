"""Importing any module of ours, in a fresh process, changes nothing."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import pytest

import megatron_det

CHANGES_ON_PURPOSE = {"megatron_det.activate"}  # the one-line import; without --det it changes nothing either
MODULES = [m.name for m in pkgutil.walk_packages(megatron_det.__path__, "megatron_det.")]

CHECK = """
import os, sys, importlib
import torch, torch.distributed
names = sys.argv[1:]
if any(n.startswith("megatron_det.patching") for n in names):  # what ours import of Megatron: there before we look
    import megatron.training.training, megatron.training.checkpointing, megatron.core.dist_checkpointing
    import megatron.training.determinism, megatron.core.optimizer.distrib_optimizer
    import megatron.core.transformer.moe.moe_logging
def snapshot():
    holders = [m for n, m in sys.modules.items() if n.split(".")[0] in ("torch", "megatron")]
    functions = {(h.__name__, k): id(v) for h in holders for k, v in list(vars(h).items()) if callable(v)}
    return dict(os.environ), list(sys.argv), functions, torch.are_deterministic_algorithms_enabled(), \\
        torch.backends.cudnn.benchmark, torch.get_num_threads(), torch.get_rng_state().tolist(), list(sys.meta_path)
before = snapshot()
for name in names:
    importlib.import_module(name)
after = snapshot()
wrong = [i for i, (x, y) in enumerate(zip(before, after)) if i != 2 and x != y]
moved = {k: v for k, v in before[2].items() if after[2].get(k) != v}
print("changed:", wrong, sorted(moved)[:5])
"""


def run(code: str, *names: str) -> str:
    done = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.parametrize("side", ["run side", "read side"])
def test_importing_changes_nothing(side):
    read = ("verify", "report", "formats", "contract", "errors", "cli")
    names = [n for n in MODULES if (n.split(".")[1] in read) == (side == "read side")]
    assert len(names) > 10
    assert run(CHECK, *names) == "changed: [] []"


def test_the_check_sees_a_change():
    """The control."""
    code = CHECK.replace("importlib.import_module(name)", "torch.cuda.synchronize = torch.cuda.is_available = print")
    assert "is_available" in run(code, "megatron_det.errors")


def test_every_module_has_a_docstring_and_a_moderate_length():
    import importlib.util

    for name in MODULES:
        source = importlib.util.find_spec(name).loader.get_source(name)
        assert source.lstrip().startswith(('"""', "'''")) or not source.strip(), name
        assert len(source.splitlines()) <= 400, name
