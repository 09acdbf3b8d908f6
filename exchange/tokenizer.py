"""Finds the tokenizer of a checkpoint, and writes it as files of a Hugging Face folder that give the same ids.

A `tokenizer.json` is copied unchanged. SentencePiece models and tiktoken ranks are converted by transformers; the
result is then compared on texts that such conversions often get wrong, and refused if it differs.
"""

from __future__ import annotations

import base64
import importlib
import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers

from data.builtin import open_builtin
from data.tokenizer import (
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    TextTokenizer,
    TiktokenTokenizer,
    load_tokenizer,
)
from exchange.checkpoint import Checkpoint

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
"""The files of a tokenizer in a folder of transformers."""


def tokenizer_of(checkpoint: Checkpoint, given: str | Path | None = None) -> TextTokenizer | None:
    """The tokenizer that made the data of the checkpoint's run; None if the run has none and none is given.

    given: its path now, if it differs from the path in the configuration.
    Raises ValueError if it is missing, cannot be read, or is another one than the run's.
    """
    data, expected = checkpoint.config.data, checkpoint.manifest.identity.get("data.tokenizer")
    tokenizer: TextTokenizer | None = None
    remedy = "give the right one as --tokenizer PATH"
    try:
        if given is not None:
            tokenizer = load_tokenizer(given, data.eod_token)
        elif checkpoint.weights_only:
            kept = {name for name in TOKENIZER_FILES if name in checkpoint.manifest.files}
            for name in kept:
                checkpoint.file(name)  # raises if it has changed
            if kept & {"tokenizer.json", "tokenizer.model"}:
                tokenizer = load_tokenizer(checkpoint.folder, data.eod_token)
        elif data.tokenizer is not None:
            tokenizer = load_tokenizer(data.tokenizer, data.eod_token)
        elif data.kind == "builtin":
            tokenizer = open_builtin(checkpoint.config.model.vocab_size, data.cache_dir).tokenizer
        elif expected is not None:  # its path used environment variables, which only a trusted configuration may read
            raise ValueError(f"{checkpoint.folder} does not have the path of its tokenizer; {remedy}")
    except OSError as error:
        raise ValueError(f"the tokenizer of {checkpoint.folder} cannot be read ({error}); {remedy}") from error
    if tokenizer is not None and expected is not None and tokenizer.fingerprint() != expected:
        raise ValueError(
            f"{tokenizer.name} is not the tokenizer of the run that made {checkpoint.folder}: its fingerprint is "
            f"{tokenizer.fingerprint()[:12]}, the run's {expected[:12]}; {remedy}"
        )
    rows = checkpoint.config.model.vocab_size
    if tokenizer is not None and tokenizer.vocab_size > rows:
        raise ValueError(f"{tokenizer.name} has {tokenizer.vocab_size} ids and the model only {rows}; {remedy}")
    return tokenizer


def kept_tokenizer(path: Path, vocab_size: int) -> tuple[dict[str, bytes], str | None]:
    """What an imported checkpoint saves of the tokenizer at `path`, a folder or a file: name -> content of its files,
    named as in a Hugging Face folder, and its fingerprint (None without a tokenizer). Raises ValueError for a tokenizer
    with more ids than the model has."""
    files = {name: path / name for name in TOKENIZER_FILES if (path / name).is_file()}
    if path.is_file():
        files = {"tokenizer.model" if path.suffix == ".model" else "tokenizer.json": path}
    fingerprint = None
    if {"tokenizer.json", "tokenizer.model"} & {*files}:
        tokenizer = load_tokenizer(path)
        if tokenizer.vocab_size > vocab_size:
            raise ValueError(
                f"{path}: its tokenizer has {tokenizer.vocab_size} ids and the model only {vocab_size}; give the "
                "model's own, or remove it"
            )
        fingerprint = tokenizer.fingerprint()
    return {name: file.read_bytes() for name, file in files.items()}, fingerprint


_KEPT = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
_PROBES = (
    "Hello, world! It's 12:30; 3.14159 x 10^23 is not 1e+23.",
    "def f(x):\n    return {'a': [1, 22, 333, 4444]}  # comment\n\n\n\tif x:\r\n\t\tpass",
    "  leading, trailing  and   many    spaces   \n \n",
    "Grüße, naïve Ωmega, Привет мир, 你好,世界, こんにちは, مرحبا, 👩‍👩‍👧 🏳️‍🌈",
    "camelCaseWords snake_case_words SHOUTING don't we'll I'M",
    "\u00a0\u2003\u200b\ufeff\x00\x07 e\u0301 é",
    "",
)


