from __future__ import annotations

from pathlib import Path

from data.tokenizer import END_OF_DOCUMENT, load_tokenizer, train_tokenizer

TEXTS = [f"def function_{i}(argument):\n    return argument + {i}\n" for i in range(200)]


def test_any_text_survives_a_round_trip() -> None:
    tokenizer = train_tokenizer(TEXTS, 300)
    texts = [
        "def f():\n\treturn  1  \n",
        "naïve ☕ 文字",
        "\x00\x7f",
        "",
        "  leading",
        f"a {END_OF_DOCUMENT} b",
    ]
    encoded = tokenizer.encode_batch(texts)
    assert [tokenizer.decode(ids) for ids in encoded] == texts
    assert all(0 <= i < tokenizer.vocab_size for ids in encoded for i in ids)


def test_text_cannot_spell_the_end_of_a_document() -> None:
    tokenizer = train_tokenizer(TEXTS, 300)
    assert tokenizer.eod_id not in tokenizer.encode_batch([f"x{END_OF_DOCUMENT}y"])[0]


def test_training_is_deterministic_and_the_fingerprint_survives_a_file(tmp_path: Path) -> None:
    first, second = train_tokenizer(TEXTS, 320), train_tokenizer(TEXTS, 320)
    assert first.fingerprint() == second.fingerprint()
    assert first.fingerprint() != train_tokenizer(TEXTS, 319).fingerprint()
    first.save(tmp_path / "tokenizer.json")
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert loaded.fingerprint() == first.fingerprint()
    assert loaded.eod_id == first.eod_id
    assert loaded.encode_batch(TEXTS) == first.encode_batch(TEXTS)
