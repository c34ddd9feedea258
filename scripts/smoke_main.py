"""The main job: ``megatron-det verify`` on GPT (DP2, PP2) and MoE (EP2), on real text, ended by one table.

Runs Megatron's own training loop on the CPU stand-in (two gloo processes, one thread each) unless --device cuda.
Exit code: 0 every arm identical and every cold arm different; 1 some arm differs; 2 something could not run.

Examples:
    scripts/smoke
    scripts/smoke --only moe-ep2 --out out/again
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Model:
    name: str
    title: str
    arguments: tuple[str, ...]


MODELS = (
    Model("gpt-dp2", "GPT DP2", ("@configs/gpt.args",)),
    Model("gpt-pp2", "GPT PP2", ("@configs/gpt.args", "--pipeline-model-parallel-size", "2")),
    Model("moe-ep2", "MoE EP2", ("@configs/moe.args", "--expert-model-parallel-size", "2")),
)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="scripts/smoke"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "smoke", help="where runs and verdicts go")
    parser.add_argument("--only", choices=[m.name for m in MODELS], help="run one model")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--iters", type=int, default=6)
    parser.add_argument("--resume-at", type=int, default=3)
    return parser.parse_args(arguments)


def build_corpus(out: Path) -> Path:
    prefix = out / "corpus" / "torch-sources"
    command = [sys.executable, "scripts/build_corpus.py", "--out", str(prefix)]
    subprocess.run(command, cwd=ROOT, check=True, stdin=subprocess.DEVNULL)
    return prefix


def verify(model: Model, options: argparse.Namespace, corpus: Path) -> tuple[int, float]:
    out = options.out / model.name
    launch = [
        "torchrun", "--standalone", "--nproc-per-node", "2", "scripts/pretrain_gpt.py", *model.arguments,
        "--data-path", str(corpus), "--data-cache-path", str(options.out / "corpus" / "cache"),
    ]  # fmt: skip
    command = [
        "megatron-det", "verify", "--out", str(out), "--overwrite", "--device", options.device,
        "--iters", str(options.iters), "--resume-at", str(options.resume_at), "--", *launch,
    ]  # fmt: skip
    start = time.monotonic()
    code = subprocess.run(command, cwd=ROOT, check=False, stdin=subprocess.DEVNULL).returncode
    return code, time.monotonic() - start


def cells(out: Path) -> dict[str, str]:
    """What ``verify.json`` says of each arm, in its words."""
    path = out / "verify.json"
    if not path.exists():
        return {}
    verdict = json.loads(path.read_text())
    return {arm["name"]: arm["result"] for arm in verdict["arms"]}


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    options.out = options.out.resolve()
    chosen = [m for m in MODELS if options.only in (None, m.name)]
    corpus = build_corpus(options.out)
    table = Table("model", "a", "b", "continued", "resumed", "cold", "exit", "seconds")
    codes = []
    for model in chosen:
        print(f"== {model.title}", flush=True)
        code, seconds = verify(model, options, corpus)
        arms = cells(options.out / model.name)
        row = [arms.get(name, "-") for name in ("a", "b", "continued", "resumed", "cold")]
        table.add_row(model.title, *row, str(code), f"{seconds:.0f}")
        codes.append(code)
    Console(width=100).print(table)
    if options.device == "cpu":
        print("CPU stand-in: Megatron's own loop over gloo; says nothing about GPU kernels.")
    return 2 if any(code not in (0, 1) for code in codes) else max(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
