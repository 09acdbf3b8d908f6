"""Opens the models named on a command line with transformers: Hugging Face folders, and checkpoints, which are exported
into a temporary folder."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from data.tokenizer import TextTokenizer
from exchange.checkpoint import Checkpoint, open_checkpoint
from exchange.hf_export import CONFIG, export_hf
from exchange.hf_import import OF_ACTIVATIONS
from exchange.tokenizer import tokenizer_of
from megatron_fp4.checkpoint.files import MANIFEST, check_plain, step_of

DTYPES = ("auto", "float32", "bfloat16", "float16")
MISSING = 'lm-eval and transformers are not installed: pip install -e ".[eval]"'


class Model(NamedTuple):
    """A model named on the command line. checkpoint: None if it is a Hugging Face folder."""

    name: str
    path: Path
    checkpoint: Checkpoint | None

    @property
    def facts(self) -> dict[str, Any]:
        if self.checkpoint is None:
            return {"path": str(self.path)}
        return {"path": str(self.checkpoint.folder), "step": self.checkpoint.step, "tokens": self.checkpoint.tokens}


def models_of(texts: Sequence[str], config_dir: Path, trusted: bool = False) -> list[Model]:
    """The models of these texts, each MODEL or NAME=MODEL. Without one, a run's `runs/nvfp4/checkpoints/step_00000200`
    gets the name `nvfp4@200`, another folder its own. trusted: whether the paths that checkpoints name may be opened.

    Raises ValueError for a model that does not exist, and for two models with the same name.
    """
    found = []
    for text in texts:
        name, equals, rest = text.partition("=")
        if not equals or Path(text).exists():
            name, rest = "", text
        path, resolved = Path(rest), Path(rest).resolve()
        checkpoint = None if (path / CONFIG).is_file() else open_checkpoint(path, config_dir, trusted)
        of_run = (resolved / MANIFEST).is_file() and resolved.parent.name == "checkpoints"
        default = f"{resolved.parent.parent.name}@{step_of(resolved)}" if of_run else resolved.name
        found.append(Model(name or default, path, checkpoint))
    names = [model.name for model in found]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"two models have the name {twice[0]}; name them, as in first={twice[0]} second=...")
    return found


@contextmanager
def as_folder(model: Model, dtype: str, tokenizer: TextTokenizer | None = None) -> Iterator[Path]:
    """The model's Hugging Face folder; of a checkpoint a temporary one."""
    if model.checkpoint is None:
        yield model.path
        return
    with tempfile.TemporaryDirectory(prefix="megatron_fp4_evaluate_") as temporary:
        folder = Path(temporary) / "model"
        export_hf(model.checkpoint, folder, dtype=getattr(torch, dtype), tokenizer=tokenizer)
        yield folder


def tokenizers_of(models: Sequence[Model], given: str | None) -> dict[str, TextTokenizer]:
    """The tokenizers of the models that are checkpoints, by name. Raises ValueError for one that is missing."""
    found = {}
    for model in models:
        if model.checkpoint is not None:
            tokenizer = tokenizer_of(model.checkpoint, given)
            if tokenizer is None:
                raise ValueError(f"{model.path}: its run has no tokenizer; give the one of its data as --tokenizer")
            found[model.name] = tokenizer
    if given is not None and not found:
        raise ValueError(f"--tokenizer {given} is for checkpoints; folders have their own, so leave it out")
    return found


class OpenedFolder(NamedTuple):
    """model: of transformers, on its device, in evaluation mode. stored: the dtype of the weights in the folder, or
    their quantized format (they are then decoded)."""

    model: Any
    tokenizer: Any
    stored: str


def open_folder(folder: Path, device: str, dtype: str = "auto", with_tokenizer: bool = True) -> OpenedFolder:
    """Load a folder without network access, and without running code that it has.

    dtype: of the computation, one of DTYPES; auto: the folder's. Raises ValueError, in one line, if transformers cannot
    load the folder, if weights are missing or superfluous, if the tokenizer is missing, or for links in the folder.
    """
    check_plain(folder)
    try:
        import transformers
    except ImportError as error:
        raise ValueError(MISSING) from error
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    config = _loaded(folder, transformers.AutoConfig)
    settings = dict(getattr(config, "quantization_config", None) or {})
    if (method := settings.get("quant_method")) not in (None, "compressed-tensors"):
        raise ValueError(
            f"{folder} has the layout of {method}, which cannot be read here; export it again with "
            "--format nvfp4-compressed-tensors, or without --format"
        )
    # Decode the weights now: by default activations are quantized too.
    decoded = {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)} if method else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers warns that `decoded` overrides the folder's configuration
        options: dict[str, Any] = {"dtype": dtype, "output_loading_info": True, "use_safetensors": True, **decoded}
        model, loading = _loaded(folder, transformers.AutoModelForCausalLM, **options)
    if method and dtype != "auto":  # decoded weights are in the folder's type
        model.to(getattr(torch, dtype))
    # transformers only warns, and initializes missing weights at random.
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if wrong := sorted(key for key in map(str, loading[what]) if not key.endswith(OF_ACTIVATIONS)):
            more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            raise ValueError(
                f"{folder} is not a complete model: {what.replace('_', ' ')} {', '.join(wrong[:3])}{more}; export it "
                "again"
            )
    tokenizer = None
    if with_tokenizer:
        if not any(folder.glob("tokenizer*")):
            raise ValueError(f"{folder} has no tokenizer, which tasks need; export it again with --tokenizer")
        tokenizer = _loaded(folder, transformers.AutoTokenizer)
        if tokenizer.eos_token_id is None:
            raise ValueError(f"the tokenizer of {folder} has no eos_token, with which a text begins; add it there")
    stored = settings.get("format") or getattr(config, "dtype", None) or "float32"
    return OpenedFolder(model.to(device).eval(), tokenizer, str(stored).removeprefix("torch."))


def _loaded(folder: Path, kind: Any, **options: Any) -> Any:
    try:
        return kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **options)
    except Exception as error:  # transformers raises any type, with pages of text
        raise ValueError(f"{folder} cannot be loaded by transformers: {in_one_line(error)}") from error


def in_one_line(error: BaseException, length: int = 240) -> str:
    """The type and message of another library's error, in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:length]}{' ...' if len(text) > length else ''}"


def device_named(name: str | None) -> str:
    """The device of the option --device; None: CUDA if there is any. Raises ValueError for a device that is absent."""
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=name).item()
    except Exception as error:
        problem = in_one_line(error, 80)
        raise ValueError(f"--device {name} cannot be used ({problem}); use cpu, cuda or cuda:N") from error
    return name
