"""The samples of one source: sample k, for any k, is a pure function of (seed, source name, k).

The token stream is cut into windows of seq_length + 1 tokens, each sharing its last token with the next one's
first, so that every token but the first is a target exactly once an epoch (Megatron's cut). An epoch visits
all windows once in the order of a keyed permutation; k beyond it goes on to the next epoch, in another order.
Unlike Megatron's order this one does not depend on how long the run is.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from data.bundle import TokenSource
from data.documents import document_numbers
from data.permutation import Permutation


def num_windows(num_tokens: int, seq_length: int) -> int:
    """How many windows of seq_length + 1 tokens, overlapping by one, a stream of num_tokens holds."""
    return max(0, (num_tokens - 1) // seq_length)


@lru_cache(maxsize=64)
def _epoch_order(size: int, key: str) -> Permutation:
    # Samples of one epoch follow one another; the cache saves hashing the same key for each of them.
    return Permutation(size, key)


class SampleSource:
    """A named token stream cut into shuffled samples.

    vocab_size is the model's: a token id beyond it is refused here, with the source's name, rather than in an
    embedding kernel. Raises ValueError for a bad seq_length or a stream shorter than one sample.
    """

    def __init__(self, name: str, stream: TokenSource, seq_length: int, seed: int, vocab_size: int) -> None:
        if seq_length < 1:
            raise ValueError(f"seq_length must be positive, got {seq_length}")
        self.name = name
        self.stream = stream
        self.seq_length = seq_length
        self.seed = seed
        self.vocab_size = vocab_size
        self.num_samples = num_windows(stream.num_tokens, seq_length)
        if self.num_samples == 0:
            raise ValueError(
                f"source {name!r} ({stream}) has {stream.num_tokens} tokens, fewer than one sample "
                f"of seq_length + 1 = {seq_length + 1}; shorten the sequence or add text"
            )

    def window(self, sample: int) -> int:
        """Which window of the stream sample k is. Raises IndexError for a negative k."""
        if sample < 0:
            raise IndexError(f"sample {sample} of source {self.name!r} is negative")
        epoch, position = divmod(sample, self.num_samples)
        # repr() keeps a name with a separator in it from colliding with another (seed, name, epoch).
        return _epoch_order(self.num_samples, f"{self.seed}/{self.name!r}/{epoch}")(position)

    def sample_and_documents(self, sample: int) -> tuple[np.ndarray, np.ndarray]:
        """Sample k, and for each of its tokens the number, from 0, of its document: both [seq_length + 1], the second
        int32. (The last token is only a target; its document tells whether it counts.)"""
        documents = document_numbers(self.stream, self.window(sample) * self.seq_length, self.seq_length + 1)
        return self.sample(sample), documents

    def sample(self, sample: int) -> np.ndarray:
        """Sample k of the source over the whole run: int64 [seq_length + 1].

        Raises ValueError for a token id outside the model's vocabulary.
        """
        tokens = self.stream.tokens(self.window(sample) * self.seq_length, self.seq_length + 1)
        tokens = tokens.astype(np.int64)
        if tokens.max() >= self.vocab_size or tokens.min() < 0:
            raise ValueError(
                f"source {self.name!r} ({self.stream}) holds token ids {tokens.min()} to "
                f"{tokens.max()}, outside the model's vocabulary of {self.vocab_size}: it was made with "
                "another tokenizer; raise model.vocab_size or prepare the data again"
            )
        return tokens

    def description(self) -> dict[str, object]:
        """What a checkpoint keeps to recognise this source: independent of where its files lie."""
        return {"num_tokens": self.stream.num_tokens, "identity": self.stream.identity()}
