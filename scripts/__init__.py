"""Commands, each run as `python scripts/NAME.py`; its first lines say how."""
