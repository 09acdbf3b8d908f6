"""A dry run: two steps of the real job on fake tensors, in one process, for any number of ranks.

The model is built and sharded as for training, over torch's `fake` process group, whose collectives return at once.
Every shape, every division of a size by a mesh and every collective is the program's own, but no tensor has memory or
values. The first step brings the run into its steady state (moments exist, weights are quantized); the second counts.

The backend of the linears runs its own code on an NVIDIA GPU whose kernels do nothing. Operands that have no fused
kernel (four-over-six in square blocks, unusual transforms, FP32 activations) go through PyTorch, as on a GPU. Of
Transformer Engine the dry run knows the operands and products, but not the temporaries.

A `Ledger` is a dispatch mode: it sees every operation, lists the storages that are alive (views share one) and adds up
the messages of `torch.distributed`. It counts memory as PyTorch's CUDA allocator does
(`torch.cuda.max_memory_allocated`): in units of 512 bytes, without the allocator's reserve, the CUDA context, NCCL's
buffers and cuBLAS's workspaces. The dry run adds these workspaces.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_fp4.config.axes import AXES, ROWS
from megatron_fp4.config.schema import Config
from megatron_fp4.parallel.mesh import ParallelMesh, axes_of, build_mesh
from megatron_fp4.parallel.reproducible import leaf_size
from megatron_fp4.precision.backend import Backend, OperandRequest, RowGroups, added
from megatron_fp4.precision.emulated import EmulatedBackend, GemmOperand, codes_of, shared_amax
from megatron_fp4.precision.fp32_gradients import local_part
from megatron_fp4.precision.messages import Pending
from megatron_fp4.precision.operands import LinearContext
from megatron_fp4.precision.plan import PrecisionController
from megatron_fp4.precision.recipe import Operand
from megatron_fp4.precision.rng import StepState
from megatron_fp4.precision.torch_scaled_mm import TorchBackend
from megatron_fp4.precision.transformer_engine import NativeLayout, NativeOperand, TransformerEngineBackend
from megatron_fp4.quantization import cuda
from megatron_fp4.quantization.formats import format_of
from megatron_fp4.quantization.rounding import Place
from megatron_fp4.quantization.tensor import QuantizedTensor
from megatron_fp4.training.optimizer import build_optimizer, is_fused, optimizer_parameters
from megatron_fp4.training.providers import MicroBatch
from megatron_fp4.training.step import accumulate, update

# 32 MiB from Hopper on, for the thread that runs the forward pass and for autograd's, which runs the backward pass.
_WORKSPACES = 2 * 32 * 2**20
_ALLOCATION_UNIT = 512
_MULTIPROCESSORS = 132  # of an H100 or H200
# Along these, ranks that compute other micro-batches gather parameters and sum gradients.
BATCH_AXES = [ROWS, *(axis.name for axis in AXES if "batch" in axis.divides and "experts" not in axis.divides)]

# (mesh, step state, backend) -> the model and the controller of its linears.
Build = Callable[[ParallelMesh, StepState, Backend], tuple[nn.Module, PrecisionController]]
Check = Callable[[nn.Module, torch.optim.Optimizer], None]
# torch's operation -> its usual name, and which argument is the whole tensor.
_COLLECTIVES = {
    "_allgather_base_": ("all-gather", 0),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "alltoall_base_": ("all-to-all", 1),
    "allreduce_": ("all-reduce", 0),
}


@dataclass(frozen=True)
class Message:
    """One kind of collective.

    group: the name of its mesh axis. num_bytes: of the whole tensor: the gathered one, the one before scattering, the
    reduced one. beside: what the program launches between starting the collective and waiting for it: `GEMM` if that
    includes one, `others` if not, `nothing`.
    """

    operation: str
    group: str
    ranks: int
    num_bytes: int
    beside: str = "nothing"

    @property
    def sent_bytes(self) -> float:
        """Bytes that each rank sends if the collective uses a ring."""
        rounds = 2 if self.operation == "all-reduce" else 1
        return rounds * self.num_bytes * (self.ranks - 1) / self.ranks


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank: the first one, which needs at least as much as any other.

    parameters: the FP32 shards. The sharded gradients are as large, between reduce-scatter and update.
    optimizer: the FP32 moments.
    gathered: gathered parameters after a forward pass, in the compute dtype or as they are.
    quantized_weights: weights that linears keep from micro-batch to micro-batch, including those gathered as codes;
        with one data-parallel rank also those that are only rounded.
    activations: what the forward pass of one micro-batch keeps for its backward pass.
    unreduced_gradients: FP32 gradients of the rank's tensor-parallel slice, until ranks add them up. 0 if every
        micro-batch reduces them, and with one data-parallel rank, whose gradients are as large as `parameters`.
    kept_sums: sums of subtrees with parallel.reproducible.
    workspaces: what PyTorch allocates for cuBLAS.
    peak: the most at any moment of a step, temporaries included.
    """

    num_parameters: int
    parameters: int
    optimizer: int
    gathered: int
    quantized_weights: int
    activations: int
    unreduced_gradients: int
    kept_sums: int
    workspaces: int
    peak: int


