"""Weights that flip between two codes are set to the one that they have: OsciReset of TetraJet-v2 (arXiv 2510.27527).

A master weight that lies near the border between two codes crosses it again and again: it hardly moves, and what the
forward pass multiplies by jumps from one grid point to the next, step after step. The more the learning rate decays,
the more of what is left of the training goes into such flips. So now and then the weights that do so are put back into
the middle of their bin. Over the steps t of a window, of each element w of the master of a quantized weight,

    dW = sum |w_t - w_(t-1)|        dQ = sum |Q(w_t) - Q(w_(t-1))|        Q: what fprop multiplies by, real values
    after the window's last step:   w = Q(w)  where  dQ > ratio * dW      Adam's moments stay as they are

    steps     |<- start ->|<- window ->|              |<- window ->|              |<- ...
                          |<-      interval         ->|<-      interval         ->|

Steps that are skipped count as steps without movement. Windows are a function of the step's number; one that would end
with the run's last step or behind it is not begun. Q is that of the plan in effect, by the same quantizer as the
forward pass, of whole tensors on any mesh (parallel/forward_weight.py); linears whose forward weight is not quantized,
or stochastically, or rotated, are left alone. A precision switch ends a window without a reset.

Memory: nothing outside of windows. Inside, for each element of a quantized weight's shard, FP32 `dQ - ratio * dW` (the
sign is all that matters) and Q(w) in BF16, 6 bytes; and while the optimizer updates, 4 more for w before the update.
Work: each step of a window quantizes the weights once more, as its first micro-batch does.

A checkpoint inside a window holds the sums (in the part `deoscillation`, beside model and optimizer), so that a resume
goes on with every bit. A run that comes into the middle of a window without sums (it began from a checkpoint of a run
without this, went back to an earlier one after a spike, or has another ratio or other formats) waits for the next.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fp4.config.schema import DeoscillationConfig
from megatron_fp4.parallel.forward_weight import ForwardWeight, forward_weight, has_values
from megatron_fp4.parallel.layers import QuantizedLinear
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.precision.controller import PrecisionController
from megatron_fp4.precision.fp32_gradients import local_part
from megatron_fp4.precision.plan import Plan
from megatron_fp4.precision.recipe import FPROP_WEIGHT
from megatron_fp4.precision.switch import step_or_fraction

KEY = "optimizer.deoscillation"


@dataclass(frozen=True)
class Windows:
    """The windows of a run of `num_steps` steps: from `start` on every `interval` steps one of `window` steps. Steps
    are counted from 0; a window is known by its first."""

    start: int
    interval: int
    window: int
    num_steps: int

    @staticmethod
    def of(config: DeoscillationConfig, num_steps: int, decay_start: int) -> Windows:
        """Those of a configuration that has an interval; decay_start: the step at which the learning rate begins to
        decay. Raises ValueError for a start that is none."""
        try:
            start = decay_start if config.start == "before_decay" else step_or_fraction(config.start, num_steps)
        except ValueError:
            raise ValueError(
                f"{KEY}.start={config.start} is not before_decay, a fraction between 0 and 1 or a step between 0 and "
                f"train.steps={num_steps}; give one of these"
            ) from None
        return Windows(start, config.interval, config.window, num_steps)

    def around(self, step: int) -> int | None:
        """The window that `step` belongs to; None: it belongs to none."""
        if step < self.start:
            return None
        first = step - (step - self.start) % self.interval
        end = first + self.window
        return first if step < end < self.num_steps else None

    def all(self) -> list[range]:
        """The steps of each."""
        return [
            range(first, first + self.window)
            for first in range(self.start, self.num_steps - self.window, self.interval)
        ]


@dataclass(frozen=True)
class Resets:
    """What one reset did, over all ranks and the same on all. linears: (elements reset, all elements) by name."""

    step: int
    linears: Mapping[str, tuple[int, int]]

    @property
    def num_reset(self) -> int:
        """Elements that were set to their quantized value."""
        return sum(reset for reset, _ in self.linears.values())

    @property
    def num_elements(self) -> int:
        """Of all quantized weights."""
        return sum(size for _, size in self.linears.values())

    @property
    def share(self) -> float:
        """0..1."""
        return self.num_reset / max(1, self.num_elements)

    def as_record(self) -> dict[str, Any]:
        """For metrics.jsonl: counts, share, and each linear's share."""
        linears = {name: reset / max(1, size) for name, (reset, size) in self.linears.items()}
        return {"reset": self.num_reset, "elements": self.num_elements, "share": self.share, "linears": linears}

    def __str__(self) -> str:
        return (
            f"{self.num_reset:,} of {self.num_elements:,} quantized weights ({self.share:.3%}) oscillated and were set "
            "to their quantized values"
        )


