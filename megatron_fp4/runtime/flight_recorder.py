"""NCCL's flight recorder: the last collectives of each rank, written to the run's folder when one times out.

NCCL ends a process in C++ then, without an exception. `torchfrtrace` of torch reads the files
(`ranks/nccl_trace_rank_3`) and says which rank did not join which collective.
"""

from __future__ import annotations

import os
from pathlib import Path

from megatron_fp4.runtime.progress import FOLDER


def record_collectives(run_dir: Path) -> None:
    """Switch it on by torch's environment variables, unless they are set; before the process group is made."""
    path = str((run_dir / FOLDER / "nccl_trace_rank_").absolute())
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", path)
