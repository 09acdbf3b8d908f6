"""Hugging Face folders, both ways: config.json, safetensors shards, tokenizer.

sections.py        what one of our parameters is called there, and in which order its rows stand
nemotron_h.py      hybrids of Mamba-2, attention without positions, and FFNs
arcee.py           Transformers with RoPE
architectures.py   which of the two a model is
"""
