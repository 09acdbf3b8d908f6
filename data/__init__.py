"""Training data: from text to the tokens of any global sample index.

From the ground up: `byte_file` and `remote` (ranges of files and of a store's objects), `index_file` and
`indexed_dataset` (the file format), `concatenation` and `source_lists` (many files as one source), `tokenizer`,
`permutation` and `samples` (a source's shuffled samples), `blend` and `phases` (which source serves global sample i),
`loader` (micro-batches, workers, state), `validation` (fixed held-out windows), `bundle` (what every kind of data gives
a run), `builtin` (the corpus every Python carries), `indexed` (one's own), `kinds` (their table), `prepare` (text to
tokens).
"""
