"""Finds the tokenizer of a checkpoint, and writes it as files of a Hugging Face folder that give the same ids.

A `tokenizer.json` is copied; transformers converts SentencePiece models and tiktoken ranks. Three things would give
users other ids than those of the training data: the folder's own tokenizer class, its `add_prefix_space`, and a begin
token that the data does not have. So the written configuration names transformers' plain class, and a text begins as
the documents of the data do. At the end transformers opens the finished folder as users do, and its ids are compared
with the tokenizer's, on texts that conversions often get wrong and on documents of the training data.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, processors

from data.builtin import open_builtin
from data.indexed import IndexedDataset
from data.sources import prefixes
from data.storage import is_url
from data.tokenizer import (
    TOKENIZER_FILES,
    HuggingFaceTokenizer,
    Read,
    SentencePieceTokenizer,
    TextTokenizer,
    TiktokenTokenizer,
    load_tokenizer,
)
from exchange.checkpoint import Checkpoint
from megatron_fp4.checkpoint.files import check_plain, read_plain, write_file

KEPT = "tokenizer"
"""The folder in run.dir with the tokenizer's files, which a run writes when it starts."""
# A folder with one of these has a tokenizer.
_OPENED = {kind.file_name for kind in (HuggingFaceTokenizer, SentencePieceTokenizer, TiktokenTokenizer)}
WITHOUT = "export with --no-tokenizer"
# Of each source, compared after an export: documents, and tokens of each.
_DOCUMENTS, _DOCUMENT_TOKENS = 32, 2000


def tokenizer_of(checkpoint: Checkpoint, given: str | Path | None = None) -> TextTokenizer | None:
    """The tokenizer that made the data of the checkpoint's run; None if the run has none and none is given.

    given: its path now, if it is neither the copy in the run's folder nor at the path in the configuration, which only
    a trusted checkpoint may name.
    Raises ValueError if it is missing, cannot be read, or is another one than the run's.
    """
    data, facts = checkpoint.config.data, checkpoint.trainer.get("data_facts", {})  # earlier versions have none
    expected = checkpoint.manifest.identity.get("data.tokenizer") or facts.get("tokenizer", {}).get("fingerprint")
    eod, bos = (facts[key]["token"] if facts.get(key) else None for key in ("eod", "bos"))
    ends = eod or data.eod_token, bos
    tokenizer: TextTokenizer | None = None
    remedy = "give the right one as --tokenizer PATH"
    try:
        if given is not None:
            tokenizer = load_tokenizer(given, *ends, read_plain)
        elif checkpoint.weights_only:
            if _OPENED & checkpoint.manifest.files.keys():
                tokenizer = load_tokenizer(checkpoint.folder, *ends, checkpoint.read)
        elif data.tokenizer is not None and (copy := _copy_of_run(checkpoint, expected, ends)) is not None:
            tokenizer = copy
        elif not checkpoint.trusted and (data.tokenizer or data.cache_dir or (expected and data.kind != "builtin")):
            path = data.tokenizer or data.cache_dir or "data.tokenizer"
            consent = "give --trust-config if the run is yours, or its tokenizer as --tokenizer PATH"
            raise ValueError(f"{checkpoint.folder} names {path}, which is not used without your consent; {consent}")
        elif data.tokenizer is not None:
            tokenizer = load_tokenizer(data.tokenizer, *ends, read_plain)
        elif data.kind == "builtin":
            tokenizer = open_builtin(checkpoint.config.model.vocab_size, data.cache_dir).tokenizer
    except OSError as error:
        raise ValueError(f"the tokenizer of {checkpoint.folder} cannot be read ({error}); {remedy}") from error
    if tokenizer is not None and expected is not None and not tokenizer.made(expected):
        raise ValueError(
            f"{tokenizer.name} is not the tokenizer of the run that made {checkpoint.folder}: its fingerprint is "
            f"{tokenizer.fingerprint()[:12]}, the run's {expected[:12]}; {remedy}"
        )
    rows = checkpoint.config.model.vocab_size
    if tokenizer is not None and tokenizer.vocab_size > rows:
        raise ValueError(f"{tokenizer.name} has {tokenizer.vocab_size} ids and the model only {rows}; {remedy}")
    return tokenizer


