"""Arrays in 8-bit floating point with scales: what they hold, and what it stands for."""
