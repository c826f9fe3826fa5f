"""Variant -> compiled kernel: source text, NVRTC, cubins and where they are kept."""
