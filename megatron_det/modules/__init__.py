"""Megatron modules with a written-down order: what ``specs.py`` puts into a model."""
