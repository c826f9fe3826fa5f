"""Python functions of a score or of a pair -> C++: traced once, and compiled into a kernel."""
