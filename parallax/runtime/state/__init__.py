"""What a run keeps between steps, where, and in which files."""
