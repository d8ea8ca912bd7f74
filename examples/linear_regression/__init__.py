"""The smallest program: a line through points."""
