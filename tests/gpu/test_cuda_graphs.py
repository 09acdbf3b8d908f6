"""CUDA graphs of micro-batches give the bits of eager steps, also after a switch of precision, a validation and a load
of weights; on one rank, sharded over one and two ranks on one GPU, and with native backends. Not run: NVFP4 and MXFP8
of the native backends, which need Blackwell.
"""

import importlib.util
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fp4.config.schema import Config
from megatron_fp4.measure.diagnostics import Probe
from megatron_fp4.parallel.data_parallel import ShardedModel, gathered_parameters
from megatron_fp4.parallel.mesh import ParallelMesh, build_mesh
from megatron_fp4.precision import torch_scaled_mm
from megatron_fp4.precision.backend import Backend, MakeOperand, OperandRequest
from megatron_fp4.precision.emulated import EmulatedBackend
from megatron_fp4.precision.fp32_gradients import local_part
from megatron_fp4.precision.rng import StepState
from megatron_fp4.precision.torch_scaled_mm import TorchBackend
from megatron_fp4.precision.transformer_engine import _seeded
from megatron_fp4.quantization.rounding import Place
from megatron_fp4.training import build
from megatron_fp4.training.cuda_graphs import EAGER_STEPS, MicroBatchGraphs
from megatron_fp4.training.optimizer import build_optimizer
from models import provider as models
from pretrain import configure
from tests.quantization import cublas
from tests.training.harness import ToyBatch, launch, train_step

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
HAS_TE = CAPABILITY >= (9, 0) and importlib.util.find_spec("transformer_engine") is not None
if HAS_TE:
    # Before any test: after PyTorch has used its cuDNN, the import fails (libcudnn_cnn.so.9: undefined symbol).
    importlib.import_module("transformer_engine.pytorch")
STEPS, MICRO_BATCHES = 9, 4  # of a rank
SMALL = [
    *("model.pattern=-*-*", "train.micro_batch_size=2", "train.sequence_length=128", "train.global_batch_size=8"),
    *("model.nvfp4_bf16_blocks.last=1", "train.steps=9", "precision.switch.when=6"),
]
EAGER = {first + step for first in (0, 6) for step in range(EAGER_STEPS)}  # 6: the switch
REPLAYED = [step not in EAGER for step in range(STEPS)]


class Drawing(EmulatedBackend):
    """Draws from CUDA's default generator, as Transformer Engine does."""

    def operands(
        self, x: Tensor, place: Place, as_stored: OperandRequest | None, transposed: OperandRequest | None
    ) -> tuple[MakeOperand | None, MakeOperand | None]:
        for request, drawn_at in ((as_stored, place), (transposed, place.t())):
            if request is not None and request.key is not None:
                with _seeded(request.key.at(drawn_at), x.device):
                    x = x + torch.rand_like(x) * x.abs().amax() / 8
        return super().operands(x, place, as_stored, transposed)


@pytest.fixture(scope="module")
def mesh(alone: None) -> Iterator[ParallelMesh]:
    yield mesh_of_all()
    torch.use_deterministic_algorithms(False)


def mesh_of_all() -> ParallelMesh:
    build.set_determinism(True)  # mamba-ssm's kernels use the tuning on disk, if there is one
    return build_mesh(configure([]).parallel, torch.device("cuda", 0))


def batches(config: Config, step: int, mesh: ParallelMesh) -> list[ToyBatch]:
    count = MICRO_BATCHES * mesh.batch.size
    shape = (count, 2, config.train.micro_batch_size, config.train.sequence_length)
    draws = torch.randint(0, config.model.vocab_size, shape, generator=torch.Generator().manual_seed(step))
    return [ToyBatch(index, *pair) for index, pair in enumerate(draws)][mesh.batch.rank :: mesh.batch.size]


