"""Plan + CuPy arrays -> launch: parameters, tensor maps, counters and the calls made ready."""
