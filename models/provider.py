"""The functions of this package that the trainer calls. `pretrain.py` passes this module to it, as Megatron's pretrain
scripts pass their model provider. megatron_fp4/training/providers.py says what training needs of the model."""

from models.hybrid import build_model  # noqa: F401
from models.initialization import initialize  # noqa: F401
from models.pattern import (  # noqa: F401
    active_parameters,
    check,
    check_exceptions,
    choose_execution,
    describe_execution,
    divided_counts,
    forward_flops_per_token,
    kernel_facts,
    linear_shapes,
    parameter_count,
    parts,
    training_flops_per_token,
)
from models.planned import planned_execution  # noqa: F401
