"""CUDA C++ sources, read by `cufa.compiler.jit`."""
