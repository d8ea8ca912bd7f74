"""What of each variable travels in a step, and what its owners do with it."""
