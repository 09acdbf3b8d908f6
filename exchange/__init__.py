"""Weights in and out: our checkpoints as one process reads and writes them, and other people's formats.

No process group, no mesh: tensors have their global shape here, and rows stand as models/packing.py says.
"""
