"""Save checkpoints, find them again, and resume from them."""
