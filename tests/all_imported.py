"""A fork server imports this module last (tests/programs.py). It excludes all modules loaded so far from garbage
collection; otherwise each forked process would copy their memory pages."""

import gc

gc.collect()
gc.freeze()
