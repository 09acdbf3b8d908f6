"""The dry run: sizes per rank counted by hand, and messages counted from the source."""

import multiprocessing
import os
import traceback
from collections import Counter
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import pytest

from megatron_fp4.config.schema import Config, ModelConfig, ParallelConfig, TrainConfig
from megatron_fp4.planning.dry_run import DryRun, dry_run
from megatron_fp4.training.build import sharded_model
from models import provider as models
from models.planned import planned_execution
from tests.composing import composed
from tests.programs import ROOT, fork_server, run_program

pytestmark = pytest.mark.slow

MODEL = ModelConfig(
    pattern="M*-", vocab_size=256, hidden_dim=64, ffn_dim=128, num_query_heads=8, num_kv_heads=4, head_dim=16,
    mamba_num_heads=8, mamba_head_dim=16, mamba_num_groups=4, mamba_state_dim=16,
)  # fmt: skip


def configured(precision: str = "nvfp4", model: ModelConfig = MODEL, recompute: str = "none", **changes) -> Config:
    base = composed(f"precision={precision}")
    train = TrainConfig(global_batch_size=64, micro_batch_size=1, sequence_length=128)
    train = replace(train, activation_checkpointing=recompute)
    config = replace(base, model=model, train=train, parallel=ParallelConfig(**changes))  # type: ignore[arg-type]
    blocks = type(config.precision.bf16_blocks)()
    return replace(config, precision=replace(config.precision, bf16_blocks=blocks, backend="emulated"))


