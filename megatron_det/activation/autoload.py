"""Torch entry point (first version: does nothing)."""


def autoload() -> None:
    """Called by ``import torch``."""
