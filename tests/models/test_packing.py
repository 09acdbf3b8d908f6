import pytest
import torch

from models.attention import qkv_order
from models.mamba2 import mamba_conv_order, mamba_in_proj_order
from models.mixer import group_major_order
from tests.models.builders import small_config


def test_order_of_two_groups():
    assert group_major_order((4, 2, 2), 2).tolist() == [0, 1, 4, 6, 2, 3, 5, 7]


@pytest.mark.parametrize("order_of", [qkv_order, mamba_in_proj_order, mamba_conv_order])
def test_round_trip(order_of):
    order = order_of(small_config())
    published = torch.randn(len(order), 3)
    ours = published[order]
    assert not torch.equal(ours, published)
    assert torch.equal(ours[order.argsort()], published)


def test_one_group_is_the_published_order():
    order = mamba_in_proj_order(small_config(mamba_num_groups=1))
    assert torch.equal(order, torch.arange(len(order)))


def test_a_split_of_our_rows_is_the_section_by_section_split():
    config = small_config()
    inner, state, heads = (
        config.mamba_inner_dim,
        config.mamba_num_groups * config.mamba_state_dim,
        config.mamba_num_heads,
    )
    sections = torch.arange(2 * inner + 2 * state + heads).split([inner, inner, state, state, heads])
    halves = mamba_in_proj_order(config).chunk(2)
    for rank in range(2):
        assert torch.equal(halves[rank], torch.cat([section.chunk(2)[rank] for section in sections]))


def test_sections_must_divide():
    with pytest.raises(ValueError, match="section of 3 rows does not divide into 2 groups"):
        group_major_order((4, 3), 2)
