"""Forward and backward of a micro-batch as CUDA graphs: captured once, then replayed by a single call.

The GPU of a small model waits for Python, which makes about ten thousand calls for a micro-batch. A graph repeats the
kernels of a micro-batch without these calls, and with the same arguments. So everything that changes between
micro-batches is in memory at a fixed address: tokens, targets and the keys of stochastic rounding (precision/rng.py).
So are the counts of experts' tokens: kernels read them, and launch as many programs as any counts can need.
The kernels are the same as without graphs, and so are all bits.

A step has two graphs: the `first` micro-batch quantizes the weights and writes the gradients; every `later` one uses
the weights' codes and adds to the gradients. The sum over ranks, norm, clipping and update are not in a graph. With
parallel.reproducible every leaf of the tree of sums begins with the `first` graph.

    steps            1, 2              3                                      4, 5, ...
    micro-batches    eager             the first two captured and replayed    replayed

Data-parallel ranks gather weights and reduce gradients outside of graphs (parallel/data_parallel.py). A graph has no
messages of them, so each rank captures by itself, and one may fail to.

The eager steps compile, tune and allocate, which a capture must not do. They already read their keys from device
memory, so that they compile the same kernels as the graphs use. When shapes, the batch size, recipes or the addresses
of weights change, the graphs are dropped and captured again. A step with a probe or a watcher runs eagerly.

Memory: a micro-batch's memory is in its own pool, from capture to release. The pool also has the gradients and
quantized weights, which stay from step to step; a step's peak is that of an eager step. What runs eagerly in between (a
probed step, validation) cannot use the pool. If there is not as much memory beside the pool, the graphs are dropped
(`make_room`) and later captured again, which takes about a second.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.precision.backend import first_line
from megatron_fp4.precision.emulated import codes_of
from megatron_fp4.precision.fp32_gradients import local_part
from megatron_fp4.precision.operands import LinearContext
from megatron_fp4.precision.rng import DeviceKeys, StepState
from megatron_fp4.training.providers import MicroBatch

EAGER_STEPS = 2


class GpuGraph:
    """A CUDA graph of `function`, in the memory of `pool`. The capture computes nothing. generators: those that the
    function draws from. result: what the function returned; every replay overwrites it."""

    def __init__(self, function: Callable[[], Tensor], pool: Any, generators: Sequence[torch.Generator] = ()) -> None:
        self._graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        for generator in generators:
            self._graph.register_generator_state(generator)
        # Other threads (loaders that pin memory, NCCL's watchdog) may make calls that are not allowed in a capture.
        try:
            with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
                self.result = function()
        finally:
            torch.cuda.set_stream(stream)  # after a failed capture, torch leaves its own stream set
        self.replay = self._graph.replay


class MicroBatchGraphs:
    """The graphs of a model's micro-batches, for `accumulate`.

    linears: the contexts of all linears of the plan, by name. required: whether a failed capture is an error; if not,
    `warn` is called with a line, and the run continues without graphs. capture: replaces `GpuGraph` in tests.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: ParallelMesh,
        linears: Mapping[str, LinearContext],
        *,
        required: bool,
        warn: Callable[[str], None],
        capture: Callable[[Callable[[], Tensor], Any, Sequence[torch.Generator]], Any] = GpuGraph,
    ) -> None:
        self._model, self._mesh, self._linears = model, mesh, dict(linears)
        self._required, self._warn, self._capture = required, warn, capture
        self._failed, self._eager_steps, self._num_micro_batches = False, 0, 0
        self._signature: Any = None
        self._keys = DeviceKeys({}, mesh.device)
        self._forget()

    def _forget(self) -> None:
        self._first: GpuGraph | None = None
        self._later: GpuGraph | None = None
        self._parameters: list[nn.Parameter] = []  # trainable, which the graphs read
        self._addresses: list[int] = []
        self._gradients: list[Tensor | None] = []
        self._weight_caches: dict[str, Any] = {}  # of the linears, in the graphs' memory
        self._tokens = self._targets = torch.empty(0)
        self._bytes = 0
        self._pool: Any = None

    @property
    def captured(self) -> bool:
        return self._first is not None

    @contextmanager
    def step(
        self, micro_batches: Sequence[MicroBatch], num_micro_batches: int, step_state: StepState
    ) -> Iterator[MicroBatchGraphs | None]:
        """A context for this rank's micro-batches of one step, out of `num_micro_batches` of all ranks. Yields these
        graphs, or None if all micro-batches of the step run eagerly."""
        contexts = self._linears.values()
        watched = any(context.probe is not None or context.watcher is not None for context in contexts)
        if self._failed or watched or not _alike(micro_batches):
            self.make_room()
            yield None
            return
        recipes = {name: context.recipe for name, context in self._linears.items()}
        signature = (micro_batches[0].tokens.shape, num_micro_batches, recipes)
        if signature != self._signature:
            self.release()
            self._signature, self._eager_steps = signature, 0
            experts = {name for name, context in self._linears.items() if context.num_experts}
            self._keys = DeviceKeys(recipes, self._mesh.device, experts)
        is_eager = self._eager_steps < EAGER_STEPS
        self._eager_steps += 1
        self._num_micro_batches = num_micro_batches
        step_state.keys = self._keys
        try:
            yield None if is_eager else self
        finally:
            step_state.keys = None

    def run(self, micro_batch: MicroBatch, step_state: StepState, position: int) -> Tensor | None:
        """Add the gradient of `micro_batch` to `.grad`; returns its loss, FP32 0-dim, which the next call overwrites.
        Returns None if the caller has to compute it eagerly, after a failed capture. position: of the micro-batch on
        this rank, within the step or within a leaf of the tree of sums; position 0 writes gradients."""
        if self._failed:
            return None
        if first := position == 0:
            self._find_parameters()
        step_state.micro_batch = micro_batch.index
        if self._tokens.shape != micro_batch.tokens.shape:
            shape, device = micro_batch.tokens.shape, self._mesh.device
            self._tokens, self._targets = (torch.zeros(shape, dtype=torch.int64, device=device) for _ in range(2))
        self._tokens.copy_(micro_batch.tokens, non_blocking=True)
        self._targets.copy_(micro_batch.targets, non_blocking=True)
        self._keys.fill(step_state.seed, step_state.step, step_state.micro_batch)
        graph = self._first if first else self._later
        if graph is None and (graph := self._captured_on_all_ranks(first)) is None:
            step_state.keys = None  # a failed capture may leave their generators unusable
            return None
        graph.replay()
        if first:
            self._hand_out(step_state)
        return graph.result

    def _captured_on_all_ranks(self, first: bool) -> GpuGraph | None:
        """The graph; None if the capture failed on any rank, because all ranks or none must capture collectives."""
        graph, failure = self._try_to_capture(first)
        if self._on_all_ranks(failure is None):
            return graph
        failure = failure or RuntimeError("on another rank")
        if self._required:
            raise failure
        self._failed = True
        error = failure.__context__ or failure  # ending a failed capture raises a second error
        self._warn(f"CUDA graphs: none, because a capture failed: {first_line(error)}")
        if first:
            self._drop_gradients_and_weights()
        self.release()  # at once, because the eager micro-batches need the memory
        return None

    def _find_parameters(self) -> None:
        """Find the parameters that the model has now, and drop graphs that read other memory."""
        codes = {parameter: codes_of(parameter) for parameter in self._model.parameters() if parameter.requires_grad}
        read = (
            [local_part(parameter)] if packed is None else [packed.codes, packed.scales, packed.scale, packed.amax]
            for parameter, packed in codes.items()
        )
        addresses = [part.data_ptr() for parts in read for part in parts if part is not None]
        if addresses != self._addresses:
            self.release()
        self._parameters, self._addresses = [*codes], addresses

    def make_room(self) -> None:
        """Before a micro-batch runs eagerly: drop the graphs unless there is as much free memory as they use."""
        if self._first is not None and not self._on_all_ranks(self._has_room()):
            self.release()

    def _on_all_ranks(self, here: bool) -> bool:
        """Whether `here` is true on all ranks of this micro-batch, whose collectives a graph contains."""
        if self._mesh.model.size == 1:
            return here
        everywhere = torch.tensor(int(here), dtype=torch.int32, device=self._mesh.device)
        dist.all_reduce(everywhere, op=dist.ReduceOp.MIN, group=self._mesh.model.group)
        return bool(everywhere)

    def _has_room(self) -> bool:
        """Whether free memory exceeds that of the graphs and, for weights that are codes there, of their values."""
        if self._mesh.device.type != "cuda":
            return True
        torch.cuda.empty_cache()  # the memory that earlier eager passes cached
        values = sum(local_part(one).nbytes for one in self._parameters if codes_of(one) is not None)
        return torch.cuda.mem_get_info(self._mesh.device)[0] > self._bytes + values

    def release(self) -> None:
        """Drop the graphs and free their memory. They are captured again when they are needed next."""
        self._forget()
        for context in self._linears.values():
            context.weight_cache = None  # it is in the graphs' memory
        gc.collect()
        if self._mesh.device.type == "cuda":
            torch.cuda.synchronize(self._mesh.device)
            torch.cuda.empty_cache()

    def _try_to_capture(self, first: bool) -> tuple[GpuGraph | None, Exception | None]:
        """The graph, or the error of its capture."""
        try:
            if first:
                self._drop_gradients_and_weights()
                self._pool = torch.cuda.graph_pool_handle() if self._mesh.device.type == "cuda" else None
            # An autograd graph that is still alive would tie gradients to its own stream.
            gc.collect()
            before = self._reserved()
            graph = self._capture(self._compute, self._pool, self._keys.generators)
            self._bytes += self._reserved() - before
        except Exception as error:
            return None, error
        if first:
            self._first = graph
            self._gradients = [parameter.grad for parameter in self._parameters]
            self._weight_caches = {name: context.weight_cache for name, context in self._linears.items()}
        else:
            self._later = graph
        return graph, None

    def _reserved(self) -> int:
        if self._mesh.device.type != "cuda":
            return 0
        torch.cuda.empty_cache()  # as a capture does first
        return torch.cuda.memory_reserved(self._mesh.device)

    def _compute(self) -> Tensor:
        loss: Tensor = self._model(self._tokens, self._targets)
        (loss / self._num_micro_batches).backward()
        return loss.detach()

    def _drop_gradients_and_weights(self) -> None:
        """Before the first capture, so that the graph allocates them where its replays write them."""
        for parameter in self._parameters:
            parameter.grad = None
        for context in self._linears.values():
            context.weight_cache = None

    def _hand_out(self, step_state: StepState) -> None:
        """Use the gradients and quantized weights that the first graph writes, instead of those of eager passes."""
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        for name, cache in self._weight_caches.items():
            if cache is not None:
                (_, *what_for), *operands = cache
                cache = ((step_state.weights_version, *what_for), *operands)
            self._linears[name].weight_cache = cache


def _alike(micro_batches: Sequence[MicroBatch]) -> bool:
    """Whether micro-batches differ only in tokens and targets."""
    kinds = {(batch.tokens.shape, batch.documents is None and batch.num_targets is None) for batch in micro_batches}
    return kinds == {(micro_batches[0].tokens.shape, True)}