def kept_tokenizer(path: Path, vocab_size: int, read: Read = read_plain) -> tuple[dict[str, bytes], str | None]:
    """What an imported checkpoint saves of the tokenizer at `path`, a folder or a file: name -> content of its files,
    as in a Hugging Face folder, and its fingerprint or None. Raises ValueError for too many ids."""
    kept = {name: read(path / name) for name in TOKENIZER_FILES if os.path.lexists(path / name)}
    fingerprint = None
    if path.is_file() or _OPENED & kept.keys():
        tokenizer = load_tokenizer(path, read=read)
        if tokenizer.vocab_size > vocab_size:
            raise ValueError(
                f"{path}: its tokenizer has {tokenizer.vocab_size} ids and the model only {vocab_size}; give the "
                "model's own, or remove it"
            )
        kept = kept or {name: read(file) for name, file in tokenizer.files().items()}
        fingerprint = tokenizer.fingerprint()
    return kept, fingerprint


def _copy_of_run(
    checkpoint: Checkpoint, expected: str | None, ends: tuple[str | None, str | None]
) -> TextTokenizer | None:
    """The tokenizer in the folder of the checkpoint's run; None if there is none, or another one."""
    folder = checkpoint.folder.absolute().parent.parent / KEPT
    if folder.is_symlink() or not any((folder / name).is_file() for name in _OPENED):
        return None
    tokenizer = load_tokenizer(folder, *ends, read_plain)
    return tokenizer if expected is not None and tokenizer.made(expected) else None


def keep_tokenizer(run_dir: Path, tokenizer: TextTokenizer) -> None:
    """Copy the files of a run's tokenizer into run_dir/tokenizer, which appears only complete. Raises OSError."""
    folder, content = run_dir / KEPT, {name: path.read_bytes() for name, path in tokenizer.files().items()}
    if folder.is_dir() and content == {path.name: path.read_bytes() for path in folder.iterdir()}:
        return
    staging = run_dir / f"{KEPT}.tmp"
    for old in (staging, folder):
        shutil.rmtree(old, ignore_errors=True)
    staging.mkdir()
    for name, text in content.items():
        write_file(staging / name, text)
    staging.rename(folder)


# What of a folder's tokenizer_config.json does not change the ids of a text.
_KEPT_SETTINGS = (
    "chat_template", "unk_token", "pad_token", "additional_special_tokens", "extra_special_tokens", "padding_side",
    "truncation_side", "model_max_length", "model_input_names",
)  # fmt: skip
_PROBES = (
    "Hello, world! It's 12:30; 3.14159 x 10^23 is not 1e+23.",
    "def f(x):\n    return {'a': [1, 22, 333, 4444]}  # comment\n\n\n\tif x:\r\n\t\tpass",
    "  leading, trailing  and   many    spaces   \n \n",
    "Grüße, naïve Ωmega, Привет мир, 你好,世界, こんにちは, مرحبا, 👩‍👩‍👧 🏳️‍🌈",
    "camelCaseWords snake_case_words SHOUTING don't we'll I'M",
    "\u00a0\u2003\u200b\ufeff\x00\x07 e\u0301 é",
    "",
)


def exported_tokenizer(
    checkpoint: Checkpoint, tokenizer: TextTokenizer | None, sequence_length: int
) -> dict[str, bytes]:
    """The files of the checkpoint's tokenizer in an exported folder: `tokenizer_files`, or those that came with an
    import which no run has trained; {} without a tokenizer. Raises ValueError as `tokenizer_files` does."""
    if tokenizer is None:
        return {}
    if _came_with(checkpoint, tokenizer):
        return kept_tokenizer(checkpoint.folder, checkpoint.config.model.vocab_size, checkpoint.read)[0]
    return tokenizer_files(tokenizer, sequence_length, checkpoint.read)


