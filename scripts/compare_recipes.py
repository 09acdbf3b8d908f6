"""What recipes cost, with error bars: groups of runs, each run against the base run of the same start and seeds.

    python scripts/compare_recipes.py bf16=runs/bf16_seed1,runs/bf16_seed2 \\
        nvfp4=runs/nvfp4_seed1,runs/nvfp4_seed2 mxfp4=runs/mxfp4_seed1 --output gap.png --final final.png
    python scripts/compare_recipes.py 'bf16=runs/bf16_from*' 'nvfp4=runs/nvfp4_from*' 'no_rht=runs/no_rht_from*'

The first group is the base. Runs from scratch are paired by run.seed and data.seed, branches by the bits of the
checkpoint that they began from, whichever run saved it, and data.seed. A branch without such a partner has its trunk,
the run whose checkpoint it began from, or the partners of its trunk, if that is in any of the groups.

Prints Markdown tables: by tokens trained on, the base's held-out loss, its standard deviation, and the mean gap of each
other group with its standard error (and how many pairs); at the end, the gaps in percent and nats, whether they are
beyond the noise, the differences to another group (--against; by default the second, if there are three), and the share
of its gap; the same by held-out source. Draws the gaps over tokens (--output) and at the end (--final). A run that is
not finished counts as far as it got, and not at the end.

Below the first table stands which run differs from its partner in more than the recipe: in its data, model, batch,
learning rate, schedule or validation. What that does is in its gap, too.

Losses are the mean of the held-out sources, each weighed alike. --sources takes some of them alone, in all tables and
pictures: one of few documents may be mostly noise.

    python scripts/compare_recipes.py bf16=runs/bf16 nvfp4=runs/nvfp4 switched=runs/nvfp4_switched --sources python,code
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from analysis.final_gaps import draw_final, final_table, source_table
from analysis.held_out import add_sources, read_groups
from analysis.paired import draw, table
from megatron_fp4.logging.picture import check_target
from megatron_fp4.runtime.closed_pipe import end_without_reader


def main() -> None:
    """Compare the groups named on the command line; exit code 2, with a line on stderr, if they cannot be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "groups", nargs="+", metavar="NAME=RUN,RUN,...", help="a recipe and its runs: folders or patterns"
    )
    parser.add_argument("--against", metavar="NAME", help="the group to which differences are told, besides the base")
    add_sources(parser)
    parser.add_argument("--output", type=Path, help="where to draw the gaps over tokens (default: nowhere)")
    parser.add_argument("--final", type=Path, help="where to draw the gaps at the end (default: nowhere)")
    options = parser.parse_args()
    try:
        for target in filter(None, (options.output, options.final)):
            check_target(target)
        groups = read_groups(options.groups, options.sources)
        names = list(groups)
        against = options.against or (names[1] if len(names) > 2 else None)
        parts = [table(groups), final_table(groups, against), source_table(groups)]
        print("\n\n".join(part for part in parts if part))
        if options.output:
            print(draw(groups, options.output))
        if options.final:
            print(draw_final(groups, options.final, against))
    except (OSError, ValueError) as error:
        print(f"compare_recipes.py: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    end_without_reader()
    main()
