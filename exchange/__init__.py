"""Weights in and out: our checkpoints as one process reads and writes them, and the formats of others.

No process group, no mesh: tensors have their global shape here, and rows stand as the packed projections of
models/attention.py and models/mamba2.py have them.
"""
