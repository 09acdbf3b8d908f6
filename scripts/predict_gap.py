"""Does what diagnostics measure early predict what a recipe costs in the end?

    python scripts/predict_gap.py 'bf16=runs/bf16_from*' 'nvfp4=runs/nvfp4_from*' 'mxfp4=runs/mxfp4_from*' \\
        'no_rht=runs/no_rht_from*' 'no_sr=runs/no_sr_from*' --output prediction.png

Groups are named as for compare_recipes.py, the base first. Every other group is a recipe: its gap to the base at the
end, the errors that its runs measured (precision.diagnostics.interval) in the first 5% of their steps, and their
training loss above the base's over the first fifth. Prints, for each of these figures, its correlation with the gap
over recipes, strongest first, and draws the strongest four. --sources takes the gap of some held-out sources alone;
what was measured early is of all training text. Four recipes at least; with ten the intervals are still wide.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml
from pydantic import ValidationError

from megatron_fp4.config.schema import ModelConfig
from megatron_fp4.report.early_figures import early_loss, early_records, figures, of_recipe
from megatron_fp4.report.final_gaps import FinalGaps
from megatron_fp4.report.held_out import HeldOut, add_sources, read_groups, sources_note
from megatron_fp4.report.metrics import records_of_run
from megatron_fp4.report.paired import notes_below, partners
from megatron_fp4.report.picture import check_target
from megatron_fp4.report.prediction import by_chance, correlation_table, correlations, draw_correlations
from megatron_fp4.runtime.closed_pipe import end_without_reader
from models.pattern import linear_shapes


def main() -> None:
    """Correlate the groups named on the command line; exit code 2, with a line on stderr, if they cannot be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="+", metavar="NAME=RUN,...", help="a recipe and its runs: folders or patterns")
    parser.add_argument("--output", type=Path, help="where to draw the strongest (default: nowhere)")
    add_sources(parser)
    parser.add_argument("--rows", type=int, default=15, help="figures to print (default 15)")
    options = parser.parse_args()
    try:
        predict(options)
    except (OSError, ValueError) as error:
        print(f"predict_gap.py: {error}", file=sys.stderr)
        sys.exit(2)


def predict(options: argparse.Namespace) -> None:
    """Read, correlate, print, draw. Raises ValueError and OSError for groups that cannot be compared."""
    if options.rows < 1:
        raise ValueError(f"--rows {options.rows}: give 1 or more")
    if options.output is not None:
        check_target(options.output)
    runs = read_groups(options.groups, options.sources)
    base, *others = runs
    found, note = FinalGaps(runs, base), sources_note(runs)
    measured = {name: [of for run in runs[name] if (of := of_run(run, runs[base], found.compared))] for name in others}
    points = {name: of_recipe(of) for name, of in measured.items() if of and name in found.percent}
    for name in others:
        if name not in points:
            what = "no diagnostics (precision.diagnostics.interval)" if not measured[name] else "no gap at the end"
            print(f"left out: {name} has {what}")
    gaps = {name: found.percent[name].mean for name in points}
    ordered = correlations(points, gaps)
    print(correlation_table(ordered, by_chance(points, gaps), options.rows))
    for line in notes_below(runs, points):
        print(line)
    if options.output:
        print(draw_correlations(ordered, points, found.percent, base, options.output, note))


def of_run(run: HeldOut, base: Sequence[HeldOut], compared: Sequence[HeldOut]) -> dict[str, float]:
    """The figures of a run; none if it has no diagnostics. compared: of `partners`."""
    folder, records = run.folder, records_of_run(run.folder)
    early = early_records(records)
    if not early:
        return {}
    partner = next(iter(partners(run, base, compared)), None)
    loss = early_loss(records, records_of_run(partner.folder)) if partner else {}
    config_file = Path(folder) / "config.yaml"
    try:
        shapes = linear_shapes(ModelConfig(**yaml.safe_load(config_file.read_text())["model"]))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{config_file}: model.{where} is nothing that this version knows: {first['msg']}") from error
    except (KeyError, TypeError, yaml.YAMLError) as error:
        raise ValueError(f"{config_file} names no model that this version knows") from error
    try:
        return figures(early, {shape.name: shape.parameters for shape in shapes}) | loss
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error


if __name__ == "__main__":
    end_without_reader()
    main()
