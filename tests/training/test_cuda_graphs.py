"""When micro-batches are replayed, and that replays have the bits of eager steps.

A CPU has no graphs. A stand-in computes what was captured again, into the same memory. It uses the StepState of the
capture, so values that only the host knows cannot reach a replay, as with real graphs.
"""

import gc
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fp4.config.schema import Config, ConfigError, DataConfig, ModelConfig, ParallelConfig, TrainConfig
from megatron_fp4.measure.diagnostics import Probe
from megatron_fp4.measure.gradient_noise import GradientNoise
from megatron_fp4.parallel.data_parallel import gathered_parameters
from megatron_fp4.parallel.mesh import ParallelMesh, build_mesh
from megatron_fp4.precision.emulated import codes_of
from megatron_fp4.precision.fp32_gradients import local_part
from megatron_fp4.precision.recipe import BF16, Recipe
from megatron_fp4.precision.transformer_engine import TransformerEngineBackend
from megatron_fp4.training import build
from megatron_fp4.training.build import graphs_refusal
from megatron_fp4.training.cuda_graphs import EAGER_STEPS, MicroBatchGraphs
from models import provider as models
from tests.composing import CONFIGS, composed, plans_of
from tests.measure.test_diagnostics_run import CONFIG, Run
from tests.precision import te_stand_in as stand_in
from tests.precision.reference import NVFP4
from tests.training.harness import ToyBatch, launch, toy_mesh, train_step


class Job(Run):
    """A model, its optimizer and, if `capture` is given, its graphs."""

    def __init__(
        self,
        mesh: ParallelMesh,
        capture: Callable[..., Any] | None = None,
        required: bool = True,
        config: ModelConfig = CONFIG,
    ) -> None:
        super().__init__(mesh, NVFP4, config=config)
        self.follow(NVFP4)
        self.warnings: list[str] = []
        self.graphs: MicroBatchGraphs | None = None
        if capture is not None:
            given: dict[str, Any] = {"required": required, "warn": self.warnings.append}
            given["capture"] = lambda *what: capture(self, *what)
            self.graphs = MicroBatchGraphs(self.model, mesh, self.linears, **given)

    def follow(self, recipe: Recipe) -> None:
        """Give all blocks but the second one this recipe; the second one stays in BF16."""
        for name, context in self.linears.items():
            context.recipe, context.weight_cache = BF16 if name.startswith("blocks.1") else recipe, None

    def sized(self, step: int, length: int, count: int) -> list[ToyBatch]:
        generator = torch.Generator().manual_seed(step)
        draws = torch.randint(0, CONFIG.vocab_size, (count, 2, 2, length), generator=generator)
        return [ToyBatch(index, *pair) for index, pair in enumerate(draws)]

    def train(self, step: int, length: int = 16, count: int = 3) -> tuple[float, float, bool]:
        """Train a step; returns loss, gradient norm, and whether the step was replayed."""
        parts = self.model, self.optimizer, self.sized(step, length, count), self.mesh, self.step_state
        result = train_step(*parts, step=step, graphs=self.graphs)
        assert self.step_state.keys is None and all(p.grad is None for p in self.model.parameters())
        return result.loss, result.grad_norm, self.graphs is not None and self.graphs.captured

    def noise(self, step: int) -> GradientNoise:
        """Measure the gradient noise, as a run does before a step."""
        if self.graphs is not None:
            self.graphs.make_room()
        found: GradientNoise = super().noise(step)
        return found

    def validate(self) -> float:
        with torch.no_grad(), gathered_parameters(self.model):
            return float(self.model(torch.ones(2, 16, dtype=torch.int64), torch.ones(2, 16, dtype=torch.int64)))


