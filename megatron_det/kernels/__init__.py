"""One file per operation: plain-torch reference first; kernels in the same order later."""