def tokenizer_files(tokenizer: TextTokenizer, sequence_length: int) -> dict[str, bytes]:
    """File name -> content, for a Hugging Face folder. sequence_length: its `model_max_length`.

    Raises ValueError if the tokenizer cannot be converted to files that give the same ids.
    """
    content = tokenizer.content if isinstance(tokenizer, HuggingFaceTokenizer) else _converted(tokenizer)
    files = {"tokenizer.json": content.encode()}
    origin = Path(tokenizer.name)
    if isinstance(tokenizer, HuggingFaceTokenizer) and (origin / "tokenizer_config.json").is_file():
        return files | {name: (origin / name).read_bytes() for name in _KEPT if (origin / name).is_file()}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": tokenizer.eod_token,
        "pad_token": tokenizer.eod_token,
        "model_max_length": sequence_length,
        "clean_up_tokenization_spaces": False,
        **({} if tokenizer.bos_token is None else {"bos_token": tokenizer.bos_token}),
    }
    files["tokenizer_config.json"] = (json.dumps(config, indent=2) + "\n").encode()
    return files


def _converted(tokenizer: TextTokenizer) -> str:
    def refusal(why: str) -> ValueError:
        return ValueError(f"{tokenizer.name}, a {tokenizer.kind} tokenizer, {why}; export with --no-tokenizer")

    try:
        # Not `import ... as`, because the package may also have a function with this name.
        convert = importlib.import_module("transformers.convert_slow_tokenizer")
    except ImportError as error:
        raise refusal(f'needs transformers ({error}): pip install "megatron_fp4[hf]"') from error
    with tempfile.TemporaryDirectory() as folder:
        try:
            if isinstance(tokenizer, TiktokenTokenizer):
                content = _from_tiktoken(tokenizer, convert, Path(folder))
            else:
                assert isinstance(tokenizer, SentencePieceTokenizer)
                content = _from_sentence_piece(tokenizer, convert, Path(folder))
            other = HuggingFaceTokenizer(content, tokenizer.name, tokenizer.eod_token)
        except Exception as error:  # converters and `tokenizers` raise many types
            reason = " ".join(str(error).split())
            raise refusal(f"cannot be converted to a tokenizer.json ({reason})") from error
    for probe, ours, theirs in zip(_PROBES, tokenizer.encode_batch(_PROBES), other.encode_batch(_PROBES), strict=True):
        if ours != theirs:
            raise refusal(f"gives other ids for {probe!r:.40} after conversion to a tokenizer.json")
    if other.eod_id != tokenizer.eod_id:
        raise refusal(f"gives {tokenizer.eod_token} another id after conversion to a tokenizer.json")
    return content


def _from_tiktoken(tokenizer: TiktokenTokenizer, convert: Any, folder: Path) -> str:
    ranks, pattern, special = tokenizer.parts
    lines = (f"{base64.b64encode(token).decode()} {rank}" for token, rank in sorted(ranks.items(), key=lambda r: r[1]))
    (folder / "ranks.tiktoken").write_text("\n".join(lines))
    made = convert.TikTokenConverter(vocab_file=str(folder / "ranks.tiktoken"), pattern=pattern).converted()
    settings = json.loads(made.to_str())
    settings["model"]["vocab"] |= special  # otherwise they would get consecutive ids
    settings["added_tokens"] = [
        {"id": number, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for token, number in sorted(special.items(), key=lambda item: item[1])
    ]  # fmt: skip
    return json.dumps(settings, ensure_ascii=False)


def _from_sentence_piece(tokenizer: SentencePieceTokenizer, convert: Any, folder: Path) -> str:
    file = folder / "tokenizer.model"
    file.write_bytes(tokenizer.model)

    has_bytes = tokenizer.has_bytes

    class Converter(convert.SpmConverter):  # type: ignore[name-defined]
        handle_byte_fallback = has_bytes

        def tokenizer(self, proto: Any) -> Any:
            if proto.trainer_spec.model_type != 2:
                return super().tokenizer(proto)
            scores = self.vocab(proto)
            ids = {piece: number for number, (piece, _) in enumerate(scores)}
            merges = convert.generate_merges(ids, dict(scores))
            unknown, fallback = proto.trainer_spec.unk_piece, self.handle_byte_fallback
            made = Tokenizer(models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=fallback))
            made.add_special_tokens([AddedToken(p.piece, normalized=False) for p in proto.pieces if p.type == 3])
            made.add_tokens([AddedToken(p.piece, normalized=False) for p in proto.pieces if p.type == 4])
            return made

        def normalizer(self, proto: Any) -> Any:
            spec, steps = proto.normalizer_spec, list[Any]()
            if spec.precompiled_charsmap:
                steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
            if spec.remove_extra_whitespaces:
                steps += [normalizers.Replace(Regex("^ +| +$"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
            if spec.add_dummy_prefix:
                steps.append(normalizers.Prepend(" "))
            return normalizers.Sequence([*steps, normalizers.Replace(" ", "\u2581")])

        def pre_tokenizer(self, replacement: str, add_prefix_space: bool) -> None:
            return None

        def decoder(self, replacement: str, add_prefix_space: bool) -> Any:
            steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
            if self.proto.normalizer_spec.add_dummy_prefix:
                steps.append(decoders.Strip(content=" ", left=1))
            return decoders.Sequence(steps)

        def post_processor(self) -> None:
            return None

    return Converter(SimpleNamespace(vocab_file=str(file))).converted().to_str()
