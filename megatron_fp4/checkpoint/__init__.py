"""Saving a run and going on from it: what is written, how it is found again, what is refused."""
