"""File formats of the project: digest, ledger, manifest. stdlib and numpy only."""
