"""The last that a fork server imports: no collection of garbage looks at the modules again, neither here nor in a
process that comes from here, which otherwise copies the pages they are in."""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
