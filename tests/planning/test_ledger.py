"""The ledger of a dry run, against known sizes."""

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_fp4.planning.dry_run import Ledger, fake_ranks, planned_gpu
from megatron_fp4.precision.backend import OperandRequest
from megatron_fp4.precision.messages import start_all_gather
from megatron_fp4.precision.recipe import Operand
from megatron_fp4.quantization.rounding import WHOLE

KIB = 1024


def test_bytes_alive_and_their_peak():
    with FakeTensorMode(), Ledger(lambda: 0) as ledger:
        a = torch.empty(256, 1024)  # 1 MiB
        b = torch.empty(100, dtype=torch.bfloat16)  # 200 bytes, in units of 512
        view = a.t()[3:]
        del a  # the view keeps its memory
        assert ledger.live_bytes == 1024 * KIB + 512
        del view
        assert (ledger.live_bytes, ledger.peak_bytes) == (512, 1024 * KIB + 512)
        b.untyped_storage().resize_(0)  # freed and allocated again, as FSDP does
        assert ledger.live_bytes == 0
        b.untyped_storage().resize_(4096)
        assert ledger.live_bytes == 4096


def test_the_ledger_records_what_runs_beside_a_message():
    products = 0
    with fake_ranks(2), FakeTensorMode(), Ledger(lambda: 0, lambda: products) as ledger:
        x = torch.empty(4, 1024)
        early = start_all_gather(x, dist.group.WORLD)
        start_all_gather(x, dist.group.WORLD).wait()
        pending = start_all_gather(x, dist.group.WORLD)
        _ = x + 1
        pending.wait()
        products += 1
        early.wait()  # it was sent before the others
        dist.all_reduce(x)
    beside = ["GEMM", "nothing", "others", "nothing"]
    assert [message.beside for _, message in ledger.sent] == beside


# codes: bytes of an element. decoded: bytes per element that a GEMM decodes.
@pytest.mark.parametrize(
    "backend, form, block, power_of_two, codes, decoded",
    [
        ("emulated", "mxfp8", (1, 32), False, 33 / 32, 2),
        ("transformer_engine", "nvfp4", (1, 16), False, 9 / 16, 0),
        ("transformer_engine", "mxfp8", (1, 32), False, 33 / 32, 0),
        ("transformer_engine", "fp8", (1, 128), False, 1 + 4 / 128, 0),
        ("transformer_engine", "fp8", (1, 128), True, 1 + 4 / 128, 0),
        ("torch", "nvfp4", (1, 16), False, 9 / 16, 0),
        ("torch", "mxfp8", (1, 32), False, 33 / 32, 0),
    ],
)
def test_operands_and_products_of_a_backend(backend, form, block, power_of_two, codes, decoded):
    operand = Operand(form, block, power_of_two_scales=power_of_two)
    request = OperandRequest(operand, keep=True)
    with planned_gpu(backend) as planned, FakeTensorMode(), Ledger(lambda: 0) as ledger:
        a, b = (torch.empty(size, 1024, dtype=torch.bfloat16) for size in (512, 256))
        before = ledger.live_bytes
        made = [planned.operands(x.t().contiguous(), WHOLE, None, request)[1]() for x in (a, b)]
        elements = a.numel() + b.numel()
        assert ledger.live_bytes - before == pytest.approx(codes * elements, abs=16 * KIB)
        before = ledger.live_bytes
        ledger.restart_peak()
        product = planned.gemm(*made, torch.bfloat16)
        assert product.shape == (512, 256)
        assert ledger.peak_bytes - before == product.nbytes + decoded * elements
    assert planned.num_products == 1
