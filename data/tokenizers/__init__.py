"""Tokenizers by the file that they come from, behind one interface."""
