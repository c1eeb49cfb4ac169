"""Moving sequences between workers, and choosing the workers. Machines without I/O."""