class Deoscillation:
    """Watches windows and resets; of a run without windows (None) nothing it does does anything.

    linears: those of the plan by name, with parameters that hold values. ratio: see the top of this file. dtype: the
    compute dtype. optimizer: of the run, whose updates are watched. before_change: called before weights change or sums
    go outside of an update, for whoever may still be copying them. say: tells people why a window is left out.
    """

    def __init__(
        self,
        windows: Windows | None,
        ratio: float,
        linears: Mapping[str, QuantizedLinear],
        controller: PrecisionController,
        mesh: ParallelMesh,
        dtype: torch.dtype,
        optimizer: torch.optim.Optimizer,
        before_change: Callable[[], None] = lambda: None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.windows, self.ratio, self._before_change, self._say = windows, ratio, before_change, say
        self._left_out: int | None = None
        self._controller, self._mesh, self._dtype = controller, mesh, dtype
        # Of every plan, so that a checkpoint has the same tensors under each.
        names = watched(controller.plans) if windows is not None else []
        self._linears = {name: linears[name] for name in names}
        self._sums: dict[str, Tensor] = {}  # dQ - ratio * dW, FP32, as the parameter lies on the mesh
        self._close()
        if windows is not None:
            optimizer.register_step_pre_hook(lambda *_: self._before_update())

    def _close(self) -> None:
        if self._sums:
            self._before_change()
        self._sums = {}
        self._window: int | None = None
        self._plan: Plan | None = None
        self._quantized: dict[str, ForwardWeight] = {}  # of the weights as they are now; empty: not known yet
        self._before: dict[str, Tensor] = {}  # FP32 local masters before the update of this step

    @property
    def description(self) -> str | None:
        """When it resets what, in words; None without windows."""
        if self.windows is None or not (windows := self.windows.all()):
            return None
        ends = f"after step {windows[0].stop:,}"
        if len(windows) > 1:
            ends += f", then every {self.windows.interval:,} to step {windows[-1].stop:,}"
        return f"{ends}: quantized weights that flipped more than {self.ratio:g} times as far as they moved"

    @property
    def open(self) -> bool:
        """Whether a window is open, whose sums a checkpoint has to hold."""
        return self._window is not None

    def before_step(self, step: int) -> None:
        """Before the training step `step` (from 0), which the plan in effect computes. A collective in a window."""
        if self.windows is None:
            return
        window = self.windows.around(step)
        if self._window is not None and (window != self._window or self._plan is not self._controller.plan):
            self._close()
        if window is not None and self._window is None and self._watched_now():
            if window == step:
                self._window, self._plan = window, self._controller.plan
                self._sums = self._zeros(self._linears)
            elif window != self._left_out:
                self._left_out = window
                self._say(
                    f"de-oscillation: nothing is known of how the window of steps {window + 1} to "
                    f"{window + self.windows.window} began, under the plan and ratio of now; it is left out"
                )
        if self._window is not None:
            self._quantize()

    def _quantize(self) -> None:
        """Know what fprop multiplies by, of the weights as they are now."""
        if not self._quantized:
            self._quantized = {name: self._forward_weight(name) for name in self._watched_now()}

    def _before_update(self) -> None:
        """The optimizer is about to change the weights."""
        if self._window is not None:
            self._before = {name: local_part(self._linears[name].weight).clone() for name in self._quantized}

    def after_step(self, done: int) -> Resets | None:
        """After `done` steps: take in what the last one did, and at the end of a window reset. Returns what was reset
        at the end of a window. A collective in a window."""
        if self._window is None:
            return None
        if self._before:  # else there was no update
            self._take_in()
        assert self.windows is not None
        end = self._window + self.windows.window
        if done < end:
            return None
        # Behind its end: this step was a spike, and the run is back at a checkpoint from inside an earlier window.
        resets = self._reset(done) if done == end else None
        self._close()
        return resets

    @torch.no_grad()
    def _take_in(self) -> None:
        for name, before in self._before.items():
            now, sums = self._forward_weight(name), local_part(self._sums[name])
            sums.add_(now.real().sub_(self._quantized[name].real()).abs_())
            sums.sub_(before.sub_(local_part(self._linears[name].weight)).abs_(), alpha=self.ratio)
            self._quantized[name] = now
        self._before = {}

    @torch.no_grad()
    def _reset(self, done: int) -> Resets:
        counts = []
        self._quantize()  # not known of a checkpoint that has been gone back to since the step began
        self._before_change()
        for name, quantized in self._quantized.items():
            master, flips = local_part(self._linears[name].weight), local_part(self._sums[name]) > 0
            master.copy_(torch.where(flips, quantized.real(), master))
            counts.append(flips.sum())
        self._controller.clock.weights_version += 1  # what linears and FSDP keep is of other weights
        total = torch.stack(counts)
        dist.all_reduce(total)
        numbers = [count // self._mesh.num_replicas for count in total.tolist()]
        sizes = [self._linears[name].weight.numel() for name in self._quantized]
        return Resets(done, dict(zip(self._quantized, zip(numbers, sizes, strict=True), strict=True)))

    def _watched_now(self) -> list[str]:
        return [name for name, linear in self._linears.items() if has_values(linear.context.recipe)]

    def _forward_weight(self, name: str) -> ForwardWeight:
        return forward_weight(self._linears[name], self._dtype)

    def _zeros(self, names: Collection[str]) -> dict[str, Tensor]:
        return {name: torch.zeros_like(self._linears[name].weight, requires_grad=False) for name in names}

    # ----------------------------------------------------------------------------------------------------- checkpoints

    def tensors(self) -> dict[str, Tensor]:
        """The live sums by linear, for a checkpoint; none outside of windows."""
        return self._sums

    def most_tensors(self) -> dict[str, Tensor]:
        """As many and as large as `tensors` ever has."""
        return self._zeros(self._linears)

    def tensors_for(self, names: Collection[str]) -> dict[str, Tensor]:
        """What a checkpoint with sums of `names` is to be loaded into; whose they are, `load_state_dict` hears."""
        self._close()
        if names and set(names) == self._linears.keys():
            self._sums = self._zeros(self._linears)
        return self._sums

    def state_dict(self) -> dict[str, Any] | None:
        """For the checkpoint, beside its tensors: the window that is open and what its sums are of, None without."""
        return None if self._window is None else {"window": self._window, **self._kind()}

    def _kind(self) -> dict[str, Any]:
        weights = {name: str(self._linears[name].context.recipe[FPROP_WEIGHT]) for name in self._watched_now()}
        return {"ratio": self.ratio, "weights": weights}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on from a checkpoint whose tensors have been loaded, or wait for the next window if it has none for this
        run."""
        sums = self._sums
        self._close()
        if state is not None and sums and self._kind().items() <= state.items():
            self._window, self._plan, self._sums = state["window"], self._controller.plan, sums


def watched(plans: Collection[Plan]) -> list[str]:
    """The linears whose masters may be reset under any of a run's plans, in order of execution."""
    rows = {row.linear.name: False for plan in plans for row in plan.rows}
    for plan in plans:
        for row in plan.rows:
            rows[row.linear.name] |= has_values(row.recipe)
    return [name for name, has in rows.items() if has]
