"""What training needs of the model and of the data. `pretrain.py` passes in one module for each.

This project's modules are `models/provider.py` and `data/provider.py`. Another model or loader needs functions of the
same names; nothing under megatron_fp4 imports either module. Of what they return, training uses:

    an execution    says which kernels compute the model; only the model's provider reads it
    the model       model(tokens, targets, ...) returns the micro-batch's mean loss over the targets that count, FP32
                    0-dim. It has `blocks`, `mtp` (the parts of multi-token prediction), `embedding` and `head`, FSDP2's
                    units; and what HybridModel says of `linears`, `fp32_units`, `routers` and `autotuned_mixers`
    phases          `spans`, each with `name`, `first_step`, `end_step`, `batch_size` and `sequence_length` (None: the
                    run's), known before any data is opened; `samples_before`, `span` and `source_ranges`
    the data        the members of RunData
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch

ModelProvider = ModuleType
DataProvider = ModuleType


@dataclass(frozen=True)
class MicroBatch:
    """The fields of a micro-batch that a step needs; the data's own class has them too.

    index: within the global batch; it does not depend on the rank. tokens, targets: int64 [micro_batch_size,
    sequence_length]. documents: int32, the same shape: each token's document; None: not masked. num_documents: in all
    rows together; None: not masked. num_targets: how many targets count (negative ones do not); None: all.
    """

    index: int
    tokens: torch.Tensor
    targets: torch.Tensor
    documents: torch.Tensor | None = None
    num_documents: int | None = None
    num_targets: int | None = None
