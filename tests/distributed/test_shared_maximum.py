"""The self-test of ranks that share a tensor's maximum notices a rank that scales by its own maximum."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_fp4.precision import verify
from megatron_fp4.precision.emulated import EmulatedBackend
from megatron_fp4.precision.transformer_engine import TransformerEngineBackend
from megatron_fp4.precision.verify import Case, SelfTestError, check
from megatron_fp4.quantization.rounding import WHOLE
from tests.precision import te_stand_in
from tests.precision.reference import NVFP4
from tests.training.harness import launch

pytestmark = pytest.mark.slow

# The operands that are sharded if ranks share the input features (in_shards) or the output features (out_shards).
SHARED = {
    "in_shards": ["fprop_activation", "wgrad_activation", "fprop_weight", "dgrad_weight"],
    "out_shards": ["fprop_weight", "dgrad_weight", "dgrad_gradient", "wgrad_gradient"],
}
CPU = torch.device("cpu")


class OwnMaximum(EmulatedBackend):
    """A backend in which each rank scales by its own maximum."""

    def operands(self, x: Any, place: Any, as_stored: Any, transposed: Any) -> Any:
        return super().operands(x, WHOLE, as_stored, transposed)


def shared_findings(rank: int, shards: str, wrong: str) -> list[tuple[str, str]]:
    """The comparisons over ranks and their faults. wrong: the backend whose ranks scale by their own maxima."""
    case = Case(128, 128, 128, 1, NVFP4, **{shards: dist.group.WORLD})
    with te_stand_in.installed(own_maximum=wrong == "native"):
        backend = OwnMaximum() if wrong == "emulated" else TransformerEngineBackend()
        found = [(f.what, f.fault) for f in check(backend, case, CPU)]
        if wrong:
            with pytest.raises(SelfTestError, match="of all ranks" if rank else "not on this one"):
                verify.require(backend, [case], CPU)
    others = [what for what, fault in found if fault and "all ranks" not in what]
    assert not others, found
    return [(what, fault) for what, fault in found if "all ranks" in what]


@pytest.mark.parametrize("shards", SHARED)
@pytest.mark.parametrize("wrong", ["", "native", "emulated"])
def test_every_operand_is_scaled_by_the_largest_maximum(shards: str, wrong: str) -> None:
    first, second = launch(shared_findings, 2, shards, wrong)
    names = [f"{name} maximum of all ranks" for name in SHARED[shards]]
    assert [what for what, _ in first] == [what for what, _ in second] == names
    # Rank 0 has the larger values.
    assert not any(fault for _, fault in first)
    assert all(bool(fault) == bool(wrong) for _, fault in second), second
