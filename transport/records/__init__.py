"""Record files: append, read, merge, repair."""
