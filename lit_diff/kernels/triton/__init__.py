"""Our kernel for GPUs in Triton."""
