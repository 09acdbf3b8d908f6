"""How a model is trained: the step, the optimizer and its schedule, evaluation."""
