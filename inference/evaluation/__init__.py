"""A model examined: lm-eval's tasks, tables of several models, and validation losses held against the framework's."""
