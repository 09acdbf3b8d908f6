"""What a trainer asks of the data of this package: `pretrain.py` hands this module over, as Megatron's pretrain scripts
hand over their datasets provider. megatron_fp4/training/providers.py describes each name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from data.loader import MicroBatch, MicroBatchLoader
from data.opening import agreed, check_kind, data_facts, open_run_data, phase_schedule, yardsticks
from data.schedule import PhaseSchedule, PhaseSpan, PlannedUse, check_epochs, check_phases, planned_use
from data.storage import default_cache_dir
from data.token_source import DataBundle
from data.validation import ValidationSet, Yardstick, fewer_windows

__all__ = ["MicroBatch", "RunData", "check", "check_kind", "default_cache_dir", "open_alone", "open_data", "phases"]

_MOST_EPOCHS = 64


@dataclass(frozen=True)
class RunData:
    """The opened data of a run. yardsticks: what held-out losses are measured by, by set; none where it was opened to
    be checked."""

    bundle: DataBundle
    loader: MicroBatchLoader
    validation: list[ValidationSet]
    yardsticks: dict[str, Yardstick]

    @property
    def phases(self) -> PhaseSchedule:
        """The data phases; after a resume, with those that have been."""
        return self.loader.schedule

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What is the same in every start of a run: its tokenizer. Which data was consumed is in the loader's state."""
        return {"tokenizer": self.bundle.tokenizer and self.bundle.tokenizer.fingerprint()}

    @property
    def unigram_entropy(self) -> dict[str, float]:
        """Of each held-out set, in nats per token."""
        return {name: yardstick.unigram_entropy for name, yardstick in self.yardsticks.items()}

    def summary(self, num_samples: int | None) -> list[str]:
        """Lines that say what was opened. num_samples: held-out windows that were asked for."""
        unused = [name for name in self.bundle.train if name not in self.loader.sources]
        told = [f"warning: no phase draws from data.sources.{', '.join(unused[:8])}"] if unused else []
        return [self.bundle.summary(), *told, *fewer_windows(self.validation, num_samples)]

    def bits_per_byte(self, losses: Mapping[str, float]) -> dict[str, float]:
        """Held-out losses in nats per token, by set, as bits per byte of text, where its bytes are known."""
        bits = {name: self.yardsticks[name].bits_per_byte(loss) for name, loss in losses.items()}
        return {name: value for name, value in bits.items() if value is not None}

    def epochs(self, step: int) -> dict[str, float]:
        """How often the steps [0, step) have gone through each source that gave any of their samples; of more than 64
        sources, those gone through most."""
        taken, sources = self.phases.counts(self.phases.samples_before(step)), self.loader.sources
        epochs = {name: sources[name].epochs(count) for name, count in taken.items() if name in sources}
        if len(epochs) <= _MOST_EPOCHS:
            return epochs
        return dict(sorted(epochs.items(), key=lambda item: -item[1])[:_MOST_EPOCHS])

    def planned_use(self) -> list[tuple[PhaseSpan, list[PlannedUse]]]:
        """For each phase, what it takes from each of its sources."""
        return planned_use(self.phases, self.loader.sources)

    def check_epochs(self, limit: Any) -> None:
        """Raise ValueError if the run would go through a source more often than `limit` (`data.max_epochs`)."""
        check_epochs(self.phases, self.loader.sources, limit)


def check(config: Any) -> None:
    """Raise ValueError for phases that cannot be, as far as the configuration tells."""
    check_phases(phases(config))


def phases(config: Any) -> PhaseSchedule:
    """The phases of the configuration, before any data is opened."""
    return phase_schedule(config, {})


def open_data(config: Any, mesh: Any, is_refusal: Callable[[Exception], bool]) -> RunData:
    """The data of a run, the same on all ranks; a collective. is_refusal: whether an error is the user's to mend.

    Raises ValueError on all ranks for what cannot be opened or does not fit.
    """
    bundle, loader, validation = agreed(lambda: open_run_data(config, mesh), data_facts, is_refusal)
    return RunData(bundle, loader, validation, yardsticks(validation, bundle, mesh, is_refusal))


def open_alone(config: Any) -> RunData:
    """The data of a run as one process sees it that does not train."""
    alone = SimpleNamespace(dp_rank=0, dp_size=1, device=torch.device("cpu"))
    return RunData(*open_run_data(config, alone), {})
