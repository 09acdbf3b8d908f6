"""What surrounds a run: signals, the lock of its folder, time limits, exit codes."""
