"""The built-in corpus, on a small library made for the test, and on the interpreter's own."""

from __future__ import annotations

import multiprocessing
import random
from collections import Counter
from pathlib import Path

import pytest

import data.builtin
from data.builtin import (
    CODE,
    PROSE,
    Document,
    build_corpus,
    check_enough,
    collect_documents,
    open_builtin,
    open_corpus,
    paragraphs,
    split_documents,
    standard_library,
)


def sentence(i: int) -> str:
    """Forty random words, the same for the same i."""
    rng = random.Random(i)
    return " ".join("".join(rng.choices("aeioubdlmnrst", k=5)) for _ in range(40))


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """120 modules with a docstring each, a licence, help topics, and folders that must stay out."""
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
    return root


def test_collects_code_and_prose_by_origin(library: Path) -> None:
    documents = [d for d in collect_documents(library) if not d.origin.startswith("builtin:")]
    assert Counter(document.source for document in documents) == {CODE: 120, PROSE: 120 + 1 + 60}
    assert not any("excluded" in document.text for document in documents)
    code, prose = (
        next(d for d in documents if d.origin == "package/module_7.py" and d.source == source)
        for source in (CODE, PROSE)
    )
    assert prose.text == sentence(7) and sentence(7) in code.text
    assert Document(PROSE, "pydoc_data/topics.py:topic3", sentence(2003)) in documents
    assert collect_documents(library) == collect_documents(library)


def test_what_is_written_is_what_was_split(library: Path, tmp_path: Path) -> None:
    documents = collect_documents(library)
    folder = tmp_path / "corpus"
    folder.mkdir()
    build_corpus(folder, documents, vocab_size=400)
    corpus = open_corpus(folder)
    tokenizer = corpus.tokenizer
    assert tokenizer is not None and tokenizer.vocab_size == 400
    training, validation = split_documents(documents, data.builtin.HELD_OUT_FRACTION)
    splits = (("train", corpus.train, training), ("validation", corpus.validation, validation))
    for split, datasets, chosen in splits:
        for source, dataset in datasets.items():
            assert str(dataset) == str(folder / split / source)
            texts = [document.text for document in chosen if document.source == source]
            assert dataset.num_documents == len(texts)
            for i, text in enumerate(texts):
                tokens = dataset.document(i).tolist()
                assert tokens[-1] == tokenizer.eod_id and tokenizer.eod_id not in tokens[:-1]
                assert tokenizer.decode(tokens) == text


def test_a_damaged_cache_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"train/code.*delete the folder"):
        open_corpus(tmp_path)


@pytest.fixture(scope="module")
def own_documents() -> list[Document]:
    return collect_documents(standard_library())


@pytest.mark.slow
def test_no_validation_text_of_the_own_library_is_in_training(own_documents: list[Document]) -> None:
    check_enough(own_documents, standard_library())
    training, validation = split_documents(own_documents, data.builtin.HELD_OUT_FRACTION)
    seen = set().union(*(paragraphs(document.text) for document in training))
    assert not any(paragraphs(document.text) & seen for document in validation)
    assert not {d.origin for d in training} & {d.origin for d in validation}
    for source in (CODE, PROSE):
        whole = sum(len(document.text) for document in own_documents if document.source == source)
        held_out = sum(len(document.text) for document in validation if document.source == source)
        assert 0.02 < held_out / whole < 0.12
    forbidden = ("site-packages", "/test/", "/tests/", "encodings/", "pydoc_data/__init__")
    assert not any(part in document.origin for document in own_documents for part in forbidden)


def prepare(cache_dir: Path, barrier: object) -> None:
    barrier.wait()  # type: ignore[attr-defined]
    open_builtin(300, cache_dir)


@pytest.mark.slow
def test_two_processes_prepare_the_own_library_once(
    own_documents: list[Document], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """End to end on every sixth document of the own library; the forked processes inherit the patches."""
    builds = tmp_path / "builds"

    def build(folder: Path, documents: list[Document], vocab_size: int) -> None:
        with open(builds, "a", encoding="utf-8") as log:
            log.write("built\n")
        build_corpus(folder, documents, vocab_size)

    monkeypatch.setattr(data.builtin, "collect_documents", lambda library: own_documents[::6])
    monkeypatch.setattr(data.builtin, "build_corpus", build)
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(2)
    processes = [context.Process(target=prepare, args=(tmp_path / "cache", barrier)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert builds.read_text() == "built\n"

    bundle = open_builtin(300, tmp_path / "cache")
    assert builds.read_text() == "built\n"
    assert set(bundle.train) == set(bundle.validation) == {CODE, PROSE}
    assert bundle.tokenizer is not None and bundle.tokenizer.vocab_size == 300
    first = bundle.train[CODE].document(0).tolist()
    assert bundle.tokenizer.decode(first) in {document.text for document in own_documents}
