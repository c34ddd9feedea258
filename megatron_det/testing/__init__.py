"""Public helpers for tests: injected faults (``chaos``)."""
