"""The tasks of the built-in corpus: they contain no training text, and their items are as documented. They need no
network: libraries that would use it are imported only after the environment tells them to stay offline."""

import subprocess
import sys
from pathlib import Path

import pytest

from data.builtin import CODE, HELD_OUT_FRACTION, PROSE, Document, paragraphs, split_documents
from inference import tasks
from inference.tasks import is_shipped, make_items

VERBS = ("returns", "raises", "holds", "ignores", "computes", "removes")


def corpus() -> list[Document]:
    """Documents without shared paragraphs."""
    documents = []
    for number in range(120):
        lines = [f"file {number} line {line} {VERBS[line % 6]} value{number}_{line % 9}" for line in range(60)]
        text = "\n".join(line + ("\n" if at % 7 == 6 else "") for at, line in enumerate(lines)) + "\n"
        documents.append(Document(CODE if number % 2 else PROSE, f"file_{number}.py", text))
    return documents


@pytest.fixture(scope="module")
def items() -> dict[str, list[dict]]:
    return make_items(corpus())


def test_items_have_only_held_out_text(items: dict[str, list[dict]]) -> None:
    training, held_out = split_documents(corpus(), HELD_OUT_FRACTION)
    assert training and held_out
    origins, texts = {document.origin for document in held_out}, {d.origin: d.text for d in held_out}
    seen = set().union(*(paragraphs(document.text) for document in training))
    for name, chosen in items.items():
        assert chosen, name
        for item in chosen:
            text = item.get("text", item.get("context"))
            assert item["origin"] in origins and text in texts[item["origin"]]
            assert seen.isdisjoint(paragraphs(text))


def test_a_cloze_item_is_a_line_without_its_last_word(items: dict[str, list[dict]]) -> None:
    texts = {document.origin: document.text for document in corpus()}
    for source in (CODE, PROSE):
        words = {line.split(" ")[-1] for text in texts.values() for line in text.splitlines()}
        for item in items[f"cloze_{source}"]:
            assert len(item["choices"]) == 4 == len(set(item["choices"])) and set(item["choices"]) <= words
            right = f"{item['context']} {item['choices'][item['answer']]}\n"
            assert right in texts[item["origin"]] and not item["context"].endswith(" ")
            assert 60 <= len(item["context"]) <= tasks._CONTEXT_CHARACTERS + 60
        places = [item["answer"] for item in items[f"cloze_{source}"]]
        assert len(places) > 100 and max(map(places.count, range(4))) < 0.4 * len(places)


def test_items_do_not_depend_on_the_order_of_documents(items: dict[str, list[dict]]) -> None:
    assert make_items(corpus()[::-1]) == items


@pytest.mark.slow
def test_the_libraries_are_imported_after_the_environment(tmp_path: Path) -> None:
    """At import they read whether to stay offline; evaluate.py sets that if all tasks are shipped ones. If they are not
    installed, one line names the extra."""
    assert all(map(is_shipped, ("builtin", "builtin_cloze_*", "builtin_bytes_code")))
    assert not any(map(is_shipped, ("hellaswag", "fox_choice", "choice.yaml")))
    code = (
        "import sys\nimport scripts.evaluate as evaluate\n"
        "early = {'transformers', 'datasets', 'huggingface_hub', 'lm_eval'} & set(sys.modules)\n"
        "assert not early, early\n"
        "sys.modules['lm_eval.tasks'] = None\n"
        "code = evaluate.main([sys.argv[1]])\n"
        "import os\nassert os.environ['HF_HUB_OFFLINE'] == os.environ['HF_DATASETS_OFFLINE'] == '1'\n"
        "sys.exit(code)\n"
    )
    (tmp_path / "config.json").write_text("{}")
    command = [sys.executable, "-c", code, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 2, ended.stderr
    assert "lm-eval and transformers are not installed: pip install" in ended.stderr
