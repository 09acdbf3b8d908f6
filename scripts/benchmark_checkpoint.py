"""What a checkpoint costs a run: how long training stands still, how long it takes to be written and to be read.

    torchrun --nproc-per-node 4 scripts/benchmark_checkpoint.py --folder /local/disk model=nemotron_h_12b ...
    python scripts/benchmark_checkpoint.py --synthetic-ranks 1000 model=nemotron_h_12b

The first takes whole training steps on random tokens, as scripts/benchmark_parallel.py does: some without a save, some
while one is written in the background, then one save that training waits for, and reads the last checkpoint back.
Overrides are those of pretrain.py, the process count is torchrun's. It needs the space of two checkpoints in the
folder, and removes them. The second plans the checkpoint of a job that is not there, every tensor cut into that many
shards, as this framework and as torch.distributed.checkpoint's planner do it on rank 0, in this process.
"""

from __future__ import annotations

import argparse
import pickle
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from assembly import backend_of, configure, device_type_of, execution_of, initialized_model, set_determinism
from megatron_fp4.checkpoint.checkpointer import Checkpointer
from megatron_fp4.checkpoint.metadata import Piece, Whole, metadata_of
from megatron_fp4.config.compose import ConfigError
from megatron_fp4.config.schema import Config
from megatron_fp4.parallel.mesh import build_mesh, end_process, init_distributed, leave_distributed
from megatron_fp4.precision.rng import StepState
from megatron_fp4.runtime.closed_pipe import end_without_reader
from megatron_fp4.training.optimizer import build_optimizer
from megatron_fp4.training.step import train_step
from models.hybrid import build_model
from scripts.compare_memory import random_micro_batches


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code: 0, or 2 with a line on stderr for what the user got wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="as for pretrain.py")
    parser.add_argument("--folder", type=Path, help="a folder on the disk to write to (default: a temporary one)")
    parser.add_argument("--steps", type=int, default=4, help="steps before the first save (default: %(default)s)")
    parser.add_argument("--saves", type=int, default=2, help="saves in the background (default: %(default)s)")
    parser.add_argument("--background-only", action="store_true", help="no save that training waits for, no reading")
    parser.add_argument("--synthetic-ranks", type=int, help="only plan, for so many ranks")
    options = parser.parse_intermixed_args(arguments)
    try:
        config = configure(options.overrides)
        if options.synthetic_ranks is not None:
            print(planned(config, options.synthetic_ranks))
            return 0
        rows = measure(config, options.folder, options.steps, options.saves, not options.background_only)
    except (ConfigError, OSError) as error:
        print(f"benchmark_checkpoint.py: {error}", file=sys.stderr, flush=True)
        return 2
    else:
        if dist.get_rank() == 0:
            print("\n".join(f"{name:44s} {value}" for name, value in rows.items()))
    finally:
        leave_distributed()
    return 0


def measure(config: Config, folder: Path | None, steps: int, saves: int, waiting: bool) -> dict[str, str]:
    """What there is to say, by name; of the first rank."""
    device = init_distributed(device_type_of(config), config.parallel.timeout_seconds)
    set_determinism(config.run.deterministic)
    mesh, clock = build_mesh(config.parallel, device), StepState(seed=config.run.seed)
    model, _ = initialized_model(config, mesh, clock, execution_of(config), backend_of(config))
    optimizer = build_optimizer(model, config.optimizer).optimizer
    batches = random_micro_batches(config, mesh, 0)
    place: list[Any] = [tempfile.mkdtemp(dir=folder) if mesh.rank == 0 else None]
    dist.broadcast_object_list(place)
    root = Path(place[0]) / "checkpoints"
    done = 0

    def train() -> float:
        nonlocal done
        began = time.perf_counter()
        train_step(
            model, optimizer, batches, mesh, clock,
            step=done, lr=config.optimizer.lr, clip_norm=config.optimizer.clip_norm, reshard=config.parallel.reshard,
        )  # fmt: skip
        done += 1
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    def save(checkpointer: Checkpointer) -> float:
        return timed(lambda: checkpointer.save(done, model, optimizer, {}, consumed_samples=done, consumed_tokens=done))

    for _ in range(3):
        train()
    plain = [train() for _ in range(steps)]
    background = Checkpointer(root, mesh, keep=1, identity={}, asynchronous=True)
    prepared = timed(lambda: background.prepare(model, optimizer))
    assert background.saves.staging is not None
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    rows = {
        "ranks, device": f"{mesh.world_size} x {name}",
        "a rank's share (GiB)": f"{background.saves.staging.num_bytes / 2**30:.2f}",
        "host memory for it taken in (s)": f"{prepared:.2f}",
        "step (s)": f"{statistics.median(plain):.3f}",
    }
    for number in range(1, saves + 1):
        dist.barrier()
        call = save(background)
        beside = [train()]
        while busy(background, device):
            beside.append(train())
        background.finish()
        (report,) = background.reports()
        rows[f"in the background {number}: call (s)"] = f"{call:.3f}"
        rows[f"in the background {number}: stall (s)"] = f"{report.stall:.3f}"
        rows[f"in the background {number}: written in (s)"] = f"{report.seconds:.2f}"
        rows[f"in the background {number}: steps beside (s)"] = (
            f"first {beside[0]:.3f}, median {statistics.median(beside):.3f} of {len(beside)}"
        )
    dist.barrier()
    if waiting:
        checkpointer = Checkpointer(root, mesh, keep=1, identity={})
        train()
        rows["training waits for it (s)"] = f"{save(checkpointer):.2f}"
        dist.barrier()
        read = timed(lambda: checkpointer.resume("auto", model, optimizer, clock, allow_mismatch=False))
        rows["read back in (s)"] = f"{read:.2f}"
    dist.barrier()
    if mesh.rank == 0:
        rows["its files (GiB)"] = f"{sum(f.stat().st_size for f in root.rglob('*') if f.is_file()) / 2**30:.2f}"
        shutil.rmtree(root.parent)
    return rows


