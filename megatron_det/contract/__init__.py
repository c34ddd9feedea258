"""Contract: levels, options and the operation catalogue. Pure data."""
