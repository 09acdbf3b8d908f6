"""Tokenizers from every kind of file: one interface, the ids of their libraries, one line for a faulty file."""

import base64
import json
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from data import tokenizer as module
from data.tokenizer import CL100K, GPT2, QWEN2, HuggingFaceTokenizer, TextTokenizer, load_tokenizer, train_tokenizer

TEXTS = [
    f"def function_{i}(argument):\n    return argument + {i}  # it's naïve, isn't it? 文字\r\n" for i in range(200)
]
ODD_TEXTS = ["数据 🙂 \t <0x41>\r\n  ", "naïve ☕ 文字", "\x00\x7f", "", "  leading", "x", TEXTS[3]]
PATTERN = r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+"
SPECIAL = {"<|endoftext|>": 300, "<|begin|>": 299}


def hugging_face_file(folder: Path) -> Path:
    train_tokenizer(TEXTS, 300).save(folder / "tokenizer.json")
    return folder / "tokenizer.json"


def hugging_face_folder(folder: Path) -> Path:
    hugging_face_file(folder)
    settings = json.loads((folder / "tokenizer.json").read_text())
    for number, name in ((300, "<s>"), (307, "</s>")):  # 301 to 306 are a gap
        settings["added_tokens"].append({**settings["added_tokens"][0], "id": number, "content": name})
        settings["model"]["vocab"][name] = number
    (folder / "tokenizer.json").write_text(json.dumps(settings))
    (folder / "special_tokens_map.json").write_text('{"eos_token": {"content": "</s>", "lstrip": false}}')
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    return folder


def sentence_piece(folder: Path) -> Path:
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(TEXTS), model_prefix=str(folder / "m"), vocab_size=320, byte_fallback=True,
        add_dummy_prefix=False, remove_extra_whitespaces=False, normalization_rule_name="identity", minloglevel=5,
    )  # fmt: skip
    return folder / "m.model"


def ranks(folder: Path) -> Path:
    tokens = {bytes([i]): i for i in range(256)} | {b" argument": 256, b"return": 257, b"re": 258, b"tu": 259}
    lines = [base64.b64encode(token) + b" %d\n" % rank for token, rank in tokens.items()]
    (folder / "r.tiktoken").write_bytes(b"".join(lines))
    (folder / "r.json").write_text(json.dumps({"pattern": PATTERN, "special_tokens": SPECIAL}))
    return folder / "r.tiktoken"


