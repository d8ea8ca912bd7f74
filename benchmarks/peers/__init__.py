"""The systems that are compared, one file for each family."""
