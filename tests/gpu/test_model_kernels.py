"""The fused path is close to the PyTorch path on a GPU: each part, and a whole model, with and without documents."""

import dataclasses
import importlib.util
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fp4.config.schema import Config, ModelConfig, ParallelConfig, TrainConfig
from megatron_fp4.parallel.mesh import ParallelMesh, build_mesh
from megatron_fp4.precision.recipe import BF16
from megatron_fp4.precision.rng import StepState
from models.attention import attend, attend_fused, split_heads
from models.execution import Execution, torch_compile
from models.hybrid import HybridModel
from models.mamba2 import causal_conv_silu, fused_conv_silu, gated_rms_norm
from models.mixer import rms_norm
from models.mlp import _squared_relu, squared_relu
from models.pattern import choose_execution
from models.positions import Documents, rope_tables
from models.ssd import ScanInputs, fused_scan, plain_scan
from tests.distributed.hybrid import controlled_model
from tests.models.builders import relative_error
from tests.models.test_documents import spans

MISSING = [name for name in ("mamba_ssm", "causal_conv1d") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(bool(MISSING), reason=f"needs the extra `cuda`: {', '.join(MISSING)}"),
]

_ATTENTION = {"num_query_heads": 8, "num_kv_heads": 2, "head_dim": 64, "rope": True}
_MAMBA = {"mamba_num_heads": 8, "mamba_head_dim": 64, "mamba_num_groups": 2, "mamba_state_dim": 128}
CONFIG = ModelConfig(pattern="M-*-M-", vocab_size=5000, hidden_dim=256, ffn_dim=512, **_ATTENTION, **_MAMBA)
COMPILED = Execution(compile=torch_compile)


@pytest.fixture(scope="module")
def mesh(alone: None) -> ParallelMesh:
    return build_mesh(ParallelConfig(), torch.device("cuda", 0))


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch.use_deterministic_algorithms(False)


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(dtype).requires_grad_()


def compare(ours, reference, tensors: list[Tensor], tolerance: float = 1e-2) -> None:
    """Compare values and gradients of two functions of the same tensors; the reference gets FP32 copies."""
    copies = [t.detach().float().requires_grad_(t.requires_grad) for t in tensors]
    made, expected = ours(*tensors), reference(*copies)
    made, expected = (y if isinstance(y, tuple) else (y,) for y in (made, expected))
    gradients = [torch.randn_like(y) for y in expected]
    torch.autograd.backward(made, [g.to(y.dtype) for g, y in zip(gradients, made, strict=True)])
    torch.autograd.backward(expected, gradients)
    for a, b in zip(made, expected, strict=True):
        assert a.dtype == torch.bfloat16 and relative_error(a, b) < tolerance
    for index, (a, b) in enumerate(zip(tensors, copies, strict=True)):
        if b.grad is not None:
            assert a.grad is not None and relative_error(a.grad, b.grad) < tolerance, index


# Chunks of the scan have 128 tokens, tiles of attention 64 or 128. Rows have 384 tokens, a multiple of these, or 257.
LENGTHS = [[100, 28, 1, 1, 254], [384], [127, 1, 128, 128], [3] * 128]
ODD = [[1, 128, 128], [127, 130], [256, 1]]


def numbers_of(lengths: list[list[int]]) -> Tensor:
    rows = [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths]
    return torch.stack(rows).to("cuda", torch.int32)


def scan_tensors(batch: int, length: int) -> list[Tensor]:
    heads, groups, width, state = 8, 2, 64, 128
    decay = (-torch.rand(heads, device="cuda") * 4 - 0.5).requires_grad_()
    x, dt = randn(batch, length, heads, width), randn(batch, length, heads)
    b, c = (randn(batch, length, groups, state, scale=0.3) for _ in range(2))
    return [x, dt, decay, b, c, *(randn(heads, dtype=torch.float32) for _ in range(2))]


@pytest.mark.parametrize("lengths", [[[200]] * 2, LENGTHS, ODD], ids=["rows", "documents", "odd"])
def test_convolution_and_scan(lengths: list[list[int]]) -> None:
    numbers = numbers_of(lengths)
    x, weight, bias = randn(*numbers.shape, 64), randn(64, 4, dtype=torch.float32), randn(64, dtype=torch.float32)
    for documents in (None, numbers):
        ours, plain = (lambda *t, f=f: f(*t, documents) for f in (fused_conv_silu, causal_conv_silu))  # noqa: B023
        compare(ours, plain, [t.detach().requires_grad_() for t in (x, weight, bias)])
        ours, plain = (lambda *t, f=f: f(ScanInputs(*t), 128, documents) for f in (fused_scan, plain_scan))  # noqa: B023
        compare(ours, plain, scan_tensors(*numbers.shape), tolerance=2e-2)


@pytest.mark.parametrize("function", [attend, attend_fused])
@pytest.mark.parametrize(
    ("lengths", "dim", "deterministic"), [(None, 64, True), (LENGTHS, 64, False), (ODD, 128, True), (ODD, 36, True)]
)
def test_attention(function: Any, deterministic: bool, lengths: list[list[int]] | None, dim: int) -> None:
    documents = None if lengths is None else Documents(numbers_of(lengths))
    shape = (2, 2048) if documents is None else documents.numbers.shape
    tensors = [randn(*shape, heads, dim) for heads in (8, 2, 2)]
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    compare(lambda *t: function(*t, documents), lambda *t: attend(*t, documents), tensors, 2e-2)  # type: ignore[call-arg]
    if deterministic:
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        dy = torch.randn_like(tensors[0])
        runs = [torch.autograd.grad(function(*tensors, documents), tensors, dy) for _ in range(8)]
        assert all(torch.equal(a, b) for run in runs for a, b in zip(run, runs[0], strict=True))


