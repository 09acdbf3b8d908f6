"""Commands, run as `python scripts/NAME.py`. The docstring at the top of each explains how to use it."""
