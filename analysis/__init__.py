"""Comparing what was trained: runs, recipes over seeds, and recipes tried from checkpoints."""
