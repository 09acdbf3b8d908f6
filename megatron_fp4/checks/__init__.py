"""What is refused before anything is built: combinations of settings that cannot run."""
