"""What is trained: stacks of Mamba-2, attention and FFN blocks, their initialization and their FLOPs."""
