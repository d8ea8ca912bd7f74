"""What is known of a captured graph: variables, reads, losses and their divisors."""
