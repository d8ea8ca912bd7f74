"""What a step will take, from measured links and devices."""
