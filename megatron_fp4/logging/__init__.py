"""The output of a run: metrics, console, pictures, summary and report."""
