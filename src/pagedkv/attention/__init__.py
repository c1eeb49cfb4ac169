"""Reading and writing K/V through the block table."""
