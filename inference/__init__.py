"""What a trained model does: it writes text, and is examined."""
