"""The precision of every GEMM: recipes, a model's plan, the switch during a run, the linear layer and its backends."""
