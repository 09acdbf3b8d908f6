"""Stand-ins for Triton's autotuner and mamba-ssm's kernels, for machines without a GPU.

`Autotuner` has the parts of Triton 3.6's class that training/callbacks/kernels.py uses, and tunes in the same order.
"""

import sys
import time
from collections.abc import Callable
from threading import get_ident
from types import ModuleType
from typing import Any


class Config:
    def __init__(self, kwargs: dict[str, int], num_warps: int = 4, num_stages: int = 3, pre_hook: Any = None) -> None:
        self.kwargs, self.num_warps, self.num_stages, self.pre_hook = kwargs, num_warps, num_stages, pre_hook

    def all_kwargs(self) -> dict[str, int]:
        return {**self.kwargs, "num_warps": self.num_warps, "num_stages": self.num_stages}


class Autotuner:
    def __init__(self, fn: Any, arg_names: list[str], configs: list[Any], key: list[str], do_bench: Any) -> None:
        self.fn, self.base_fn, self.arg_names, self.configs, self.keys = fn, fn.fn, arg_names, configs, key
        self.do_bench, self.cache = do_bench, {}

    def run(self, *args: Any) -> None:
        named = dict(zip(self.arg_names, args, strict=True))
        self.nargs: dict[str, Any] | None = named
        key = tuple(named[name] for name in self.keys)
        if len(self.configs) > 1 and key not in self.cache:
            self.cache[key] = min(
                self.prune_configs({}),
                key=lambda config: self.do_bench(lambda: self.fn.run(*args, **config.all_kwargs()), (0.5,)),
            )
        config = self.cache[key] if len(self.configs) > 1 else self.configs[0]
        if config.pre_hook is not None:
            config.pre_hook(named)
        self.fn.run(*args, **config.all_kwargs())
        self.nargs = None

    def prune_configs(self, arguments: dict[str, Any]) -> list[Any]:
        return self.configs


class Heuristics:
    def __init__(self, fn: Any) -> None:
        self.fn = fn


class Kernel:
    """A kernel to tune. launches: the block sizes that it ran with. compiled: those that were compiled without running.
    loaded_by: the thread of each load. benchmarks: the number of measurements."""

    def __init__(self, name: str, fastest: int) -> None:
        def fn(x: int, n: int) -> None: ...

        fn.__module__, fn.__name__ = "mamba_ssm.ops.triton.ssd_combined", name
        self.fn, self.fastest = fn, fastest
        self.launches, self.hooked, self.compiled, self.loaded_by = (list[int]() for _ in range(4))
        self.benchmarks = 0

    def run(self, *args: Any, BLOCK_SIZE_M: int, **options: int) -> Any:
        (self.compiled if options.get("warmup") else self.launches).append(BLOCK_SIZE_M)
        return Compiled(self.loaded_by)

    def bench(self, call: Callable[[], None], quantiles: Any) -> list[float]:
        call()
        self.benchmarks += 1
        return [float(self.launches.pop() != self.fastest)]


class Compiled:
    def __init__(self, loaded_by: list[int]) -> None:
        self.loaded_by = loaded_by

    @property
    def run(self) -> None:
        """Triton loads a kernel when this is read."""
        self.loaded_by.append(get_ident())
        time.sleep(0.02)  # meanwhile another thread would load the next one


def install(fastest: int, sizes: tuple[int, ...] = (64, 32, 128)) -> dict[str, Kernel]:
    """Install a package mamba_ssm in this process with two kernels: `scan`, whose configurations have hooks, and
    `norm`, which has heuristics.

    fastest: the block size that measurements find fastest. sizes: the block sizes of the configurations.
    """
    triton: Any = ModuleType("triton.runtime.autotuner")
    triton.Autotuner, triton.Heuristics = Autotuner, Heuristics
    sys.modules["triton.runtime.autotuner"] = triton
    kernels = {name: Kernel(name, fastest) for name in ("scan", "norm")}

    def tuner(kernel: Kernel, hooked: bool) -> Any:
        hook = (lambda named: kernel.hooked.append(named["n"])) if hooked else None
        configs = [Config({"BLOCK_SIZE_M": size}, pre_hook=hook) for size in sizes]
        return Autotuner(kernel, ["x", "n"], configs, ["n"], kernel.bench)

    for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton", "mamba_ssm.ops.triton.ssd_combined"):
        sys.modules[name] = ModuleType(name)
    combined: Any = sys.modules["mamba_ssm.ops.triton.ssd_combined"]
    combined.scan, combined.norm = tuner(kernels["scan"], True), Heuristics(tuner(kernels["norm"], False))
    return kernels


def call(n: int) -> None:
    """Run both kernels with a key of `n`."""
    combined: Any = sys.modules["mamba_ssm.ops.triton.ssd_combined"]
    combined.scan.run(1, n)
    combined.norm.fn.run(1, n)
