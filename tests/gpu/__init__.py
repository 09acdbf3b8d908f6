"""Tests that need a GPU. `make test-kernels` runs those of kernels without one (tests/interpreted)."""

import os

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # a thousand times slower: smaller sizes, fewer repetitions
