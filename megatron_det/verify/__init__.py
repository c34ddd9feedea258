"""Read side: runs arms in fresh processes, compares their ledgers, names the first difference. Needs no torch."""
