"""Print hashes of the bits of short runs, which together use every recipe, switch, mesh and measurement.

    python scripts/fingerprint.py > before.txt          at the commit before a change
    python scripts/fingerprint.py > after.txt           at the commit after it
    diff before.txt after.txt                           empty after a refactoring

Each line has a run's name, its last loss, and hashes of its results: losses, gradient norms and validation losses of
all steps; weights and moments of the last checkpoint; measurements of diagnostics, gradient noise and rechecks,
generated text and exported weights. A run takes seconds and uses the GPU if there is one. Lines of different machines
cannot be compared. --tree runs another checkout, for example a worktree of the commit before. A case with more ranks
than there are GPUs is left out. Exit code: 0, or 1 if a run failed.
"""

from __future__ import annotations

if __name__ == "__main__":
    import _command  # noqa: F401

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from data.indexed import write_dataset
from megatron_fp4.checkpoint.files import read_checked, read_manifest
from megatron_fp4.checkpoint.shards import METADATA, read_metadata, read_shards

COMMON = (
    "train.steps=6 train.global_batch_size=4 train.micro_batch_size=1 train.sequence_length=64 "
    "model.pattern=M-*-M-M- model.nvfp4_bf16_blocks.last=1 schedule.decay_fraction=0.5 validation.interval=3 "
    "validation.num_samples=3 checkpoint.interval=3 logging.interval=1 logging.tensorboard=false data.num_workers=0"
)
# name -> (ranks, overrides). {first}: the folder of the first case's run; {corpus}: the prefix of `write_corpus`.
CASES: dict[str, tuple[int, str]] = {
    "nvfp4": (1, "precision=nvfp4"),
    "bf16": (1, "precision=bf16"),
    "mxfp4": (1, "precision=mxfp4"),
    "mxfp8": (1, "precision=mxfp8"),
    "fp8_block": (1, "precision=fp8_block"),
    "nvfp4_all_the_way": (1, "precision=nvfp4_all_the_way"),
    "nvfp4_nemotron_3": (1, "precision=nvfp4_nemotron_3"),
    "nvfp4_best": (1, "precision=nvfp4_best"),
    "sections": (1, "precision=nvfp4 precision.exceptions=[{{names:['*.in_proj'],sections:[z],precision:mxfp8}}]"),
    "switch forward": (1, "precision.switch.scope=forward precision.switch.when=3"),
    "switch backward": (1, "experiment=qaf"),
    "switch to mxfp8": (1, "precision.switch.target=mxfp8 precision.switch.when=0.5"),
    "nvfp4_quartet2": (1, "precision=nvfp4_quartet2 train.sequence_length=128"),
    "four over six, 1x16 weights": (
        1,
        "precision.fprop.weight.four_over_six=true precision.fprop.weight.block=1x16 "
        "precision.fprop.activation.four_over_six=true",
    ),
    "codes of fprop": (
        1,
        "precision.wgrad.rht=0 precision.wgrad.activation.source=codes precision.dgrad.weight.source=codes",
    ),
    "fresh signs everywhere": (1, "precision.rht_signs=fresh precision.fprop.rht=16 precision.dgrad.rht=16"),
    "FP32": (1, "precision.compute_dtype=float32"),
    "sums as Blackwell": (1, "precision.sums=blackwell"),
    "odd sizes": (1, "train.sequence_length=48 model.num_query_heads=4 precision=mxfp4"),
    "selective recomputation": (1, "train.activation_checkpointing=selective"),
    "block recomputation": (1, "train.activation_checkpointing=block"),
    "transformer": (1, "model=transformer_60m model.pattern=*-*- model.hidden_dim=128 model.ffn_dim=256"),
    "experts": (
        2,
        "precision=nvfp4_nemotron_3 model.pattern=ME*E model.moe_ffn_dim=64 model.moe_shared_ffn_dim=64 "
        "model.moe_latent_dim=64 model.moe_num_groups=4 model.moe_top_groups=2 train.activation_checkpointing=block "
        "precision.diagnostics.interval=2 precision.recheck_interval=2 run.replay_interval=2",
    ),
    "gated FFNs, other formats": (
        2,
        "parallel.tensor=2 model.pattern=*G*G model.rope=true precision.wgrad.gradient.format=e2m1_e4m3_row "
        "precision.fprop.weight.format=e1m2_e5m3 precision.fprop.activation.format=e4m3_tensor "
        "precision.exceptions=[{{names:[head],precision:nvfp4}}]",
    ),
    "measured": (1, "precision.diagnostics.interval=2 precision.recheck_interval=2"),
    "gradient noise": (1, "precision.switch.when=gradient_noise precision.switch.interval=2"),
    "tensor parallel": (2, "parallel.tensor=2 precision.diagnostics.interval=2"),
    "tensor parallel, amax of shards": (2, "parallel.tensor=2 precision.amax=shard parallel.sequence=false"),
    "data parallel": (2, "precision.switch.when=gradient_noise precision.switch.interval=2"),
    "masked documents": (1, "data.documents=masked model.rope=true"),
    "masked documents, no boundary loss": (2, "data.documents=masked data.boundary_loss=false"),
    "data parallel, resharded": (2, "parallel.reshard=true train.activation_checkpointing=selective"),
    "data parallel, reduced each": (2, "parallel.reduce_gradients=each"),
    "hybrid sharding": (4, "parallel.replicate=2"),
    "resumed": (1, "checkpoint.resume={first}/checkpoints/step_00000003"),
    "resumed on two ranks": (2, "checkpoint.resume={first}/checkpoints/step_00000003"),
    "resumed, tensor parallel": (2, "checkpoint.resume={first}/checkpoints/step_00000003 parallel.tensor=2"),
    "Megatron's order": (
        1,
        "data=indexed data.order=megatron model.vocab_size=512 data.sources={{a:{corpus}_a,b:{corpus}_b}} "
        "data.phases=[{{name:main,blend:{{a:0.7,b:0.3}}}}] validation.interval=0 data.cache_dir={corpus}_cache",
    ),
    "own files": (
        2,
        "data=indexed model.vocab_size=512 data.sources={{a:{corpus}_a,b:{corpus}_b}} "
        "data.validation={{held_out:{corpus}_c}} data.phases=[{{name:main,blend:tokens}}]",
    ),
    "phases of other lengths": (
        1,
        "data.phases=[{{name:short,steps:3,blend:{{code:1}}}},"
        "{{name:long,sequence_length:32,global_batch_size:8,blend:{{prose:1}}}}]",
    ),
    "prompts": (1, "validation.prompts=[def,The] validation.prompt_tokens=8"),
    "export": (1, "checkpoint.export_interval=6"),
}


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=Path(__file__).resolve().parent.parent, help="checkout to run")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time (default: 2)")
    options = parser.parse_args(arguments)
    names = [name for name in CASES if options.only in name]
    if not names:
        parser.error(f"--only {options.only}: no name contains it; the cases are {', '.join(CASES)}")
    if gpus := torch.cuda.device_count():
        names = [name for name in names if CASES[name][0] <= gpus]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        scratch = Path(folder)
        write_corpus(scratch)
        # The first case runs alone: it prepares the corpus for all, and others resume from its checkpoint.
        first = next(iter(CASES))
        lines = [fingerprint(first, options.tree, scratch)]
        if first in names:
            print(lines[0], flush=True)
        for line in pool.map(lambda name: fingerprint(name, options.tree, scratch), [n for n in names if n != first]):
            lines.append(line)
            print(line, flush=True)
    return int(any("FAILED" in line for line in lines))


