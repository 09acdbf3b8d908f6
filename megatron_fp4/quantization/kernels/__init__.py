"""Triton kernels. A module is imported when one of its kernels is first launched: a CPU install has no Triton."""
