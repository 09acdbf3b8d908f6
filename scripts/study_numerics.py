"""Measure what each number format and each part of the recipe does; the tables and pictures of docs/numerics.md.

    python scripts/study_numerics.py                                  everything, a few minutes on one CPU core
    python scripts/study_numerics.py --only rounding exactness        two of the sections
    python scripts/study_numerics.py --page docs/numerics.md          also put tables and pictures into the page
    python scripts/study_numerics.py --checkpoint runs/a/checkpoints/step_00000300
    python scripts/study_numerics.py --quick                          seconds, to see that it works

Tables are printed as Markdown. Pictures are drawn for --page, into `pictures` beside it, or into --pictures. Tensors of
a real model come from the tiny model, which is trained here for some steps of the built-in data in NVFP4, or from
--checkpoint. `--set key=value` changes that run (model.vocab_size=512, train.steps=300). The same command on the same
machine gives the same numbers; on another, the trained model differs in the last bits of its BF16 products, and the
captured rows in their last digits.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from megatron_fp4.checkpoint.files import DamagedCheckpointError
from megatron_fp4.parallel.mesh import leave_distributed
from megatron_fp4.runtime.closed_pipe import end_without_reader
from scripts.study.exactness import study_exactness
from scripts.study.formats import study_formats
from scripts.study.hadamard import study_hadamard
from scripts.study.layers import study_layers
from scripts.study.means import study_means
from scripts.study.rounding import study_rounding
from scripts.study.tensors import QUICK, Size, Study
from scripts.study.weights import study_weights

SECTIONS: dict[str, Callable[[Study], Iterator[tuple[str, str]]]] = {
    "formats": study_formats,
    "hadamard": study_hadamard,
    "weights": study_weights,
    "rounding": study_rounding,
    "means": study_means,
    "layers": study_layers,
    "exactness": study_exactness,
}


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="study_numerics.py", description="The tables and pictures of docs/numerics.md."
    )
    parser.add_argument("--quick", action="store_true", help="small tensors and a hardly trained model")
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS), help="sections to run")
    parser.add_argument("--checkpoint", type=Path, help="capture tensors from this checkpoint instead of training")
    parser.add_argument("--pictures", type=Path, help="folder of the PNG files (default: beside --page)")
    parser.add_argument("--page", type=Path, help="a Markdown page to put the tables into")
    parser.add_argument("--set", nargs="+", default=[], metavar="key=value", help="changes to the captured run")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code: 0, or 2 with a line on stderr for what the user got wrong."""
    options = parse(arguments)
    pictures = options.pictures or (options.page.parent / "pictures" if options.page else None)
    study = Study(QUICK if options.quick else Size(), pictures, options.set, options.checkpoint)
    try:
        tables: dict[str, str] = {}
        for section in options.only:
            for name, content in SECTIONS[section](study):
                tables[name] = content
                print(f"\n{section}: {name}\n\n{content}", flush=True)
        if options.page is not None:
            fill_page(options.page, tables)
    except (ValueError, OSError, DamagedCheckpointError) as error:
        print(f"study_numerics.py: {error}", file=sys.stderr)
        return 2
    finally:
        leave_distributed()
    return 0


def fill_page(page: Path, tables: dict[str, str]) -> None:
    """Put each table between `<!-- table: NAME -->` and `<!-- end -->` of `page`; ValueError without them."""
    text = page.read_text()
    for name, content in tables.items():
        pattern = rf"(<!-- table: {name} -->\n).*?(<!-- end -->)"
        if not re.search(pattern, text, flags=re.DOTALL):
            raise ValueError(f"{page} has no place <!-- table: {name} --> ... <!-- end -->")
        text = re.sub(pattern, lambda m, c=content: f"{m[1]}{c}\n{m[2]}", text, flags=re.DOTALL)  # type: ignore[misc]
    page.write_text(text)


if __name__ == "__main__":
    end_without_reader()
    sys.exit(main(sys.argv[1:]))