def check_exported_tokenizer(folder: Path, checkpoint: Checkpoint, tokenizer: TextTokenizer | None) -> None:
    """Raise ValueError unless AutoTokenizer of a finished folder gives the ids of the data (`compare_auto_tokenizer`);
    nothing is known of the data of an import."""
    if tokenizer is not None and not _came_with(checkpoint, tokenizer):
        compare_auto_tokenizer(folder, tokenizer, texts_of_data(checkpoint, tokenizer))


def _came_with(checkpoint: Checkpoint, tokenizer: TextTokenizer) -> bool:
    return checkpoint.weights_only and tokenizer.name == str(checkpoint.folder)


def tokenizer_files(tokenizer: TextTokenizer, sequence_length: int, read: Read = read_plain) -> dict[str, bytes]:
    """File name -> content, for a Hugging Face folder. sequence_length: its `model_max_length`, unless the tokenizer's
    folder has one. read: reads the files beside the tokenizer's.

    Raises ValueError if the tokenizer cannot be converted to files that give the same ids.
    """
    content = tokenizer.content if isinstance(tokenizer, HuggingFaceTokenizer) else _converted(tokenizer)
    config: dict[str, Any] = {
        "pad_token": tokenizer.eod_token,
        "model_max_length": sequence_length,
        "clean_up_tokenization_spaces": False,
    }
    origin, files = Path(tokenizer.name), {}
    if isinstance(tokenizer, HuggingFaceTokenizer) and (origin / "tokenizer_config.json").is_file():
        own = json.loads(read(origin / "tokenizer_config.json"))
        config |= {key: own[key] for key in _KEPT_SETTINGS if own.get(key) is not None}
        if os.path.lexists(template := origin / "chat_template.jinja"):
            files[template.name] = read(template)
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokenizer.eod_token}
    if tokenizer.bos_token is not None:
        config["bos_token"] = tokenizer.bos_token
    files["tokenizer.json"] = _with_begin(content, tokenizer).encode()
    files["tokenizer_config.json"] = (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
    return files


def _with_begin(content: str, tokenizer: TextTokenizer) -> str:
    """A tokenizer.json that puts the token before a text that begins every document of the data, and no others."""
    if Tokenizer.from_str(content).encode("").ids == tokenizer.ids_before:
        return content
    settings, bos = json.loads(content), tokenizer.bos_token
    if bos is None:
        settings["post_processor"] = None
    else:
        template = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B:1", special_tokens=[(bos, tokenizer.bos_id)]
        )
        settings["post_processor"] = json.loads(template.__getstate__())
    return json.dumps(settings, ensure_ascii=False)


def compare_auto_tokenizer(folder: Path, tokenizer: TextTokenizer, texts: Sequence[str]) -> None:
    """Raise ValueError unless transformers' AutoTokenizer of a finished folder, called without options, gives the ids
    that the data has for the beginning of a document. texts: of the data, besides those that are always compared.

    Left out are texts in which a special token is spelled out: only transformers recognizes it there.
    """
    try:
        from transformers import AutoTokenizer
        from transformers.utils import logging
    except ImportError as error:
        raise ValueError(
            f"the exported tokenizer is compared with transformers' ({error}): pip install -e '.[hf]', or export with "
            "--no-tokenizer"
        ) from error
    logging.set_verbosity_error()
    check_plain(folder)
    try:
        auto = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many types
        reason = " ".join(str(error).split())
        raise ValueError(f"transformers cannot open {tokenizer.name} as exported ({reason}); {WITHOUT}") from error
    special = auto.all_special_tokens
    compared = [text for text in (*_PROBES, *texts) if not any(token in text for token in special)]
    for text, ids in zip(compared, tokenizer.encode_batch(compared), strict=True):
        ours, theirs = tokenizer.ids_before + ids, auto(text)["input_ids"]
        if theirs != ours:
            raise ValueError(
                f"AutoTokenizer of the exported folder gives {str(theirs[:8])[:-1]} ...] for {text!r:.40} and the data "
                f"has {str(ours[:8])[:-1]} ...], by {tokenizer.name}; {WITHOUT}"
            )
    if auto.eos_token_id != tokenizer.eod_id:
        raise ValueError(
            f"AutoTokenizer of the exported folder ends texts with the id {auto.eos_token_id} and the data with "
            f"{tokenizer.eod_id}, by {tokenizer.name}; {WITHOUT}"
        )


