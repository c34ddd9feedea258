"""``megatron-det``: verify, compare, receipt, doctor, run."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from megatron_det import __version__
from megatron_det.errors import DetError
from megatron_det.formats.ledger import read_run
from megatron_det.formats.receipt import locate
from megatron_det.report import receipt as receipts
from megatron_det.report.progress import ArmProgress
from megatron_det.report.terminal import show_comparison, show_verdict
from megatron_det.verify import command as commands
from megatron_det.verify import verify as verification
from megatron_det.verify.arms import plan
from megatron_det.verify.compare import compare as compare_runs

UsageError: Any = typer.BadParameter.__base__  # typer carries its own click and does not export this one

app = typer.Typer(
    no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False,
    help="Prove that a Megatron pretraining run repeats and resumes bit for bit.\n\n"
    "Exit codes: 0 identical, 1 differs, 2 could not run or was refused.",
)  # fmt: skip


def guarded(action: Callable[[], int]) -> None:
    """Ends the process with the action's exit code; an error of ours is one line and its own code."""
    try:
        code = action()
    except DetError as error:
        print(f"megatron-det: {error}", file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        print("megatron-det: interrupted; what was started has been ended", file=sys.stderr)
        code = 2
    raise typer.Exit(code)


def interrupt(*_: Any) -> None:
    """SIGTERM ends what was started, as Ctrl-C does."""
    raise KeyboardInterrupt


def version_wanted(value: bool) -> None:
    if value:
        print(f"megatron-det {__version__}")
        raise typer.Exit


@app.callback()
def main_options(
    version: Annotated[
        bool, typer.Option("--version", callback=version_wanted, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options before the command."""


@app.command(
    epilog="Examples:\n\n"
    "  megatron-det verify -- torchrun --nproc-per-node 8 pretrain_gpt.py ARGS\n\n"
    "  megatron-det verify --resume-at 10 --iters 20 --out proof -- torchrun pretrain_gpt.py ARGS\n\n"
    "  megatron-det verify --device cpu --chaos b:flip-bit:iteration=3,rank=1 -- torchrun --nproc-per-node 2 "
    "pretrain_gpt.py ARGS\n\n"
    "  megatron-det verify --vary '--ddp-bucket-size 40000' --vary '--det-placement 3,1,0,2' -- torchrun "
    "--nproc-per-node 4 pretrain_gpt.py ARGS"
)
def verify(
    launch: Annotated[list[str] | None, typer.Argument(metavar="-- LAUNCH COMMAND", show_default=False)] = None,
    runs: Annotated[int, typer.Option(min=1, help="How many times to run from scratch.")] = 2,
    resume_at: Annotated[int | None, typer.Option(min=1, help="Where the checkpoint is taken [default: half]")] = None,
    iters: Annotated[int | None, typer.Option(min=2, help="How far arms run; --train-iters is never changed.")] = None,
    out: Annotated[Path, typer.Option(help="Logs, ledgers, checkpoint and verify.json go here.")] = Path("verify-out"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Empty an OUT that verify made.")] = False,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            help="Another run from scratch with these flags added, whose bits must be the same: 'FLAG VALUE'."
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that one arm may take.")] = 3600,
    device: Annotated[str | None, typer.Option(help="cpu: add --det-device cpu (CPU stand-in); or cuda.")] = None,
    chaos: Annotated[list[str] | None, typer.Option(help="Inject a fault into one arm: ARM:SPEC.")] = None,
    fail_fast: Annotated[bool, typer.Option("--fail-fast", help="Stop at the first arm that differs.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print verify.json instead of the table.")] = False,
) -> None:
    """Run the launch command in fresh processes (twice from scratch, continued past a checkpoint, resumed from it,
    and a cold start that must differ), compare every bit, and name the first difference.

    verify adds what it needs to the end of the command: --det, --det-ledger, --save/--load, --exit-interval.
    """

    def action() -> int:
        signal.signal(signal.SIGTERM, interrupt)
        command = commands.read(launch or [])
        steps = commands.schedule(command, iters, resume_at)
        if device not in (None, "cpu", "cuda"):
            raise typer.BadParameter("--device is cpu or cuda")
        target = out.absolute()
        varied = tuple(tuple(shlex.split(text)) for text in vary or [])
        faults = commands.chaos_by_arm(chaos or [], [arm.name for arm in plan(target, steps, runs, varied)])
        verification.prepare_output(target, overwrite)
        console = Console(stderr=True, width=None if sys.stderr.isatty() else 100)
        for words in command.removed:
            console.print(f"verify sets this itself, taken out of the command: {words}", markup=False)
        extra = ("--det-device", device) if device else ()
        with ArmProgress(console, steps.iterations) as progress:
            job = verification.Job(
                command, target, steps, runs, extra, faults, timeout, fail_fast, progress.update, progress.finished,
                varied,
            )  # fmt: skip
            code = verification.run(job)
        result = verification.verdict(job, code)
        _show(result, job.lines, as_json)
        if job.error is not None:
            print(f"megatron-det: {job.error}", file=sys.stderr)
        return code

    guarded(action)


def _show(result: dict[str, Any], lines: list[str], as_json: bool) -> None:
    if as_json:
        print(json.dumps(result, indent=1))
    else:
        show_verdict(Console(width=None if sys.stdout.isatty() else 100), result, lines)


@app.command(epilog="Example:\n\n  megatron-det compare monday/ledger tuesday/ledger --from 100")
def compare(
    a: Annotated[Path, typer.Argument(metavar="DIR_A", help="What --det-ledger wrote.")],
    b: Annotated[Path, typer.Argument(metavar="DIR_B")],
    first: Annotated[int | None, typer.Option("--from", help="First iteration to compare.")] = None,
    last: Annotated[int | None, typer.Option("--to", help="Last iteration to compare.")] = None,
    portable: Annotated[
        bool, typer.Option("--portable", help="Bucket size, overlap or placement may differ: fold optimizer shards.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare two recorded runs offline; neither torch nor Megatron is needed."""

    def action() -> int:
        comparison = compare_runs(read_run(a), read_run(b), first, last, portable=portable)
        result = comparison.as_dict()
        if as_json:
            print(json.dumps(result, indent=1))
        else:
            show_comparison(Console(width=None if sys.stdout.isatty() else 100), result)
        return 0 if comparison.identical else 1

    guarded(action)


@app.command(
    epilog="Examples:\n\n  megatron-det receipt checkpoints\n\n"
    "  megatron-det receipt checkpoints/iter_0000100 other/iter_0000100"
)
def receipt(
    a: Annotated[Path, typer.Argument(metavar="PATH", help="A checkpoint, or a --save directory (its newest).")],
    b: Annotated[Path | None, typer.Argument(metavar="[PATH_B]", help="Another one: show where they differ.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the receipt of a checkpoint, or compare those of two; neither torch nor Megatron is needed."""

    def action() -> int:
        found = receipts.describe(locate(a)) if b is None else receipts.difference(locate(a), locate(b))
        if as_json:
            print(json.dumps(found, indent=1))
        else:
            show = receipts.show if b is None else receipts.show_difference
            show(Console(width=None if sys.stdout.isatty() else 140), found)
        if b is None:
            return 1 if found["facts"]["replicas"] else 0
        return 0 if found["verdict"] == "identical" else 1

    guarded(action)


@app.command(
    epilog="Examples:\n\n  megatron-det doctor --device cpu\n\n  megatron-det doctor --collectives --ranks 8 --json"
)
def doctor(
    device: Annotated[str, typer.Option(help="auto, cuda, or cpu for the CPU stand-in.")] = "auto",
    collectives: Annotated[
        bool, typer.Option("--collectives", help="Probe which all-reduce keeps its bits here, and how fast it is.")
    ] = False,
    ranks: Annotated[int | None, typer.Option(min=2, help="Processes of the probe [default: GPUs, else 4]")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print this machine's manifest and preflight, without training; or probe its collectives."""

    def action() -> int:
        from megatron_det.activation import doctor as activation_doctor

        if collectives:
            return activation_doctor.collectives(ranks, as_json, device)
        examine = activation_doctor.main
        return examine(as_json, device)

    guarded(action)


@app.command(epilog="Examples:\n\n  megatron-det explain embedding\n\n  megatron-det explain aten.index_put_")
def explain(
    id: Annotated[str, typer.Argument(metavar="ID", help="An operation of the catalogue, or a torch operation.")],
) -> None:
    """Say what the catalogue knows of an operation: its level, the reason, and the test that proves it."""

    def action() -> int:
        from megatron_det.contract import catalogue

        print(catalogue.explain(id))
        return 0

    guarded(action)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def run(context: typer.Context) -> None:
    """Run a pretrain script where PyTorch's autoload is switched off (like python -m megatron_det.run)."""

    def action() -> int:
        from megatron_det.run import main as start

        return start(context.args)

    guarded(action)


def main() -> None:
    """Entry point of the console script. What click refuses is one line too."""
    try:
        code = app(standalone_mode=False)
    except UsageError as error:
        text = " ".join(error.format_message().split())
        print(f"megatron-det: DET-USAGE: {text} See --help.", file=sys.stderr)
        code = error.exit_code
    except typer.Abort:
        code = 2
    sys.exit(code)


if __name__ == "__main__":
    main()
