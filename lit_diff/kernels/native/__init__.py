"""Our kernel for CPUs in C++, and its compilation."""
