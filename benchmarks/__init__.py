"""Measurements: each prints a table with what it is compared to, from the same run."""
