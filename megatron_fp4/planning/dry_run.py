"""A dry run: two steps of the real job on fake tensors, in one process, for any number of ranks.

The model is built and sharded as for training, over torch's `fake` process group, whose collectives return at once.
Every shape, every division of a size by a mesh and every collective is the program's own; no tensor has memory or
values. The first step brings everything into the state in which a long run is (moments, quantized weights of the step
before); the second is measured.

Linears are those of the emulated backend on an NVIDIA GPU whose kernels do nothing: operands go through the fused
quantizers' own code, and what those do not make (four-over-six, unusual transforms, FP32 activations) goes through
PyTorch, as on a GPU. Native backends send the same bytes, and keep a weight's codes twice in cuBLAS's layout, for fprop
and for dgrad. Transformer Engine's own temporaries are not known.

A `Ledger` is a dispatch mode: it sees every operation, keeps a list of the storages that are alive (views share one)
and adds up the messages of `torch.distributed`. Memory is counted as PyTorch's CUDA allocator counts it
(`torch.cuda.max_memory_allocated`): in units of 512 bytes, without the allocator's own reserve, the CUDA context, the
buffers of NCCL and the workspaces of cuBLAS (the dry run adds these).
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_fp4.config.schema import Config
from megatron_fp4.parallel.mesh import ParallelMesh, build_mesh
from megatron_fp4.parallel.parameters import is_replicated
from megatron_fp4.parallel.reproducible import leaf_size
from megatron_fp4.precision.backend import Backend, MakeOperand, OperandRequest
from megatron_fp4.precision.emulated import EmulatedBackend, GemmOperand, PackedWeight, codes_of, packed_weight
from megatron_fp4.precision.fp32_gradients import local_part
from megatron_fp4.precision.linear import LinearContext
from megatron_fp4.precision.messages import Pending
from megatron_fp4.precision.plan import PrecisionController
from megatron_fp4.precision.recipe import FPROP_WEIGHT, Operand
from megatron_fp4.precision.rng import StepState
from megatron_fp4.precision.support import TAKES
from megatron_fp4.quantization import cuda
from megatron_fp4.quantization.microscaling import PackedMXFP8
from megatron_fp4.training.optimizer import build_optimizer, optimizer_parameters
from megatron_fp4.training.providers import MicroBatch
from megatron_fp4.training.step import accumulate, update

# 32 MiB from Hopper on, for the thread that runs the forward pass and for autograd's, which runs the backward pass.
_WORKSPACES = 2 * 32 * 2**20
_ALLOCATION_UNIT = 512
_MULTIPROCESSORS = 132  # of an H100 or H200

Build = Callable[[ParallelMesh, StepState, Any, Backend], tuple[nn.Module, PrecisionController]]
_COLLECTIVES = {  # torch's operation -> name, and which argument is the whole tensor
    "_allgather_base_": ("all-gather", 0),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "alltoall_base_": ("all-to-all", 1),
    "allreduce_": ("all-reduce", 0),
}


@dataclass(frozen=True)
class Message:
    """One kind of collective: operation, the group's name and number of ranks, and the bytes of the whole tensor (the
    gathered one, the one before scattering, the reduced one). beside: what is asked for before it is waited for, as far
    as the program waits itself: `GEMM` if there is one among it, `others` if not, `nothing`.
    """

    operation: str
    group: str
    ranks: int
    num_bytes: int
    beside: str = "nothing"

    @property
    def sent_bytes(self) -> float:
        """What each rank sends if the collective goes round a ring."""
        rounds = 2 if self.operation == "all-reduce" else 1
        return rounds * self.num_bytes * (self.ranks - 1) / self.ranks


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank (the first, which never has less than another).

    parameters: the FP32 shards; those of the gradients take as much from the reduction to the update. optimizer: its
    FP32 moments. gathered: whole parameters after a forward pass, in the compute dtype or as they are.
    quantized_weights: kept from micro-batch to micro-batch, those that were gathered as codes among them; of one
    data-parallel rank, those that are only rounded too. activations: what one micro-batch's forward pass leaves for its
    backward pass. unreduced_gradients: FP32 gradients of the rank's whole tensor-parallel slice while micro-batches add
    up (0 with one micro-batch a step, where each is reduced at once, and with one data-parallel rank, where they are as
    large as `parameters`). kept_sums: with parallel.reproducible, those of subtrees. workspaces: of cuBLAS, which
    PyTorch allocates for it. peak: the most at any moment of a step, temporaries included.
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
    """Of a step of the largest batch that a phase has; one of `micro_batches` micro-batches on each rank.

    first, middle, last: the collectives of a step's micro-batches as the first rank sees them, with their number;
    groups go by axis name. ends: of these, FSDP's first gathering and last reduction, beside which nothing runs.
    """

    memory: RankMemory
    micro_batches: int
    first: Mapping[Message, int]
    middle: Mapping[Message, int]
    last: Mapping[Message, int]
    ends: Mapping[Message, int]

    @property
    def messages(self) -> Mapping[Message, int]:
        """The collectives of the step, with their number."""
        return self.messages_of(self.micro_batches)

    def messages_of(self, micro_batches: int) -> Mapping[Message, int]:
        """The collectives of a step of so many micro-batches, as some phase has."""
        total: Counter[Message] = Counter()
        for part, times in ((self.first, 1), (self.middle, micro_batches - 2), (self.last, 1)):
            for message, count in part.items():
                total[message] += times * count  # a single micro-batch is first and last, and not what is in between
        return +total


@contextmanager
def fake_ranks(world_size: int) -> Iterator[None]:
    """A process group of `world_size` ranks of which this process is the first and the only one."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def dry_run(config: Config, world_size: int, build: Build, execution: Any) -> DryRun:
    """Take two steps of `config` on `world_size` ranks.

    build: makes the sharded model with the given kernels, its parameters still on the meta device, and the controller
    of its linears, which the given backend computes. execution: these kernels, `planned_execution` of the provider.
    """
    with fake_ranks(world_size), planned_gpu(native=config.precision.backend in TAKES) as backend:
        # On the CPU: without a GPU, PyTorch has no autograd for fake CUDA tensors.
        mesh, step_state = build_mesh(config.parallel, torch.device("cpu")), StepState(seed=0)
        _ = mesh.dp_group  # of two axes it is made when it is first asked for, which fake tensors cannot do
        model, controller = build(mesh, step_state, execution, backend)
        batches = {phase.global_batch_size or config.train.global_batch_size for phase in config.data.phases}
        numbers = {batch // (config.train.micro_batch_size * mesh.dp_size) for batch in batches}
        # A first, a middle and a last micro-batch show all there is: those between are like the middle one.
        shown = 3 if len(numbers) > 1 else min(*numbers, 3)
        ledger = Ledger(lambda: step_state.micro_batch, lambda: backend.num_products)
        with FakeTensorMode(allow_non_fake_inputs=True), ledger:
            model.to_empty(device=mesh.device)
            optimizer = build_optimizer(model, config.optimizer)
            # The update works in place on a GPU; of fake tensors torch makes copies.
            optimizer.step = lambda: None  # type: ignore[method-assign, assignment, misc]
            watch = _Watch(model, controller.linears, ledger, optimizer)

            def step(number: int, count: int) -> None:
                step_state.step, reshard = number, config.parallel.reshard
                loss = accumulate(model, _micro_batches(config, count), mesh, step_state, reshard=reshard)
                lr, clip_norm = config.optimizer.lr, config.optimizer.clip_norm
                update(optimizer, loss, mesh, step_state, lr=lr, clip_norm=clip_norm)

            # Two micro-batches: whatever DTensor looks up once per kind of operation, it has looked up then.
            step(0, min(shown, 2))
            ledger.sent.clear()
            ledger.restart_peak()
            step_state.micro_batch = 0  # so that what ranks say before the first micro-batch is counted once
            step(1, shown)
            memory = watch.memory(max(numbers) > 1 and not mesh.reduce_each and mesh.dp_size > 1)
            if mesh.reproducible:
                leaves = max(number // leaf_size(number * mesh.dp_size) for number in numbers)
                kept = (memory.unreduced_gradients or memory.parameters) * (leaves.bit_length() - 1)
                memory = replace(memory, kept_sums=kept, peak=memory.peak + kept)
        axes = mesh.device_mesh.mesh_dim_names or ()
        names: dict[str, str] = {mesh.device_mesh[axis].get_group().group_name: axis for axis in axes}
        sent = [(part, replace(message, group=names.get(message.group, "all ranks"))) for part, message in ledger.sent]
        parts = [Counter(message for at, message in sent if at == part) for part in range(shown)]
        middle, last = parts[1] if shown == 3 else Counter[Message](), parts[-1] if shown > 1 else Counter[Message]()
        return DryRun(memory, max(numbers), parts[0], middle, last, _ends([message for _, message in sent]))


def _ends(sent: Sequence[Message]) -> Counter[Message]:
    """FSDP's first gathering and its last reduction, over shards and over replicas."""
    found: list[Message] = []
    for operation, axis, place in (
        ("all-gather", "dp", 0),
        ("reduce-scatter", "dp", -1),
        ("all-to-all", "dp", -1),
        ("all-reduce", "replicate", -1),
    ):
        found += [message for message in sent if (message.operation, message.group) == (operation, axis)][place:][:1]
    return Counter(found)


def _micro_batches(config: Config, count: int) -> list[MicroBatch]:
    """Of rows that are one document each, where documents are masked."""
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

    def zeros(self, device: torch.device) -> Tensor:
        # By themselves: of many made at once, the rest would outlive a fake tensor's mode.
        return torch.zeros(2, dtype=torch.int32, device=device)

    def start(
        self, kernel: cuda.Kernel, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]
    ) -> None:
        pass


def _packed_mxfp8(x: Tensor) -> GemmOperand:
    rows, columns = x.shape
    codes, scales = (x.new_empty(size, columns, dtype=torch.uint8) for size in (rows, rows // 32))
    return GemmOperand(PackedMXFP8(codes, scales), quantized=True)


class PlanningBackend(EmulatedBackend):
    """The emulation with its products counted. native: fprop and dgrad have their own copies of a weight's codes."""

    def __init__(self, native: bool) -> None:
        self.native, self.transposes, self.num_products = native, not native, 0

    def weight_of_codes(self, gathered: PackedWeight, operand: Operand) -> tuple[GemmOperand, GemmOperand]:
        """As the emulation, or as a native backend: of copies."""
        if not self.native:
            return super().weight_of_codes(gathered, operand)
        copies = [replace(gathered, codes=gathered.codes.clone(), scales=gathered.scales.clone()) for _ in range(2)]
        fprop, dgrad = (GemmOperand(copy, gathered.scale, quantized=True) for copy in copies)
        return fprop, dgrad.transposed()

    def operands(
        self, x: Tensor, columns: OperandRequest | None, rows: OperandRequest | None
    ) -> tuple[MakeOperand | None, MakeOperand | None]:
        """As the emulation; of a native backend's weight the codes of each direction."""
        if self.native and columns is not None and columns.slot is FPROP_WEIGHT:
            if columns == rows and self.packs(columns):
                make = functools.partial(packed_weight, x, columns, len(x), len(x))
                return make, lambda: make().transposed()
            columns, rows = replace(columns, keep=True), rows and replace(rows, keep=True)
            if columns.operand.format == "mxfp8":  # whose kernels pack along the rows alone
                return functools.partial(_packed_mxfp8, x.t()), super().operands(x, None, rows)[1]
        return super().operands(x, columns, rows)

    def gemm(self, *arguments: Any) -> Tensor:
        """As the emulation, counted."""
        self.num_products += 1
        return super().gemm(*arguments)


@contextmanager
def planned_gpu(native: bool = False) -> Iterator[PlanningBackend]:
    """Inside, tensors are on an H100 or H200 that allocates and computes nothing; a linear's backend there."""
    with cuda.other_gpu(AllocatingGPU()):
        yield PlanningBackend(native)


class _Watch:
    """Looks at what is alive before and after every forward pass of the model; keeps what it saw last."""

    def __init__(
        self,
        model: nn.Module,
        linears: Mapping[str, LinearContext],
        ledger: Ledger,
        optimizer: torch.optim.Optimizer,
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
        """What was seen. unreduced: gradients add up over several micro-batches before they are reduced."""
        # Every gradient is FP32 and whole on its tensor-parallel rank until it is reduced.
        whole = sum(4 * parameter.numel() // _tensor_parallel_parts(parameter) for parameter in self.parameters)
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


def _tensor_parallel_parts(parameter: Tensor) -> int:
    """Into how many parts tensor parallelism cuts a parameter."""
    if not isinstance(parameter, DTensor) or is_replicated(parameter):
        return 1
    names = parameter.device_mesh.mesh_dim_names or ()
    return parameter.device_mesh.size(names.index("tp"))


@dataclass
class _Storage:
    number: int
    num_bytes: int = 0


class Ledger(TorchDispatchMode):
    """Use it as a context manager inside `FakeTensorMode`.

    sent: all messages as they were sent, each with what `now` said then, the part of the step. num_products: how many
    GEMMs of linears there have been. live_bytes, peak_bytes: of all storages seen.
    """

    def __init__(self, now: Callable[[], int], num_products: Callable[[], int] = lambda: 0) -> None:
        super().__init__()
        self.sent: list[tuple[int, Message]] = []
        self.live_bytes = self.peak_bytes = 0
        self._now, self._num_products, self._operations = now, num_products, 0
        # By what receives a message: its number, the GEMMs and operations before it.
        self._under_way: dict[int, tuple[int, int, int]] = {}
        self._storages: dict[int, _Storage] = {}  # by address, which others take when a storage is gone
        self._count = 0

    def __enter__(self) -> Ledger:
        # FSDP2 frees and allocates gathered parameters by resizing storages, which is no operation.
        self._resize, self._wait = torch.UntypedStorage.resize_, Pending.wait

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = self._resize(storage, size)
            if storage._cdata in self._storages:
                self._set(storage._cdata, storage.nbytes())
            return result

        def waited(pending: Pending) -> Tensor:
            received = self._wait(pending)
            index, products, operations = self._under_way.pop(received.untyped_storage()._cdata)
            if self._num_products() > products:
                beside = "GEMM"
            else:
                beside = "others" if self._operations > operations else "nothing"
            part, message = self.sent[index]
            self.sent[index] = part, replace(message, beside=beside)
            return received

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
        Pending.wait = waited  # type: ignore[method-assign, assignment]
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign, assignment]
        Pending.wait = self._wait  # type: ignore[method-assign]
        super().__exit__(kind, value, trace)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again, on local tensors
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0  # fake tensors have no values; a loss and a norm of one let the step go its usual way
        self._operations += 1
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self._send(func, args)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                self._see(leaf)
        return result

    def storages(self) -> dict[int, int]:
        """Bytes of every storage that is alive, by a number of its own."""
        return {storage.number: storage.num_bytes for storage in self._storages.values() if storage.num_bytes}

    def numbers(self, tensors: Iterable[Tensor]) -> set[int]:
        """The numbers of the tensors' storages (of the local parts of DTensors), as in `storages`."""
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
        counts = len(self.sent), self._num_products(), self._operations
        self._under_way[received.untyped_storage()._cdata] = counts
        message = Message(operation, group.group_name, group.size(), sum(t.nbytes for t in tensors))
        self.sent.append((self._now(), message))
