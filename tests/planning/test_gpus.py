"""Planned times in 4 bits, against published measurements on Blackwell."""

from typing import get_args, get_type_hints

import pytest

import pretrain
from megatron_fp4.config.schema import ConfigError, ParallelConfig
from megatron_fp4.planning.gpus import GPUS, seconds_of_a_token
from megatron_fp4.planning.needs import as_planned
from megatron_fp4.precision.plan import LinearShape, Plan, PlannedLinear
from megatron_fp4.precision.recipe import BF16, recipe_from_config
from models import provider as models
from tests.composing import composed, plans_of


def llama(name: str, sizes: tuple[int, ...], in_bf16: int) -> tuple[Plan, float]:
    """The plan of a Llama 3 with its last blocks in BF16, and its training FLOPs per token at sequences of 8,192."""
    hidden, ffn, blocks, heads = sizes
    recipe = recipe_from_config(composed("model=transformer_60m", f"precision={name}").precision)
    shapes = [(hidden, hidden + 16 * hidden // heads), (hidden, hidden), (hidden, 2 * ffn), (ffn, hidden)]
    rows = [
        PlannedLinear(LinearShape("", block, *shape), BF16 if block >= blocks - in_bf16 else recipe, "")
        for block in range(blocks)
        for shape in shapes
    ]
    plan = Plan(tuple(rows))
    return plan, 3 * (plan.linear_flops_per_token + blocks * 2 * 8192 * hidden + 2 * hidden * 128256)


SMALL, MIDDLE, LARGE = (4096, 14336, 32, 32), (8192, 28672, 80, 64), (16384, 53248, 126, 128)


@pytest.mark.parametrize(
    ("gpu", "sizes", "in_bf16", "base", "mfu", "measured", "planned"),
    [
        ("b200", SMALL, 4, "bf16", 0.5, 1.37, 1.31),  # torchtitan, 8B
        ("b200", SMALL, 4, "mxfp8", 0.5, 1.07, 1.07),
        ("gb200", SMALL, 0, "bf16", 0.5, 27622 / 18812, 1.36),  # arXiv 2610.00053, 8B
        ("gb200", SMALL, 4, "bf16", 0.5, 27077.5 / 18812, 1.30),
        ("gb300", MIDDLE, 0, "mxfp8", 0.609, 1.50, 1.35),  # Megatron Bridge, 70B
        ("gb300", LARGE, 0, "mxfp8", 0.637, 1.48, 1.44),  # and 405B
    ],
)
def test_planned_speedups_are_near_published_ones(
    gpu: str, sizes: tuple[int, ...], in_bf16: int, base: str, mfu: float, measured: float, planned: float
) -> None:
    """A plan promises no more than was measured. How much less is in docs/research.md, Planned times."""
    time, nvfp4 = (
        seconds_of_a_token(GPUS[gpu], *llama(name, sizes, in_bf16), mfu, emulated=()) for name in (base, "nvfp4")
    )
    assert 0.89 * measured < time / nvfp4 < measured
    assert time / nvfp4 == pytest.approx(planned, abs=0.006)


@pytest.mark.parametrize(("sizes", "mfu", "published"), [(MIDDLE, 0.609, 4864), (LARGE, 0.637, 960)])
def test_the_mfu_is_what_published_mxfp8_reaches(sizes: tuple[int, ...], mfu: float, published: float) -> None:
    """published: Megatron Bridge's tokens/s of a GB300 in MXFP8."""
    seconds = seconds_of_a_token(GPUS["gb300"], *llama("mxfp8", sizes, 0), mfu, emulated=())
    assert 1 / seconds == pytest.approx(published, rel=0.01)


def test_the_schema_lists_these_gpus() -> None:
    assert set(get_args(get_args(get_type_hints(ParallelConfig)["gpu"])[0])) == set(GPUS)


@pytest.mark.slow(seconds=14)
def test_a_run_that_does_not_fit_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    large = ["train.micro_batch_size=512", "train.global_batch_size=512", "train.sequence_length=8192", "run.dry=true"]
    assert pretrain.main([*large, "parallel.gpu=h100"]) == 2
    printed = capsys.readouterr()
    assert "Memory of a rank" in printed.out
    said, _, remedy = printed.err.rstrip().partition("GiB, parallel.gpu=h100 has 79; set ")
    remedy, _, needed = remedy.partition(" (")
    assert said and remedy == "train.activation_checkpointing=block"  # what saves nothing on one rank is not named
    given = [o for o in large if o.partition("=")[0] not in remedy]
    assert pretrain.main([*given, "parallel.gpu=h100", *remedy.split()]) == 0
    assert float(needed.split()[0]) < 79
    # What is in force is not offered; if nothing helps, the line says so.
    huge = ["model.vocab_size=1e8", "train.global_batch_size=1", "train.micro_batch_size=1", "run.dry=true"]
    assert pretrain.main([*huge, "parallel.gpu=h100"]) == 2
    assert "has 79; use more ranks, a GPU with more memory, or a smaller model" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "8")
    experts = ["model=nemotron_3_nano", "model.pattern=E", "model.moe_num_experts=2048", "precision=bf16"]
    experts += ["precision.switch.when=never", "train.global_batch_size=32", "run.dry=true", "parallel.gpu=b200"]
    assert pretrain.main(experts) == 2
    assert "GiB, parallel.gpu=b200 has 177; set parallel.expert=8 (" in capsys.readouterr().err


def test_the_planned_gpu_and_backend() -> None:
    """Without parallel.gpu, FP4 on a native backend is planned for a B200. A GPU without FP4 is refused."""
    for given, gpu, backend in (
        ([], "h100", "emulated"),
        (["parallel.gpu=h200"], "h200", "emulated"),
        (["parallel.gpu=b200"], "b200", "transformer_engine"),
        (["parallel.gpu=b200", "precision=bf16"], "b200", "emulated"),
        (["parallel.gpu=b200", "precision=mxfp4"], "b200", "emulated"),  # transformer_engine has no mxfp4
        (["precision.backend=torch"], "b200", "torch"),
        (["precision.backend=transformer_engine"], "b200", "transformer_engine"),
        (["precision.backend=transformer_engine", "precision=mxfp8"], "h100", "transformer_engine"),
    ):
        config = composed(*given)
        planned = as_planned(config, plans_of(config))
        assert (planned.parallel.gpu, planned.precision.backend) == (gpu, backend)
    config = composed("precision.backend=transformer_engine", "parallel.gpu=h200")
    with pytest.raises(ConfigError, match="has no tensor cores for 4 bits"):
        as_planned(config, plans_of(config))


def test_four_over_six_of_activations_costs_its_quantizer() -> None:
    def time(precision: str) -> float:
        config = composed("model=nemotron_h_8b", f"precision={precision}")
        flops = models.training_flops_per_token(config.model, config.train.sequence_length)
        return seconds_of_a_token(GPUS["b200"], plans_of(config)[0], flops, 0.5, emulated=())

    assert time("nvfp4") < time("nvfp4_4over6_1x16") < time("bf16")
    assert time("nvfp4_all_the_way") < time("nvfp4")
