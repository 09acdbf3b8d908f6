"""The program as it runs on a GPU, without the GPU: for runs on fake tensors.

Inside `with shapes_only():` every tensor says that it is on CUDA, and what would launch a kernel does nothing. So
linears and loss go the way that they go on an NVIDIA GPU with Triton, through their own code: what they allocate, in
which order and for how long is theirs. Replaced are only the calls that end in a kernel:

    quantizers of 4-bit formats, FP8, MXFP8 the launches (their operands are allocated before)
    GEMMs with a scale on the device        by the allocation of the product
    softmax of the loss                     by the allocation of its statistics
    its sum of products, fused AdamW        by nothing: they work in place (torch 2.11 makes copies of fake tensors)

What has no kernel of its own (four-over-six, unusual transforms, FP32 activations) goes through PyTorch, as it does on
a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megatron_fp4.parallel import cross_entropy
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.precision import gemm_cuda
from megatron_fp4.quantization import cuda

MULTIPROCESSORS = 132  # of an H100 or H200: some kernels' temporaries grow with it


@contextmanager
def shapes_only() -> Iterator[None]:
    """Replace the kernels inside."""
    loss_and_gradient = cross_entropy._loss_and_gradient

    def loss_shapes(logits_tv: Tensor, index_t: Tensor, mesh: ParallelMesh, fused: bool) -> Tensor:
        if not fused:
            return loss_and_gradient(logits_tv, index_t, mesh, fused)
        maximum, total, target = logits_tv.new_empty(3, *index_t.shape, dtype=torch.float32)
        maximum, total, target = cross_entropy._over_ranks(maximum, total, target, mesh)
        return total.log_().add_(maximum).sub_(target)

    with ExitStack() as stack:
        for module, name, replacement in (
            (torch.Tensor, "is_cuda", property(lambda _: True)),
            (torch.Tensor, "data_ptr", lambda _: 0),  # aligned
            (torch.cuda, "device", _no_device),
            (cuda, "gpu", _ShapesOnly()),
            (gemm_cuda, "scaled_matmul", _scaled_matmul),
            (cross_entropy, "_loss_and_gradient", loss_shapes),
            (cross_entropy, "_add_product", _add_product),
            (torch, "_fused_adamw_", lambda *_, **__: None),
        ):
            stack.enter_context(mock.patch.object(module, name, replacement))
        yield


def _no_device(_: torch.device) -> AbstractContextManager[None]:
    return nullcontext()


class _ShapesOnly(cuda.NvidiaGPU):
    """Kernels are there, and starting one does nothing."""

    def available(self, device: torch.device) -> bool:
        return True

    def multiprocessors(self, device: torch.device) -> int:
        return MULTIPROCESSORS

    def start(self, kernel: str, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        pass


def _scaled_matmul(a: Tensor, b: Tensor, alpha: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """As `gemm_cuda.scaled_matmul` by cuBLAS."""
    (a, *_), (b, *_) = gemm_cuda._layout(a), gemm_cuda._layout(b)
    return a.new_empty(a.shape[0], b.shape[1], dtype=out_dtype)


def _add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """As `cross_entropy._add_product`."""
    return cross_entropy._product(a, b) if total is None else total