@dataclass(frozen=True)
class DryRun:
    """What one step needs, for the largest batch of any phase: `micro_batches` micro-batches on each rank.

    first, middle, last: the collectives of the step's first micro-batch, of each one in the middle and of the last one,
    with their number, as the first rank sees them. ends: of these, those over data-parallel ranks that nothing can
    hide: with `reshard` or `reduce_gradients=each` the first all-gather and the last reduction, else all.
    """

    memory: RankMemory
    micro_batches: int
    first: Mapping[Message, int]
    middle: Mapping[Message, int]
    last: Mapping[Message, int]
    ends: Mapping[Message, int]

    @property
    def messages(self) -> Mapping[Message, int]:
        return self.messages_of(self.micro_batches)

    def messages_of(self, micro_batches: int) -> Mapping[Message, int]:
        """The collectives of a step of `micro_batches` micro-batches, with their number."""
        total: Counter[Message] = Counter()
        for part, times in ((self.first, 1), (self.middle, micro_batches - 2), (self.last, 1)):
            for message, count in part.items():
                total[message] += times * count
        # A single micro-batch is first and last: the middle counts -1 times. + drops what is not above 0.
        return +total


@contextmanager
def fake_ranks(world_size: int) -> Iterator[None]:
    """Inside, this process is the first rank of a process group of `world_size` ranks, and the only one that exists."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def dry_run(config: Config, world_size: int, build: Build, check: Check = lambda *_: None) -> DryRun:
    """Run two steps of `config`, whose backend is not `auto`, as the first of `world_size` ranks.

    build: makes the sharded model with the provider's `planned_execution`, its parameters on the meta device, and the
    controller of its linears. check: of the model and its optimizer.
    """
    with fake_ranks(world_size), planned_gpu(config.precision.backend) as backend:
        # On the CPU: without a GPU, PyTorch has no autograd for fake CUDA tensors.
        mesh, step_state = build_mesh(config.parallel, torch.device("cpu")), StepState(seed=0)
        model, controller = build(mesh, step_state, backend)
        batches = {phase.global_batch_size or config.train.global_batch_size for phase in config.data.phases}
        numbers = {batch // (config.train.micro_batch_size * mesh.batch.size) for batch in batches}
        # Three micro-batches are enough: all between the first and the last are alike.
        shown = 3 if len(numbers) > 1 else min(*numbers, 3)
        ledger = Ledger(lambda: step_state.micro_batch)
        ledger.count_products(backend)
        with FakeTensorMode(allow_non_fake_inputs=True), ledger:
            model.to_empty(device=mesh.device)
            optimizer = build_optimizer(model, config.optimizer)
            check(model, optimizer)
            if is_fused(optimizer):  # on a GPU it updates in place; on fake tensors torch would copy
                optimizer.step = lambda: None  # type: ignore[method-assign, assignment, misc]
            watch = _Watch(model, controller.linears, ledger, optimizer)

            def step(number: int, count: int) -> None:
                step_state.step = number
                loss = accumulate(model, _micro_batches(config, count), mesh, step_state)
                lr, clip_norm = config.optimizer.lr, config.optimizer.clip_norm
                update(optimizer, loss, mesh, step_state, lr=lr, clip_norm=clip_norm)

            # Two micro-batches: then DTensor's caches are filled.
            step(0, min(shown, 2))
            ledger.sent.clear()
            ledger.restart_peak()
            step_state.micro_batch = 0  # messages before the first micro-batch count as part of it
            step(1, shown)
            reduced_at_once = mesh.reduce_each or (config.parallel.reshard and max(numbers) == 1)
            memory = watch.memory(not reduced_at_once and mesh.batch.size > 1)
            if mesh.reproducible:
                leaves = max(number // leaf_size(number * mesh.batch.size) for number in numbers)
                kept = (memory.unreduced_gradients or memory.parameters) * (leaves.bit_length() - 1)
                memory = replace(memory, kept_sums=kept, peak=memory.peak + kept)
        axes = mesh.device_mesh.mesh_dim_names or ()
        names: dict[Any, str] = {mesh.device_mesh[axis].get_group().group_name: axis for axis in axes}
        if mesh.experts is not None:  # with one rank along `dp` both have the same group
            names["all-to-all", mesh.experts.group.group_name] = axes_of(mesh.device_mesh, "experts")[0]
            names[mesh.shards.get_group().group_name] = ROWS

        def named(message: Message) -> Message:
            axis = names.get((message.operation, message.group)) or names.get(message.group, "all ranks")
            return replace(message, group=axis)

        sent = [(part, named(message)) for part, message in ledger.sent]
        parts = [Counter(message for at, message in sent if at == part) for part in range(shown)]
        middle, last = parts[1] if shown == 3 else Counter[Message](), parts[-1] if shown > 1 else Counter[Message]()
        ends = _ends([message for _, message in sent], mesh.reduce_each or config.parallel.reshard)
        return DryRun(memory, max(numbers), parts[0], middle, last, ends)


def _ends(sent: Sequence[Message], beside: bool) -> Counter[Message]:
    """Messages over data-parallel ranks that nothing hides. beside: others go beside computation, and these are the
    first all-gather, and the last reduction over shards and over replicas; if not, all."""
    if not beside:
        return Counter(message for message in sent if message.group in BATCH_AXES)
    over_shards, over_replicas = {"all-gather": 0, "reduce-scatter": -1, "all-to-all": -1}, {"all-reduce": -1}
    ends: list[Message] = []
    for axis in (axis for axis in AXES if axis.name in BATCH_AXES):
        for operation, place in (over_shards if "rows" in axis.divides else over_replicas).items():
            alike = [message for message in sent if (message.operation, message.group) == (operation, axis.name)]
            ends += alike[place:][:1]
    return Counter(ends)


def _micro_batches(config: Config, count: int) -> list[MicroBatch]:
    shape, masked = (config.train.micro_batch_size, config.train.sequence_length), config.data.documents == "masked"
    batches = []
    for index in range(count):
        tokens, targets = (torch.zeros(shape, dtype=torch.int64) for _ in range(2))
        documents = torch.zeros(shape, dtype=torch.int32) if masked else None
        num_targets = None if config.data.boundary_loss else targets.numel()
        batches.append(MicroBatch(index, tokens, targets, documents, shape[0] if masked else None, num_targets))
    return batches


class AllocatingGPU(cuda.NvidiaGPU):
    """An H100 or H200 whose quantization kernels and cuBLAS do nothing."""

    def available(self, device: torch.device) -> bool:
        return True

    def multiplies(self, x: Tensor) -> bool:
        return True

    def call(self, function: Callable[..., None], *arguments: Any) -> None:
        pass

    def aligned(self, x: Tensor) -> bool:
        return True

    def multiprocessors(self, device: torch.device) -> int:
        return _MULTIPROCESSORS

    def start(
        self, kernel: cuda.Kernel, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]
    ) -> None:
        pass


class _PlannedTransformerEngine(TransformerEngineBackend):
    """Allocates what quantizers and GEMMs of Transformer Engine return. What they allocate besides is not known."""

    def __init__(self) -> None:  # without the package
        self._weight_layouts = {}

    def quantize_parts(
        self,
        x: Tensor,
        rows: list[int],
        place: Place,
        as_stored: OperandRequest | None,
        transposed: OperandRequest | None,
    ) -> list[tuple[NativeOperand, Any]]:
        request = as_stored or transposed
        assert request is not None
        operand, made = request.operand, list[tuple[NativeOperand, Any]]()
        for part in x.to(request.dtype).contiguous().split(rows):
            amax = None
            if format_of(operand.format).tensor_scale:
                amax = shared_amax(x.new_empty((), dtype=torch.float32), place.amax_groups).view(1)
            across = None if transposed is None else _native_operand(part, operand, amax, "rows")
            made.append((_native_operand(part, operand, amax, "columns"), across))
        return made

    def multiply(self, pairs: list[tuple[NativeOperand, NativeOperand]], outs: list[Tensor], accumulate: bool) -> None:
        pass

    def gemm(
        self, a: Any, b: Any, out_dtype: torch.dtype, total: Tensor | None = None, groups: RowGroups | None = None
    ) -> Tensor:
        """As Transformer Engine: a GEMM of codes reads them as they are, and adds to `total`."""
        if isinstance(a, GemmOperand):
            return super().gemm(a, b, out_dtype, total, groups)  # type: ignore[no-any-return]
        if groups is not None:
            return added(self.gemm(a, b, out_dtype), total, groups)
        if total is not None:
            return total
        return torch.empty(a.num_rows, b.num_rows, dtype=out_dtype, device=a.data.device)


def _native_operand(x: Tensor, operand: Operand, amax: Tensor | None, along: str) -> NativeOperand:
    """An operand of `x` [n, m] along its `columns` or its `rows`, in Transformer Engine's layout."""
    num_rows, k = x.shape if along == "columns" else reversed(x.shape)
    codes = x.new_empty(num_rows, k // 2 if operand.format == "nvfp4" else k, dtype=torch.uint8)
    # FP8 keeps a scale for each square block, the other formats one for each row of the block.
    scale_rows = num_rows // operand.block[0] if operand.format == "fp8" else num_rows
    scales = x.new_empty(scale_rows, k // operand.block[1], dtype=format_of(operand.format).scales)
    return NativeOperand.of(QuantizedTensor(codes, scales, operand.block), amax, NativeLayout(operand, along))


_BACKENDS: dict[str, Callable[[], Backend]] = {
    "emulated": EmulatedBackend,
    "torch": TorchBackend,
    "transformer_engine": _PlannedTransformerEngine,
}


@contextmanager
def planned_gpu(backend: str = "emulated") -> Iterator[Backend]:
    """Inside, tensors are on an H100 or H200 that allocates and computes nothing. Yields the backend of its linears.

    backend: its name in `precision.backend`.
    """
    with cuda.other_gpu(AllocatingGPU()):
        yield _BACKENDS[backend]()


class _Watch:
    """Measures what is alive before and after every forward pass of the model; the last one counts."""

    def __init__(
        self, model: nn.Module, linears: Mapping[str, LinearContext], ledger: Ledger, optimizer: torch.optim.Optimizer
    ) -> None:
        self.model, self.linears, self.ledger = model, linears, ledger
        self.parameters = optimizer_parameters(optimizer)
        self.shards = [local_part(p) for p in self.parameters]
        self.state = [local_part(value) for state in optimizer.state.values() for value in state.values()]
        self.gathered = self.quantized = self.activations = 0  # bytes at the end of a forward pass
        self._before: set[int] = set()
        model.register_forward_pre_hook(lambda *_: self._start())
        model.register_forward_hook(lambda *_: self._end())

    def _start(self) -> None:
        self._before = {*self.ledger.storages()}

    def _end(self) -> None:
        alive = self.ledger.storages()
        gathered = self.ledger.numbers(self.model.parameters()) - self.ledger.numbers(self.shards)
        quantized = self.ledger.numbers(self._kept_weights())
        new = alive.keys() - self._before - gathered - quantized
        self.gathered, self.quantized, self.activations = (
            sum(alive.get(number, 0) for number in numbers) for numbers in (gathered, quantized, new)
        )

    def _kept_weights(self) -> Iterator[Tensor]:
        for context in self.linears.values():
            for operand in (context.weight_cache or ())[1:]:
                yield from (tensor for tensor in operand.tensors() if tensor is not None)
        for parameter in self.model.parameters():
            if (gathered := codes_of(parameter)) is not None:
                yield from (gathered.codes, gathered.scales)

    def memory(self, unreduced: bool) -> RankMemory:
        """What was measured. unreduced: several micro-batches add to the gradients before these are reduced."""
        # Until it is reduced, a gradient is FP32 and not sharded over data-parallel ranks.
        whole = sum(4 * parameter.numel() // _parts_when_gathered(parameter) for parameter in self.parameters)
        return RankMemory(
            num_parameters=sum(t.numel() for t in self.shards),
            parameters=sum(t.nbytes for t in self.shards),
            optimizer=sum(t.nbytes for t in self.state),
            gathered=self.gathered,
            quantized_weights=self.quantized,
            activations=self.activations,
            unreduced_gradients=whole if unreduced else 0,
            kept_sums=0,
            workspaces=_WORKSPACES,
            peak=self.ledger.peak_bytes + _WORKSPACES,
        )


def _parts_when_gathered(parameter: Tensor) -> int:
    """Over how many ranks a parameter is still sharded after it is gathered over data-parallel ranks."""
    if not isinstance(parameter, DTensor):
        return 1
    mesh = parameter.device_mesh
    axes = zip(mesh.mesh_dim_names or (), mesh.shape, parameter.placements, strict=True)
    return math.prod(size for name, size, placed in axes if name not in BATCH_AXES and not placed.is_replicate())


@dataclass
class _Storage:
    number: int
    num_bytes: int = 0


class Ledger(TorchDispatchMode):
    """Use it as a context manager inside `FakeTensorMode`.

    now: returns the micro-batch that runs. num_products: how many GEMMs the linears have computed.

    sent: all messages in order, each with the micro-batch that sent it. live_bytes, peak_bytes: of all storages.
    """

    def __init__(self, now: Callable[[], int]) -> None:
        super().__init__()
        self.sent: list[tuple[int, Message]] = []
        self.live_bytes = self.peak_bytes = self.num_products = 0
        self._now, self._operations = now, 0
        # By the storage that receives a message: its index in `sent`, and how many GEMMs and operations came before.
        self._under_way: dict[int, tuple[int, int, int]] = {}
        self._storages: dict[int, _Storage] = {}  # by address, which a later storage may reuse
        self._count = 0

    def __enter__(self) -> Ledger:
        # Gathered parameters are freed and allocated by resizing storages, which the dispatch mode does not see.
        self._resize, self._wait = torch.UntypedStorage.resize_, Pending.wait

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = self._resize(storage, size)
            if storage._cdata in self._storages:
                self._set(storage._cdata, storage.nbytes())
            return result

        def waited(pending: Pending) -> Tensor:
            received = self._wait(pending)
            index, products, operations = self._under_way.pop(received.untyped_storage()._cdata)
            if self.num_products > products:
                beside = "GEMM"
            else:
                beside = "others" if self._operations > operations else "nothing"
            part, message = self.sent[index]
            self.sent[index] = part, replace(message, beside=beside)
            return received

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
        Pending.wait = waited  # type: ignore[method-assign, assignment]
        return super().__enter__()

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign, assignment]
        Pending.wait = self._wait  # type: ignore[method-assign]
        super().__exit__(kind, value, trace)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor calls it again, on local tensors
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0  # fake tensors have no values; with a finite loss and norm the step updates
        self._operations += 1
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self._send(func, args)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                self._see(leaf)
        return result

    def count_products(self, backend: Any) -> None:
        """From now on, count the products of `backend`."""

        def counted(product: Callable[..., Any]) -> Callable[..., Any]:
            def count_and_compute(*arguments: Any) -> Any:
                self.num_products += 1
                return product(*arguments)

            return count_and_compute

        backend.gemm, backend.grouped_gemm = counted(backend.gemm), counted(backend.grouped_gemm)

    def storages(self) -> dict[int, int]:
        """Bytes of every storage that is alive, by its number."""
        return {storage.number: storage.num_bytes for storage in self._storages.values() if storage.num_bytes}

    def numbers(self, tensors: Iterable[Tensor]) -> set[int]:
        """The numbers, as in `storages`, of the tensors' storages; of DTensors the local parts."""
        return {self._storages[local_part(t).untyped_storage()._cdata].number for t in tensors}

    def restart_peak(self) -> None:
        self.peak_bytes = self.live_bytes

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            self._count += 1
            self._storages[storage._cdata] = _Storage(self._count)
            self._set(storage._cdata, storage.nbytes())
            weakref.finalize(storage, self._forget, storage._cdata)

    def _set(self, address: int, num_bytes: int) -> None:
        storage, num_bytes = self._storages[address], -(-num_bytes // _ALLOCATION_UNIT) * _ALLOCATION_UNIT
        self.live_bytes += num_bytes - storage.num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        storage.num_bytes = num_bytes

    def _forget(self, address: int) -> None:
        self.live_bytes -= self._storages.pop(address).num_bytes

    def _send(self, func: Any, args: Any) -> None:
        name = func.name().removeprefix("c10d::").split(".")[0]
        assert name in _COLLECTIVES, f"a collective that the ledger does not know: {name}"
        operation, which = _COLLECTIVES[name]
        tensors = args[which] if isinstance(args[which], (list, tuple)) else [args[which]]
        group = dist.ProcessGroup.unbox(next(arg for arg in args if isinstance(arg, torch.ScriptObject)))
        received = args[0][0] if isinstance(args[0], (list, tuple)) else args[0]
        counts = len(self.sent), self.num_products, self._operations
        self._under_way[received.untyped_storage()._cdata] = counts
        message = Message(operation, group.group_name, group.size(), sum(t.nbytes for t in tensors))
        self.sent.append((self._now(), message))
