"""What may go wrong around a run: signals, other runs in its folder, ranks that stand still, and how it then ends."""
