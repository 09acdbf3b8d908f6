"""The ledger of a dry run, against known sizes."""

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_fp4.planning.dry_run import Ledger, fake_ranks
from megatron_fp4.precision.messages import start_all_gather

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
        b.untyped_storage().resize_(0)  # freed and allocated again, as between two passes
        assert ledger.live_bytes == 0
        b.untyped_storage().resize_(4096)
        assert ledger.live_bytes == 4096


def test_the_ledger_records_what_runs_beside_a_message():
    with fake_ranks(2), FakeTensorMode(), Ledger(lambda: 0) as ledger:
        x = torch.empty(4, 1024)
        early = start_all_gather(x, dist.group.WORLD)
        start_all_gather(x, dist.group.WORLD).wait()
        pending = start_all_gather(x, dist.group.WORLD)
        _ = x + 1
        pending.wait()
        ledger.num_products += 1
        early.wait()  # it was sent before the others
        dist.all_reduce(x)
    beside = ["GEMM", "nothing", "others", "nothing"]
    assert [message.beside for _, message in ledger.sent] == beside
