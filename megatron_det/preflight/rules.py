"""All rules, and the function that runs them. Each rule gives findings; nothing is changed."""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from megatron_det.contract.levels import strength, weakest
from megatron_det.errors import Finding
from megatron_det.formats.ledger import rank_path
from megatron_det.preflight.arguments import RULES as ARGUMENT_RULES
from megatron_det.preflight.context import Context

Rule = Callable[[Context], Iterator[Finding]]
SUPPORTED = {"megatron-core": ((0, 19), (0, 20)), "torch": ((2, 10), (2, 15))}


WAIVABLE = ("DET-ARG-", "DET-MEGATRON-", "DET-VERSION", "DET-ENV")


def findings(context: Context) -> list[Finding]:
    """Every problem, in the order of the table."""
    return [finding for rule in RULES for finding in rule(context)]


def standing(found: list[Finding], allow: tuple[str, ...]) -> list[Finding]:
    """What is left after ``--det-allow``. A code that may not be waived is a finding itself."""
    unknown = [
        Finding(
            "DET-ALLOW", f"--det-allow {code}", "a code that cannot be waived", "one that begins with " +
            " or ".join(WAIVABLE), "Without it there is nothing to train or to compare.", "mend what it names.",
        )
        for code in allow if not code.startswith(WAIVABLE)
    ]  # fmt: skip
    return [*unknown, *(f for f in found if f.code not in allow or not f.code.startswith(WAIVABLE))]


def needs_det(context: Context) -> Iterator[Finding]:
    if not context.options.det:
        yield Finding(
            "DET-NEEDS-DET", "--det-… flags", "without --det", "--det as well",
            "Half a request would train without a guarantee.", "add --det; --det-level observe only records.",
        )  # fmt: skip


def level(context: Context) -> Iterator[Finding]:
    """The level asked for against the weakest link of the chain."""
    link = weakest(context.options.level)
    if strength(context.options.level) > strength(link.level):
        yield Finding(
            "DET-LEVEL", f"--det-level {context.options.level}", f"{link.name} reach {link.level}", "all links at it",
            f"Weakest link: {link.why}.", f"ask for --det-level {link.level}.",
        )  # fmt: skip


def supported_versions(context: Context) -> Iterator[Finding]:
    for package, (low, high) in SUPPORTED.items():
        text = context.versions.get(package)
        numbers = tuple(int(n) for n in (text or "0").split("+")[0].split(".")[:2] if n.isdigit())
        if not low <= numbers < high:
            needed = f">= {low[0]}.{low[1]}, < {high[0]}.{high[1]}"
            yield Finding(
                "DET-VERSION", package, text or "not installed", needed,
                "The patches were written for the sources of these versions.", f"pip install '{package}{needed}'",
            )  # fmt: skip


def device(context: Context) -> Iterator[Finding]:
    if context.options.device != "cpu" and not context.gpu_visible:
        yield Finding(
            "DET-NO-GPU", "device", "no GPU", "a GPU, or the CPU stand-in by name",
            "Nobody should train on CPU by surprise.", "add --det-device cpu.",
        )  # fmt: skip


def megatron_arguments(context: Context) -> Iterator[Finding]:
    """Megatron's own table of what ``--deterministic-mode`` requires, before its assertion stops at the first."""
    for name, required in context.required_args.items():
        actual = context.arg(name, required)
        if actual != required:
            flag = "--" + name.replace("_", "-")
            yield Finding(
                "DET-MEGATRON-ARG", flag, repr(actual), repr(required),
                "Megatron's deterministic mode rejects it.", f"drop {flag}.",
            )  # fmt: skip


def megatron_environment(context: Context) -> Iterator[Finding]:
    """Megatron's own tables of environment variables."""
    for name, accepted in context.accepted_env.items():
        value = context.environment.get(name)
        if value is not None and value not in accepted:
            needed = " or ".join(sorted(accepted))
            yield Finding("DET-MEGATRON-ENV", name, repr(value), needed, "Megatron's table.", f"unset {name}.")
    algorithms = context.environment.get("NCCL_ALGO")
    tokens = [token.strip() for token in (algorithms or "").split(",") if token.strip()]
    if algorithms is not None and (not tokens or not set(tokens) <= context.accepted_nccl):
        needed = "of " + ", ".join(sorted(context.accepted_nccl))
        yield Finding(
            "DET-MEGATRON-ENV", "NCCL_ALGO", repr(algorithms), needed,
            "Other algorithms add in an order that a user cannot control.", "unset NCCL_ALGO.",
        )  # fmt: skip
    mamba = context.environment.get("MAMBA_DETERMINISTIC")
    if mamba and mamba[0] != "1":
        yield Finding(
            "DET-MEGATRON-ENV", "MAMBA_DETERMINISTIC", repr(mamba), "1", "It switches determinism off.", "unset it."
        )


def argument_table(context: Context) -> Iterator[Finding]:
    for rule in ARGUMENT_RULES:
        value = context.arg(rule.argument)
        if rule.refused(value):
            yield Finding(rule.code, rule.flag, repr(value), rule.needed, rule.why, rule.do)