def texts_of_data(checkpoint: Checkpoint, tokenizer: TextTokenizer) -> list[str]:
    """The beginnings of some documents of the data that the checkpoint's run trained on, as far as it is on this
    machine and its paths may be opened: at most _DOCUMENTS of each source, _DOCUMENT_TOKENS each."""
    data, texts = checkpoint.config.data, list[str]()
    for name, value in data.sources.items() if data.kind == "indexed" and checkpoint.trusted else ():
        try:
            prefix = next(prefix for prefix in prefixes(f"data.sources.{name}", value) if not is_url(prefix))
            dataset = IndexedDataset(prefix)
        except (OSError, ValueError, StopIteration):
            continue
        for number in range(min(_DOCUMENTS, dataset.num_documents)):
            start, end = map(int, dataset.document_offsets(number, number + 1))
            texts.append(tokenizer.decode(dataset.tokens(start, min(end - start, _DOCUMENT_TOKENS)).tolist()))
    return texts


def _converted(tokenizer: TextTokenizer) -> str:
    def refusal(why: str) -> ValueError:
        return ValueError(f"{tokenizer.name}, a {tokenizer.kind} tokenizer, {why}; {WITHOUT}")

    try:
        # Not `import ... as`, because the package may also have a function with this name.
        convert = importlib.import_module("transformers.convert_slow_tokenizer")
    except ImportError as error:
        raise refusal(f'needs transformers ({error}): pip install -e ".[hf]"') from error
    try:
        if isinstance(tokenizer, TiktokenTokenizer):
            return _from_tiktoken(tokenizer, convert)
        assert isinstance(tokenizer, SentencePieceTokenizer)
        return _from_sentence_piece(tokenizer, convert)
    except Exception as error:  # converters and `tokenizers` raise many types
        reason = " ".join(str(error).split())
        raise refusal(f"cannot be converted to a tokenizer.json by this version of transformers ({reason})") from error


def _from_tiktoken(tokenizer: TiktokenTokenizer, convert: Any) -> str:
    ranks, pattern, special = tokenizer.parts
    converter = convert.TikTokenConverter(pattern=pattern)
    converter.load_tiktoken_bpe = lambda _: dict(sorted(ranks.items(), key=lambda item: item[1]))
    made = converter.converted()
    settings = json.loads(made.to_str())
    settings["model"]["vocab"] |= special  # otherwise they would get consecutive ids
    settings["added_tokens"] = [
        {"id": number, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for token, number in sorted(special.items(), key=lambda item: item[1])
    ]  # fmt: skip
    return json.dumps(settings, ensure_ascii=False)


def _from_sentence_piece(tokenizer: SentencePieceTokenizer, convert: Any) -> str:
    proto = convert.import_protobuf().ModelProto.FromString(tokenizer.model)
    pieces = [(piece.piece, piece.score) for piece in proto.pieces]
    is_bpe = proto.trainer_spec.model_type == 2
    vocab = {piece: number for number, (piece, _) in enumerate(pieces)} if is_bpe else pieces
    made = convert.SpmConverter.build_tokenizer_from_spm_proto(proto, vocab)
    made.add_special_tokens([AddedToken(piece.piece, normalized=False) for piece in proto.pieces if piece.type == 3])
    return made.to_str()
