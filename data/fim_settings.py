"""`data.fim` of a configuration: checked, its tokens found in the tokenizer, and given to the sources."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from data.fim import FillInTheMiddle, FimTokens
from data.samples import Samples
from data.tokenizer import is_tokenizer, load_tokenizer
from data.tokenizers.interface import TextTokenizer


def fim_tokens(key: str, given: Any, tokenizer: TextTokenizer | None) -> FimTokens:
    """The settings of one source, with its tokens as the tokenizer knows them.

    given: `FimConfig` of the configuration's schema; key: what messages call it. Raises ValueError without a tokenizer,
    or for tokens that it does not have or that are not three.
    """
    if tokenizer is None:
        raise ValueError(f"{key} names its tokens, and there is no tokenizer that knows them; give data.tokenizer")
    names = {"prefix": given.prefix, "middle": given.middle, "suffix": given.suffix}
    ids = {part: tokenizer.token_id(token) for part, token in names.items()}
    for part, number in ids.items():
        if number is None:
            raise ValueError(
                f"{key}.{part}={names[part]} is no token of {tokenizer.name}; name one that it has, or add it there "
                "before the corpus is tokenized"
            )
    if len({*ids.values(), tokenizer.eod_id}) < 4:
        raise ValueError(f"{key}: prefix, middle, suffix and the end of a document have to be four tokens, not {names}")
    return FimTokens(given.rate, given.spm_rate, end=tokenizer.eod_id, **ids)  # type: ignore[arg-type]


def check_fim(data: Any) -> None:
    """Raise ValueError for sources in a configuration's `data.fim` from which no phase draws, or tokens that the
    tokenizer does not have."""
    if not data.fim:
        return
    if data.kind == "builtin":
        raise ValueError(
            f"data.fim={', '.join(data.fim)}: the tokenizer of the built-in corpus has no tokens for it; choose "
            "data=indexed with a tokenizer that has"
        )
    drawn = {name for phase in data.phases if phase.blend != "tokens" for name, weight in phase.blend.items() if weight}
    if any(phase.blend == "tokens" for phase in data.phases):
        drawn |= set(data.sources)
    for name in data.fim:
        if drawn and name not in drawn:
            raise ValueError(
                f"data.fim.{name} has no effect: no phase draws from {name}, only from {', '.join(sorted(drawn))}"
            )
    # A path that leads nowhere has its own message.
    found = data.tokenizer is not None and is_tokenizer(data.tokenizer)
    tokenizer = load_tokenizer(data.tokenizer, data.eod_token) if found else None
    for name, given in data.fim.items():
        if tokenizer is not None or data.tokenizer is None:
            fim_tokens(f"data.fim.{name}", given, tokenizer)


def with_fim(
    sources: Mapping[str, Samples], given: Mapping[str, Any], tokenizer: TextTokenizer | None
) -> dict[str, Samples]:
    """The sources, those in `given` (`data.fim` of a configuration) rearranged.

    Raises ValueError for a name that is no source, and as fim_tokens does.
    """
    missing = [name for name in given if name not in sources]
    if missing:
        raise ValueError(f"data.fim names {', '.join(missing)}, and the sources are {', '.join(sources)}")
    found = dict(sources)
    for name, settings in given.items():
        found[name] = FillInTheMiddle(sources[name], fim_tokens(f"data.fim.{name}", settings, tokenizer))
    return found
