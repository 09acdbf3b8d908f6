"""Tensors to quantize: synthetic ones, and those captured from a model that is trained here or loaded."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load

from assembly import CONFIGS, build, configure, set_determinism
from megatron_fp4.checkpoint.files import read_manifest, read_trainer
from megatron_fp4.checkpoint.shards import CheckedReader
from megatron_fp4.config.compose import config_from_saved
from megatron_fp4.config.precision_schema import Bf16BlocksConfig
from megatron_fp4.measure.probe import Probe
from megatron_fp4.parallel.mesh import build_mesh, init_distributed
from megatron_fp4.precision.controller import PrecisionController
from megatron_fp4.precision.plan import build_plan
from megatron_fp4.precision.recipe import recipe_from_config
from megatron_fp4.training.accumulate import ALONE, accumulate
from megatron_fp4.training.step import train_step
from run_parts import Run

if TYPE_CHECKING:
    from megatron_fp4.precision.linear_call import LinearCall


@dataclass(frozen=True)
class Size:
    """How much to compute. side: of synthetic tensors. draws: quantizations that are averaged. tensors: random
    tensors whose codes are compared."""

    side: int = 1024
    steps: int = 120
    tokens: tuple[int, int] = (4, 256)
    draws: int = 1024
    tensors: int = 4000
    depths: tuple[int, ...] = (1, 4, 16, 32)


QUICK = Size(side=256, steps=2, tokens=(2, 64), draws=8, tensors=200, depths=(1, 4))


@dataclass
class Study:
    """What the sections share. Captured tensors, made at first use: linear -> x, W, dy, BF16, rows by features.

    pictures: the folder to draw into, None to draw nothing.
    """

    size: Size
    pictures: Path | None
    overrides: list[str]
    checkpoint: Path | None
    _run: tuple[Run, dict[str, dict[str, Tensor]], dict[str, dict[str, float]]] | None = field(default=None)

    @property
    def captured(self) -> dict[str, dict[str, Tensor]]:
        """One linear of each kind of block: its x [tokens, in], W [out, in] and dy [tokens, out]."""
        tensors = self._trained()[1]
        firsts = [[n for n in tensors if n.endswith(end)][:1] for end in ("0.mixer.out_proj", "down_proj", "qkv_proj")]
        return {name: tensors[name] for first in firsts for name in first}

    @property
    def every_linear(self) -> dict[str, dict[str, Tensor]]:
        """The same of all linears."""
        return self._trained()[1]

    @property
    def errors(self) -> dict[str, dict[str, float]]:
        """Relative error of fprop, dgrad and wgrad of every linear, all of them quantized."""
        return self._trained()[2]

    def _trained(self) -> tuple[Run, dict[str, dict[str, Tensor]], dict[str, dict[str, float]]]:
        if self._run is None:
            run, start = trained_model(self.size, self.overrides, self.checkpoint)
            self._run = run, *look_inside(run, start)
        return self._run


# --------------------------------------------------------------------------------------------------- synthetic tensors


def generator(seed: int) -> torch.Generator:
    """Of synthetic tensors."""
    return torch.Generator().manual_seed(seed)


def synthetic(side: int) -> dict[str, Tensor]:
    """BF16 [side, side]: Gaussian, Student's t with three degrees of freedom, and Gaussian with every 64th column
    multiplied by 30."""
    g = generator(1)
    normal = torch.randn(side, side, generator=g)
    chi_squared = torch.randn(3, side, side, generator=g).square().mean(0)
    channels = torch.randn(side, side, generator=g)
    channels[:, ::64] *= 30
    made = {"Gaussian": normal, "Student t, 3 d.o.f.": normal / chi_squared.sqrt(), "outlier channels": channels}
    return {name: tensor.bfloat16() for name, tensor in made.items()}


def token_outliers(tokens: int, dim: int, scale: float, where: str) -> tuple[Tensor, Tensor, Tensor]:
    """x, dy [tokens, dim], BF16, correlated as in training, and which tokens are outliers: one in 64, by chance, whose
    x or dy (`where`) is `scale` times as large."""
    g = generator(2)
    shared = torch.randn(tokens, 32, generator=g)

    def mixed() -> Tensor:
        signal = shared @ torch.randn(32, dim, generator=g) / math.sqrt(32)
        return signal + 0.3 * torch.randn(tokens, dim, generator=g)

    x, dy = mixed(), mixed()
    outlier = torch.rand(tokens, generator=g) < 1 / 64
    loud = x if where == "x" else dy
    loud[outlier] = scale * (torch.randn(1, dim, generator=g) + 0.3 * torch.randn(int(outlier.sum()), dim, generator=g))
    return x.bfloat16(), dy.bfloat16(), outlier


# ------------------------------------------------------------------------------------------------ a model to look into


class Capture:
    """Hangs where a probe hangs, and keeps x, W and dy of each linear's last call."""

    def __init__(self) -> None:
        self.tensors: dict[str, dict[str, Tensor]] = {}

    def forward(self, call: LinearCall, x: Tensor, _y: Tensor) -> Capture._Backward:
        """Keep x and W; the answer is told about the backward pass."""
        kept = {"x": x.detach().clone(), "W": call.weight.detach().clone()}
        self.tensors[call.context.name] = kept
        return Capture._Backward(kept)

    @dataclass
    class _Backward:
        kept: dict[str, Tensor]

        def backward(self, dy: Tensor, _dx: Tensor | None, _dw: Tensor | None) -> None:
            self.kept["dy"] = dy.detach().clone()


