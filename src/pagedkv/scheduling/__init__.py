"""What runs in the next step, and who yields. No tensors, no clock, no randomness."""
