"""Which tasks need a network, and that what asks for it is imported behind the answer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from data.builtin import CODE, PROSE
from inference.evaluation.tasks import is_standard, task_names


def test_no_network_for_what_is_local(tmp_path: Path) -> None:
    files, tmp_path = tmp_path / "files", tmp_path / "hub"
    for folder in (files, tmp_path):
        folder.mkdir()
    (files / "choice.yaml").write_text("task: fox_choice\ndataset_path: json\n")
    (files / "text.yaml").write_text(f"task: fox_text\ndataset_path: {tmp_path}\n")
    assert not is_standard(["builtin", "builtin_cloze_*"], None)
    assert not is_standard(["fox_choice", "builtin_bytes_code", str(files / "text.yaml")], files)
    assert is_standard(["fox_choice"], None) and is_standard(["hellaswag"], files)
    (tmp_path / "base").write_text("dataset_path: some/dataset\ndoc_to_text: !function code.of_mine\n")
    (tmp_path / "hub.yaml").write_text("include: base\ntask: of_the_hub\ntag: [mine, others]\n")
    (tmp_path / "mixed.yaml").write_text("group: mixed\ntask: [builtin, of_the_hub]\n")
    (tmp_path / "outer.yaml").write_text("group: outer\ntask:\n  - {task: builtin_cloze_code}\n  - mixed\n")
    (tmp_path / "mine.yaml").write_text("group: ours\ntask: [builtin]\n")
    for name in ("of_the_hub", "mine", "mixed", "outer", str(tmp_path / "hub.yaml"), str(tmp_path / "mixed.yaml")):
        assert is_standard([name], tmp_path), name
    assert not is_standard(["ours"], tmp_path)
    assert task_names(tmp_path)[:3] == ["builtin", "builtin_bytes_code", "builtin_bytes_prose"]
    assert {"of_the_hub", "outer", "mine"} <= set(task_names(tmp_path))


@pytest.mark.slow
def test_the_libraries_are_imported_behind_the_environment() -> None:
    """They read whether to stay offline when they are imported; without them one line names the extra."""
    code = (
        "import sys\nimport scripts.evaluate as evaluate\n"
        "early = {'transformers', 'datasets', 'huggingface_hub', 'lm_eval'} & set(sys.modules)\n"
        "assert not early, early\n"
        "sys.modules['lm_eval.tasks'] = None\n"
        "assert evaluate.main(['--tasks', 'list']) == 0\n"
        "import inference.evaluation.models as models\nmodels.is_folder = lambda path: True\n"
        "code = evaluate.main(['x'])\n"
        "import os\nassert os.environ['HF_HUB_OFFLINE'] == os.environ['HF_DATASETS_OFFLINE'] == '1'\n"
        "sys.exit(code)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 2, ended.stderr
    shipped = [f"builtin_{kind}_{source}" for kind in ("bytes", "cloze") for source in (CODE, PROSE)]
    assert ended.stdout.split() == ["builtin", *shipped]
    assert ended.stderr == (
        'evaluate.py: lm-eval and transformers are not installed: pip install "megatron_fp4[eval]"\n'
    )
