"""The README.md of an exported folder: what the model is, how it was trained, in which precision, what it scored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from exchange.checkpoint import Checkpoint
from megatron_fp4.logging.metrics import last_validation
from models.pattern import parameter_count


def model_card(checkpoint: Checkpoint, model_type: str, sequence_length: int, weights: str, use: str) -> str:
    """Markdown with the fields that model hubs read. sequence_length: of the longest sequences it knows. weights: what
    they are written as. use: how they are loaded, in Markdown."""
    config, trainer = checkpoint.config, checkpoint.trainer
    model = config.model
    counts = parameter_count(model)
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags:",
        "- megatron_fp4",
        f"- {model_type}",
        "---",
        "",
        f"# {model.name}",
        "",
        f"A base language model of {counts.total:,} parameters, {_origin(checkpoint)}",
        "",
        "| | |",
        "|---|---|",
        f"| blocks (`M` Mamba-2, `-` FFN, `*` attention) | `{model.pattern}` |",
        f"| hidden, FFN | {model.hidden_dim}, {model.ffn_dim} |",
        f"| vocabulary | {model.vocab_size:,} |",
        f"| sequences it was {'made for' if checkpoint.weights_only else 'trained on'} | {sequence_length:,} tokens |",
        f"| weights in this folder | {weights} |",
    ]
    lines += ["", "## Precision in training", ""]
    if "plan" in trainer:
        lines += _plan(trainer["plan"], config.precision.name, trainer["switch"]["switched_at"], config)
    else:
        lines += ["These are imported weights, which no run of this framework has trained."]
    if losses := _losses(checkpoint):
        lines += ["", "## Held-out loss", "", *losses]
    lines += ["", "## Use", "", use]
    return "\n".join(lines) + "\n"


def _origin(checkpoint: Checkpoint) -> str:
    """Who trained it, the second half of a sentence."""
    trainer, steps = checkpoint.trainer, checkpoint.config.train.steps
    if checkpoint.weights_only:
        return f"imported by megatron_fp4 {trainer['version']} from {trainer['imported'].get('from', 'elsewhere')}."
    begun = trainer.get("initialized_from")
    return (
        f"trained by megatron_fp4 {trainer['version']} on {checkpoint.tokens:,} tokens in {checkpoint.step:,} steps of "
        f"{steps:,}{', from the weights of ' + Path(begun['path']).name if begun else ''}."
    )


def _plan(plan: dict[str, Any], name: str, switched_at: int | None, config: Any) -> list[str]:
    """What the linears were in when the checkpoint was made."""
    lines = [f"Trained with `precision={name}`; masters and optimizer in FP32."]
    if switched_at is not None:
        lines.append(
            f"Precision switched to `{config.precision.switch.target}` ({config.precision.switch.scope}) before step "
            f"{switched_at + 1}."
        )
    lines.append(f"Quantized linears when this checkpoint was made: {plan['quantized_linears']}.")
    lines += ["", "| recipe | linears | operands |", "|---|---|---|"]
    linears = plan["linears"].values()
    for recipe, operands in plan["recipes"].items():
        count = sum(linear["recipe"] == recipe for linear in linears)
        cells = "<br>".join(operand.replace("|", "\\|") for operand in operands)
        lines.append(f"| {recipe} | {count} | {cells} |")
    return lines


def _losses(checkpoint: Checkpoint) -> list[str]:
    """The last validation up to the checkpoint, if the run's records lie beside it."""
    last = None
    if not checkpoint.weights_only:
        last = last_validation(checkpoint.folder.absolute().parent.parent, checkpoint.step)
    if last is None:
        return []
    rows = [
        f"Step {last['step']:,}, in the precision of training.",
        "",
        "| set | nats per token | bits per byte |",
        "|---|---|---|",
    ]
    for name, loss in last["losses"].items():
        bits = (last.get("bits_per_byte") or {}).get(name, "")
        rows.append(f"| {name} | {_number(loss)} | {_number(bits)} |")
    return rows


def _number(value: float | str | None) -> str:
    """None: it was not finite, for which JSON has no number."""
    if value is None:
        return "not finite"
    return value if isinstance(value, str) else f"{value:.4f}"
