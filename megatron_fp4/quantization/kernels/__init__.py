"""Triton kernels. Each module is imported where one of its kernels first starts: Triton is absent on a CPU install."""