def trained_model(size: Size, overrides: list[str], checkpoint: Path | None) -> tuple[Run, int]:
    """A model trained for `size.steps` steps (or loaded), every linear then quantized; and its number of steps."""
    if checkpoint is not None:
        if not checkpoint.is_dir():
            raise ValueError(f"--checkpoint {checkpoint} is no folder; name one like runs/a/checkpoints/step_00000300")
        steps = read_manifest(checkpoint).step
        saved = read_trainer(checkpoint)["config"]
        config = config_from_saved(saved, [*overrides, "precision.switch.when=never"], CONFIGS)
    else:
        micro, length = size.tokens
        own = [f"train.micro_batch_size={micro}", f"train.global_batch_size={micro}", f"train.sequence_length={length}"]
        own += [f"train.steps={size.steps + 4}", "precision=nvfp4", "precision.switch.when=never", "run.device=cpu"]
        config = configure([*own, "data.num_workers=0", *overrides])
        steps = config.train.steps - 4  # of the rest, the measurements below take their batches
    recipe = recipe_from_config(config.precision)
    if not recipe.quantized:
        raise ValueError(f"precision {config.precision.name} quantizes nothing; name a recipe: --set precision=nvfp4")
    device = init_distributed("cpu", config.parallel.timeout_seconds)
    set_determinism(True)
    run = build(config, build_mesh(config.parallel, device))
    if checkpoint is not None:
        with torch.no_grad():
            load({"model": run.model.state_dict()}, storage_reader=CheckedReader(checkpoint))
    else:
        print(f"training {config.model.name} for {steps} steps", file=sys.stderr)
        for step, batches in enumerate(run.loader.steps(0, steps)):
            lr, clip = run.schedule.lr(step, None, 0), config.optimizer.clip_norm
            parts = run.model, run.optimizer.optimizer, batches, run.mesh, run.controller.clock
            train_step(*parts, step=step, lr=lr, clip_norm=clip)
    shapes, old = [row.linear for row in run.controller.plan.rows], run.controller
    plan = build_plan(shapes, recipe, Bf16BlocksConfig(), config.model.num_blocks)
    run.controller = PrecisionController(old.linears, plan, old.clock)
    return run, steps


def look_inside(run: Run, start: int) -> tuple[dict[str, dict[str, Tensor]], dict[str, dict[str, float]]]:
    """Of one micro-batch each linear's x, W and dy; of four steps (fewer at a run's end) each linear's errors."""
    capture, probe = Capture(), Probe(once=False)
    start = max(0, min(start, run.config.train.steps - 4))
    for number, batches in enumerate(run.loader.steps(start, min(start + 4, run.config.train.steps))):
        with probe.attached(run.controller.linears):
            forward_backward(run, start + number, batches[0])
        if number == 0:
            for context in run.controller.linears.values():
                context.probe = capture  # type: ignore[assignment]
            forward_backward(run, start, batches[0])
    found = probe.collect(list(run.controller.linears))
    return capture.tensors, {name: one.errors for name, one in found.items()}


def forward_backward(run: Run, step: int, batch: Any) -> None:
    """One micro-batch through the model and back; gradients are thrown away."""
    run.controller.clock.step = step
    accumulate(run.model, [batch], run.mesh, run.controller.clock, whole=ALONE)
    for parameter in run.model.parameters():
        parameter.grad = None
