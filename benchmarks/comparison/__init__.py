"""The parts of `benchmarks.compare`: starting workers, what they measure, limits, the report."""
