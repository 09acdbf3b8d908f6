from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models

from data.fim import FillInTheMiddle, FimTokens, rearranged
from data.fim_settings import check_fim, fim_tokens, with_fim
from data.indexed_dataset import IndexedDataset
from data.samples import SampleSource
from data.tokenizers.hugging_face import HuggingFaceTokenizer

MakeDataset = Callable[..., IndexedDataset]
PREFIX, MIDDLE, SUFFIX, END = 1001, 1002, 1003, 1000


def fim(rate: float = 1.0, spm_rate: float = 0.5) -> FimTokens:
    return FimTokens(rate, spm_rate, PREFIX, MIDDLE, SUFFIX, END)


def original(document: list[int]) -> tuple[str, list[int], tuple[int, int]]:
    """(form, the document as it was, where it was cut), by the definition of the two forms."""
    end = [END] if document[-1] == END else []
    body = document[: len(document) - len(end)]
    if PREFIX not in body:
        return "none", document, (0, 0)
    assert body[0] == PREFIX and [body.count(token) for token in (PREFIX, MIDDLE, SUFFIX)] == [1, 1, 1]
    suffix_at, middle_at = body.index(SUFFIX), body.index(MIDDLE)
    behind = body[suffix_at + 1 : middle_at]
    if suffix_at == 1 and (middle_at, body[middle_at + 1 :]) != (2, []):  # SPM, or PSM with an empty prefix
        text = body[middle_at + 1 :] + behind
        return "first", text + end, (-1, len(text) - len(behind))
    before, gap = body[1:suffix_at], body[middle_at + 1 :]
    return "psm", before + gap + behind + end, (len(before), len(before) + len(gap))


def documents_of(tokens: np.ndarray, numbers: np.ndarray) -> list[list[int]]:
    assert numbers[0] == 0 and set(np.diff(numbers).tolist()) <= {0, 1}
    return [tokens[numbers == number].tolist() for number in range(int(numbers[-1]) + 1)]


@pytest.mark.parametrize("spm_rate", [0.0, 0.5, 1.0])
def test_the_text_comes_back(spm_rate: float) -> None:
    rng = np.random.default_rng(0)
    for trial in range(300):
        text = rng.integers(0, 1000, rng.integers(1, 12))
        document = np.append(text, END) if trial % 2 else text
        # Long enough behind it that nothing of it is cut.
        tokens = np.concatenate([document, rng.integers(0, 1000, 20)]).astype(np.int64)
        numbers = np.repeat([0, 1], [len(document), 20]).astype(np.int32)
        found = rearranged(tokens, numbers, fim(spm_rate=spm_rate), f"key {trial}")
        assert found.tokens.shape == tokens.shape and found.tokens.dtype == np.int64
        assert found.documents is not None and found.documents.dtype == np.int32
        first = documents_of(found.tokens, found.documents)[0]
        assert len(first) == len(document) + 3
        assert original(first)[1] == document.tolist()
        if spm_rate == 0.0 and first[1] != SUFFIX:
            assert original(first)[0] == "psm"
        if spm_rate == 1.0:
            assert first[:2] == [PREFIX, SUFFIX]


def test_rates_and_places_by_distribution() -> None:
    tokens, numbers = np.arange(40, dtype=np.int64), np.zeros(40, dtype=np.int32)
    tokens[9] = END
    numbers[10:] = 1
    forms, firsts, seconds, draws = {"spm": 0, "psm": 0, "none": 0}, [], [], 20_000
    for key in range(draws):
        found = rearranged(tokens, numbers, fim(rate=0.3, spm_rate=0.2), str(key))
        assert found.documents is not None
        first = documents_of(found.tokens, found.documents)[0]
        if first[0] != PREFIX:
            forms["none"] += 1
            assert first == tokens[:10].tolist()
            continue
        text, middle_at = first[:-1], first.index(MIDDLE)
        behind = middle_at - text.index(SUFFIX) - 1
        forms["spm" if first[1] == SUFFIX else "psm"] += 1
        if first[1] != SUFFIX:
            firsts.append(text.index(SUFFIX) - 1)
        seconds.append(9 - behind)
    # Four standard deviations; PSM with an empty prefix (1 - (9/10)^2 of them) looks like SPM.
    empty = 1 - 0.9**2
    expected = {"none": 0.7, "spm": 0.3 * (0.2 + 0.8 * empty), "psm": 0.3 * 0.8 * (1 - empty)}
    for form, share in expected.items():
        assert abs(forms[form] / draws - share) < 4 * (share * (1 - share) / draws) ** 0.5, form
    # The larger of two uniform places among 0..9.
    counts = np.bincount(seconds, minlength=10) / len(seconds)
    shares = (2 * np.arange(10) + 1) / 100
    assert (np.abs(counts - shares) < 4 * np.sqrt(shares / len(seconds))).all()
    assert set(firsts) == set(range(1, 10))


def test_documents_are_rearranged_each_for_itself_and_the_end_is_cut() -> None:
    lengths = [5, 1, 7, 2, 20]
    rng = np.random.default_rng(1)
    parts = [np.append(rng.integers(0, 1000, length - 1), END) for length in lengths]
    parts[-1][-1] = 7  # the sample ends within its last document
    tokens = np.concatenate(parts).astype(np.int64)
    numbers = np.repeat(np.arange(5, dtype=np.int32), lengths)
    for key in range(50):
        found = rearranged(tokens, numbers, fim(), str(key))
        assert found.documents is not None and len(found.documents) == len(tokens)
        documents = documents_of(found.tokens, found.documents)
        assert [len(document) for document in documents] == [8, 1, 10, 5, 11]  # nothing to rearrange in [END]
        for before, after in zip(parts[:4], documents, strict=False):
            assert original(after)[1] == before.tolist()
        assert documents[4][0] == PREFIX


