"""Pretraining of hybrid Mamba-Transformer language models in NVFP4."""
