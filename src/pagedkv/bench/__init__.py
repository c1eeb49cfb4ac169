"""What the parts of the engine take on this machine, beside what the machine can give."""
