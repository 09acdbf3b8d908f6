"""A Hugging Face folder opened to be scored: its weights all there, its tokenizer if it has one."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

DTYPES = ("auto", "float32", "bfloat16", "float16")
MISSING = 'lm-eval and transformers are not installed: pip install "megatron_fp4[eval]"'


@dataclass(frozen=True)
class OpenedFolder:
    """model: of transformers, on its device, in evaluation mode. stored: the dtype that the folder says it has, or the
    format of its quantized weights, which are decoded."""

    model: Any
    tokenizer: Any
    stored: str

    @property
    def dtype(self) -> str:
        """What it computes in."""
        return str(self.model.dtype).removeprefix("torch.")


def is_folder(path: Path) -> bool:
    """Whether a Hugging Face model may lie there."""
    return (path / "config.json").is_file()


def open_folder(folder: Path, device: str, dtype: str = "auto", with_tokenizer: bool = True) -> OpenedFolder:
    """Load a folder without a network.

    dtype: one of DTYPES, that of the computation; auto: as the folder says. Raises ValueError, in one line, for what
    transformers cannot load, weights that are missing or left over, and a tokenizer that is not there.
    """
    if not is_folder(folder):
        raise ValueError(
            f"{folder} has no config.json, so no Hugging Face model; write one with scripts/convert.py export-hf"
        )
    transformers = _transformers()
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        quantized = _quantization(folder, config, transformers)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that `quantized` is not what the folder says
            model, loading = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, local_files_only=True, output_loading_info=True, **quantized
            )
    except ValueError as error:
        if str(error).startswith(str(folder)):
            raise
        raise ValueError(f"{folder} cannot be loaded by transformers: {first_line(error)}") from error
    except Exception as error:  # transformers raises any type, with pages of text
        raise ValueError(f"{folder} cannot be loaded by transformers: {first_line(error)}") from error
    # transformers only warns, and draws what is missing at random.
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if wrong := sorted(map(str, loading[what])):
            raise ValueError(
                f"{folder} is not a whole model: {what.replace('_', ' ')} {', '.join(wrong[:3])}"
                f"{f' and {len(wrong) - 3} more' if len(wrong) > 3 else ''}; export it again"
            )
    tokenizer = _tokenizer(folder, transformers) if with_tokenizer else None
    stored = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    if quantized:
        stored = str(_settings(config).get("format"))
    return OpenedFolder(model.to(device).eval(), tokenizer, stored)


def _quantization(folder: Path, config: Any, transformers: Any) -> dict[str, Any]:
    """What loading takes for a folder of quantized weights: they are decoded, and activations stay as they are.

    Left packed they are decoded when the whole model is first called, which scoring does not do.
    """
    method = _settings(config).get("quant_method")
    if method is None:
        return {}
    if method != "compressed-tensors":
        raise ValueError(
            f"{folder} is in the layout of {method}, which is not read here; export it again with "
            "--format nvfp4-compressed-tensors, or without --format"
        )
    return {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)}


def _settings(config: Any) -> dict[str, Any]:
    return dict(getattr(config, "quantization_config", None) or {})


def _tokenizer(folder: Path, transformers: Any) -> Any:
    if not any(folder.glob("tokenizer*")):
        raise ValueError(f"{folder} has no tokenizer, which tasks of text need; export it again with --tokenizer")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise ValueError(f"the tokenizer of {folder} cannot be loaded: {first_line(error)}") from error
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer of {folder} has no eos_token, by which a text without context begins; name it in "
            "tokenizer_config.json"
        )
    return tokenizer


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ValueError(MISSING) from error
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def first_line(error: BaseException, length: int = 240) -> str:
    """What an error of another library says, in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:length]}{' ...' if len(text) > length else ''}"


def device_named(name: str | None) -> str:
    """The device of an option: None for CUDA if there is any. Raises ValueError for one that is not there."""
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        if torch.device(name).type not in ("cpu", "cuda"):
            raise ValueError("of a kind that nothing here was tried on")
        torch.zeros(1, device=name)
    except Exception as error:
        raise ValueError(f"--device {name} is not here ({first_line(error, 80)}); use cpu, cuda or cuda:N") from error
    return name
