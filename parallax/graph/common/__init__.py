"""What all else of a graph rests on: operations, memory, torch's private names."""
