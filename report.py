"""What a run says of itself before it begins and when it is finished."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from assembly import Run
from megatron_fp4.precision.plan import Plan
from megatron_fp4.training import console as show
from megatron_fp4.training.console import RunConsole
from megatron_fp4.training.plot import plot_loss
from models.flops import forward_flops_per_token, parameter_count


def introduce(run: Run, console: RunConsole, start: int) -> None:
    """Print what is about to run: model, plan, batch arithmetic, phases, data, backend, optimizer."""
    config, plan = run.config, run.plan
    counts, flops = parameter_count(config.model), forward_flops_per_token(config.model, config.train.sequence_length)
    pattern = config.model.pattern
    kinds = {"M": "Mamba-2 blocks", "-": "FFN blocks", "*": "attention blocks"}
    parts = [show.ModelPart("embedding", 1, counts.embedding)]
    for letter, name in kinds.items():
        if pattern.count(letter):
            own = [b for i, b in enumerate(run.model.blocks) if pattern[i] == letter]
            parameters = sum(p.numel() for block in own for p in block.parameters())
            parts.append(show.ModelPart(name, len(own), parameters))
    parts += [show.ModelPart("final norm", 1, config.model.hidden_dim), show.ModelPart("head", 1, counts.head)]
    console.table(show.model_table(config.model.name, pattern, parts, 3 * flops.total))
    rows = [
        show.PlanRow(row.linear.name, (row.linear.out_features, row.linear.in_features), row.recipe.name, row.reason)
        for row in plan.rows
    ]
    console.table(show.plan_table(rows, config.precision.name))
    facts: dict[str, object] = {**recipe_facts(plan)}
    facts["linears quantized"] = f"{plan.num_quantized} of {len(plan.rows)} ({plan.share_of_linears:.1%})"
    facts["model FLOPs quantized"] = f"{plan.quantized_flops_per_token / flops.total:.1%}"
    facts["compute dtype, backend"] = f"{config.precision.compute_dtype}, {run.backend.name} on {run.mesh.device.type}"
    facts["why this backend"] = run.backend.reason
    when, at_step = config.precision.switch.when, run.switch.at_step
    facts["switch"] = when if at_step is None else f"before step {at_step + 1} ({when}), to {run.switch.config.target}"
    facts["learning rate decays from step"] = run.schedule.decay_start_step + 1
    facts["kernels"] = run.model.execution.describe(pattern)
    facts["activation checkpointing"] = run.model.execution.recompute
    facts["optimizer"] = run.optimizer.name
    console.table(show.facts_table("Numerics", facts))
    console.table(show.batch_table(config.train, config.parallel, run.mesh.world_size))
    size, tokens = config.train.global_batch_size, run.phases.tokens_per_phase(config.train.sequence_length)
    console.table(
        show.phases_table(
            [
                show.PhaseRow(span.name, span.start // size + 1, span.end // size, tokens[span.name], phase.blend)
                for span, phase in zip(run.phases.spans, config.data.phases, strict=True)
            ]
        )
    )
    console.text(run.bundle.summary())
    if start:
        console.text(f"resumed after step {start} of {config.train.steps}")


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


def summarize(run: Run, console: RunConsole, losses: dict[str, float], entropy: dict[str, float]) -> None:
    """Print the final table and write summary.json and loss.png."""
    config, run_dir = run.config, Path(run.config.run.dir)
    facts: dict[str, Any] = {
        "steps": config.train.steps,
        "tokens": config.train.steps * config.train.global_batch_size * config.train.sequence_length,
        "precision switched before step": None if run.switch.switched_at is None else run.switch.switched_at + 1,
    }
    for name, loss in losses.items():
        facts[f"validation loss, {name} (nats)"] = round(loss, 4)
        facts[f"unigram entropy, {name} (nats)"] = round(entropy[name], 4)
        facts[f"below unigram entropy, {name}"] = round(entropy[name] - loss, 4)
    plot = plot_loss(run_dir)
    (run_dir / "summary.json").write_text(json.dumps({"finished": True, **facts}, indent=1) + "\n")
    names = ("metrics.jsonl", plot.name, "config.yaml", "plan.yaml", "summary.json", "checkpoints")
    facts["files"] = f"{run_dir}: {', '.join(names)}"
    console.table(show.facts_table("Finished", facts))