def layout(context: Context) -> Iterator[Finding]:
    tensor, pipeline, expert = (
        context.arg(name) or 1
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
    )
    expert_tensor = context.arg("expert_tensor_parallel_size") or tensor
    sizes = {
        f"TP {tensor} x PP {pipeline}": tensor * pipeline,
        f"EP {expert} x expert TP {expert_tensor} x PP {pipeline}": expert * expert_tensor * pipeline,
    }
    if context.args is None:
        return
    for text, size in sizes.items():
        if context.world_size % size:
            yield Finding(
                "DET-LAYOUT", "world size", str(context.world_size), f"a multiple of {size} ({text})",
                "The layout cannot be built from so many ranks.", "change the number of processes or the layout.",
            )  # fmt: skip
            return
    batch, micro = context.arg("global_batch_size"), context.arg("micro_batch_size")
    replicas = context.world_size // (tensor * pipeline)
    if batch and micro and batch % (micro * replicas):
        yield Finding(
            "DET-LAYOUT", "--global-batch-size", str(batch), f"a multiple of {micro} x {replicas} data-parallel ranks",
            "A batch cannot be split evenly.", "change the batch size or the number of processes.",
        )  # fmt: skip


def importable_spec(context: Context) -> Iterator[Finding]:
    spec = context.arg("spec")
    if not spec or spec == ["local"]:
        return
    try:
        getattr(importlib.import_module(spec[0]), spec[1])
    except (ImportError, AttributeError, IndexError, ValueError) as error:
        yield Finding(
            "DET-SPEC", "--spec " + " ".join(spec), str(error), "a module and an attribute that can be imported",
            "megatron-core 0.19.2 logs the error and silently trains the default layers.", "correct --spec.",
        )  # fmt: skip


def ledger_directory(context: Context) -> Iterator[Finding]:
    directory = context.options.ledger
    if directory is None:
        return
    path = Path(directory)
    parent = next(p for p in (path, *path.parents) if p.exists())
    if not can_write(parent):
        yield Finding(
            "DET-LEDGER-WRITE", f"--det-ledger {path}", f"{parent} cannot be written", "a directory that can",
            "Every iteration is recorded there.", "choose another directory.",
        )  # fmt: skip
    elif rank_path(path, context.rank).exists():
        yield Finding(
            "DET-LEDGER-FOREIGN", f"--det-ledger {path}", "a ledger of another run", "a directory without ledgers",
            "Two runs in one file could not be told apart.", "choose a new directory.",
        )  # fmt: skip


def can_write(directory: Path) -> bool:
    """Tried, with a file that has no name: permission bits say little (root, read-only mounts)."""
    try:
        with tempfile.TemporaryFile(dir=directory):
            return True
    except OSError:
        return False


def data_files(context: Context) -> Iterator[Finding]:
    names = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
    for prefix in data_prefixes([word for name in names for word in context.arg(name) or []]):
        missing = [f"{prefix}{suffix}" for suffix in (".idx", ".bin") if not os.path.exists(f"{prefix}{suffix}")]
        if missing:
            yield Finding(
                "DET-DATA", "--data-path", f"no {' and no '.join(missing)}", "a Megatron indexed dataset",
                "The data are part of what is compared.", "correct the prefix.",
            )  # fmt: skip


def data_prefixes(words: list[str] | None) -> list[str]:
    """The prefixes of a blend: every word that is not a weight."""
    return [word for word in words or [] if not word.replace(".", "", 1).isdigit()]


def checkpoint(context: Context) -> Iterator[Finding]:
    """A checkpoint that was asked for by its iteration must be there and look whole. An empty --load directory
    without --ckpt-step is Megatron's way to start fresh and is let through."""
    directory, step = context.arg("load"), context.arg("ckpt_step")
    if not directory:
        return
    tracker = Path(directory) / "latest_checkpointed_iteration.txt"
    text = tracker.read_text().strip() if tracker.is_file() else ""
    iteration = step if step is not None else text
    if iteration == "":
        if context.arg("exit_on_missing_checkpoint"):
            yield _missing(f"--load {directory}", "no latest_checkpointed_iteration.txt")
        return
    if str(iteration) == "release":
        return
    if not str(iteration).isdigit():
        yield _damaged(tracker, repr(text))
        return
    if step is not None and text != str(step) and context.arg("ckpt_format") == "torch":
        yield Finding(
            "DET-CKPT-STEP", "--ckpt-step", f"{step} with the newest checkpoint {text or 'unknown'}", "the newest one",
            "In the torch format megatron-core 0.19.2 loads the distributed optimizer of the newest one into it.",
            "load from a directory whose tracker names this step, or use --ckpt-format torch_dist.",
        )  # fmt: skip
    folder = Path(directory) / f"iter_{int(iteration):07d}"
    if not folder.is_dir():
        yield _missing(f"--load {directory}, iteration {iteration}", f"no {folder.name}")
        return
    yield from _whole(folder)


def _missing(what: str, found: str) -> Finding:
    return Finding(
        "DET-CKPT-MISSING", what, found, "a checkpoint at the resume step",
        "Megatron would start from random weights.", "correct --load or --ckpt-step.",
    )  # fmt: skip


def _damaged(path: Path, found: str) -> Finding:
    return Finding(
        "DET-CKPT-DAMAGED", f"checkpoint {path}", found, "whole files", "Half a state would not be a resume.",
        "resume from another checkpoint (--ckpt-step N).",
    )  # fmt: skip


def _whole(folder: Path) -> Iterator[Finding]:
    sharded = (folder / "metadata.json").exists() or any(folder.glob("*.distcp"))
    if sharded and not (folder / ".metadata").is_file():
        yield _damaged(folder, "no .metadata: the save did not finish")
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.stat().st_size == 0:
            yield _damaged(path, "an empty file")
            return


RULES: tuple[Rule, ...] = (
    needs_det,
    level,
    supported_versions,
    device,
    layout,
    megatron_arguments,
    megatron_environment,
    argument_table,
    importable_spec,
    ledger_directory,
    data_files,
    checkpoint,
)