def run_each(world_size: int, *configs: Config) -> list[DryRun]:
    """The dry runs of these configurations. In another process, since a dry run needs its own process group."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = fork_server().Process(target=_send_runs, args=(sender, world_size, configs), daemon=True)
    process.start()
    sender.close()  # the process has its own copy; when it ends, `recv` fails instead of waiting
    assert receiver.poll(300), "the dry run takes too long"
    results = receiver.recv()
    process.join()
    assert process.exitcode == 0 and isinstance(results, list), results
    return results


def _built(config: Config, mesh: Any, step_state: Any, backend: Any) -> Any:
    return sharded_model(config, models, mesh, step_state, planned_execution(config), backend)


def _send_runs(sender: Connection, world_size: int, configs: tuple[Config, ...]) -> None:
    try:
        sender.send([dry_run(config, world_size, partial(_built, config)) for config in configs])
    except Exception:
        sender.send(traceback.format_exc())


def counted(dry, operation: str, group: str) -> int:
    return sum(n for m, n in dry.messages.items() if (m.operation, m.group) == (operation, group))


def sizes_of(dry, operation: str, group: str) -> Counter[int]:
    """The number of messages by size in bytes."""
    sizes: Counter[int] = Counter()
    for message, count in dry.messages.items():
        if (message.operation, message.group) == (operation, group):
            sizes[message.num_bytes] += count
    return sizes


@pytest.fixture(scope="module")
def tp2_dp4() -> DryRun:
    return run_each(8, configured(tensor=2))[0]


@pytest.fixture(scope="module")
def on_four() -> list[DryRun]:
    """In NVFP4 and BF16, each with parameters kept and with parameters freed between micro-batches."""
    kinds = [(precision, reshard) for precision in ("nvfp4", "bf16") for reshard in (False, True)]
    return run_each(4, *(configured(precision=precision, reshard=reshard) for precision, reshard in kinds))


def test_shards_of_parameters_and_moments(tp2_dp4):
    memory = tp2_dp4.memory
    in_proj = 2 * 128 + 2 * 64 + 8
    conv, norms, scalars = 5 * (128 + 128), 128, 3 * 8
    mamba = in_proj * 64 + conv + norms + scalars + 64 * 128
    attention, mlp = 64 * (8 + 4 + 4) * 16 + 64 * 128, 2 * 64 * 128
    whole = mamba + attention + mlp + 2 * 256 * 64  # split in two by tensor parallelism
    replicated = 4 * 64  # on every tensor-parallel rank
    per_rank = (whole / 2 + replicated) / 4
    assert per_rank <= memory.num_parameters < per_rank * 1.05  # each tensor is rounded up
    assert memory.parameters == 4 * memory.num_parameters
    assert 8 * memory.num_parameters <= memory.optimizer < 8 * memory.num_parameters + 4 * 100  # plus step counters
    # Linears gather codes instead of BF16 weights; each of the others' parameters takes at least 512 bytes.
    linears = in_proj * 64 + attention + mlp + 64 * 128
    others = (whole - linears) / 2 + replicated
    assert memory.gathered == pytest.approx(2 * others + 4 * 3 * 4 + 512 * 15, abs=512 * 10)
    assert memory.unreduced_gradients == pytest.approx(4 * (whole / 2 + replicated), rel=0.1)
    assert memory.quantized_weights == pytest.approx(9 / 16 * linears / 2, rel=0.1)
    parts = memory.parameters + memory.optimizer + memory.gathered + memory.unreduced_gradients + memory.activations
    assert parts < memory.peak


def test_messages_of_a_step(tp2_dp4):
    n = tp2_dp4.micro_batches
    assert n == 16
    # Sequence parallelism: every block gathers codes and scales of four operands: x of its first projection for fprop
    # and wgrad, dy of its second one for dgrad and wgrad. It scatters tokens once in each direction. The head gathers
    # tokens in its forward and scatters in its backward pass, the embedding the other way round.
    assert counted(tp2_dp4, "all-gather", "tp") == n * (4 * 3 + 1 + 1)
    assert counted(tp2_dp4, "reduce-scatter", "tp") == n * (2 * 3 + 1 + 1)
    # Tokens x hidden elements: half a byte of code and one scale for 16 in the blocks, BF16 outside of them.
    size = 128 * 64
    sizes = Counter({size // 2 + size // 16: n * 4 * 3, 2 * size: n * 2})
    assert sizes == sizes_of(tp2_dp4, "all-gather", "tp")
    assert sizes_of(tp2_dp4, "reduce-scatter", "tp") == {2 * size: n * 8}
    # Tensor maxima of the input and output gradient of each projection and the loss's maximum and sum, in every
    # micro-batch; once the maxima of all weights, and at the end the gradients of replicated parameters.
    assert counted(tp2_dp4, "all-reduce", "tp") == n * (6 + 6 + 2) + 1 + 1
    assert counted(tp2_dp4, "all-reduce", "dp") == 1  # maxima of weights, and of blocks that ranks share
    # Parameters are gathered once and gradients reduced once in a step, and nothing hides that.
    assert counted(tp2_dp4, "all-gather", "dp") == counted(tp2_dp4, "reduce-scatter", "dp") == 1
    assert {message.group for message in tp2_dp4.ends} == {"dp"} and sum(tp2_dp4.ends.values()) == 3
    assert counted(tp2_dp4, "all-reduce", "all ranks") == 1


@pytest.mark.parametrize(("ranks", "tensor"), [(2, 1), (4, 1), (4, 2)])
def test_rows_are_exchanged_and_the_weights_of_experts_are_not_gathered(ranks: int, tensor: int) -> None:
    """With two ranks, `ep` and the axis of all shards are the same ranks."""
    sizes: dict[str, Any] = {"moe_num_experts": 4, "moe_top_k": 2, "moe_ffn_dim": 64, "moe_shared_ffn_dim": 32}
    (dry,) = run_each(ranks, configured("bf16", replace(MODEL, pattern="E", **sizes), expert=2, tensor=tensor))
    rows, micro_batches, experts = 2 * 128 // tensor, 64 * tensor // ranks, 2 * 2 * 64 * 64
    # Counts; tokens; rows to the experts and back, and their gradients.
    sent = {4 * 8 // tensor: micro_batches, rows * 8: micro_batches, rows * 64 * 2: 4 * micro_batches}
    assert sizes_of(dry, "all-to-all", "ep") == sent
    rest = (2 * 256 + 2 * 32 + (4 + 2) * tensor) * 64  # embedding and head, shared expert, router and norms
    assert dry.memory.num_parameters == (2 * experts + rest) // ranks
    assert sum(n * size for size, n in sizes_of(dry, "reduce-scatter", "dp").items()) == 4 * experts // tensor


def test_resharding_gathers_more_often_and_holds_less(on_four):
    codes, codes_freed, kept, freed = on_four
    assert counted(kept, "all-gather", "dp") == counted(codes, "all-gather", "dp") == 1
    n = freed.micro_batches
    # Parameters outside of blocks stay between the forward and the backward pass.
    assert counted(freed, "all-gather", "dp") == n * (2 * 3 + 3)
    assert freed.memory.gathered < kept.memory.gathered
    assert freed.memory.parameters == kept.memory.parameters
    # Codes are gathered once a step and stay. They take 9/16 of a byte for each parameter of a linear, BF16 two bytes.
    assert codes_freed.memory.quantized_weights == codes.memory.quantized_weights
    assert counted(codes_freed, "all-gather", "dp") == 3 + 3 * n

    def sent(dry) -> int:
        return sum(m.num_bytes * n for m, n in dry.messages.items() if (m.operation, m.group) == ("all-gather", "dp"))

    linears = 64 * (2 * 128 + 2 * 64 + 8) + 64 * 128 + 64 * (8 + 4 + 4) * 16 + 64 * 128 + 2 * 64 * 128
    assert sent(kept) - sent(codes) == (2 - 9 / 16) * linears


def test_a_native_backend_keeps_the_codes_of_both_directions():
    model = replace(MODEL, hidden_dim=256, ffn_dim=512, head_dim=32, mamba_head_dim=64, mamba_state_dim=32)
    # (backend, recipe, bytes of a weight's element)
    rows = [
        ("transformer_engine", "nvfp4_4over6_1x16", 9 / 16),
        ("transformer_engine", "fp8_block", 1),
        ("transformer_engine", "mxfp8", 33 / 32),
        ("torch", "nvfp4_4over6_1x16", 9 / 16),
        ("torch", "mxfp8", 33 / 32),
    ]
    natives = []
    for backend, recipe, _ in rows:
        config = configured(recipe, model)
        natives.append(replace(config, precision=replace(config.precision, backend=backend)))
    emulated, *kept = (dry.memory.quantized_weights for dry in run_each(1, configured(model=model), *natives))
    for row, memory in zip(rows, kept, strict=True):  # the tolerance is for the padding of groups
        assert memory == pytest.approx(2 * row[-1] / (9 / 16) * emulated, rel=0.15), row


def test_reducing_gradients_of_each_micro_batch_with_masked_documents(on_four):
    once, config = on_four[0], configured(replicate=2, reduce_gradients="each")
    data = replace(config.data, documents="masked", boundary_loss=False)
    [each] = run_each(8, replace(config, train=replace(config.train, global_batch_size=32), data=data))
    assert each.micro_batches == 4 and counted(once, "reduce-scatter", "dp") == 1
    assert counted(each, "reduce-scatter", "dp") == 4 * 6
    assert counted(each, "all-reduce", "replicate") == 6  # after the last micro-batch
    assert once.memory.unreduced_gradients > each.memory.unreduced_gradients == 0
    # A rank holds the sums of its shard, a quarter, and the gradients of one unit, instead of all gradients.
    assert each.memory.peak < once.memory.peak - 0.3 * once.memory.unreduced_gradients
    # One message has the number of targets that count.
    assert [n for m, n in each.messages.items() if (m.operation, m.num_bytes) == ("all-reduce", 8)] == [1]


def test_selective_recomputation_keeps_no_more_in_nvfp4_than_in_bf16():
    """Inputs are computed again instead of keeping their codes."""
    tensor = 2
    overrides = ["model=nemotron_h_12b", "model.pattern=M*-", "model.vocab_size=256", "model.nvfp4_bf16_blocks.last=0"]
    model = composed(*overrides, "model.nvfp4_bf16_blocks.first=0").model
    kinds = (("nvfp4", "selective"), ("bf16", "selective"), ("nvfp4", "none"))
    configs = [configured(precision, model, recompute, tensor=tensor) for precision, recompute in kinds]
    nvfp4, bf16, everything = (dry.memory.activations for dry in run_each(tensor, *configs))
    assert nvfp4 <= bf16 + 64 * 1024  # for maxima and tensor scales, whatever the number of tokens
    assert nvfp4 < 0.9 * everything


def test_the_command_prints_memory_messages_and_time():
    overrides = ["parallel.tensor=2", "train.sequence_length=64", "train.global_batch_size=64", "model.pattern=M*-M"]
    command = [ROOT / "pretrain.py", "run.dry=true", *overrides, "run.dry_mfu=0.5"]
    done = run_program(command, {**os.environ, "WORLD_SIZE": "8"})
    assert done.returncode == 0, done.stderr
    for words in ("Precision plan nvfp4", "peak, temporaries included", "reduce-scatter", "50% of 989 TFLOP/s"):
        assert words in done.stdout
