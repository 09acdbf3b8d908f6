"""Around a run: signals, the lock of its folder, limits for its sections, exit codes."""
