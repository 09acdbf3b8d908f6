"""The configuration: its schema, and how Hydra composes it from files and overrides."""
