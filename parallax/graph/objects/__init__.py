"""The Python objects that a step reaches: what they hold, what it reads and sets."""
