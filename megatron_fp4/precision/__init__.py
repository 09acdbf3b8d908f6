"""Which GEMM gets what: recipes, the plan of a model, the switch during a run, and the linear that carries them out."""
