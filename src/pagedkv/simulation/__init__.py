"""The same scheduler under a virtual clock; no tensors."""
