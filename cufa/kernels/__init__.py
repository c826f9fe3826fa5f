"""CUDA C++ sources, read by `cufa.jit`."""
