"""How long each phase of a run is: a fraction of its steps, a number of steps or tokens, or what is left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Phase:
    """A span of training drawn from sources by the weights of `blend` (see blend.Blend).

    At most one length: `fraction` of the run's steps, from 0 to 1, `steps`, or `tokens` (rounded to whole steps). One
    phase of a run may have none: it gets the rest. global_batch_size, in samples, and sequence_length: the run's if
    None. by_tokens: the weights are the sources' tokens, which change with their files.
    """

    name: str
    fraction: float | None = None
    blend: Mapping[str, float] | None = None
    steps: int | None = None
    tokens: float | None = None
    global_batch_size: int | None = None
    sequence_length: int | None = None
    by_tokens: bool = False


def phase_boundaries(
    phases: Sequence[Phase], num_steps: int, global_batch_size: int, sequence_length: int
) -> list[int]:
    """The step behind each phase, in a run of num_steps.

    A boundary is the step nearest to the sum of the lengths, so in a run of very few steps a short phase may get none.
    global_batch_size, sequence_length: in samples and tokens, the run's.

    Raises ValueError when there are no phases, two share a name, one has no positive length or two of them, more than
    one has none, or they do not fill the run.
    """
    if not phases:
        raise ValueError("a run needs at least one phase, e.g. {name: main, blend: {code: 1.0}}")
    names = [phase.name for phase in phases]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two phases are named {name!r}; phase names must differ")
    lengths: list[float | None] = []
    for phase in phases:
        size = phase.global_batch_size or global_batch_size
        lengths.append(_length(phase, num_steps, size * sequence_length))
    left = num_steps - sum(length for length in lengths if length is not None)
    open_ones = [phase.name for phase, length in zip(phases, lengths, strict=True) if length is None]
    if len(open_ones) > 1:
        raise ValueError(
            f"the phases {' and '.join(open_ones)} have no length; give all but one of them steps, tokens or a fraction"
        )
    if open_ones and left < 0.5:
        raise ValueError(
            f"the phases beside {open_ones[0]!r} take {num_steps - left:.6g} steps of {num_steps}, so nothing is left "
            "for it; raise train.steps or shorten them"
        )
    if not open_ones and all(phase.fraction is not None for phase in phases):
        if abs(left) > 1e-6 * num_steps:
            raise ValueError(
                f"the fractions of the phases {', '.join(names)} sum to {1 - left / num_steps:.6g}; they must sum to "
                "1: they are shares of the whole run"
            )
    elif not open_ones and abs(left) >= 0.5:
        raise ValueError(
            f"the phases {', '.join(names)} take {num_steps - left:.6g} steps in all, and the run has {num_steps}; set "
            f"train.steps={round(num_steps - left)}, or leave out the length of one phase, which then gets the rest"
        )
    ends, share, steps = [], 0.0, 0.0
    for phase, length in zip(phases, lengths, strict=True):
        share += phase.fraction or 0.0
        if phase.fraction is None:
            steps += left if length is None else length
        ends.append(min(num_steps, round(share * num_steps + steps)))
    ends[-1] = num_steps
    return ends


def _length(phase: Phase, num_steps: int, tokens_per_step: int) -> float | None:
    """In steps; None for a phase that gets the rest."""
    given = {key: getattr(phase, key) for key in ("fraction", "steps", "tokens") if getattr(phase, key) is not None}
    if len(given) > 1:
        spelled = " and ".join(f"{key}={value}" for key, value in given.items())
        raise ValueError(f"phase {phase.name!r} has {spelled}; give one length")
    for key, value in given.items():
        if value <= 0 or (key == "fraction" and value > 1):
            allowed = "fractions lie in (0, 1]" if key == "fraction" else "it must be positive"
            raise ValueError(f"phase {phase.name!r} has the {key} {value}; {allowed}")
    if phase.fraction is not None:
        return phase.fraction * num_steps
    if phase.steps is not None:
        return float(phase.steps)
    return None if phase.tokens is None else phase.tokens / tokens_per_step
