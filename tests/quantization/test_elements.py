import numpy as np
import pytest
import torch

from megatron_fp4.quantization.rounding import (
    RoundingKey,
    e2m1_codes,
    round_e2m1_nearest,
    round_e2m1_stochastic,
    rounding_draws,
    to_e4m3,
    to_ue8m0_up,
    ue8m0_values,
)
from tests.quantization import oracle

GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def around(points: np.ndarray) -> torch.Tensor:
    """Each point, its single-precision neighbours on both sides, and all negatives."""
    points = np.asarray(points, dtype=np.float32)
    near = np.concatenate([points, np.nextafter(points, np.float32(1e30)), np.nextafter(points, np.float32(-1e30))])
    return torch.from_numpy(np.concatenate([near, -near]))


def test_nearest_is_the_nearest_entry_of_the_table():
    rng = np.random.default_rng(0)
    critical = around(np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, *GRID[1:7]]))
    tiny = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1e-38, -1e-38, 5.9999995, -5.9999995, 6.0, -6.0])
    spread = torch.from_numpy(rng.uniform(-6, 6, 20000).astype(np.float32))
    x = torch.cat([critical, tiny, spread])
    codes = e2m1_codes(round_e2m1_nearest(x), x < 0)
    assert np.array_equal(codes.numpy(), oracle.e2m1(x.numpy()))


def test_e4m3_rounds_to_nearest_even_and_saturates():
    points = np.concatenate([oracle.E4M3, (oracle.E4M3[1:] + oracle.E4M3[:-1]) / 2])
    x = around(points[points > 0]).clamp(-448, 448)
    assert np.array_equal(to_e4m3(x).double().numpy(), oracle.e4m3(x.numpy()))
    assert to_e4m3(torch.tensor([449.0, 1e30, float("inf"), -1e30])).tolist() == [448, 448, 448, -448]
    assert to_e4m3(torch.tensor([float("nan")])).isnan().all()


def test_ue8m0_rounds_up_to_powers_of_two():
    powers = np.exp2(np.arange(-126, 128).astype(np.float64)).astype(np.float32)
    x = torch.from_numpy(np.concatenate([powers, np.nextafter(powers, np.float32(0))]))
    expected = np.concatenate([np.arange(1, 255), np.arange(1, 255)])
    assert to_ue8m0_up(x).tolist() == expected.tolist()
    above = torch.from_numpy(np.nextafter(powers[:-1], np.float32(np.inf)))
    assert to_ue8m0_up(above).tolist() == list(range(2, 255))


def test_ue8m0_at_the_ends():
    low = torch.tensor([0.0, 1e-45, 2.0**-127, 2.0**-127 + 2.0**-149, 2.0**-126])
    assert to_ue8m0_up(low).tolist() == [0, 0, 0, 1, 1]
    assert to_ue8m0_up(torch.tensor([3.4e38, float("inf"), float("nan")])).tolist() == [254, 255, 255]
    codes = torch.arange(255, dtype=torch.uint8)
    assert np.array_equal(ue8m0_values(codes).double().numpy(), np.exp2(np.arange(255.0) - 127))
    assert ue8m0_values(torch.tensor([255], dtype=torch.uint8)).isnan().all()


def test_every_product_of_code_and_scale_is_exact_in_bf16():
    scales = torch.from_numpy(oracle.E4M3).float()
    assert len(scales) == 127
    products = torch.tensor(GRID)[:, None] * scales
    assert torch.equal(products.bfloat16().float(), products)
    assert np.array_equal(products.double().numpy(), np.array(GRID)[:, None] * oracle.E4M3)
    powers = ue8m0_values(torch.arange(254, dtype=torch.uint8))
    powers = torch.tensor(GRID)[:, None] * powers
    finite = torch.isfinite(powers)
    assert torch.equal(powers.bfloat16().float()[finite], powers[finite])


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("below", range(7))
def test_stochastic_rounding_is_unbiased_between_every_two_neighbours(below, sign):
    low, high = GRID[below], GRID[below + 1]
    num = 2**16
    for index, fraction in enumerate((2**-7, 0.125, 0.3, 0.5, 0.9, 1 - 2**-7)):
        value = torch.tensor(low + fraction * (high - low))
        actual_fraction = (value.item() - low) / (high - low)
        uniform = rounding_draws(RoundingKey(1000 * below + 10 * index + sign + 1), 256, num // 256, "cpu")
        rounded = round_e2m1_stochastic((sign * value).expand(256, num // 256).contiguous(), uniform)
        assert set(rounded.unique().tolist()) == {sign * low, sign * high}
        error = (rounded == sign * high).double().mean().item() - actual_fraction
        assert abs(error) < 4 * (actual_fraction * (1 - actual_fraction) / num) ** 0.5
