import os
import sys


def pytest_runtest_logreport(report):
    """Print a failure at once: time on a GPU may end before pytest's own summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\n{report.nodeid} ({report.when}):\n{report.longreprtext[-1500:]}", file=sys.__stdout__, flush=True)
