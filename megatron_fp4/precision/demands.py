"""What kernels demand of the local sizes of a linear: the one description that padding, configuration and tests read.

A linear multiplies x [tokens, inputs] and W [outputs, inputs]. Each of the three sizes is the dot product of one GEMM
and a row of operands in the others, and a quantized operand comes in whole blocks in both directions: kernels load
tiles of a block's size whichever way its scales lie. So one multiple holds for a format, a Hadamard transform adds its
own along the dot product that it mixes, and tensor cores may want more (each backend says so in `demands`).

    tokens, outputs    the linear pads them with zeros, which changes no code and no product
    inputs             what a user chose as a model's width; refused at configuration time where they do not divide

The multiples are the same on every device, because the draws of stochastic rounding go by an element's position among
the padded ones.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from megatron_fp4.precision.recipe import Recipe
from megatron_fp4.quantization.formats import format_of


@dataclass(frozen=True)
class Demands:
    """Multiples of a linear's local sizes.

    tokens, inputs, outputs: of the operands as a whole. group_outputs: of each group of output features (the heads of a
    packed projection), so that blocks never straddle two groups, and with them two ranks. fast_outputs: of output
    features, for a kernel that is faster; groups that are padded anyway are padded to it where that adds 1/16 at most.
    """

    tokens: int = 1
    inputs: int = 1
    outputs: int = 1
    group_outputs: int = 1
    fast_outputs: int = 1

    def padded_tokens(self, tokens: int) -> int:
        """The next multiple."""
        return -(-tokens // self.tokens) * self.tokens

    def padded_group(self, group_rows: int, num_groups: int) -> int:
        """Output features that each of `num_groups` groups of `group_rows` takes, padding included."""
        size, fast = (self._padded(group_rows, num_groups, of) for of in (1, self.fast_outputs))
        return fast if size != group_rows and fast - size <= size // 16 else size

    def _padded(self, group_rows: int, num_groups: int, fast: int) -> int:
        outputs = math.lcm(self.outputs, fast)
        step = math.lcm(self.group_outputs, outputs // math.gcd(outputs, num_groups))
        return -(-group_rows // step) * step


@functools.cache
def block_demands(recipe: Recipe) -> Demands:
    """What the blocks and transforms of `recipe` demand, whoever computes: whole ones.

    Raises ValueError for a format that nobody knows.
    """
    tile = max((format_of(name).tile for name in recipe.formats), default=1)
    outputs = max(tile, recipe.dgrad.rht)
    return Demands(max(tile, recipe.wgrad.rht), max(tile, recipe.fprop.rht), outputs, outputs)
