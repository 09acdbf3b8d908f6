"""The Triton kernels on a CPU: Triton's interpreter with the arithmetic of a GPU, and tensors that say they are on one.

    make test-kernels [ARGS="-k ms_eden"]

    arithmetic.py          what a GPU's instructions compute, in NumPy
    interpreter.py         Triton's interpreter with this arithmetic, checks of memory and of hints
    plugin.py              a pytest plugin: tensors on "cuda", the project's launches, which kernels ran
    check_interpreter.py   faults of memory, and mutations that the tests must find

It shows what kernels compute and where they read and write. It does not show that they compile, what PTX the compiler
makes, fusion of products and sums, registers, alignment, or speed.
"""
