"""A fork server imports this module last (tests/programs.py). It composes what most runs begin with, and excludes all
that is loaded so far from garbage collection; otherwise each forked process would copy its memory pages."""

import gc

from tests.composing import compose_once, composed

compose_once()
for data in ("builtin", "indexed"):
    composed(f"data={data}")
composed()
gc.collect()
gc.freeze()
