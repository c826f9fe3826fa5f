"""The same algorithms on NumPy arrays, for the machine without a GPU."""
