"""Keys of earlier versions: what to use instead, and how a run that was saved with one resumes.

Commands and files that still set one are refused, with a remedy. Saved configurations with one (in checkpoints of any
version) are converted to today's keys. If a value differs from the one that always holds now, a resume prints it; if
the run used a removed feature, the resume is refused.
"""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Iterator, Mapping
from typing import Any

# key or section, as a pattern -> (the value that always holds now, or None; what to do instead)
_REMOVED = {
    "checkpoint.export_at_end": (False, "set checkpoint.export_interval to train.steps instead"),
    "checkpoint.local_dir": (None, "no checkpoints are kept on nodes' own disks; save shared ones more often instead"),
    "checkpoint.local_interval": (0, "no checkpoints are kept on nodes' own disks; lower checkpoint.interval instead"),
    "checkpoint.max_failed_saves": (3, "three failed saves in a row end a run; leave it out"),
    "logging.memory_history": (None, "logging.profile_steps=[1,1] records the history of CUDA memory too"),
    "logging.wandb_project": (None, "set wandb's own WANDB_PROJECT in the environment"),
    "data.prefetch": (2, "loader workers are two steps ahead; leave it out, or raise data.num_workers"),
    "data.remote_cache": (None, "blocks of URLs are kept in `remote` below data.cache_dir; set that instead"),
    "optimizer.implementation": ("torch", "torch's fused AdamW is the only one; leave it out"),
    "optimizer.deoscillation*": (None, "master weights are never reset; leave it out"),
    "data.fim*": (None, "documents are never rearranged; do it when you prepare them, and leave it out"),
    "precision.mean_group": (None, "operands are never without their means; leave it out"),
    "precision.*.mean": ("kept", "operands are never without their means; leave it out"),
    "precision.*.four_over_six_error": (None, "write four_over_six=squared instead"),
    "precision.*.power_of_two_scales": (None, "write precision.fp8_power_of_two_scales=true instead"),
    "precision.*.reuse_fprop": (None, "write source=codes instead, of dgrad's weight or wgrad's activation"),
    "precision.switch.patience": (3, "three measurements in a row must lie below the threshold; leave it out"),
    "precision.recheck_action": ("end", "a difference ends the run; leave it out, or set precision.recheck_interval=0"),
    "run.dry_host_bandwidth": (None, "a plan assumes 300 GB/s within a host; leave it out"),
    "run.dry_host_ms": (None, "a plan assumes 3 ms of Python a linear; leave it out"),
    "run.dry_network_bandwidth": (None, "a plan assumes 40 GB/s between hosts; leave it out"),
    "run.dry_peak_tflops": (None, "parallel.gpu names the GPU that a plan is for; leave it out"),
    "run.replay_action": ("end", "a difference ends the run; leave it out, or set run.replay_interval=0"),
    "spikes.min_history": (None, "half of spikes.window steps are needed; set that instead"),
    "run.file_mode": (None, "set the umask of the shell, such as umask 027, instead"),
}
# Removed features: pattern of a key -> the value with which a run did not use the feature.
_ABILITIES = {"optimizer.deoscillation.interval": 0, "data.fim.*.rate": 0, "precision.*.mean": "kept"}


def why_removed(key: str) -> str | None:
    """The error message for a dotted key of an earlier version; None for any other key."""
    for pattern, (_, instead) in _REMOVED.items():
        if fnmatch.fnmatchcase(key, pattern):
            return f"{key} is no longer a key: {instead}"
    return None


def refuse_removed(saved: Mapping[str, Any]) -> None:
    """Raise ValueError if the run that saved this configuration used a removed feature."""
    for key, value in leaves(saved):
        for pattern, off in _ABILITIES.items():
            if fnmatch.fnmatchcase(key, pattern) and value != off:
                raise ValueError(
                    f"its run had {key}={value}, which this version cannot do; resume it with the version that wrote "
                    "it, or begin a new run with its weights (checkpoint.initialize_from)"
                )


def removed_values(saved: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """(key, its value in `saved`, the value that always holds now), for each key where they differ."""
    for key, value in leaves(saved):
        for pattern, (now, _) in _REMOVED.items():
            if fnmatch.fnmatchcase(key, pattern) and now is not None and value not in (None, now):
                yield key, value, now


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
