"""Ways to compute the same faster: found in a graph, timed, and chosen."""
