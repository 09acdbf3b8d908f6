"""Training data: from text to the tokens of any global sample index.

From the ground up: `storage` (ranges of files and of a store's objects), `indexed` (streams of tokens and the files
that hold them), `sources` (many files as one source), `tokenizer`, `order` (a source's shuffled samples), `blend` and
`schedule` (which source serves global sample i), `megatron_order` (Megatron-core's samples), `workers` and `loader`
(processes, micro-batches, what a checkpoint knows of the data), `validation` (fixed held-out windows), `builtin` (the
corpus every Python carries), `provider` (the table of kinds, and the data of a run), `prepare` (text to tokens).
"""
