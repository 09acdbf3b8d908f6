"""Tokenizes a corpus of text into Megatron's `.bin` and `.idx`."""
