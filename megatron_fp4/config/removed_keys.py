"""Keys of earlier versions: what to use instead.

Commands and files that still set one are refused, with a remedy. Saved configurations with one (in checkpoints of any
version, whose weights are still read) are converted to today's keys.
"""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Iterator, Mapping
from typing import Any

# key or section, as a pattern -> what to do instead
_REMOVED = {
    "checkpoint.export_at_end": "set checkpoint.export_interval to train.steps instead",
    "checkpoint.local_dir": "no checkpoints are kept on nodes' own disks; save shared ones more often instead",
    "checkpoint.local_interval": "no checkpoints are kept on nodes' own disks; lower checkpoint.interval instead",
    "checkpoint.max_failed_saves": "three failed saves in a row end a run; leave it out",
    "logging.baseline": "scripts/report.py --baseline shows another run beside this one; leave it out",
    "logging.memory_history": "logging.profile_steps=[1,1] records the history of CUDA memory too",
    "logging.wandb_project": "set wandb's own WANDB_PROJECT in the environment",
    "data.prefetch": "loader workers are two steps ahead; leave it out, or raise data.num_workers",
    "data.remote_cache": "blocks of URLs are kept in `remote` below data.cache_dir; set that instead",
    "optimizer.implementation": "torch's fused AdamW is the only one; leave it out",
    "optimizer.deoscillation*": "master weights are never reset; leave it out",
    "data.fim*": "documents are never rearranged; do it when you prepare them, and leave it out",
    "precision.mean_group": "operands are never without their means; leave it out",
    "precision.*.mean": "operands are never without their means; leave it out",
    "precision.*.four_over_six_error": "write four_over_six=squared instead",
    "precision.*.power_of_two_scales": "write precision.fp8_power_of_two_scales=true instead",
    "precision.*.reuse_fprop": "write source=codes instead, of dgrad's weight or wgrad's activation",
    "precision.switch.patience": "three measurements in a row must lie below the threshold; leave it out",
    "precision.recheck_action": "a difference ends the run; leave it out, or set precision.recheck_interval=0",
    "run.dry_host_bandwidth": "a plan assumes 300 GB/s within a host; leave it out",
    "run.dry_host_ms": "a plan assumes 3 ms of Python a linear; leave it out",
    "run.dry_network_bandwidth": "a plan assumes 40 GB/s between hosts; leave it out",
    "run.dry_peak_tflops": "parallel.gpu names the GPU that a plan is for; leave it out",
    "run.replay_action": "a difference ends the run; leave it out, or set run.replay_interval=0",
    "spikes.min_history": "half of spikes.window steps are needed; set that instead",
    "run.file_mode": "set the umask of the shell, such as umask 027, instead",
}


def why_removed(key: str) -> str | None:
    """The error message for a dotted key of an earlier version; None for any other key."""
    for pattern, instead in _REMOVED.items():
        if fnmatch.fnmatchcase(key, pattern):
            return f"{key} is no longer a key: {instead}"
    return None


def renewed(saved: Mapping[str, Any]) -> dict[str, Any]:
    """A saved configuration of this or an earlier version, with today's keys."""
    found = copy.deepcopy(dict(saved))
    for precision in (found.get("precision") or {}, found.get("after_switch") or {}):
        for gemm in ("fprop", "dgrad", "wgrad"):
            for tensor, operand in precision.get(gemm, {}).items():
                if not isinstance(operand, dict):
                    continue
                if operand.get("reuse_fprop"):
                    operand["source"] = "codes"
                if (gemm, tensor) not in (("dgrad", "weight"), ("wgrad", "activation")):
                    operand.pop("source", None)
                if isinstance(on := operand.get("four_over_six"), bool):
                    operand["four_over_six"] = operand.get("four_over_six_error", "absolute") if on else "none"
                if operand.get("power_of_two_scales") and operand["format"] == "fp8":
                    precision["fp8_power_of_two_scales"] = True
    return _without_removed(found)


def _without_removed(saved: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    return {
        name: _without_removed(value, f"{path}{name}.") if isinstance(value, Mapping) else value
        for name, value in saved.items()
        if why_removed(f"{path}{name}") is None
    }


def leaves(node: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """All keys that are not sections, with their values."""
    for name, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value
