"""Passes over a graph that was just captured, whatever the strategy is."""
