"""Training data: from text to the tokens of any global sample index.

From the ground up: `indexed_dataset` (the file format), `tokenizer`, `permutation` and `samples` (a source's
shuffled samples), `blend` and `phases` (which source serves global sample i), `loader` (micro-batches,
workers, state), `validation` (fixed held-out windows), `bundle` (what every kind of data gives a run), `builtin`
(the corpus every Python carries), `indexed` (one's own), `kinds` (their table), `prepare` (text to tokens).
"""
