"""What recipes cost over several starts, with error bars: files of try_recipes.py in one table.

    for seed in 1 2 3; do
        python scripts/try_recipes.py runs/bf16_seed$seed/checkpoints/step_00000600 --output tried_$seed.json \\
            bf16 nvfp4 nvfp4_best
    done
    python scripts/compare_starts.py tried_1.json tried_2.json tried_3.json --picture starts.png

Of each recipe: the mean over the starts of its training loss above the base's, its standard error over starts, whether
that is beyond the noise, the same against another recipe, its share of that one's gap, and the time of a step. Recipes
are known by their names, which have to mean the same in all files; one that a file lacks has fewer starts.
Exit code: 0; 2 wrong arguments, or files that cannot be compared.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from analysis.starts import Starts, draw_starts, read_starts, starts_table
from analysis.trials import first_steps
from megatron_fp4.logging.picture import check_target
from megatron_fp4.runtime.closed_pipe import end_without_reader


def main() -> None:
    """Compare the starts named on the command line; exit code 2, with a line on stderr, if they cannot be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="what try_recipes.py --output has written")
    parser.add_argument("--base", metavar="NAME", help="the recipe to hold others against (default: the first)")
    parser.add_argument(
        "--against", metavar="NAME", help="another recipe to tell differences to (default: the second, of three)"
    )
    parser.add_argument("--skip", type=int, help="first steps that do not count (default: a sixth, at most 10)")
    parser.add_argument("--picture", type=Path, help="where to draw the gaps (default: nowhere)")
    options = parser.parse_args()
    try:
        if options.picture is not None:
            check_target(options.picture)
        starts = read_starts(options.files)
        names = list(starts[0].trials)
        base, against = options.base or names[0], options.against or (names[1] if len(names) > 2 else None)
        skip = first_steps(starts[0].steps) if options.skip is None else options.skip
        found = Starts(starts, base, None if against == base else against, skip)
        print(starts_table(found))
        if options.picture is not None:
            print(draw_starts(found, options.picture))
    except (OSError, ValueError) as error:
        print(f"compare_starts.py: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    end_without_reader()
    main()
