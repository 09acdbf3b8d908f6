"""The common interface of the GPU quantizers, and how their kernels are compiled and launched.

`Fused` is the interface of a format's kernels (`FusedFP4`, `FusedFP8`, ...; the table is in `formats.py`). The kernels
are in `kernels/`. The file that launches a kernel has a `Kernel` for it, which says how it is compiled. `launch` starts
all kernels on `gpu`, which `other_gpu` replaces for a dry run on fake tensors. Triton is imported when a kernel is
first launched, so a machine without an NVIDIA GPU never needs it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_fp4.quantization.rounding import WHOLE, Place, RoundingKey

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Kernel:
    """A kernel of `kernels/` and how it is compiled. Its numbers and its speed depend on these options.

    name: `module.function`. num_warps, num_stages, enable_fp_fusion: Triton's options. Fusion of a product and a sum
        into one rounding is off for every kernel whose bits are the reference's.
    types: None: Triton's own launch inspects every argument to choose a compiled variant, which takes longer than the
        smaller kernels run. Otherwise only constants and the input's type choose the variant, and `types` has an entry
        for each run-time argument: a dtype for a pointer to it, 1 for an integer, None for a pointer to pairs, of BF16
        (in 32 bits) or FP32 (in 64). For kernels that specialize on no integer and get aligned pointers.
    """

    name: str
    num_warps: int = 4
    num_stages: int = 3
    enable_fp_fusion: bool = False
    types: tuple[torch.dtype | int | None, ...] | None = None

    @property
    def options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("num_warps", "num_stages", "enable_fp_fusion")}

    @functools.cached_property
    def function(self) -> Any:
        module, name = self.name.split(".")
        return getattr(importlib.import_module(f"megatron_fp4.quantization.kernels.{module}"), name)


@dataclass(frozen=True)
class Side:
    """An operand to make. format: a key of `formats.FORMATS`. block: (rows, columns), columns along the dot product.

    hadamard: size of the transform along the dot product; 0: none. signs: `fixed`, `none`, or `fresh`, from
    `signs_key`. key: of stochastic rounding; None: to nearest. ms_eden: `key` is of block scales.
    """

    format: str
    block: tuple[int, int]
    hadamard: int = 0
    signs: str = "fixed"
    key: RoundingKey | None = None
    four_over_six: str = ""
    power_of_two_scales: bool = False
    signs_key: RoundingKey | None = None
    ms_eden: bool = False


class Packed(Protocol):
    """An operand [rows, k] as codes and scales, in the order in which its kernels write and read them.

    Its class can make an operand from these two tensors alone: `type(packed)(codes, scales)`.
    """

    @property
    def codes(self) -> Tensor: ...

    @property
    def scales(self) -> Tensor: ...

    def values(self) -> Tensor:
        """[rows, k]: `code * block scale`, in BF16 if that is exact, else in FP32."""


class Fused(ABC):
    """Makes two operands of a tensor x [n, m] by kernels: along its `columns` [n, k = m] and its `rows` [m, k = n].

    scales: by direction, FP32 0-dim factors from values to real values, if the format has them. The kernels write them
    when they make the operand. in_segments: whether x may consist of segments, without their padding or with it; the
    operands then have the padding, and FP32 [segments] factors.
    """

    in_segments = False

    def __init__(self, x: Tensor, columns: Side | None = None, rows: Side | None = None, place: Place = WHOLE) -> None:
        """x: BF16, or FP32, which is rounded to BF16. columns, rows: the operands along its columns and along its rows,
        of one format. place: of x in the global tensor."""
        sides = {"columns": columns, "rows": rows}
        self.x, self.place = x, place
        self.sides = {along: side for along, side in sides.items() if side is not None}
        self.scales: dict[str, Tensor] = {}

    @staticmethod
    def makes(side: Side, along: str) -> bool:
        """Whether the kernels can make this operand along `columns` or along `rows`. By default: untransformed
        operands, rounded to nearest, without four over six."""
        return not side.hadamard and side.key is None and not side.four_over_six

    @abstractmethod
    def operand(self, along: str, *, keep: bool = False) -> Tensor | Packed:
        """`code * block scale` in BF16, or codes and scales if that is not exact. keep: make it as small as possible,
        because it waits for the backward pass, or is sent to other ranks, which concatenate the parts of all tokens."""

    def code_bytes(self, along: str) -> tuple[Tensor, Tensor]:
        """The operand along `columns` or `rows` for a GEMM of codes: codes in plain order, uint8 [rows, bytes], and
        scale bytes [rows, k / block columns]."""
        raise NotImplementedError(f"{type(self).__name__} has no GEMM of codes")


class NvidiaGPU:
    """What the quantizers need of a device: whether kernels run there, how large it is, and how to launch them."""

    def available(self, device: torch.device) -> bool:
        """Whether the kernels run on `device`. If it is a GPU on which they do not, a warning says once why."""
        return device.type == "cuda" and _available(device)

    def aligned(self, x: Tensor) -> bool:
        """Whether `x` starts at a multiple of 16 bytes, so that kernels can load 16 bytes at a time."""
        return x.data_ptr() % 16 == 0

    def multiprocessors(self, device: torch.device) -> int:
        return _multiprocessors(device)

    def multiplies(self, x: Tensor) -> bool:
        return x.is_cuda

    def call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call `function` with the device of the first argument as the current one."""
        device = arguments[0].device
        with nullcontext() if device.index == torch.cuda.current_device() else torch.cuda.device(device):
            function(*arguments)

    def start(
        self, kernel: Kernel, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]
    ) -> None:
        """Start a kernel; the arguments are those of `launch`."""
        device = arguments[0].device
        if device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                self.start(kernel, grid, arguments, constants)
        elif kernel.types is not None:
            fp32 = arguments[0].dtype == torch.float32
            compiled, values = _compiled(kernel, device.index, fp32, tuple(constants), tuple(constants.values()))
            compiled[(*grid, 1, 1)[:3]](*arguments, *values)
        else:
            kernel.function[grid](*arguments, **constants, **kernel.options)


