"""A shuffle that needs no memory: a keyed permutation of [0, size), evaluated one index at a time.

A stored shuffle of N samples costs 8 N bytes in every process and has to be built before the first step and
again at each restart. A Feistel network is a bijection on an even number of bits whatever its round function
is; when size is not a power of four, an output outside [0, size) is fed in again until it falls inside
("cycle walking": following a cycle of a bijection from a point inside must come back inside; Black and
Rogaway 2002, section 4). The domain is less than 4 * size, so that takes fewer than four steps on average.
"""

from __future__ import annotations

import hashlib

import numpy as np

_NUM_ROUNDS = 6
_MASK = (1 << 64) - 1


def _mix(value: int) -> int:
    """The finalizer of splitmix64: every input bit reaches every output bit. 64 bits to 64 bits."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class Permutation:
    """A bijection of [0, size) chosen by `key`; equal (size, key) give equal permutations on every machine.

    Raises ValueError when size is not positive.
    """

    def __init__(self, size: int, key: str) -> None:
        if size < 1:
            raise ValueError(f"a permutation needs a positive size, got {size}")
        self.size = size
        self._half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        self._half_mask = (1 << self._half_bits) - 1
        digest = hashlib.blake2b(key.encode("utf-8"), digest_size=8 * _NUM_ROUNDS).digest()
        self._round_keys = [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(_NUM_ROUNDS)]

    def __call__(self, index: int) -> int:
        """Where `index` goes. Raises IndexError outside [0, size)."""
        if not 0 <= index < self.size:
            raise IndexError(f"index {index} is outside a permutation of {self.size}")
        value = self._feistel(index)
        while value >= self.size:
            value = self._feistel(value)
        return value

    def _feistel(self, value: int) -> int:
        left, right = value >> self._half_bits, value & self._half_mask
        for key in self._round_keys:
            left, right = right, left ^ (_mix((right + key) & _MASK) & self._half_mask)
        return (left << self._half_bits) | right


def shuffled(size: int, key: str) -> np.ndarray:
    """The numbers [0, size) in an order chosen by `key`, int64 [size]: sorted by a hash of each.

    For orders that are used whole; equal arguments give equal orders on every machine.
    """
    seed = np.frombuffer(hashlib.blake2b(key.encode("utf-8"), digest_size=8).digest(), dtype="<u8")
    # splitmix64: its state takes equal steps, its finalizer is a bijection, so no two numbers get the same hash.
    value = seed + np.arange(1, size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(value ^ (value >> np.uint64(31)), kind="stable")
