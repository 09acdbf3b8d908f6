"""How a model is trained: trainer, step, optimizer and schedule, CUDA graphs, callbacks."""
