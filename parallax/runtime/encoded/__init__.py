"""Buckets of gradients that travel encoded."""