def trained(
    mesh: ParallelMesh, graphs: bool, overrides: list[str], backend: Backend | None = None, watched: int | None = None
) -> tuple[list[Any], list[Tensor], list[bool]]:
    """Losses and norms by step, the last weights, and which steps were replayed. watched: a step whose linears have a
    probe, for which values are gathered instead of codes."""
    config = configure([*SMALL, *overrides])
    step_state, backend = StepState(seed=1), backend or build.backend_of(config, models).open()
    execution = build.execution_of(config, models)
    model, controller = build.sharded_model(config, models, mesh, step_state, execution, backend)
    build.initialize(model, config, models, mesh)
    optimizer = build_optimizer(model, config.optimizer)
    captured = None
    if graphs:
        captured = MicroBatchGraphs(model, mesh, controller.linears, required=True, warn=print)
    found, replayed = [], []
    for step in range(STEPS):
        controller.before_step(step, lambda: 0.0)
        with Probe().attached(controller.linears) if step == watched else nullcontext():
            result = train_step(
                *(model, optimizer, batches(config, step, mesh), mesh, step_state),
                **{"step": step, "lr": 1e-2, "clip_norm": 1.0, "graphs": captured},
            )
        replayed.append(captured is not None and captured.captured)
        found.append((result.loss, result.grad_norm))
        if step == 3:  # a validation quantizes weights itself
            with torch.no_grad(), gathered_parameters(model):
                (batch, *_) = batches(config, 100, mesh)
                found.append(model(batch.tokens.to(mesh.device), batch.targets.to(mesh.device)).item())
        if step == 4:  # new weights in the same memory, as after a load
            with torch.no_grad():
                for parameter in model.parameters():
                    local_part(parameter).mul_(0.5)
            step_state.weights_version += 1
    return found, [local_part(parameter).clone() for parameter in model.parameters()], replayed


def check(mesh: ParallelMesh, overrides: list[str], backend: Backend | None = None, watched: int | None = None) -> None:
    expected, weights, _ = trained(mesh, False, overrides, backend, watched)
    found, same, replayed = trained(mesh, True, overrides, backend, watched)
    assert found == expected
    assert all(torch.equal(a, b) for a, b in zip(weights, same, strict=True))
    assert replayed == REPLAYED


TE_FP8 = ["precision=fp8_block", "precision.backend=transformer_engine"]
NEEDS_TE = pytest.mark.skipif(not HAS_TE, reason="needs Transformer Engine and compute capability 9.0 or more")


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(["precision=nvfp4"], id="nvfp4"),
        pytest.param(
            ["precision=mxfp4", "parallel.reshard=true", "train.activation_checkpointing=selective"],
            id="mxfp4, reshard, selective",
        ),
        pytest.param(["precision=nvfp4", "model.pattern=M-*M"], id="Mamba-2"),
        pytest.param(["precision=nvfp4", "model.pattern=EM*E/*E"], id="experts, multi-token prediction"),
        pytest.param(TE_FP8, id="Transformer Engine's FP8", marks=NEEDS_TE),
    ],
)
def test_graphs_give_the_bits_of_eager_steps(mesh: ParallelMesh, overrides: list[str]) -> None:
    check(mesh, overrides)


@pytest.mark.parametrize("precision", ["nvfp4", "mxfp8"])
def test_the_torch_backend_with_its_gemms_replaced(mesh: ParallelMesh, precision: str, monkeypatch) -> None:
    monkeypatch.setattr(torch_scaled_mm, "scaled_mm", cublas.scaled_mm)
    check(mesh, [f"precision={precision}"], TorchBackend())


@pytest.mark.parametrize("recomputed", ["none", "block"])
def test_draws_from_the_default_generator(mesh: ParallelMesh, recomputed: str) -> None:
    """For gradients, and for activations, whose draws recomputation repeats."""
    drawn = ["precision=nvfp4", "precision.fprop.activation.rounding=stochastic"]
    check(mesh, [*drawn, f"train.activation_checkpointing={recomputed}"], Drawing())


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(["precision=nvfp4"], id="nvfp4"),
        pytest.param(["precision=nvfp4", "model.pattern=M-*M"], id="Mamba-2"),
        pytest.param(TE_FP8, id="Transformer Engine's FP8", marks=NEEDS_TE),
    ],
)
def test_sharded_over_one_rank(mesh: ParallelMesh, overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def shard(model: Any, mesh: ParallelMesh, *, fp32_units: Any, compute_dtype: torch.dtype, **_: Any) -> None:
        model._gathered_model = ShardedModel(model, mesh, fp32_units, compute_dtype)

    monkeypatch.setattr(build, "apply_data_parallel", shard)
    check(mesh, overrides)


def _on_a_rank(rank: int, overrides: list[str]) -> None:
    torch.cuda.set_device(0)
    check(mesh_of_all(), overrides, watched=3)


@pytest.mark.parametrize("precision", ["nvfp4", "mxfp4"])
def test_sharded_over_two_ranks_of_one_gpu(precision: str) -> None:
    """Their collectives use gloo. Weights are gathered as codes, and after the switch in BF16."""
    launch(_on_a_rank, 2, [f"precision={precision}"], seconds=300)
