"""Preflight: rules as tables of records. It finds problems, all of them, and changes nothing."""
