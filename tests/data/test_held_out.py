from __future__ import annotations

import random

from data.builtin import CODE, MIN_SHARED_CHARACTERS, PROSE, Document, paragraphs, split_documents


def paragraph(i: int) -> str:
    rng = random.Random(i)
    return " ".join("".join(rng.choices("abcdefgh", k=6)) for _ in range(MIN_SHARED_CHARACTERS // 5))


DOCUMENTS = [
    Document(source, f"file{i}.py", f"{paragraph(1000 * i + k)}\n\n{paragraph(1000 * i + k + 500)}")
    for i in range(300)
    for k, source in enumerate((CODE, PROSE, PROSE))
]


def origins(documents: list[Document]) -> set[str]:
    return {document.origin for document in documents}


def test_origins_stay_together_and_validation_gets_its_share() -> None:
    training, validation = split_documents(DOCUMENTS, 0.1)
    assert not origins(training) & origins(validation)
    assert 15 <= len(origins(validation)) <= 45
    assert sorted(map(repr, training + validation)) == sorted(map(repr, DOCUMENTS))


def test_split_of_a_file_does_not_depend_on_the_others() -> None:
    _, validation = split_documents(DOCUMENTS, 0.1)
    _, of_half = split_documents(DOCUMENTS[::-1][:450], 0.1)
    assert origins(of_half) == origins(validation) & {document.origin for document in DOCUMENTS[450:]}


def test_repeated_text_is_not_held_out() -> None:
    """A chain: training shares with one held-out file, which shares with another."""
    training, validation = split_documents(DOCUMENTS, 0.1)
    first, second = sorted(origins(validation))[:2]
    linked = [
        *DOCUMENTS,
        Document(PROSE, min(origins(training)), f"see\n\n  {paragraph(-1)}"),
        Document(PROSE, first, f"{paragraph(-1)}\n\n{paragraph(-2)}"),
        Document(PROSE, second, f"{paragraph(-2).replace(' ', chr(10))}\n\nend"),
    ]
    _, now = split_documents(linked, 0.1)
    assert origins(validation) - origins(now) == {first, second}


def test_short_paragraphs_are_no_leak() -> None:
    assert paragraphs("short\n\n" + "x" * MIN_SHARED_CHARACTERS) == {"x" * MIN_SHARED_CHARACTERS}
