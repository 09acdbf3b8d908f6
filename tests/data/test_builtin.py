"""The built-in corpus, made from a small library instead of Python's own."""

import random
from collections import Counter
from pathlib import Path

import pytest

import data.builtin
from data.builtin import (
    CODE,
    HELD_OUT_FRACTION,
    MIN_SHARED_CHARACTERS,
    PROSE,
    Document,
    collect_documents,
    open_builtin,
    paragraphs,
    split_documents,
)
from tests.data.streams import document
from tests.programs import Program


def sentence(i: int) -> str:
    """Forty random words, determined by i."""
    rng = random.Random(i)
    return " ".join("".join(rng.choices("aeioubdlmnrst", k=5)) for _ in range(40))


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replaces the standard library: 120 modules with a docstring each, a licence, help topics, excluded folders."""
    root = tmp_path / "library"
    for folder in ("pydoc_data", "package/test", "site-packages", "encodings"):
        (root / folder).mkdir(parents=True)
    for i in range(120):
        body = f'"""{sentence(i)}"""\n\n\ndef function_{i}(x):\n    return x + {i}\n'
        (root / "package" / f"module_{i}.py").write_text(body)
    (root / "LICENSE.txt").write_text(f"Licence. {sentence(1000)}")
    topics = {f"topic{i}": f"{sentence(2000 + i)}" for i in range(60)}
    (root / "pydoc_data" / "topics.py").write_text(f"topics = {topics!r}\n")
    for path in ("package/test/test_a.py", "site-packages/b.py", "encodings/c.py", "_sysconfigdata_d.py"):
        (root / path).write_text(f"# excluded\n'''{sentence(3000)}'''\n")
    (root / "broken.py").write_text(f"def ({sentence(1)}")
    (root / "binary.py").write_bytes(b"\xff\xfe\x00" * 100)
    monkeypatch.setattr(data.builtin, "standard_library", lambda: root)
    monkeypatch.setattr(data.builtin, "MIN_CHARACTERS", {CODE: 1000, PROSE: 1000})
    return root


def test_code_and_prose_are_collected_with_their_origin(library: Path) -> None:
    documents = [d for d in collect_documents(library) if not d.origin.startswith("builtin:")]
    assert Counter(document.source for document in documents) == {CODE: 120, PROSE: 120 + 1 + 60}
    assert not any("excluded" in document.text for document in documents)
    code = (library / "package/module_7.py").read_text()
    assert Document(CODE, "package/module_7.py", code) in documents
    assert Document(PROSE, "package/module_7.py", sentence(7)) in documents
    assert Document(PROSE, "pydoc_data/topics.py:topic3", sentence(2003)) in documents


def test_the_written_datasets_are_the_split_documents(library: Path, tmp_path: Path) -> None:
    corpus = open_builtin(400, tmp_path / "cache")
    tokenizer = corpus.tokenizer
    assert tokenizer is not None and tokenizer.vocab_size == 400
    training, validation = split_documents(collect_documents(library), HELD_OUT_FRACTION)
    for datasets, chosen in ((corpus.train, training), (corpus.validation, validation)):
        for source, dataset in datasets.items():
            texts = [document.text for document in chosen if document.source == source]
            assert dataset.num_documents == len(texts)
            for i, text in enumerate(texts):
                tokens = document(dataset, i)
                assert tokens[-1] == tokenizer.eod_id and tokenizer.eod_id not in tokens[:-1]
                assert tokenizer.decode(tokens) == text
    Path(f"{corpus.train[CODE]}.idx").unlink()
    with pytest.raises(ValueError, match=r"train/code.*delete the folder"):
        open_builtin(400, tmp_path / "cache")


# Opens the corpus of the library argv[1] in the cache argv[2], and prints `built` if it builds. The pause of rank 1, in
# which rank 0 gets the lock, ends when rank 0 has it, or after 200 s.
OPEN = """
import sys
from pathlib import Path
from data import builtin

library, cache, build = Path(sys.argv[1]), Path(sys.argv[2]), builtin.build_corpus
builtin.standard_library = lambda: library
builtin.MIN_CHARACTERS = dict.fromkeys(builtin.MIN_CHARACTERS, 1000)
builtin.build_corpus = lambda *arguments: (print("built"), build(*arguments))
builtin.open_builtin(300, cache)
"""


def test_of_two_processes_one_builds_and_reports_it(library: Path, tmp_path: Path) -> None:
    (tmp_path / "open.py").write_text(OPEN)
    command = [tmp_path / "open.py", library, tmp_path / "cache"]
    ranks = [Program(command, errors_apart=True) for _ in range(2)]
    other, (first, lines) = sorted(rank.communicate(timeout=300) for rank in ranks)
    assert (first, other) == ("built\n", ("", "")) and [rank.returncode for rank in ranks] == [0, 0], lines
    begin, training = lines.splitlines()
    assert begin == f"building the built-in corpus once, in about ten seconds: {tmp_path}/cache", training


DOCUMENTS = [
    Document(source, f"file{i}.py", f"{sentence(1000 * i + k)}\n\n{sentence(1000 * i + k + 500)}")
    for i in range(300)
    for k, source in enumerate((CODE, PROSE, PROSE))
]


def origins(documents: list[Document]) -> set[str]:
    return {document.origin for document in documents}


def test_documents_of_one_origin_stay_together_whatever_the_others_are() -> None:
    training, validation = split_documents(DOCUMENTS, 0.1)
    assert not origins(training) & origins(validation)
    assert 15 <= len(origins(validation)) <= 45
    assert sorted(map(repr, training + validation)) == sorted(map(repr, DOCUMENTS))
    _, of_half = split_documents(DOCUMENTS[::-1][:450], 0.1)
    assert origins(of_half) == origins(validation) & origins(DOCUMENTS[450:])


def test_repeated_text_is_not_held_out() -> None:
    """Training text shares a paragraph with one held-out file, which shares another one with a second file."""
    training, validation = split_documents(DOCUMENTS, 0.1)
    first, second = sorted(origins(validation))[:2]
    one, other = sentence(-1), sentence(-2)
    linked = [
        *DOCUMENTS,
        Document(PROSE, min(origins(training)), f"see\n\n  {one}"),
        Document(PROSE, first, f"{one}\n\n{other}"),
        Document(PROSE, second, f"{other.replace(' ', chr(10))}\n\nend"),
    ]
    assert origins(validation) - origins(split_documents(linked, 0.1)[1]) == {first, second}
    assert paragraphs("short\n\n" + "x" * MIN_SHARED_CHARACTERS) == {"x" * MIN_SHARED_CHARACTERS}