gpu = NvidiaGPU()


@contextmanager
def other_gpu(other: NvidiaGPU) -> Iterator[None]:
    """Within the context, `other` takes the place of `gpu`, for tensors on any device."""
    global gpu
    before, gpu = gpu, other
    try:
        yield
    finally:
        gpu = before


def launch(kernel: Kernel, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    """Launch a kernel on the device of its first argument.

    arguments: tensors and numbers, in the order of its signature. constants: by their names in its signature.
    """
    gpu.start(kernel, grid, arguments, constants)


def compiled_ahead(kernel: Kernel, arguments: tuple[Any, ...], constants: dict[str, Any]) -> Any:
    """Compile a kernel for the arguments of `launch`; inside Triton's `AsyncCompileMode` in threads."""
    if kernel.types is None:
        return kernel.function.warmup(*arguments, grid=(1,), **constants, **kernel.options)
    types, values = _variant(kernel, arguments[0].dtype == torch.float32, constants)
    return kernel.function.warmup(*types, *values, grid=(1,), **kernel.options)


def kernels_unavailable(device: torch.device) -> str | None:
    """Why the kernels cannot run on a CUDA `device`; None if they can. They need compute capability 8.0 and Triton."""
    if torch.version.hip is not None:
        return "AMD GPUs are not supported by the kernels"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"compute capability {capability[0]}.{capability[1]} is below 8.0"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    return None


@functools.cache
def _available(device: torch.device) -> bool:
    reason = kernels_unavailable(device)
    if reason is not None:
        log.warning("%s: quantization runs in plain PyTorch, with the same numbers but slowly: %s", device, reason)
    return reason is None


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _compiled(
    kernel: Kernel, device_index: int, fp32: bool, names: tuple[str, ...], constants: tuple[Any, ...]
) -> tuple[Any, tuple[Any, ...]]:
    """A kernel compiled for the current device, and the values of its constants in the order of its signature.

    device_index: of the current device, for a cache of its own. names: of `constants`, in the same order.
    """
    types, values = _variant(kernel, fp32, dict(zip(names, constants, strict=True)))
    return kernel.function.warmup(*types, *values, grid=(1,), **kernel.options), values


def _variant(kernel: Kernel, fp32: bool, constants: dict[str, Any]) -> tuple[list[Any], tuple[Any, ...]]:
    """The types of a kernel's arguments, and the values of its constants in the order of its signature."""
    assert kernel.types is not None
    pair_type = torch.int64 if fp32 else torch.int32
    types = [pair_type if dtype is None else dtype for dtype in kernel.types]
    parameters = list(inspect.signature(kernel.function.fn).parameters)[len(types) :]
    assert constants.keys() == set(parameters), f"{kernel.name} has the constants {parameters}, not {list(constants)}"
    return types, tuple(constants[parameter] for parameter in parameters)
