"""``Options`` as flags: in Megatron's parser, under their own heading, and read early from the command line."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from megatron_det.contract.options import Options

HEADING = "deterministic training (megatron-det)"


def present(words: Sequence[str]) -> list[str]:
    """Our flags on this command line (exact names, or ``--flag=value``)."""
    ours = set(Options.flags())
    return [word for word in words if word.partition("=")[0] in ours]


def destination(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def add(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the group to a parser. Destinations are ``det``, ``det_level``, ``det_ledger`` …"""
    group = parser.add_argument_group(HEADING)
    for field in fields(Options):
        flag, text = field.metadata["flag"], field.metadata["help"]
        settings: dict[str, Any] = {"help": text, "dest": destination(flag), "default": field.default}
        if field.default is False:
            group.add_argument(flag, action="store_true", **settings)
        elif isinstance(field.default, tuple):
            group.add_argument(flag, action="append", metavar=field.metadata["metavar"], **{**settings, "default": []})
        else:
            kind = int if isinstance(field.default, int) else str
            extra = {key: field.metadata[key] for key in ("choices", "metavar") if key in field.metadata}
            group.add_argument(flag, type=kind, **extra, **settings)
    return parser


def from_namespace(namespace: argparse.Namespace) -> Options:
    values: dict[str, Any] = {}
    for field in fields(Options):
        value = getattr(namespace, destination(field.metadata["flag"]))
        values[field.name] = tuple(value) if isinstance(value, list) else value
    return Options(**values)


def early(words: Sequence[str], environment: Mapping[str, str] | None = None) -> Options:
    """Our options from a whole command line, before Megatron's parser exists. A malformed value is left for
    Megatron's parser to refuse: the default stands until then."""
    environment = os.environ if environment is None else environment
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
    try:
        known, _ = add(parser).parse_known_args(list(words))
        options = from_namespace(known)
    except (argparse.ArgumentError, SystemExit):
        options = replace(Options(), det="--det" in words)
    return replace(options, det=options.det or environment.get("MEGATRON_DET") == "1")
