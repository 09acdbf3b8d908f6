"""What a run says of itself before it begins and when it is finished."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_fp4.config.schema import Config
from megatron_fp4.logging import console as show
from megatron_fp4.logging.completion import SUMMARY_FILE
from megatron_fp4.logging.console import RunConsole
from megatron_fp4.logging.goodput import goodput_of
from megatron_fp4.logging.metrics import METRICS_FILE, finite
from megatron_fp4.logging.run_files import attempt, replace_text
from megatron_fp4.precision.plan import Plan


def introduce(
    console: RunConsole,
    config: Config,
    plan: Plan,
    *,
    parts: Sequence[show.ModelPart],
    flops_per_token: int,
    phases: Sequence[show.PhaseRow],
    num_tokens: int,
    facts: Mapping[str, object],
    world_size: int,
) -> None:
    """Print what is about to run: model, plan, numerics, batch arithmetic, phases.

    parts, flops_per_token: of the model; FLOPs are those of its forward pass. facts: what else is to be said of
    numerics and kernels. num_tokens: of the run.
    """
    console.table(show.model_table(config.model.name, config.model.pattern, parts, 3 * flops_per_token))
    console.table(show.plan_table(plan, config.precision.name))
    quantized = {
        "linears quantized": f"{plan.num_quantized} of {len(plan.rows)} ({plan.share_of_linears:.1%})",
        "model FLOPs quantized": f"{plan.quantized_flops_per_token / flops_per_token:.1%}",
    }
    console.table(show.facts_table("Numerics", {**recipe_facts(plan), **quantized, **facts}))
    console.table(show.batch_table(config.train, config.parallel, world_size, num_tokens))
    console.table(show.phases_table(phases))


def recipe_facts(plan: Plan) -> dict[str, str]:
    """What the GEMMs of each quantized recipe of the plan multiply; the recipe is named where there are several."""
    written = plan.as_dict()
    quantized = [written["linears"][row.linear.name]["recipe"] for row in plan.rows if row.recipe.quantized]
    names = list(dict.fromkeys(quantized)) or list(written["recipes"])
    facts = {}
    for recipe in names:
        for line in written["recipes"][recipe]:
            gemm, _, value = line.partition(": ")
            facts[gemm if len(names) == 1 else f"{recipe}, {gemm}"] = value
    return facts


def summarize(
    console: RunConsole,
    config: Config,
    num_tokens: int,
    switched_at: int | None,
    losses: Mapping[str, float],
    entropy: Mapping[str, float],
    bits_per_byte: Mapping[str, float],
    export: Path | None = None,
) -> None:
    """Print the final table of a finished run and write its summary.json and loss.png, as far as the disk takes them.

    num_tokens: of the run. switched_at: the first step under the plan after the precision switch. losses, entropy:
    held-out loss and unigram entropy per source, in nats. bits_per_byte: the loss for each byte of text, where known.
    export: the folder of the last checkpoint's export, if there is one.
    """
    run_dir = Path(config.run.dir)
    # What is shown is worded for a person; what is written keeps its keys.
    facts: dict[str, Any] = {
        "steps": config.train.steps,
        "tokens": num_tokens,
        "precision switched before step": None if switched_at is None else switched_at + 1,
    }
    shown: dict[str, object] = dict(facts)
    for name, loss in losses.items():
        measured = {f"validation loss, {name} (nats)": loss}
        if name in bits_per_byte:
            measured[f"validation loss, {name} (bits per byte)"] = bits_per_byte[name]
        measured[f"unigram entropy, {name} (nats)"] = entropy[name]
        below = entropy[name] - loss
        shown |= {what: f"{value:.4f}" for what, value in measured.items()}
        shown[f"{'above' if below < 0 else 'below'} unigram entropy, {name}"] = f"{abs(below):.4f}"
        measured[f"below unigram entropy, {name}"] = below
        facts |= {what: round(value, 4) for what, value in measured.items()}
    if export is not None:
        facts["exported as"] = shown["exported as"] = f"{export.parent.name}/{export.name}"
    if (goodput := attempt("the goodput", lambda: goodput_of(run_dir))) is not None:
        facts["goodput"] = shown["goodput"] = str(goodput)
    text = json.dumps(finite({"finished": True, **facts}), indent=1, allow_nan=False) + "\n"
    attempt(str(run_dir / "loss.png"), lambda: _draw(run_dir, config.logging.baseline))
    # Last: a summary that is there says that the run is finished.
    attempt(str(run_dir / SUMMARY_FILE), lambda: replace_text(run_dir / SUMMARY_FILE, text))
    names = (METRICS_FILE, "loss.png", "config.yaml", "plan.yaml", SUMMARY_FILE, "checkpoints", "exports")
    shown["files"] = f"{run_dir}: {', '.join(name for name in names if (run_dir / name).exists())}"
    console.table(show.facts_table("Finished", shown))


def _draw(run_dir: Path, baseline: str | None) -> None:
    from megatron_fp4.logging.plot import plot_loss  # and with it matplotlib, for which no start has to wait

    try:
        plot_loss(run_dir, baseline)
    except (OSError, ValueError):
        if baseline is None:
            raise
        plot_loss(run_dir)
        raise  # the picture is there, without the baseline: which is said
