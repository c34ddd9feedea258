"""``python -m megatron_det.run SCRIPT ARGS…``: runs a pretrain script where PyTorch's autoload is switched off.

The script is not changed. ``@FILE`` stands for the flags in an argument file.

Examples:
    torchrun --nproc-per-node 8 -m megatron_det.run pretrain_gpt.py ... --det
    python -m megatron_det.run --help
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys

from megatron_det.activation import flags, start
from megatron_det.errors import DetError
from megatron_det.formats.argfile import expand_argument_files


def usage() -> str:
    parser = argparse.ArgumentParser(
        prog="python -m megatron_det.run", usage="%(prog)s SCRIPT [ARGUMENTS]", description=__doc__, add_help=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    return flags.add(parser).format_help()


def main(arguments: list[str]) -> int:
    """Runs the script as ``__main__``. Returns an exit code only when it could not start it."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0 if arguments else 2
    script = arguments[0]
    if not os.path.isfile(script):
        print(f"megatron-det: no such script: {script}", file=sys.stderr)
        return 2
    try:
        sys.argv = [script, *expand_argument_files(arguments[1:])]
    except DetError as error:
        print(f"megatron-det: {error}", file=sys.stderr)
        return error.exit_code
    start.begin(sys.argv)
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    runpy.run_path(script, run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
