"""Which kernels a run computes with, decided once from configuration and machine."""

from __future__ import annotations

import importlib.util

import torch.distributed as dist

from megatron_fp4.config.schema import ConfigError, ModelConfig, TrainConfig
from models.execution import Execution, FusedKernel, torch_compile
from models.mixer import Mixer
from models.pattern import mixers_of


def choose_execution(
    train: TrainConfig, model: ModelConfig, tensor_parallel: int, device_type: str, compute_dtype: str
) -> Execution:
    """The execution for `train.kernels` and `train.activation_checkpointing`.

    `torch` is the reference path. `fused` needs CUDA, BF16, Triton and the packages of the model's mixers. `auto` is
    `fused` on CUDA with BF16, as far as what it needs is installed and takes the model's sizes, and `torch` elsewhere.
    Raises ConfigError for `fused` where it cannot run.
    """
    recompute = train.activation_checkpointing
    plain = Execution(recompute=recompute)
    if train.kernels == "torch":
        return plain
    kernels = [(mixer, kernel) for mixer in mixers_of(model.pattern) for kernel in mixer.fused]
    refusals = [_refusal(mixer, kernel, model, tensor_parallel) for mixer, kernel in kernels]
    no_compiler = None if _installed("triton") else "needs Triton: pip install triton"
    general = None
    if device_type != "cuda":
        general = f"needs CUDA, and this run is on {device_type}"
    elif compute_dtype != "bfloat16":
        general = f"computes in BF16, and precision.compute_dtype={compute_dtype}"
    if train.kernels == "fused":
        demanded = (r for (_, k), r in zip(kernels, refusals, strict=True) if not k.optional)
        for refusal in (general, *demanded, no_compiler):
            if refusal is not None:
                raise ConfigError(f"train.kernels=fused {refusal}; or use auto or torch")
    if general is not None:
        return plain
    return Execution(
        kernels={k.part: k.function for (_, k), refusal in zip(kernels, refusals, strict=True) if refusal is None},
        compile=torch_compile if no_compiler is None else None,
        recompute=recompute,
    )


def agreed_execution(execution: Execution) -> Execution:
    """`execution`, if all ranks chose alike; a collective. Raises ConfigError if they did not."""
    executions: list[Execution] = [execution] * dist.get_world_size()
    dist.all_gather_object(executions, execution)
    used = [[*chosen.kernels, *(["compiled"] if chosen.compiled else [])] for chosen in executions]
    for part in dict.fromkeys(part for parts in used for part in parts):
        first = part in used[0]
        others = [str(rank) for rank, parts in enumerate(used) if (part in parts) != first]
        if others:
            raise ConfigError(
                f"train.kernels=auto: the fused part `{part}` is {'' if first else 'not '}used on rank 0, unlike "
                f"on rank {', '.join(others)}; install the same packages on all machines, or choose train.kernels=torch"
            )
    return execution


def describe_execution(execution: Execution, pattern: str, masked: bool = False) -> str:
    """One line for the log: what runs for the blocks in `pattern`. masked: whether documents are masked."""
    parts = [line for mixer in mixers_of(pattern) for line in mixer.describe_kernels(execution, masked)]
    parts.append(f"norms and activations: {'torch.compile' if execution.compiled else 'torch'}")
    parts.append(f"loss: {'Triton' if execution.compiled else 'torch'}")
    return ", ".join(parts)


def cost_of_determinism(execution: Execution, pattern: str, masked: bool = False) -> str | None:
    """What deterministic algorithms make slower on CUDA in the blocks of `pattern`, in words; None if nothing known."""
    costs = [mixer.cost_of_determinism(execution, masked) for mixer in mixers_of(pattern)]
    known = "; ".join(cost for cost in costs if cost is not None)
    return f"{known}; run.deterministic=false is faster" if known else None


def _refusal(mixer: type[Mixer], kernel: FusedKernel, model: ModelConfig, tensor_parallel: int) -> str | None:
    """Why a mixer's kernel cannot run, or None."""
    package = kernel.package
    if not _installed(package.replace("-", "_")):
        return f"needs {package} for {mixer.name}'s {kernel.title}: pip install --no-build-isolation {package}"
    return kernel.refusal(model, tensor_parallel)


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
