"""Commands, each run as `python scripts/NAME.py`; its first lines say how.

They import the installed packages. Where nothing is installed (on a GPU machine with an image of its own, say), run
them from the repository's root with PYTHONPATH=. before the command.
"""
