"""How a model is trained: the step, the optimizer and its schedule, checkpoints, evaluation, and what is logged."""