class RecomputingGraph:
    """A stand-in for a CUDA graph: computes what was captured again, into the same memory."""

    def __init__(self, job: Job, function: Callable[[], Tensor], pool: Any, generators: Any) -> None:
        self.job, self.function, step_state = job, function, job.step_state
        self.parameters = list(job.model.parameters())
        self.read = self.gathered()
        self.first = all(context.weight_cache is None for context in job.linears.values())
        self.writes = all(parameter.grad is None for parameter in self.parameters)
        self.at = step_state.step, step_state.micro_batch
        self.result = function()
        self.gradients = [parameter.grad for parameter in self.parameters]
        self.kept = {name: context.weight_cache for name, context in job.linears.items()}
        self.computed = True  # unlike a capture on a GPU

    def gathered(self) -> list[Tensor]:
        """The gathered codes, scales and maxima that a micro-batch reads."""
        found = filter(None, map(codes_of, self.parameters))
        parts = (part for codes in found for part in (codes.codes, codes.scales, codes.scale, codes.amax))
        return [part for part in parts if part is not None]

    def replay(self) -> None:
        if self.computed:
            self.computed = False
            return
        # A graph reads the addresses of the capture, which might now belong to another tensor.
        assert all(a.data_ptr() == b.data_ptr() for a, b in zip(self.read, self.gathered(), strict=True))
        step_state = self.job.step_state
        now, (step_state.step, step_state.micro_batch) = (step_state.step, step_state.micro_batch), self.at
        if self.first:
            for context in self.job.linears.values():
                context.weight_cache = None
        for parameter in self.parameters if self.writes else ():
            parameter.grad = None
        self.result.copy_(self.function())
        if self.writes:
            for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
                assert parameter.grad is not None and gradient is not None
                local_part(gradient).copy_(local_part(parameter.grad))
        if self.first:
            for name, context in self.job.linears.items():
                if self.kept[name] is None:
                    continue  # gathered codes are not kept a second time
                for new, old in zip(context.weight_cache[1:], self.kept[name][1:], strict=True):
                    for source, target in zip(new.tensors(), old.tensors(), strict=True):
                        if target is not None:
                            target.copy_(source)
        step_state.step, step_state.micro_batch = now


