"""A Hugging Face folder as lm-eval sees it.

Requests, texts and scores are lm-eval's own. Two things are done otherwise: log-likelihoods are computed by
`scoring.py`, in bounded memory and in batches by length over all windows of all documents, where lm-eval keeps the
logits of whole batches; and one line says how far it is. Generation is lm-eval's: contexts padded at the left, masked.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import lm_eval.api.task
from lm_eval.models.huggingface import HFLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from inference.evaluation.folder import OpenedFolder
from inference.evaluation.scoring import Progress, Row, Scorer

# A bar for each task, which lm-eval has no option to leave out.
lm_eval.api.task.tqdm = partial(tqdm, disable=True)
# Rows that generate at a time, where nobody says.
_GENERATING_ROWS = 16


class FolderModel(HFLM):
    """batch_rows: rows of a batch; None: by their length. max_length: tokens of a window; None: as the folder says."""

    def __init__(
        self,
        opened: OpenedFolder,
        *,
        batch_rows: int | None = None,
        max_length: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        super().__init__(
            pretrained=opened.model,
            tokenizer=opened.tokenizer,
            backend="causal",
            batch_size=batch_rows or _GENERATING_ROWS,
            max_length=max_length,
        )
        self._scorer = Scorer(opened.model, batch_rows)
        self._progress = progress
        self._generated = (0, 0)

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Of each continuation after its context: nats, and whether it is what greedy decoding says."""
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        """Of each text, in nats, cut into windows of `max_length` that follow each other."""
        owners: list[int] = []
        windows: list[tuple[None, list[int], list[int]]] = []
        for owner, request in enumerate(requests):
            for window in get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            ):
                context, continuation = make_disjoint_window(window)
                owners.append(owner)
                windows.append((None, list(context), list(continuation)))
        sums = [0.0] * len(requests)
        for owner, (log_prob, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            sums[owner] += log_prob
        return sums

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = True, override_bs: Any = None
    ) -> list[tuple[float, bool]]:
        """(key, context, continuation) -> log-probability of the continuation, and whether it is the greedy one.

        Choices that share all tokens but the last share a row. What is too long loses its beginning, as in lm-eval.
        """
        inputs: dict[tuple[int, ...], list[int]] = {}  # what the model reads -> the requests
        for number, (_, context, continuation) in enumerate(requests):
            if not context or not 0 < len(continuation) <= self.max_length:
                raise ValueError(
                    f"a continuation of {len(continuation)} tokens after a context of {len(context)} cannot be scored "
                    f"in a window of {self.max_length}; raise --max-length"
                )
            tokens = tuple((context + continuation)[-(self.max_length + 1) :][:-1])
            inputs.setdefault(tokens, []).append(number)
        rows, order = [], []
        for tokens, numbers in inputs.items():
            positions: list[int] = []
            targets: list[int] = []
            for number in numbers:
                continuation = requests[number][2]
                positions += range(len(tokens) - len(continuation), len(tokens))
                targets += continuation
            rows.append(Row(tokens, positions, targets))
            order.append(numbers)
        found: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        for numbers, scored in zip(order, self._scorer.score(rows, self._progress), strict=True):
            lengths = [len(requests[number][2]) for number in numbers]
            for number, log_probs, greedy in zip(
                numbers, scored.log_probs.split(lengths), scored.greedy.split(lengths), strict=True
            ):
                found[number] = (float(log_probs.sum()), bool(greedy.all()))
        return found

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        """What the model writes after each context, up to a stop sequence."""
        self._generated = (0, len(requests))
        return super().generate_until(requests, disable_tqdm=disable_tqdm)

    def _model_generate(self, context: Any, max_length: int, stop: list[str], **settings: Any) -> Any:
        generated = super()._model_generate(context, max_length, stop, **settings)
        done, total = self._generated
        self._generated = (done + len(context), total)
        if self._progress is not None:
            self._progress(*self._generated)
        return generated
