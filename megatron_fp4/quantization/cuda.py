"""What the fused quantizers share: what they take, what they give, and how their kernels start.

`Fused` is the interface of a format's kernels (`FusedFP4`, `FusedFP8`, ...; the table is `formats.py`). The kernels are
in `kernels/`; beside their launches each has a `Kernel`, which says how it is compiled. All start by `launch` on `gpu`,
in whose place `other_gpu` puts another for a dry run on fake tensors. Triton is imported when a kernel first starts: a
machine without an NVIDIA GPU never needs it.
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
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from megatron_fp4.quantization.rounding import RoundingKey

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

log = logging.getLogger(__name__)

_ZEROS = 512  # pairs at once


@dataclass(frozen=True, eq=False)
class Kernel:
    """A kernel of `kernels/` and how it is compiled: its numbers and its speed depend on these, so each names them.

    name: `module.function`. num_warps, num_stages, enable_fp_fusion: Triton's options; fusion of a product and a sum
        into one rounding is off wherever a kernel has the reference's bits.
    types: None: by Triton's own launch, which looks at every argument to choose a compiled variant; that takes longer
        than the smaller kernels run. Else of each run-time argument a dtype for a pointer to it, 1 for an integer, None
        for a pointer to pairs of BF16 in 32 bits, or of FP32 in 64; constants alone choose the variant. For kernels
        that specialize on no integer and get aligned pointers.
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
    """One operand that kernels are to make: a format of `formats.FORMATS`, its block (rows, columns) with the columns
    along the dot product, and its options.

    hadamard: size of the transform along the dot product, 0 for none. signs: `fixed`, `none` or `fresh`, drawn from
    `signs_key` then. key: of the draws of stochastic rounding, whose rows and columns are the operand's; None rounds to
    nearest. ms_eden: whether `key` is that of MS-EDEN's block scales.
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
    """An operand [rows, k] as codes and scales, in whatever order its kernels write and read them.

    A class of such operands makes one of its two tensors alone: `type(packed)(codes, scales)`.
    """

    @property
    def codes(self) -> Tensor: ...

    @property
    def scales(self) -> Tensor: ...

    def values(self) -> Tensor:
        """[rows, k]: `code * block scale`, BF16 where that is exact, else FP32."""


class Fused(ABC):
    """A tensor x [n, m], of which kernels make two operands, each when it is asked for: along its `columns`
    [n, k = m], and along its `rows` [m, k = n].

    scales: by direction, FP32 0-dim factors from values to real values, where there are any; written when the operand
    is made.
    """

    def __init__(
        self, x: Tensor, columns: Side | None = None, rows: Side | None = None, amax_group: ProcessGroup | None = None
    ) -> None:
        """x: BF16, or FP32 that counts as rounded to BF16. columns, rows: what will be made along its columns and along
        its rows, of one format. amax_group: ranks that hold the other shards, for formats with a tensor scale.
        """
        self.x, self.sides = x, {"columns": columns, "rows": rows}
        self.scales: dict[str, Tensor] = {}

    @staticmethod
    def makes(side: Side, along: str) -> bool:
        """Whether the kernels can make this operand along `columns` or along `rows`.

        By default untransformed ones, rounded to nearest and without four-over-six.
        """
        return not side.hadamard and side.key is None and not side.four_over_six

    @abstractmethod
    def operand(self, along: str, *, keep: bool = False) -> Tensor | Packed:
        """`code * block scale` in BF16, or codes and scales where that is not exact. keep: as small as it can be, to be
        sent, the parts of the tokens one after the other, or to wait for the backward pass."""

    def code_bytes(self, along: str) -> tuple[Tensor, Tensor]:
        """The operand along `columns` or `rows` for a GEMM of codes: these in their plain order, uint8 [rows, k / codes
        a byte], and the bytes of its block scales [rows, k / block columns].
        """
        raise NotImplementedError(f"{type(self).__name__} has no GEMM of codes")


class NvidiaGPU:
    """What the quantizers ask of a device: whether kernels run there, how large it is, and to start them."""

    def __init__(self) -> None:
        self._zeros: dict[tuple[torch.device, int], list[Tensor]] = {}

    def available(self, device: torch.device) -> bool:
        """Whether the fused kernels run on `device`; of a GPU, a warning says once why they do not."""
        return device.type == "cuda" and _available(device)

    def aligned(self, x: Tensor) -> bool:
        """Whether `x` starts where 16 bytes can be loaded at a time."""
        return x.data_ptr() % 16 == 0

    def multiprocessors(self, device: torch.device) -> int:
        return _multiprocessors(device)

    def zeros(self, device: torch.device) -> Tensor:
        """Two int32 zeros on 16 bytes, for one caller alone. Many are made at once: a kernel that fills them takes as
        long as a small quantizer."""
        if torch.cuda.is_current_stream_capturing():  # a graph has to make its zeros anew whenever it runs
            return torch.zeros(2, dtype=torch.int32, device=device)
        stream = torch.cuda.current_stream(device).cuda_stream
        left = self._zeros.setdefault((device, stream), [])
        if not left:
            left.extend(torch.zeros(_ZEROS, 4, dtype=torch.int32, device=device)[:, :2].unbind())
        return left.pop()

    def multiplies(self, x: Tensor) -> bool:
        """Whether cuBLAS multiplies `x`."""
        return x.is_cuda

    def call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call what computes on the device of the first argument."""
        device = arguments[0].device
        with nullcontext() if device.index == torch.cuda.current_device() else torch.cuda.device(device):
            function(*arguments)

    def start(
        self, kernel: Kernel, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]
    ) -> None:
        """Start a kernel as `launch` describes it."""
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
    """Inside, `other` stands for the GPU, whatever the device of tensors."""
    global gpu
    before, gpu = gpu, other
    try:
        yield
    finally:
        gpu = before


def launch(kernel: Kernel, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    """Launch a kernel on the device of its first argument.

    arguments: tensors and numbers in the order of its signature. constants: by their names there.
    """
    gpu.start(kernel, grid, arguments, constants)


def kernels_unavailable(device: torch.device) -> str | None:
    """Why the fused kernels cannot run on a CUDA `device`, or None if they can: compute capability 8.0 and Triton."""
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
    kernel: Kernel, device_index: int, fp32: bool, given: tuple[str, ...], constants: tuple[Any, ...]
) -> tuple[Any, tuple[Any, ...]]:
    """A kernel compiled for the current device, and the values of its constants in the order of its signature.

    device_index: of the current device, a key of the cache. given: the names of `constants`.
    """
    assert kernel.types is not None
    named = dict(zip(given, constants, strict=True))
    types = [(torch.int64 if fp32 else torch.int32) if of is None else of for of in kernel.types]
    names = list(inspect.signature(kernel.function.fn).parameters)[len(types) :]
    assert named.keys() == set(names), f"{kernel.name} has the constants {names}, not {list(named)}"
    values = tuple(named[name] for name in names)
    return kernel.function.warmup(*types, *values, grid=(1,), **kernel.options), values