def test_compiled_functions() -> None:
    tables = rope_tables(48, 64, 10000.0, torch.device("cuda"))
    y, z = randn(2, 48, 8, 32), randn(2, 48, 4, 96).detach()[..., :64].requires_grad_()
    weight = randn(256, dtype=torch.float32)
    for function, tensors, settings in (
        (rms_norm, [randn(96, 256), weight], (1e-5,)),
        (gated_rms_norm, [y, z, weight.detach().requires_grad_()], (1e-5,)),
    ):
        ours, plain = (lambda *t, f=f: f(*t, *settings) for f in (COMPILED.pure(function), function))  # noqa: B023
        compare(ours, plain, tensors)
    q_k_v = (("q", 256), ("k", 64), ("v", 64))
    for layout in ((q_k_v,), (q_k_v[:1], q_k_v[1:])):
        settings = layout, 2, 48, 64, *tables
        ours, plain = (lambda *t, f=f: f(*settings, *t) for f in (COMPILED.pure(split_heads), split_heads))  # noqa: B023
        compare(ours, plain, [randn(96, 2 * sum(rows for _, rows in sections)) for sections in layout])
    compare(COMPILED.pure(_squared_relu), squared_relu, [randn(96, 256)])


def model_of(execution: Execution, mesh: ParallelMesh, *, reshard: bool = False) -> HybridModel:
    return controlled_model(mesh, BF16, StepState(seed=0), CONFIG, torch.bfloat16, reshard, execution)[0]


def fused(**changes: str) -> Execution:
    train = dataclasses.replace(TrainConfig(kernels="fused"), **changes)
    execution = choose_execution(Config(model=CONFIG, train=train), "cuda")
    assert execution.kernels.keys() == {"scan", "conv", "attention"} and execution.compiled
    return execution


def text() -> tuple[Tensor, Tensor]:
    """Tokens that a model can learn: each is the one before plus 3 (modulo 64), with noise."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randint(0, 64, (4, 1), generator=generator)
    noisy = [(start * 7 + 3 * i) % 64 + torch.randint(0, 4, (4, 1), generator=generator) for i in range(257)]
    tokens = torch.cat(noisy, 1)
    return tokens[:, :-1].cuda(), tokens[:, 1:].cuda()


def test_every_gradient_of_the_model(mesh: ParallelMesh) -> None:
    reference, model = model_of(Execution(), mesh), model_of(fused(), mesh, reshard=True)
    called = []
    for name, module in model.linears():
        module.register_forward_hook(lambda *_, name=name: called.append(name))
    for m in (reference, model):
        m(*text()).backward()
    assert called == [name for name, _ in model.linears()]
    for (name, a), b in zip(model.named_parameters(), reference.parameters(), strict=True):
        error = relative_error(a.grad.to_local(), b.grad.to_local())
        assert a.grad.dtype == torch.float32 and error < 6e-2, (name, error)


@pytest.mark.parametrize(("recompute", "reshard"), [("block", True), ("selective", False)])
def test_recomputation_changes_no_bit(mesh: ParallelMesh, recompute: str, reshard: bool) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        models = [model_of(fused(activation_checkpointing=how), mesh, reshard=reshard) for how in ("none", recompute)]
        for model in models:
            model(*text()).backward()
    finally:
        torch.use_deterministic_algorithms(False)
    for (name, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a.grad.to_local(), b.grad.to_local()), name


def test_fused_logits_of_a_document_are_those_of_the_document_alone(mesh) -> None:
    model, lengths, tokens = model_of(fused(), mesh), [[100, 156], [28, 228]], text()[0][:2]
    with torch.no_grad():
        logits, joined = model(tokens, documents=numbers_of(lengths)), model(tokens)
        for row, span in spans(lengths):
            alone = model(tokens[row : row + 1, span])
            assert relative_error(logits[row : row + 1, span], alone) < 2e-2
            if span.start:  # without masks, earlier documents change the logits (little in an untrained model)
                assert relative_error(joined[row : row + 1, span], alone) > 6e-2


def test_with_the_number_of_documents_the_host_never_waits(mesh) -> None:
    # FlashAttention, which computes attention if the Triton kernels do not support a model.
    execution = fused()
    execution = dataclasses.replace(execution, kernels={**execution.kernels, "attention": attend_fused})
    model, (tokens, targets) = model_of(execution, mesh), text()
    numbers = numbers_of([[100, 28, 1, 127], [256], [128, 128], [1] * 256])
    assert int((numbers[:, -1] + 1).sum()) == 4 + 1 + 2 + 256
    waits = []
    for options in ({}, {"documents": numbers, "num_documents": 263}, {"documents": numbers}):
        model(tokens, targets, **options).backward()  # compiles, tunes
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                model(tokens, targets, **options)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        waits.append(sum("synchroniz" in str(warning.message) for warning in caught))
    _, with_number, without_number = waits
    assert with_number == 0 < without_number, waits
