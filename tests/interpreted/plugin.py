"""The pytest plugin of `make test-kernels`: tests/gpu on a machine without a GPU.

`torch.cuda.is_available()` is true. Tensors on "cuda" are tensors in the memory of the host that say they are on a GPU:
so the project launches its kernels on them, and computes its references, which are on the CPU, in PyTorch.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.interpreted import interpreter

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
ROOT = Path(__file__).resolve().parents[2]


class CudaTensor(Tensor):
    device = property(lambda self: CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]


def on_host(x: Any) -> Any:
    return x.as_subclass(Tensor) if isinstance(x, CudaTensor) else x


class Pretence(TorchFunctionMode):
    """Where a function of PyTorch is given a device: computes on the CPU, and says so of the result or does not."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.cuda:
            args, function = (args[0], CUDA), torch.Tensor.to
        elif function is torch.Tensor.cpu:
            args, function = (args[0], CPU), torch.Tensor.to
        elif function in (torch.mm, torch.addmm) and kwargs.pop("out_dtype", None) is not None:
            args = [x.to(torch.float32) if isinstance(x, Tensor) else x for x in args]
        devices = {name: x.type for name, x in (*enumerate(args), *kwargs.items()) if isinstance(x, torch.device)}
        devices |= {name: x.split(":")[0] for name, x in kwargs.items() if name == "device" and isinstance(x, str)}
        if function is torch.Tensor.to and isinstance(args[1], str):
            devices[1] = args[1].split(":")[0]
        if not devices or function is torch.device:
            return function(*args, **kwargs)
        cuda = "cuda" in devices.values()
        args = [CPU if i in devices else x for i, x in enumerate(args)]
        result = function(*args, **{name: CPU if name in devices else x for name, x in kwargs.items()})
        if args and isinstance(args[0], Tensor) and isinstance(args[0], CudaTensor) != cuda:
            result = result.clone() if result.data_ptr() == args[0].data_ptr() else result  # a copy to the other device
        return result.as_subclass(CudaTensor) if cuda else on_host(result)


def pretend() -> None:
    """Make PyTorch say that there is a GPU, for the rest of the process."""
    cuda: Any = torch.cuda
    cuda.is_available = cuda.is_initialized = lambda: True
    cuda.is_current_stream_capturing = lambda: False
    cuda.current_device = lambda: 0
    cuda.device_count = lambda: 1
    cuda.device = lambda *_: contextlib.nullcontext()
    cuda.current_stream = lambda *_: SimpleNamespace(cuda_stream=0)
    cuda.get_device_capability = lambda *_: (9, 0)
    cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=2)
    cuda.manual_seed_all = lambda seed: None
    Pretence().__enter__()
    graph: Any = torch.autograd.graph
    run_backward = graph._engine_run_backward

    def run(*args: Any, **kwargs: Any) -> Any:
        # While PyTorch handles `backward`, the outer mode is off, and results lose the class of tensors.
        with Pretence(), torch._C._EnableTorchFunction():
            return run_backward(*args, **kwargs)

    graph._engine_run_backward = torch.autograd._engine_run_backward = run  # type: ignore[attr-defined]


def launch_interpreted() -> None:
    """Let the project launch its kernels by Triton's interpreter."""
    from megatron_fp4.quantization import cuda, fp4

    types = {getattr(torch, t): getattr(tl, t) for t in ("uint8", "int8", "int16", "int32", "int64", "float32")}

    class Interpreter(cuda.NvidiaGPU):
        def multiplies(self, x: Tensor) -> bool:
            return False

        def start(self, kernel: Any, grid: Any, arguments: Any, constants: Any) -> None:
            arguments = list(map(on_host, arguments))
            pair = torch.int64 if arguments[0].dtype == torch.float32 else torch.int32
            for i, given in enumerate(kernel.types or ()):
                if given != 1:
                    arguments[i] = triton.reinterpret(arguments[i], types[given or pair])
            kernel.function[grid](*arguments, **constants)

    cuda.gpu = Interpreter()
    fp4._MEASURE_PROGRAMS = fp4._QUANTIZE_PROGRAMS = 1  # several tiles for a program in small tensors, too
    fp4._QUANTIZE_ROWS_COLUMNS = {16: 512, 32: 512}  # wide programs take as long


def kernels() -> set[str]:
    """All kernels of the project, as `module.function`."""
    found = set()
    for path in [*ROOT.glob("megatron_fp4/**/*.py"), *ROOT.glob("models/*.py")]:
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        names = re.findall(r"@triton\.jit[^@]*?\ndef (\w+_kernel)\(", path.read_text())
        found |= {f"{module}.{name}" for name in names}
    return found


NEEDS_A_GPU = {
    "test_in_a_cuda_graph": "CUDA graphs",
    "test_scaled_matmul": "cuBLAS",
    "test_scaled_matmul_adds_and_leaves_out_padding": "cuBLAS",
    "test_mxfp8_of_more_tokens_than_a_grid_has_rows": "a GPU: it launches 70,000 programs",
}
interpreter.install()
pretend()
launch_interpreted()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.originalname in NEEDS_A_GPU:
            item.add_marker(pytest.mark.skip(reason=f"needs {NEEDS_A_GPU[item.originalname]}"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every-kernel", action="store_true", help="fail if a kernel of the project was not launched")


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """Count the launches of all processes, in the first one."""
    config = session.config
    if hasattr(config, "workeroutput"):
        config.workeroutput["launches"] = dict(interpreter.LAUNCHES)
    elif config.getoption("every_kernel") and kernels() - interpreter.LAUNCHES.keys():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    return (yield)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    interpreter.LAUNCHES.update(node.workeroutput["launches"])


def pytest_terminal_summary(terminalreporter: Any) -> None:
    missing = kernels() - interpreter.LAUNCHES.keys()
    for name in sorted(kernels()):
        terminalreporter.write_line(f"{interpreter.LAUNCHES[name]:6} launches of {name}")
    if missing and terminalreporter.config.getoption("every_kernel"):
        terminalreporter.write_line(f"never launched: {', '.join(sorted(missing))}", red=True)
