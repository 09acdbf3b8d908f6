"""Comparisons of runs, of recipes over several seeds, and of recipes trained from a checkpoint."""

try:
    import pandas  # noqa: F401
    import scipy  # noqa: F401
except ImportError as _error:
    raise ImportError(f'comparing runs needs pandas and scipy ({_error}); pip install -e ".[analysis]"') from None