def test_replays_have_the_bits_of_eager_steps(mesh: ParallelMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run has a watched step, a validation, a noise measurement that takes the graphs' memory, another recipe, and
    batches of other shapes and sizes, for which graphs are captured again."""
    monkeypatch.setattr(MicroBatchGraphs, "_has_room", lambda *_: False)
    eager, replayed = Job(mesh), Job(mesh, RecomputingGraph)
    was = []
    for step, (length, count) in enumerate([(16, 3)] * 8 + [(32, 3)] * 3 + [(32, 1)] * 3):
        if step == 5:
            for job in (eager, replayed):
                job.follow(BF16)
        if step == 4:
            assert eager.validate() == replayed.validate()
            noise = replayed.noise(step)
            assert noise == eager.noise(step) and 1 < noise.ratio < 20
        probes = [Probe() for job in (eager, replayed) if step == 3]
        with ExitStack() as attached:
            for probe, job in zip(probes, (eager, replayed), strict=False):
                attached.enter_context(probe.attached(job.linears))
            (*expected, _), (*found, captured) = eager.train(step, length, count), replayed.train(step, length, count)
        assert found == expected
        assert not probes or probes[0].collect([*eager.linears]) == probes[1].collect([*replayed.linears]) != {}
        was.append(captured)
    assert was == [False, False, True, False, True] + [False, False, True] * 3
    assert all(torch.equal(a, b) for a, b in zip(eager.weights(), replayed.weights(), strict=True))


EXPERTS = replace(
    CONFIG, pattern="E*E/*E/*E", moe_num_experts=4, moe_ffn_dim=32, moe_shared_ffn_dim=32, moe_aux_loss=0.1,
    init_std=0.3, mtp_use_repeated_layer=True,
)  # fmt: skip


SLOW = pytest.mark.slow(seconds=10)


@pytest.mark.parametrize("config", [pytest.param(CONFIG, id="dense"), pytest.param(EXPERTS, id="experts", marks=SLOW)])
def test_replays_sum_gradients_by_the_tree(mesh: ParallelMesh, config: ModelConfig) -> None:
    """The run has a validation and a noise measurement that leave the graphs their memory, counts tokens, and adds up
    the losses of multi-token prediction."""
    mesh = replace(mesh, reproducible=True)
    eager, replayed = Job(mesh, config=config), Job(mesh, RecomputingGraph, config=config)
    routers = [router for job in (eager, replayed) for router in job.model.routers().values()]
    was = []
    for step in range(EAGER_STEPS + 2):
        if step > EAGER_STEPS:
            assert (eager.validate(), eager.noise(step)) == (replayed.validate(), replayed.noise(step))
        for job in (eager, replayed):
            sums = job.model.mtp_losses
            job.model.mtp_losses = torch.zeros(2, 2, dtype=torch.float64) if sums is None else sums.zero_()
        for router in routers:
            router.load = torch.zeros(4, dtype=torch.int64) if router.load is None else router.load.zero_()
        (*expected, _), (*found, captured) = eager.train(step, count=6), replayed.train(step, count=6)
        assert found == expected
        loads = [router.load.tolist() for router in routers]
        assert loads[: len(loads) // 2] == loads[len(loads) // 2 :]
        assert all(sum(load) in (6 * 2 * 16 * config.moe_top_k * uses for uses in (1, 2)) for load in loads)
        assert torch.equal(eager.model.mtp_losses, replayed.model.mtp_losses)
        assert not config.mtp_patterns or eager.model.mtp_losses[:, 1].tolist() == [6 * 2 * 15, 6 * 2 * 14]
        was.append(captured)
    assert was == [False] * EAGER_STEPS + [True] * 2
    assert all(torch.equal(a, b) for a, b in zip(eager.weights(), replayed.weights(), strict=True))


def _sharded(rank: int, parallel: ParallelConfig) -> list[bool]:
    """A run with a validation, a watched step, for which other copies of weights are gathered, and smaller batches."""
    mesh, captures, was = build_mesh(parallel, torch.device("cpu")), list[Any](), list[bool]()

    def counted(*what: Any) -> RecomputingGraph:
        # Otherwise autograd would add gradients in the stream of the eager micro-batch, which a capture forbids.
        assert all(found.grad_fn is None for found in gc.get_objects() if isinstance(found, Tensor))
        captures.append(what)
        return RecomputingGraph(*what)

    eager, replayed = Job(mesh), Job(mesh, counted)
    for step, count in enumerate([4] * (EAGER_STEPS + 4) + [1] * (EAGER_STEPS + 2)):
        if step == EAGER_STEPS + 1:
            assert eager.validate() == replayed.validate()
        with ExitStack() as attached:
            for job in (eager, replayed) if step == EAGER_STEPS + 2 else ():
                attached.enter_context(Probe().attached(job.linears))
            (*expected, _), (*found, captured) = eager.train(step, count=count), replayed.train(step, count=count)
        assert found == expected
        was.append(captured)
    assert all(torch.equal(a, b) for a, b in zip(eager.weights(), replayed.weights(), strict=True))
    # Weights and gradients stay where they are. With the tree every micro-batch begins a leaf.
    assert len(captures) == (2 if parallel.reproducible else 3)
    return was


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [
        (2, ParallelConfig()),
        (2, ParallelConfig(reproducible=True)),
        pytest.param(2, ParallelConfig(replicate=2), marks=pytest.mark.slow),
        pytest.param(4, ParallelConfig(tensor=2, sequence=True), marks=pytest.mark.slow),
    ],
    ids=["shards", "reproducible", "replicas", "shards and tensor parallel"],
)
def test_all_micro_batches_of_sharded_models_are_replayed(ranks: int, parallel) -> None:
    wanted = [False] * EAGER_STEPS + [True] * 4 + [False] * EAGER_STEPS + [True] * 2
    assert launch(_sharded, ranks, parallel) == [wanted] * ranks


def _failing_on_one(rank: int, which: int) -> list[str]:
    captures = list[Any]()

    def failing(*what: Any) -> RecomputingGraph:
        captures.append(what)
        if rank and len(captures) == which:
            raise RuntimeError("not on this rank\nand more")
        return RecomputingGraph(*what)

    eager, replayed = Job(toy_mesh()), Job(toy_mesh(), failing, required=False)
    for step in range(EAGER_STEPS + 2):
        *found, captured = replayed.train(step, count=4)
        assert found == [*eager.train(step, count=4)[:2]]
        assert captured == (step >= EAGER_STEPS and rank == 0)  # a failure releases all graphs of the rank
    return replayed.warnings


@pytest.mark.parametrize("which", [1, 2])
def test_a_capture_may_fail_on_one_data_parallel_rank_only(which: int) -> None:
    first, second = launch(_failing_on_one, 2, which)
    assert first == [] and second == ["CUDA graphs: none, because a capture failed: RuntimeError: not on this rank"]


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_reports_that_its_capture_failed(mesh: ParallelMesh, rank: int, monkeypatch, capsys) -> None:
    monkeypatch.setattr(build, "why_eager", lambda *_: None)
    job, printed = Job(mesh), list[str]()
    monkeypatch.setattr(ParallelMesh, "rank", rank)
    job.graphs = build.graphs_for(Config(), models, mesh, job.model, job.linears, printed.append)
    monkeypatch.setattr(job.graphs, "_capture", lambda *_: 1 / 0)
    for step in range(EAGER_STEPS + 2):
        job.train(step)
    line = "CUDA graphs: none, because a capture failed: ZeroDivisionError: division by zero"
    assert printed == ([] if rank else [line])
    assert capsys.readouterr().err == (f"pretrain.py: rank {rank}: {line}\n" if rank else "")


def test_transformer_engine_draws_by_the_keys_of_each_step(mesh: ParallelMesh) -> None:
    with stand_in.installed():
        eager, replayed = Job(mesh), Job(mesh, RecomputingGraph)
        for job in (eager, replayed):
            for context in job.linears.values():
                context.backend = TransformerEngineBackend()
        for step in range(EAGER_STEPS + 2):
            assert replayed.train(step)[:2] == eager.train(step)[:2]
        assert replayed.graphs is not None and replayed.graphs.captured
    assert all(torch.equal(a, b) for a, b in zip(eager.weights(), replayed.weights(), strict=True))


def test_an_error_in_a_micro_batch_resets_the_keys(mesh: ParallelMesh) -> None:
    job = Job(mesh, RecomputingGraph)
    job.model.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        job.train(0)
    assert job.step_state.keys is None


def test_a_failed_capture_is_an_error_if_graphs_are_required(mesh: ParallelMesh) -> None:
    job = Job(mesh, lambda *_: 1 / 0, required=True)
    for step in range(EAGER_STEPS):
        job.train(step)
    with pytest.raises(ZeroDivisionError):
        job.train(EAGER_STEPS)


EACH = Config(parallel=ParallelConfig(reduce_gradients="each"))


@pytest.mark.parametrize(
    ("config", "ranks", "device", "backend", "why"),
    [
        (Config(), 1, "cpu", "emulated", "the run is on cpu"),
        (Config(parallel=ParallelConfig(reshard=True)), 2, "cuda", "emulated", "parallel.reshard=true"),
        (EACH, 2, "cuda", "emulated", "parallel.reduce_gradients=each"),
        (Config(data=DataConfig(documents="masked")), 1, "cuda", "emulated", "data.documents=masked"),
        (Config(train=TrainConfig(kernels="torch")), 1, "cuda", "emulated", "train.kernels=torch"),
        (Config(parallel=ParallelConfig(expert=2)), 2, "cuda", "emulated", "parallel.expert=2 waits"),
    ],
)
def test_runs_that_cannot_use_graphs(config: Config, ranks: int, device: str, backend: str, why: str) -> None:
    assert why in (graphs_refusal(config, ranks, device, backend) or "")
    required = replace(config, train=replace(config.train, cuda_graphs="true"))
    with pytest.raises(ConfigError, match=f"train.cuda_graphs=true is not possible: .*{why}.*; leave it at auto"):
        graphs_refusal(required, ranks, device, backend)


MOE = ("model=moe_tiny", "model.nvfp4_bf16_blocks.last=0")


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["precision.rht_signs=fresh"], "wgrad_gradient of the recipe nvfp4 with rht_signs=fresh is quantized"),
        # With square blocks; blocks of one row have a kernel.
        (["precision.fprop.weight.four_over_six=absolute"], "four_over_six=absolute is quantized by PyTorch"),
        ([*MOE, "precision.sums=blackwell"], "precision.sums=blackwell multiplies one expert after another"),
        ([*MOE, "parallel.tensor=2"], "parallel.tensor=2 waits for how many tokens its experts get"),
        ([*MOE, "precision=nvfp4_quartet2"], "the recipe nvfp4_quartet2 quantizes one expert after another"),
        ([*MOE, "precision=fp8_block"], "the recipe fp8_block multiplies one expert after another"),
    ],
)
def test_operands_that_no_kernel_makes_are_not_captured(overrides: list[str], why: str) -> None:
    config = composed("precision=nvfp4", *overrides)
    for backend in ("emulated", "torch"):
        assert why in (graphs_refusal(config, 1, "cuda", backend, plans_of(config)) or "")
    waits = graphs_refusal(config, 1, "cuda", "transformer_engine", plans_of(config))
    assert (waits is None) == (MOE[0] not in overrides)


@pytest.mark.parametrize(
    ("more", "but"), [((), set()), (MOE, {"nvfp4_quartet2", "fp8_block"})], ids=["dense", "experts"]
)
def test_shipped_recipes_can_be_captured(more: tuple[str, ...], but: set[str]) -> None:
    configs = {path.stem: composed(f"precision={path.stem}", *more) for path in (CONFIGS / "precision").glob("*.yaml")}
    assert but == {name for name, of in configs.items() if graphs_refusal(of, 1, "cuda", "emulated", plans_of(of))}
    assert graphs_refusal(Config(parallel=ParallelConfig(tensor=4)), 4, "cuda", "emulated") is None
