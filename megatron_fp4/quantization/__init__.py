"""How numbers become 4 bits (and 8): formats, rounding, the Hadamard transform.

`quantize_nvfp4`, `NVFP4Tensor` and `random_hadamard_transform` are the stable public calls.
"""

from megatron_fp4.quantization.formats import quantize, quantize_nvfp4
from megatron_fp4.quantization.hadamard import random_hadamard_transform
from megatron_fp4.quantization.rounding import Place, RoundingKey, Span, rounding_key
from megatron_fp4.quantization.tensor import NVFP4Tensor, QuantizedTensor

__all__ = ["NVFP4Tensor", "Place", "QuantizedTensor", "RoundingKey", "Span"]
__all__ += ["quantize", "quantize_nvfp4", "random_hadamard_transform", "rounding_key"]
