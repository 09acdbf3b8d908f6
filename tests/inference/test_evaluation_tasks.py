"""Which tasks need a network, and that what asks for it is imported after the answer."""

from __future__ import annotations

import subprocess
import sys

import pytest

from data.builtin import CODE, PROSE
from inference.tasks import is_shipped


def test_no_network_for_what_is_shipped() -> None:
    assert all(map(is_shipped, ("builtin", "builtin_cloze_*", "builtin_bytes_code")))
    assert not any(map(is_shipped, ("hellaswag", "fox_choice", "choice.yaml")))


@pytest.mark.slow
def test_the_libraries_are_imported_after_the_environment() -> None:
    """They read whether to stay offline when they are imported; without them one line names the extra."""
    code = (
        "import sys\nimport scripts.evaluate as evaluate\n"
        "early = {'transformers', 'datasets', 'huggingface_hub', 'lm_eval'} & set(sys.modules)\n"
        "assert not early, early\n"
        "import inference.models as models\nmodels.is_folder = lambda path: True\n"
        "assert evaluate.main(['--tasks', 'list']) == 0\n"
        "sys.modules['lm_eval.tasks'] = None\n"
        "code = evaluate.main(['x'])\n"
        "import os\nassert os.environ['HF_HUB_OFFLINE'] == os.environ['HF_DATASETS_OFFLINE'] == '1'\n"
        "sys.exit(code)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 2, ended.stderr
    shipped = [f"builtin_{kind}_{source}" for kind in ("bytes", "cloze") for source in (CODE, PROSE)]
    assert ended.stdout.split() == ["builtin", *shipped]
    assert "lm-eval and transformers are not installed: pip install" in ended.stderr
