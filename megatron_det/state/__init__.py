"""Pieces of the resume closure: what the next step depends on, named, captured, restored and digested."""