def busy(checkpointer: Checkpointer, device: torch.device) -> bool:
    """Whether a save is still on its way, on any rank."""
    flag = torch.tensor(float(checkpointer.saves.on_its_way), device=device)
    dist.all_reduce(flag)
    return bool(flag.item())


def timed(action: Callable[[], object]) -> float:
    """Seconds it takes."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def planned(config: Config, ranks: int) -> str:
    """Rank 0's processor time to plan the checkpoint of `ranks` ranks, here and by torch.distributed.checkpoint."""
    init_distributed("cpu", 60)
    mesh = build_mesh(config.parallel, torch.device("cpu"))
    with torch.device("meta"):
        model = build_model(config.model, mesh, torch.bfloat16, execution_of(config))
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    wholes = [Whole(("model", name), torch.float32, shape) for name, shape in shapes.items()]
    for moment in ("exp_avg", "exp_avg_sq"):
        wholes += [Whole(("optimizer", f"{name}.{moment}"), torch.float32, shape) for name, shape in shapes.items()]
    pieces: dict[str, list[Piece]] = {}
    for rank in range(ranks):
        of_rank = pieces.setdefault(f"__{rank}_0.distcp", [])
        for number, whole in enumerate(wholes):
            rows = -(-whole.shape[0] // ranks)
            first, last = min(rank * rows, whole.shape[0]), min((rank + 1) * rows, whole.shape[0])
            if first < last:
                rest = whole.shape[1:]
                of_rank.append(Piece(number, (first, *(0 for _ in rest)), (last - first, *rest), 0, 1))
    received = pickle.dumps(list(pieces.values()))
    began = time.process_time()
    pickle.loads(received)
    content = metadata_of(wholes, pieces)
    ours = time.process_time() - began

    paths = {whole.name: whole.path for whole in wholes}
    plans = [
        SavePlan([write_item(wholes[piece.tensor], piece) for piece in of_rank], planner_data=paths)
        for of_rank in pieces.values()
    ]
    received = pickle.dumps(plans)
    planner = DefaultSavePlanner()
    planner.set_up_planner({whole.name: torch.empty(0) for whole in wholes}, None, is_coordinator=True)
    began = time.process_time()
    global_plans, metadata = planner.create_global_plan(pickle.loads(received))
    # Each rank then gets its plan, and sends where it wrote what; here without the files.
    for plan in global_plans:
        pickle.dumps(plan)
    metadata.storage_data = {item.index: item.index for plan in global_plans for item in plan.items}
    pickle.dumps(metadata)
    theirs = time.process_time() - began
    count = sum(map(len, pieces.values()))
    return (
        f"{ranks} ranks, {len(wholes)} tensors, {count:,} pieces, .metadata {len(content) / 1e6:.0f} MB\n"
        f"rank 0's processor time: {ours:.1f} s for the first save of a run and 0 for the others, beside training;\n"
        f"torch.distributed.checkpoint's planner: {theirs:.1f} s for each"
    )


def write_item(whole: Whole, piece: Piece) -> WriteItem:
    """A piece in the words of torch.distributed.checkpoint."""
    chunk = ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes))
    return WriteItem(
        index=MetadataIndex(whole.name, chunk.offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(chunk, TensorProperties(whole.dtype), torch.Size(whole.shape)),
    )


if __name__ == "__main__":
    end_without_reader()
    end_process(main(sys.argv[1:]))