def write_corpus(scratch: Path) -> None:
    """Three small datasets in Megatron's format: scratch/corpus_a, _b, _c."""
    generator = np.random.default_rng(0)
    for name, documents in (("a", 60), ("b", 40), ("c", 12)):
        lengths = generator.integers(5, 200, documents).astype(np.int32)
        tokens = generator.integers(0, 512, lengths.sum())
        write_dataset(scratch / f"corpus_{name}", np.split(tokens, np.cumsum(lengths)[:-1]), np.int32)


def arguments_of(name: str, scratch: Path) -> list[str]:
    """The command line of a case: `COMMON`, its overrides, its folder."""
    names = list(CASES)
    overrides = CASES[name][1].format(first=scratch / "0", corpus=scratch / "corpus")
    return [*COMMON.split(), *overrides.split(), f"run.dir={scratch / str(names.index(name))}"]


def fingerprint(name: str, tree: Path, scratch: Path) -> str:
    """Run one case with the pretrain.py of `tree`, in a folder of `scratch`; returns its line."""
    ranks, arguments = CASES[name][0], arguments_of(name, scratch)
    run_dir = Path(arguments[-1].removeprefix("run.dir="))
    # Import the packages of this tree, not the installed ones.
    paths = os.pathsep.join([str(tree), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *torchrun, "pretrain.py", *arguments]
    done = subprocess.run(
        command, cwd=tree, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        return f"{name:32} FAILED\n{done.stdout[-6000:]}"
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [(r["step"], r["loss"], r["grad_norm"], r["lr"]) for r in records if r["kind"] == "step"]
    losses = [
        {k: v for k, v in r.items() if k not in ("time", "bits_per_byte")}  # bits_per_byte follows from the losses
        for r in records
        if r["kind"] == "validation"
    ]
    measured = [r for r in records if r["kind"] in ("diagnostics", "gradient_noise")]
    measured += [r["samples"] for r in records if r.get("event") == "text"]
    measured += [tensors_digest(load_file(path)) for path in sorted(run_dir.glob("exports/*/*.safetensors"))]
    # Sorted, because the order depends on when a save in the background ends.
    events = sorted((r["step"], r["event"]) for r in records if r["kind"] == "event")
    newest = run_dir / "checkpoints" / (run_dir / "checkpoints" / "latest").read_text().strip()
    hashes = {"steps": digest([steps, losses, events]), "state": state_digest(newest), "measured": digest(measured)}
    return f"{name:32} {steps[-1][1]!r:20} " + "  ".join(f"{what} {value}" for what, value in hashes.items())


def digest(value: Any) -> str:
    """Eight hexadecimal digits of a hash of JSON values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]


def state_digest(checkpoint: Path) -> str:
    """The digest of all tensors of a checkpoint."""
    records = read_manifest(checkpoint).files
    metadata = read_metadata(read_checked(checkpoint, METADATA, records))
    tensors: dict[str, torch.Tensor] = {
        name: torch.empty(meta.size, dtype=meta.properties.dtype)
        for name, meta in metadata.state_dict_metadata.items()
        if isinstance(meta, TensorStorageMetadata)
    }
    read_shards(checkpoint, metadata, records, tensors)
    return tensors_digest(tensors)


def tensors_digest(tensors: dict[str, torch.Tensor]) -> str:
    """The digest of the names, dtypes and bytes of tensors."""
    of_tensors = {
        name: (str(t.dtype), hashlib.sha256(t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest())
        for name, t in tensors.items()
    }
    return digest(of_tensors)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
