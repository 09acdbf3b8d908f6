"""What a run would need, without running it: memory, messages, FLOPs, time. For any number of ranks, in one process.

    python scripts/plan_run.py --world-size 736 experiment=nemotron_h_12b data=my_corpus parallel.tensor=8
    WORLD_SIZE=736 python pretrain.py experiment=nemotron_h_12b data=my_corpus parallel.tensor=8 run.dry=true

Both do the same. The configuration is checked as for the run itself; then the job is built on a fake process group and
takes two steps on fake tensors (megatron_fp4/planning/dry_run.py), with what the CUDA kernels would allocate. Data is
not opened. The time of a step is the largest of what the GPU computes, what the links carry and what Python does
(megatron_fp4/planning/step_time.py), at the rates that the keys `run.dry_*` give.
"""

from __future__ import annotations

import argparse
import os
import sys

import pretrain
from megatron_fp4.runtime.closed_pipe import end_without_reader


def main(arguments: list[str]) -> int:
    """Run the command; the exit code is that of pretrain.py."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, default=1, help="ranks of the run (default: 1)")
    parser.add_argument("overrides", nargs="*", help="the run's configuration, as for pretrain.py")
    options = parser.parse_intermixed_args(arguments)
    os.environ["WORLD_SIZE"] = str(options.world_size)
    return pretrain.main([*options.overrides, "run.dry=true"])


if __name__ == "__main__":
    end_without_reader()
    sys.exit(main(sys.argv[1:]))
