"""What stands for functions of Python and torch while a step is captured."""