def test_samples_of_a_source(make_dataset: MakeDataset) -> None:
    plain = SampleSource("code", make_dataset("code", 5000), 64, seed=3, vocab_size=1000)
    none, all_of_them = FillInTheMiddle(plain, fim(rate=0.0)), FillInTheMiddle(plain, fim())
    for k in range(0, 160, 7):
        as_it_is = plain.sample_and_documents(k)
        for one, other in zip(none.sample_and_documents(k), as_it_is, strict=True):
            assert one is not None and other is not None and np.array_equal(one, other)
        assert np.array_equal(none.sample(k), plain.sample(k))
        found = all_of_them.sample_and_documents(k)
        assert found.tokens.shape == (65,) and np.array_equal(found.tokens, all_of_them.sample(k))
        again = pickle.loads(pickle.dumps(all_of_them)).sample(k)
        assert np.array_equal(found.tokens, again)
    # Other draws in another epoch, for another seed and another name.
    assert plain.num_samples < 100
    keys = [rearranged(*plain.sample_and_documents(0), fim(), key).tokens.tolist() for key in ("1/'a'/0", "1/'b'/0")]  # type: ignore[arg-type]
    assert keys[0] != keys[1]
    assert all_of_them.epochs(plain.num_samples) == 1.0 and all_of_them.order == "documents"


def test_a_checkpoint_remembers_it(make_dataset: MakeDataset) -> None:
    plain = SampleSource("code", make_dataset("code", 5000), 64, seed=3, vocab_size=1000)
    half = FillInTheMiddle(plain, fim(rate=0.5))
    assert half.replaces(half.description()) is None
    assert "had no data.fim and now has data.fim rate 0.5" in str(half.replaces(plain.description()))
    assert "rate 1.0" in str(FillInTheMiddle(plain, fim()).replaces(half.description()))
    assert "had 1 files" not in str(half.replaces(half.description()))
    other = FillInTheMiddle(SampleSource("code", make_dataset("other", 400), 64, 3, 1000), fim(rate=0.5))
    assert "5000 tokens" in str(other.replaces(half.description()))


def tokenizer(*names: str) -> HuggingFaceTokenizer:
    made = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    made.add_special_tokens([AddedToken(name, special=True) for name in ("<|endoftext|>", *names)])
    return HuggingFaceTokenizer(made.to_str(), "tokenizer.json")


def settings(**changes: object) -> SimpleNamespace:
    names = {"prefix": "<|fim_prefix|>", "middle": "<|fim_middle|>", "suffix": "<|fim_suffix|>"}
    return SimpleNamespace(**{"rate": 0.5, "spm_rate": 0.25, **names, **changes})


def test_tokens_by_name() -> None:
    known = tokenizer("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
    assert fim_tokens("data.fim.code", settings(), known) == FimTokens(0.5, 0.25, 2, 3, 4, 1)
    with pytest.raises(ValueError, match=r"data\.fim\.code\.middle=<gap> is no token of tokenizer\.json"):
        fim_tokens("data.fim.code", settings(middle="<gap>"), known)
    with pytest.raises(ValueError, match="four tokens"):
        fim_tokens("data.fim.code", settings(middle="<|fim_prefix|>"), known)
    with pytest.raises(ValueError, match="four tokens"):
        fim_tokens("data.fim.code", settings(suffix="<|endoftext|>"), known)
    with pytest.raises(ValueError, match=r"give data\.tokenizer"):
        fim_tokens("data.fim.code", settings(), None)


def test_only_sources_that_are_drawn_from(make_dataset: MakeDataset, tmp_path: Path) -> None:
    sources = {name: SampleSource(name, make_dataset(name), 64, 3, 1000) for name in ("code", "prose")}
    known = tokenizer("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
    found = with_fim(sources, {"code": settings()}, known)
    assert isinstance(found["code"], FillInTheMiddle) and found["prose"] is sources["prose"]
    with pytest.raises(ValueError, match=r"data\.fim names web, and the sources are code, prose"):
        with_fim(sources, {"web": settings()}, known)
    phases = [SimpleNamespace(blend={"code": 0.5, "prose": 0.0})]

    def check(**given: object) -> None:
        check_fim(SimpleNamespace(**{"kind": "indexed", "phases": phases, "sources": {}, "eod_token": None, **given}))

    known.save(tmp_path / "tokenizer.json")
    check(fim={"code": settings()}, tokenizer=str(tmp_path / "tokenizer.json"))
    check(fim={})
    with pytest.raises(ValueError, match=r"data\.fim\.code\.suffix=<tail> is no token of"):
        check(fim={"code": settings(suffix="<tail>")}, tokenizer=str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"data\.fim\.code names its tokens.*give data\.tokenizer"):
        check(fim={"code": settings()}, tokenizer=None)
    with pytest.raises(ValueError, match="tokenizer of the built-in corpus has no tokens for it"):
        check(fim={"code": settings()}, kind="builtin")
    with pytest.raises(ValueError, match=r"data\.fim\.prose has no effect: no phase draws from prose, only from code"):
        check(fim={"prose": settings()}, tokenizer=None)
