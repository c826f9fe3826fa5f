"""The checks of arrays and options of a call, and the Problem that they make."""
