"""Run side of the record: digests of tensors and the ledger's writer."""