KINDS: dict[str, tuple[Callable[[Path], Path], str, str | None, int]] = {
    "tokenizer.json": (hugging_face_file, "<|endoftext|>", None, 300),
    "folder": (hugging_face_folder, "</s>", "<s>", 308),
    "sentencepiece": (sentence_piece, "</s>", "<s>", 320),
    "tiktoken": (ranks, "<|endoftext|>", "<|begin|>", 301),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_tokenizer_works_alike(kind: str, tmp_path: Path) -> None:
    make, eod, bos, vocab_size = KINDS[kind]
    assert load_tokenizer(make(tmp_path)).bos_token is None  # whatever the file names
    tokenizer = load_tokenizer(make(tmp_path), bos_token=bos)
    assert (tokenizer.eod_token, tokenizer.bos_token, tokenizer.vocab_size) == (eod, bos, vocab_size)
    assert tokenizer.eod_id == tokenizer.id_of(eod)
    texts, lengths = [*ODD_TEXTS, f"def {eod} argument"], tokenizer.byte_lengths()
    encoded = tokenizer.encode_batch(texts)
    assert all(0 <= i < vocab_size and i != tokenizer.eod_id for ids in encoded for i in ids)
    assert lengths is not None and lengths.shape == (vocab_size,) and lengths[tokenizer.eod_id] == 0
    for text, ids in zip(texts, encoded, strict=True):
        assert tokenizer.decode([*ids, tokenizer.eod_id]) == text and lengths[ids].sum() == len(text.encode())
    copy: TextTokenizer = pickle.loads(pickle.dumps(tokenizer))
    assert copy.encode_batch(texts) == encoded
    assert (copy.fingerprint(), copy.eod_id, copy.bos_token) == (tokenizer.fingerprint(), tokenizer.eod_id, bos)
    with pytest.raises(ValueError, match=r"has no token 'no such' to end a document.*its special tokens: "):
        load_tokenizer(make(tmp_path), "no such")


def changed(path: str, value: Any) -> str:
    content = json.loads(train_tokenizer(TEXTS, 270).content)
    *outer, last = path.split("/")
    part = content
    for name in outer:
        part = part[int(name) if isinstance(part, list) else name]
    part[last] = value
    return HuggingFaceTokenizer(json.dumps(content, indent=3), "changed").fingerprint()


def test_fingerprints_tell_what_a_file_means() -> None:
    own = train_tokenizer(TEXTS, 270)
    merges = json.loads(own.content)["model"]["merges"]
    vocab = {**json.loads(own.content)["model"]["vocab"]}
    swapped = vocab | {"a": vocab["b"], "b": vocab["a"]}
    for path, value in (
        ("model/merges", [" ".join(pair) for pair in merges]),
        ("model/vocab", dict(reversed(vocab.items()))),
        ("post_processor", {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}),
        ("pre_tokenizer", {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}),
        ("added_tokens/0/normalized", True),
    ):
        assert changed(path, value) == own.fingerprint(), path
    for path, value in (
        ("model/merges", merges[::-1]),
        ("model/vocab", swapped),
        ("model/ignore_merges", True),
        ("normalizer", {"type": "NFC"}),
        ("pre_tokenizer/add_prefix_space", True),
        ("pre_tokenizer/use_regex", False),
        ("added_tokens/0/special", False),
    ):
        assert changed(path, value) != own.fingerprint(), path


def test_sentence_piece_and_tiktoken_give_the_ids_of_their_libraries(tmp_path: Path) -> None:
    processor = sentencepiece.SentencePieceProcessor(model_file=str(sentence_piece(tmp_path)))
    assert load_tokenizer(tmp_path / "m.model").encode_batch(TEXTS) == [processor.encode(text) for text in TEXTS]
    assert load_tokenizer(ranks(tmp_path)).encode_batch([" argument,return"]) == [[256, 44, 257]]
    # Under another name, such as Llama 3's.
    (tmp_path / "r.tiktoken").rename(tmp_path / "tokenizer.model")
    with pytest.raises(ValueError, match=r"tokenizer.model needs a pattern and special .*: write .*\.json with"):
        load_tokenizer(tmp_path / "tokenizer.model")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", b"{", r"cannot be read as a tokenizer\.json \(.*\); save it anew, or update tokenizers"),
        ("m.model", b"\x00garbage", r"m\.model is not a complete SentencePiece model"),
        ("r.tiktoken", b"IQ== 0\nIg==\n", r"r\.tiktoken:2 is no token in base64 with its rank"),
    ],
)
def test_a_faulty_tokenizer_file_gives_one_line(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as refusal:
        load_tokenizer(tmp_path / name)
    assert "\n" not in str(refusal.value)


# --- caching the ids of words does not change them --------------------------------------------------------------------

CONTENT = train_tokenizer(TEXTS, 400).content
ASCII = [*map(chr, range(128)), "it's", "IT'S", "  ", "\n\n"]
OTHERS = ["\u017f", "\u212a", "é", "文", "²", "😀", "\u2003", "\x85", "e\u0301"]  # of every class in the expressions


def cut_by(expression: str, normalizer: str | None = None, added: str | None = None) -> HuggingFaceTokenizer:
    """The trained tokenizer with another expression that cuts words."""
    settings: dict[str, Any] = json.loads(CONTENT)
    if expression != GPT2:
        settings["pre_tokenizer"] = {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        }
    settings["normalizer"] = {"type": normalizer} if normalizer else None
    if added:
        token = {"id": 400, "content": added, "special": False}
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        settings["added_tokens"].append({**token, **flags})
    return HuggingFaceTokenizer(json.dumps(settings), "a test")


def random_texts(seed: int, number: int) -> list[str]:
    draw = random.Random(seed)
    texts = ["".join(draw.choices(ASCII + OTHERS * (i % 2), k=draw.randint(0, 60))) for i in range(number)]
    return texts + [text + draw.choice(TEXTS) for text in texts[::5]]


@pytest.mark.parametrize(
    "shape", [(GPT2,), (GPT2, None, "return argument"), (CL100K, "NFC"), (QWEN2,), (QWEN2, "NFKD")]
)
def test_any_text_gets_the_ids_of_tokenizers(shape: tuple[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """An added token is found before words are cut."""
    subject = cut_by(*shape)
    assert subject._words is not None
    texts = [*random_texts(1, 300), "x".join(random_texts(2, 100)), ""]
    expected = [found.ids for found in subject._tokenizer.encode_batch(texts, add_special_tokens=False)]
    assert any(400 in ids for ids in expected) == (len(shape) == 3)
    for at_once in (1 << 18, 8, 1):
        monkeypatch.setattr(module, "_CHARACTERS_AT_ONCE", at_once)
        for text, ids, right in zip(texts, subject.encode_batch(texts), expected, strict=True):
            assert ids == right, repr(text)
