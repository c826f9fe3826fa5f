"""Variant -> compiled kernel: source text, NVRTC, cubins and the cache folder."""
