"""What a run measures of its own numerics."""
