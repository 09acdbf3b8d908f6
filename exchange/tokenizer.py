"""The tokenizer of a checkpoint: found where its run had it, and the same one."""

from __future__ import annotations

from pathlib import Path

from data.builtin import open_builtin
from data.tokenizer import TextTokenizer, load_tokenizer
from exchange.checkpoint import Checkpoint

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
"""What a folder's tokenizer consists of, in transformers."""


def tokenizer_of(checkpoint: Checkpoint, given: str | Path | None = None) -> TextTokenizer | None:
    """The tokenizer that made the data of the checkpoint's run, None if that run knew of none and none is given.

    given: where it is now, if not where the configuration says.
    Raises ValueError if it is not there, not readable, or another one than the run's.
    """
    data = checkpoint.config.data
    expected = checkpoint.manifest.identity.get("data.tokenizer")
    found: TextTokenizer | None
    remedy = "give the right one as --tokenizer PATH"
    try:
        if given is not None:
            found = load_tokenizer(given, data.eod_token)
        elif checkpoint.weights_only:
            found = _kept_tokenizer(checkpoint)
        elif data.tokenizer is not None:
            found = load_tokenizer(data.tokenizer, data.eod_token)
        elif data.kind == "builtin":
            found = open_builtin(checkpoint.config.model.vocab_size, data.cache_dir).tokenizer
        else:
            found = None
    except OSError as error:
        raise ValueError(f"the tokenizer of {checkpoint.folder} cannot be read ({error}); {remedy}") from error
    if found is not None and expected is not None and found.fingerprint() != expected:
        raise ValueError(
            f"{found.name} is not the tokenizer of the run that made {checkpoint.folder}: its fingerprint is "
            f"{found.fingerprint()[:12]}, the run's {expected[:12]}; {remedy}"
        )
    rows = checkpoint.config.model.vocab_size
    if found is not None and found.vocab_size > rows:
        raise ValueError(f"{found.name} has {found.vocab_size} ids and the model only {rows}; {remedy}")
    return found


def _kept_tokenizer(checkpoint: Checkpoint) -> TextTokenizer | None:
    """The one that came with imported weights."""
    kept = [name for name in TOKENIZER_FILES if name in checkpoint.manifest.files]
    if not {"tokenizer.json", "tokenizer.model"} & {*kept}:
        return None
    for name in kept:
        checkpoint.file(name)  # they are as they were
    return load_tokenizer(checkpoint.folder, checkpoint.config.data.eod_token)
