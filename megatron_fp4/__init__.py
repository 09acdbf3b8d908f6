"""Pretraining of hybrid Mamba-Transformer language models in NVFP4."""

__version__ = "0.3.0"
