"""How verdicts are shown: terminal tables. Needs no torch."""
