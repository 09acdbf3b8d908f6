"""Weights that oscillate are reset: which, when, on any mesh, and with every bit after a resume."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_fp4.checkpoint import shards
from megatron_fp4.checkpoint.checkpointer import Checkpointer
from megatron_fp4.config.precision_schema import Bf16BlocksConfig
from megatron_fp4.config.schema import DeoscillationConfig, OptimizerConfig
from megatron_fp4.parallel.data_parallel import apply_data_parallel
from megatron_fp4.parallel.forward_weight import forward_weight, has_values
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.parallel.parameters import global_offsets
from megatron_fp4.precision.backend import RowGroups
from megatron_fp4.precision.clock import RunClock
from megatron_fp4.precision.controller import PrecisionController
from megatron_fp4.precision.fp32_gradients import local_part
from megatron_fp4.precision.gemm_operand import GemmOperand
from megatron_fp4.precision.plan import LinearShape, build_plan
from megatron_fp4.precision.recipe import BF16, FPROP_WEIGHT, Operand, Recipe
from megatron_fp4.precision.switch import PrecisionSwitch
from megatron_fp4.training.deoscillation import Deoscillation, Resets, Windows
from megatron_fp4.training.optimizer import build_optimizer, optimizer_state
from megatron_fp4.training.step import train_step
from models.hybrid import HybridModel, build_model
from models.initialization import initialize
from tests.distributed.hybrid import MODEL, NVFP4, Layout, micro_batches, watched_gemms
from tests.precision.reference import MXFP4_2D, QUARTET2
from tests.recipes import changed
from tests.training.harness import launch, whole

RATIO = 2.0
WINDOWS = Windows(start=1, interval=4, window=3, num_steps=12)
SMALL = replace(MODEL, pattern="M-")  # rows that come in padded groups, and both kinds of linears
SIX = replace(NVFP4[FPROP_WEIGHT], four_over_six=True)


class Trained:
    """A small run: model, plan, optimizer, and what resets its weights. Its down_proj is in BF16."""

    def __init__(
        self,
        mesh: ParallelMesh,
        windows: Windows | None = WINDOWS,
        recipe: Recipe = NVFP4,
        ratio: float = RATIO,
        switch_at: int | None = None,
        optimizer: Callable[[HybridModel], torch.optim.Optimizer] | None = None,
    ) -> None:
        self.mesh, self.clock, dtype = mesh, RunClock(seed=5), torch.bfloat16
        with torch.device("meta"):
            self.model = build_model(SMALL, mesh, dtype)
        apply_data_parallel(
            self.model, mesh, units=list(self.model.blocks), fp32_units=self.model.fp32_units(), compute_dtype=dtype,
            reshard=False, ends=[self.model.embedding, self.model.head],
        )  # fmt: skip
        self.model.to_empty(device=mesh.device)
        initialize(self.model, SMALL, seed=7)
        self.linears = dict(self.model.linears())
        shapes = [LinearShape(n, int(n.split(".")[1]), m.in_features, m.out_features) for n, m in self.linears.items()]
        before, after = (
            build_plan(shapes, one, Bf16BlocksConfig(names=["*down_proj"]), SMALL.num_blocks) for one in (recipe, BF16)
        )
        self.controller = PrecisionController(
            {name: linear.context for name, linear in self.linears.items()}, before, self.clock,
            switch=PrecisionSwitch(at_step=switch_at), plan_after_switch=None if switch_at is None else after,
        )  # fmt: skip
        self.optimizer = (
            build_optimizer(self.model, OptimizerConfig(lr=1e-2)).optimizer
            if optimizer is None
            else optimizer(self.model)
        )
        self.checkpointer: Checkpointer | None = None
        self.said: list[str] = []
        self.deoscillation = Deoscillation(
            windows, ratio, self.linears, self.controller, mesh, dtype, self.optimizer,
            lambda: self.checkpointer.before_change() if self.checkpointer is not None else None, self.said.append,
        )  # fmt: skip

    def before_step(self, step: int) -> None:
        self.controller.before_step(step, lambda: 0.0)
        self.deoscillation.before_step(step)

    def update(self, step: int, accept: bool = True) -> None:
        train_step(
            self.model, self.optimizer, micro_batches(step, self.mesh, self.mesh.dp_size), self.mesh, self.clock,
            step=step, lr=1e-2, clip_norm=1.0, accept=None if accept else lambda *_: False,
        )  # fmt: skip

    def step(self, step: int, accept: bool = True) -> Resets | None:
        self.before_step(step)
        self.update(step, accept)
        return self.deoscillation.after_step(step + 1)

    def checkpoints(self, folder: Path, asynchronous: bool = False) -> int:
        """Go on from the newest checkpoint in `folder`, if there is one; returns the steps done."""
        self.checkpointer = Checkpointer(folder, self.mesh, keep=0, identity={}, asynchronous=asynchronous)
        self.checkpointer.deoscillation = self.deoscillation
        parts = self.model, self.optimizer, self.clock
        resumed = self.checkpointer.resume("auto", *parts, allow_mismatch=False)
        self.checkpointer.prepare(self.model, self.optimizer)
        if resumed is not None:
            self.deoscillation.load_state_dict(resumed.trainer.get("deoscillation"))
        return 0 if resumed is None else resumed.step

    def save(self, done: int) -> None:
        assert self.checkpointer is not None
        trainer = {"deoscillation": self.deoscillation.state_dict()}
        self.checkpointer.save(done, self.model, self.optimizer, trainer, consumed_samples=done, consumed_tokens=done)

    def weights(self) -> dict[str, Tensor]:
        return {name: whole(linear.weight) for name, linear in self.linears.items()}

    def state(self) -> dict[str, Tensor]:
        tensors = {**self.model.state_dict(), **optimizer_state(self.model, self.optimizer)}
        return {name: whole(value) for name, value in tensors.items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def fprop_weights(run: Trained) -> dict[str, GemmOperand]:
    """What a forward pass multiplies by, by linear."""
    seen: list[GemmOperand] = []
    (batch,) = micro_batches(0, run.mesh, run.mesh.dp_size)
    with torch.no_grad(), watched_gemms(lambda a, b: seen.append(b)):
        run.model(batch.tokens, batch.targets)
    return dict(zip(run.linears, seen, strict=False))  # the last one is the head's


def unpadded(run: Trained, name: str, operand: GemmOperand) -> Tensor:
    values, linear = operand.unpacked(), run.linears[name]
    groups = linear.context.num_groups
    return RowGroups(len(values) // groups, linear.out_features // groups).of(values)


RECIPES = {
    "16x16": NVFP4,
    "16x16 4/6": changed(NVFP4, fprop_weight=SIX, dgrad_weight=SIX),
    "1x16 4/6": QUARTET2,
    "mxfp4": MXFP4_2D,
    "mxfp8": changed(NVFP4, fprop_weight=Operand("mxfp8", (1, 32))),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_values_are_those_that_the_forward_pass_multiplies_by(recipe: str, mesh: ParallelMesh) -> None:
    run = Trained(mesh, recipe=RECIPES[recipe])
    operands, compared = fprop_weights(run), 0
    for name, linear in run.linears.items():
        if not has_values(linear.context.recipe):
            assert name.endswith("down_proj")
            continue
        found, expected = forward_weight(linear, torch.bfloat16), operands[name]
        assert torch.equal(found.values, unpadded(run, name, expected)) and found.values.unique().numel() > 10
        assert (found.scale is None) == (expected.scale is None)
        assert found.scale is None or torch.equal(found.scale, expected.scale)  # type: ignore[arg-type]
        compared += 1
    assert compared == len(run.linears) - 1


def test_resets_what_flips_more_than_it_moves(mesh: ParallelMesh) -> None:
    run, events = Trained(mesh), []
    weights = {name: local_part(linear.weight) for name, linear in run.linears.items()}
    quantized = [name for name in weights if not name.endswith("down_proj")]

    def values() -> dict[str, Tensor]:
        return {name: forward_weight(run.linears[name], torch.bfloat16).real() for name in quantized}

    moved = flipped = {name: torch.zeros_like(weights[name], dtype=torch.float64) for name in quantized}
    for step in range(12):
        if step in (1, 5, 9):
            moved, flipped = ({name: torch.zeros_like(weights[name]).double() for name in quantized} for _ in "12")
        before, was = {name: weight.clone() for name, weight in weights.items()}, values()
        run.before_step(step)
        run.update(step)
        updated, now, moments = {name: w.clone() for name, w in weights.items()}, values(), run.state()
        for name in quantized:
            moved[name] += (updated[name].double() - before[name].double()).abs()
            flipped[name] += (now[name].double() - was[name].double()).abs()
        version = run.clock.weights_version
        resets = run.deoscillation.after_step(step + 1)
        if step not in (3, 7):  # the third window would end with the last step
            assert resets is None and run.clock.weights_version == version
            assert all(torch.equal(weights[name], updated[name]) for name in weights)
            continue
        assert resets is not None and resets.step == step + 1 and list(resets.linears) == quantized
        events.append(resets)
        assert run.clock.weights_version == version + 1
        for name in quantized:
            flips = flipped[name] > RATIO * moved[name]
            doubtful = (flipped[name] - RATIO * moved[name]).abs() < 1e-6 * moved[name]
            reset = weights[name] != updated[name]
            assert doubtful.float().mean() < 1e-3 and not (reset & ~flips & ~doubtful).any()
            expected = torch.where(flips, now[name], updated[name])
            assert torch.equal(torch.where(doubtful, expected, weights[name]), expected)
            count, size = resets.linears[name]
            assert size == weights[name].numel() and abs(count - int(flips.sum())) <= int(doubtful.sum())
            assert 0.02 < count / size < 0.98
        assert torch.equal(weights["blocks.1.mixer.down_proj"], updated["blocks.1.mixer.down_proj"])
        after = run.state()
        assert all(torch.equal(after[name], moments[name]) for name in after if "exp_avg" in name)
        # What the next forward pass multiplies by is made of the weights as they are now.
        operands = fprop_weights(run)
        for name in quantized:
            again = forward_weight(run.linears[name], torch.bfloat16)
            assert torch.equal(operands[name].scale, again.scale)  # type: ignore[arg-type]
            assert torch.equal(unpadded(run, name, operands[name]), again.values)
    assert len(events) == 2 and events[0].share != events[1].share
    assert f"({events[0].share:.3%})" in str(events[0]) and events[0].as_record()["reset"] == events[0].num_reset


def test_without_windows_nothing_is_there_and_watching_changes_no_bit(mesh: ParallelMesh) -> None:
    off, watching = Trained(mesh, windows=None), Trained(mesh, ratio=1e12)
    for step in range(6):
        assert off.step(step) is None
        resets = watching.step(step)
        assert resets is None or resets.num_reset == 0
        assert not off.deoscillation.tensors() and bool(watching.deoscillation.tensors()) == (step not in (0, 3, 4))
    assert same(off.state(), watching.state())
    assert not off.optimizer._optimizer_step_pre_hooks and off.deoscillation.state_dict() is None


def test_a_skipped_step_is_one_without_movement(mesh: ParallelMesh) -> None:
    run = Trained(mesh)
    run.step(0)
    for step in (1, 2):
        assert run.step(step, accept=False) is None
        assert not any(whole(sums).any() for sums in run.deoscillation.tensors().values())
    before = run.weights()
    resets = run.step(3)
    assert resets is not None and resets.num_reset > 0 and not same(before, run.weights())
    run.before_step(5)
    assert run.deoscillation.open


def test_a_precision_switch_ends_a_window_without_a_reset(mesh: ParallelMesh) -> None:
    run = Trained(mesh, switch_at=2)
    run.step(0)
    run.step(1)
    assert run.deoscillation.open
    for step in range(2, 8):
        assert run.step(step) is None and not run.deoscillation.open and not run.said


@pytest.mark.parametrize("asynchronous", [False, True], ids=["at once", "in the background"])
def test_goes_on_inside_a_window_with_every_bit(
    asynchronous: bool, mesh: ParallelMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = replace(WINDOWS, num_steps=13)
    straight, first = Trained(mesh, windows), Trained(mesh, windows)
    # With sums a rank writes one file more.
    monkeypatch.setattr(shards, "_FILE_BYTES", sum(tensor.nbytes for tensor in first.state().values()) // 2 + 8)
    events = [straight.step(step) for step in range(9)]
    assert first.checkpoints(tmp_path, asynchronous) == 0
    for step in range(7):
        first.step(step)
        if step + 1 in (1, 3, 4, 7):  # also outside of windows, before and after one with sums
            first.save(step + 1)
    assert first.checkpointer is not None
    first.checkpointer.finish()
    assert [len([*folder.glob("*.distcp")]) for folder in sorted(tmp_path.glob("step_*"))] == [2, 3, 2, 3]
    again = Trained(mesh, windows)
    assert again.checkpoints(tmp_path, asynchronous) == 7 and not again.said
    assert again.deoscillation.open and any(sums.any() for sums in again.deoscillation.tensors().values())
    assert [again.step(step) for step in (7, 8)] == events[7:] and events[7] is not None
    assert same(again.state(), straight.state())

    def back() -> None:
        assert again.checkpointer is not None
        resumed = again.checkpointer.reload(again.model, again.optimizer, again.clock)
        again.deoscillation.load_state_dict(resumed.trainer["deoscillation"])

    # In the middle of the run back to that checkpoint: inside its window with its sums, in a later one without.
    back()
    assert again.step(7) == events[7]
    # Because of a spike in the window's last step, which is one without movement; in a later window it is left.
    again.before_step(7)
    back()
    resets, now = again.deoscillation.after_step(8), again.state()
    assert resets is not None and resets.num_reset > 0 and not again.deoscillation.open
    again.before_step(11)
    back()
    before = again.state()
    assert again.deoscillation.after_step(12) is None and not again.deoscillation.open
    assert same(again.state(), before) and not same(now, before)
    back()
    again.before_step(9)
    state = again.deoscillation.state_dict()
    assert state is not None and (state["window"], state["ratio"]) == (9, RATIO)
    assert set(state["weights"].values()) == {"nvfp4 16x16"} and len(state["weights"]) == len(again.linears) - 1
    assert not any(whole(sums).any() for sums in again.deoscillation.tensors().values())


def test_without_sums_of_its_own_a_run_waits_for_the_next_window(mesh: ParallelMesh, tmp_path: Path) -> None:
    six = Trained(mesh, recipe=RECIPES["16x16 4/6"])
    for name, old in {"none": Trained(mesh, windows=None), "six": six, "ratio": Trained(mesh, ratio=3.0)}.items():
        folder = tmp_path / name
        old.checkpoints(folder)
        for step in range(3):
            old.step(step)
        old.save(3)
        run = Trained(mesh)
        assert run.checkpoints(folder) == 3 and same(run.state(), old.state())
        assert run.step(3) is None and not run.deoscillation.open
        (said,) = run.said
        assert "the window of steps 2 to 4 began" in said and said.endswith("it is left out")
        assert run.step(4) is None and run.step(5) is None and run.deoscillation.open
    off = Trained(mesh, windows=None)
    assert off.checkpoints(folder) == 3 and off.step(3) is None and same(off.weights(), off.weights())


class Moves(torch.optim.Optimizer):
    """Sets every weight at random, and then moves it, equally on any mesh and device."""

    def __init__(self, model: HybridModel) -> None:
        self.parameters, self.draws = list(model.parameters()), torch.Generator().manual_seed(3)
        super().__init__(self.parameters, {})
        self.move(0.0, 0.1)

    def step(self) -> None:  # type: ignore[override]
        self.move(1.0, 0.01)

    @torch.no_grad()
    def move(self, keep: float, size: float) -> None:
        for parameter in self.parameters:
            local, at = local_part(parameter), global_offsets(parameter)
            moves = size * torch.randn(parameter.shape, generator=self.draws)
            here = moves[tuple(slice(o, o + n) for o, n in zip(at, local.shape, strict=True))]
            local.mul_(keep).add_(here.to(local.device))


def moved(mesh: ParallelMesh, recipe: str) -> tuple[Resets | None, dict[str, Tensor]]:
    """After a window: what was reset, and the weights."""
    run = Trained(mesh, recipe=RECIPES[recipe], optimizer=Moves)
    for step in (1, 2):
        run.before_step(step)
        run.optimizer.step()
        assert run.deoscillation.after_step(step + 1) is None
    run.before_step(3)
    run.optimizer.step()
    return run.deoscillation.after_step(4), run.weights()


# Blocks of 16x16 lie in the rows of several of four shards.
LAYOUTS = [
    (Layout(4), "16x16 4/6"),
    (Layout(4, tensor=2), "16x16"),
    (Layout(4, tensor=2), "1x16 4/6"),
    (Layout(4, replicate=2), "16x16"),
]


def on_meshes(rank: int) -> list[tuple[Resets | None, dict[str, Tensor]]]:
    return [moved(layout.mesh(), recipe) for layout, recipe in LAYOUTS]


@pytest.mark.slow
def test_resets_do_not_depend_on_the_mesh(mesh: ParallelMesh) -> None:
    expected = {recipe: moved(mesh, recipe) for _, recipe in LAYOUTS}
    for of_rank in launch(on_meshes, 4):
        for (_, recipe), (resets, weights) in zip(LAYOUTS, of_rank, strict=True):
            resets_of_one, weights_of_one = expected[recipe]
            assert resets is not None and resets == resets_of_one and 0.02 < resets.share < 0.98
            assert same(weights, weights_of_one)


def test_windows() -> None:
    windows = Windows(start=10, interval=20, window=5, num_steps=55)
    assert windows.all() == [range(10, 15), range(30, 35)]  # the next would end with the run
    assert [windows.around(step) for step in (9, 10, 14, 15, 29, 30, 34, 35, 50, 54)] == [
        *(None, 10, 10, None, None, 30, 30, None, None, None)
    ]
    always = Windows(start=0, interval=5, window=5, num_steps=12)
    assert [always.around(step) for step in range(12)] == [0] * 5 + [5] * 5 + [None] * 2
    for start, first in (("before_decay", 85), ("0.65", 65), ("20", 20)):
        assert Windows.of(DeoscillationConfig(interval=10, start=start), 100, 85).start == first
    with pytest.raises(ValueError, match=r"optimizer\.deoscillation\.start=soon is not before_decay"):
        Windows.of(DeoscillationConfig(interval=10, start="soon"), 100, 85)
