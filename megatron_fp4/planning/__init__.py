"""What a run would need, without running it."""
