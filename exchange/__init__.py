"""Export and import of weights: checkpoints of this framework, read and written by one process, and other formats.

There is no process group and no mesh here: tensors have their global shape. "Our row order" is that of the packed
projections in models/attention.py and models/mamba2.py.
"""
