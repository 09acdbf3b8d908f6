"""The planned time of a step, against bounds counted by hand."""

from dataclasses import replace
from unittest import mock

import pytest

from megatron_fp4.config.schema import Config, ModelConfig, ParallelConfig, RunConfig, TrainConfig
from megatron_fp4.planning.dry_run import DryRun, Message
from megatron_fp4.planning.gpus import GPUS
from megatron_fp4.planning.needs import PlannedPhase, StepTime, as_planned, axis_bandwidth, hidden_share, step_time
from megatron_fp4.precision.plan import Plan, PlannedLinear
from models import provider as models
from models.pattern import training_flops_per_token
from tests.composing import composed, plans_of
from tests.precision.reference import NVFP4

GB = 10**9
TOKENS = Message("all-gather", "tp", 2, 120 * GB)  # each rank sends half: 0.2 s at 300 GB/s
BESIDE_GEMMS = Message("reduce-scatter", "tp", 2, 120 * GB, "GEMM")
WEIGHTS = Message("all-gather", "dp", 2, 60 * GB)  # 0.1 s
EMPTY = DryRun(None, 4, {}, {}, {}, {})  # type: ignore[arg-type]
MODEL = ModelConfig(pattern="*-")  # four linears
PLANS = (Plan(()), None)  # all FLOPs are those of BF16


def times(messages: dict[Message, int], ends: dict[Message, int] | None = None, peak: float = 989) -> StepTime:
    """The time of a step of two micro-batches on four ranks, with `messages` in each. peak: TFLOP/s."""
    config = Config(
        model=MODEL,
        train=TrainConfig(global_batch_size=8, micro_batch_size=2, sequence_length=64),
        parallel=ParallelConfig(tensor=2),
    )
    dry = DryRun(None, 2, messages, messages, messages, ends or {})  # type: ignore[arg-type]
    with mock.patch.dict(GPUS, h100=replace(GPUS["h100"], bf16=peak)):
        return step_time(as_planned(config, PLANS), models, 4, dry, PlannedPhase("main", 10, 8, 64), PLANS)


def test_messages_within_a_host_and_between_hosts():
    parallel, run = ParallelConfig(tensor=8), RunConfig()
    assert axis_bandwidth("tp", 8, parallel, 512, run) == 300
    assert axis_bandwidth("dp", 64, parallel, 512, run) == 40  # the axis has one rank on each host
    assert axis_bandwidth("dp", 128, ParallelConfig(tensor=4), 512, run) == 80
    assert axis_bandwidth("dp", 512, ParallelConfig(), 512, run) == 300  # eight adapters are faster than the links
    assert axis_bandwidth("dp", 8, ParallelConfig(expert=8), 64, run) == 40
    assert axis_bandwidth("dp_ep", 64, ParallelConfig(expert=8), 64, run) == 300
    assert axis_bandwidth("replicate", 2, ParallelConfig(replicate=2), 16, run) == 40
    assert axis_bandwidth("tp", 8, ParallelConfig(tensor=8, gpu="b200"), 512, run) == 600


def test_work_beside_a_message_hides_a_share_of_it():
    others = replace(BESIDE_GEMMS, beside="others")
    assert [hidden_share(message) for message in (TOKENS, others, BESIDE_GEMMS, WEIGHTS)] == [0, 0.15, 0.95, 0.95]
    assert hidden_share(replace(BESIDE_GEMMS, operation="all-to-all", group="ep")) == 0.3
    found = times({TOKENS: 1, BESIDE_GEMMS: 1, WEIGHTS: 2}, ends={WEIGHTS: 1})
    # Nothing runs beside the first all-gather of the step.
    assert found.exposed == pytest.approx(2 * 0.2 + 0.05 * 2 * 0.2 + 0.1 + 0.05 * 3 * 0.1, rel=1e-3)
    assert found.links == pytest.approx(2 * (0.2 + 0.2), rel=1e-3)  # weights take 4 x 0.1 s on their own axis


def test_the_largest_bound_is_the_time_of_the_step():
    flops = training_flops_per_token(MODEL, 64) * 8 * 64
    peak = flops / 4 / 1e12  # one second on each rank at a utilization of one
    found = times({TOKENS: 1}, peak=peak)
    assert found.compute == pytest.approx(1.07 / 0.55)
    assert found.seconds == pytest.approx(found.compute + 0.4, rel=1e-3) and found.bound == "compute"
    assert found.host == pytest.approx(2e-3)  # two micro-batches, replayed
    assert times({TOKENS: 6}, peak=peak).bound == "messages"
    assert times({BESIDE_GEMMS: 6}, peak=peak).seconds == pytest.approx(2.4, rel=1e-3)
    assert times({BESIDE_GEMMS: 6}, peak=peak).bound == "messages"
    found = times({}, peak=1e6)
    assert (found.bound, found.seconds) == ("host", found.host)


def test_time_of_the_host_with_cuda_graphs():
    def host(config: Config, batch: int, plans: tuple[Plan, Plan | None] = PLANS) -> float:
        return step_time(config, models, 4, EMPTY, PlannedPhase("main", 10, batch, 64), plans).host

    train = TrainConfig(global_batch_size=8, micro_batch_size=2, sequence_length=64)
    graphs = as_planned(Config(model=MODEL, train=train, parallel=ParallelConfig(tensor=4)), PLANS)
    assert host(graphs, 8) == pytest.approx(4e-3)  # all four micro-batches are replayed
    ranks = replace(graphs, parallel=ParallelConfig(), train=replace(train, global_batch_size=64))
    assert host(ranks, 64) == pytest.approx(8e-3)
    eager = replace(ranks, parallel=ParallelConfig(reshard=True))
    linears = Plan(tuple(PlannedLinear(shape, NVFP4, "") for shape in models.linear_shapes(MODEL)))
    assert host(eager, 64, (linears, None)) == pytest.approx(8 * 4 * 3.0e-3)  # each with four linears
    native = replace(ranks.precision, backend="transformer_engine")
    native = replace(ranks, precision=native, parallel=ParallelConfig(gpu="b200"))
    native_plans = (Plan(linears.rows[:1]), None)
    assert host(native, 64, native_plans) == pytest.approx(8 * 1.02e-3)  # plus the draws for dy of dgrad and of wgrad


def test_recomputation_takes_as_long_as_measured():
    """The measurements are of the 1.2B in BF16 on one H200 (docs/measurements.md)."""
    seconds, host = dict[str, float](), dict[str, float]()
    for what, measured in {"none": 500, "selective": 509, "block": 620}.items():
        config = composed("model=transformer_1_2b", "precision=bf16", f"train.activation_checkpointing={what}")
        phase = PlannedPhase("main", 10, config.train.global_batch_size, 8192)
        plans = plans_of(config)
        planned = as_planned(replace(config, train=replace(config.train, cuda_graphs="false")), plans)
        found = step_time(planned, models, 1, EMPTY, phase, plans)
        seconds[what], host[what] = found.compute, found.host
        assert host[what] / host["none"] == pytest.approx(seconds[what] / seconds["none"])
        assert seconds[what] / seconds["none"] == pytest.approx(measured / 500, rel=0.03)
