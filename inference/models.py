"""Opens the models named on a command line with transformers, and computes the log-probabilities of tokens in bounded
memory. A model is a Hugging Face folder, or a checkpoint, which is exported into a temporary folder."""

from __future__ import annotations

import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from data.tokenizer import TextTokenizer
from exchange.checkpoint import Checkpoint, open_checkpoint
from exchange.hf_export import CONFIG, Progress, export_hf
from exchange.tokenizer import tokenizer_of
from megatron_fp4.checkpoint.files import MANIFEST, check_plain, step_of

DTYPES = ("auto", "float32", "bfloat16", "float16")
MISSING = 'lm-eval and transformers are not installed: pip install -e ".[eval]"'
BATCH_TOKENS = 8192
# FP32 elements of logits at a time: 256 MB.
_LOGITS = 1 << 26


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
        checkpoint = None if is_folder(path) else open_checkpoint(path, config_dir, trusted)
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


def is_folder(path: Path) -> bool:
    """Whether this is the folder of a Hugging Face model."""
    return (path / CONFIG).is_file()


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
    # Decode the weights now: by default that happens at the first call of the whole model, which scoring does not make.
    decoded = {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)} if method else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers warns that `decoded` overrides the folder's configuration
        options: dict[str, Any] = {"dtype": dtype, "output_loading_info": True, "use_safetensors": True, **decoded}
        model, loading = _loaded(folder, transformers.AutoModelForCausalLM, **options)
    # transformers only warns, and initializes missing weights at random.
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if wrong := sorted(map(str, loading[what])):
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


class Row(NamedTuple):
    """tokens: the input, at least one. positions, targets [n]: the logits at positions[i] predict targets[i]."""

    tokens: Sequence[int]
    positions: Sequence[int]
    targets: Sequence[int]


class Scored(NamedTuple):
    """For a row's n targets, on the CPU: log_probs in nats, FP64; greedy: whether each is the most probable token."""

    log_probs: Tensor
    greedy: Tensor


class Scorer:
    """Log-probabilities of given tokens by a causal model of transformers.

    Rows are scored longest first, so that the rows of a batch have similar lengths, and a batch that is too large fails
    at once. A batch is padded at the right, without a mask or cache: in a causal model, attention or Mamba, no position
    depends on later ones. The head multiplies only the requested positions, in parts, so logits take a few hundred MB
    for any length and vocabulary. The softmax is in FP32.

    batch_rows: rows of a batch; None: as many as have BATCH_TOKENS padded tokens.
    """

    def __init__(self, model: Any, batch_rows: int | None = None) -> None:
        self._model, self._batch_rows = model, batch_rows
        self._plain_head: bool | None = None

    @torch.no_grad()
    def score(self, rows: Sequence[Row], progress: Progress | None = None) -> list[Scored]:
        found: dict[int, Scored] = {}
        for batch in self.batches([len(row.tokens) for row in rows]):
            found.update(zip(batch, self._score_batch([rows[number] for number in batch]), strict=True))
            if progress is not None:
                progress(len(found), len(rows))
        return [found[number] for number in range(len(rows))]

    def batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Batches of row numbers with similar lengths, longest first."""
        order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
        while order:
            count = self._batch_rows or max(1, BATCH_TOKENS // max(lengths[order[0]], 1))
            yield order[:count]
            order = order[count:]

    def _score_batch(self, rows: Sequence[Row]) -> list[Scored]:
        device = self._model.device
        tokens = torch.zeros(len(rows), max(len(row.tokens) for row in rows), dtype=torch.int64)
        for row, line in zip(rows, tokens, strict=True):
            line[: len(row.tokens)] = torch.tensor(row.tokens)
        which = torch.tensor([number for number, row in enumerate(rows) for _ in row.positions], device=device)
        where = torch.tensor([position for row in rows for position in row.positions], device=device)
        targets = torch.tensor([target for row in rows for target in row.targets], device=device)
        states, head = self._states(tokens.to(device))
        log_probs = torch.empty(len(targets), dtype=torch.float64)
        greedy = torch.empty(len(targets), dtype=torch.bool)
        size = max(1, _LOGITS // self._model.config.vocab_size)
        for start in range(0, len(targets), size):
            part = slice(start, start + size)
            logits = head(states[which[part], where[part]]).float()
            picked = logits.gather(-1, targets[part, None]).squeeze(-1)
            log_probs[part] = (picked - logits.logsumexp(-1)).double().cpu()
            greedy[part] = (logits.argmax(-1) == targets[part]).cpu()
        ends = [len(row.targets) for row in rows]
        return [Scored(*pair) for pair in zip(log_probs.split(ends), greedy.split(ends), strict=True)]

    def _states(self, tokens: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """The input of the head, [rows, length, hidden], and the head. If the model does more than its head computes
        (some cap or scale logits): the logits, and an identity function."""
        head, decoder = self._model.get_output_embeddings(), self._model.get_decoder()
        if self._plain_head is None:
            probe = tokens[:1, :8]
            theirs = self._model(probe, use_cache=False).logits.float()
            ours = theirs.new_empty(0) if head is None else head(decoder(probe, use_cache=False)[0]).float()
            self._plain_head = ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3)
        if self._plain_head:
            return decoder(tokens, use_cache=False)[0], head
        return self._model(tokens, use_cache=False).logits, lambda logits: logits


class ProgressLine:
    """Prints progress to stderr once a second if it is a terminal."""

    def __init__(self, what: str) -> None:
        self._what, self._last = what, 0.0

    def __call__(self, done: int, total: int) -> None:
        if sys.stderr.isatty() and (done == total or time.monotonic() - self._last > 1.0):
            self._last = time.monotonic()
            end = "\r" if done < total else "\033[K\r"
            text = f"{self._what}: {done:,} of {total:,}" if done < total else ""
            print(f"\r{text}", end=end, file=sys.stderr, flush=True)
