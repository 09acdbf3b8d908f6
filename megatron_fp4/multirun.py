"""`pretrain.py --multirun run.seed=1,2 precision=nvfp4,bf16`: Hydra's own sweep, a run for each combination.

Here one after another, each in a process of its own on all GPUs of this machine; with `hydra/launcher=submitit_slurm`
(and `hydra.launcher.*` of that plugin) a job each. What sets one run apart is the name of its folder below run.dir.
"""

from __future__ import annotations

import importlib.util
import itertools
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_fp4.config.compose import compose_config, compose_groups, hydra_defaults, one_word, parse_override
from megatron_fp4.config.schema import ConfigError
from megatron_fp4.runtime.signals import SIGNALS

_STOPPED = 75


def multirun(arguments: Sequence[str], program: Path, config_dir: Path) -> int:
    """Run `program` for each combination of the sweeps in `arguments`; returns the first exit code that is not 0.

    Raises ConfigError for a combination that is refused, before any run starts.
    """
    import hydra
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.hydra_config import HydraConfig

    arguments = one_word(arguments)
    of_hydra = [argument for argument in arguments if argument.startswith(("hydra.", "hydra/"))]
    folders = [argument for argument in arguments if argument.startswith("--config-dir=")]
    paths = [Path(folder.partition("=")[2]).resolve() for folder in folders]
    overrides = [argument for argument in arguments if argument not in (*of_hydra, *folders)]
    for argument in of_hydra:
        if "submitit" in argument and importlib.util.find_spec("submitit") is None:
            raise ConfigError(
                f"{argument} needs the package hydra-submitit-launcher; pip install it, or leave it out for runs one "
                "after another here"
            )
    compose_groups("config", of_hydra, [config_dir, *paths])  # any other plugin that is not there
    parsed = [parse_override(override) for override in overrides]
    fixed = [override.key_or_group for override in parsed if not override.is_sweep_override()]
    run_dir = next((str(o.value()) for o in parsed if o.key_or_group == "run.dir"), "runs/sweep")
    if len(fixed) == len(parsed):
        raise ConfigError("--multirun has nothing to vary; give a key several values, such as run.seed=1,2")
    for job in itertools.chain.from_iterable(BasicSweeper.split_arguments(parsed, None)):
        compose_config([*job, *folders], config_dir)
    codes: list[int] = []

    def run(_: object) -> int:
        own = HydraConfig.get()
        given = [one for one in own.overrides.task if not one.startswith("run.dir=")]
        import torch

        gpus = torch.cuda.device_count()
        launcher = ["-m", "megatron_fp4.launch", "--standalone", "--nproc-per-node", str(gpus)] if gpus > 1 else []
        command = [sys.executable, *launcher, str(program), *given, *folders, f"run.dir='{own.runtime.output_dir}'"]
        print(f"--- {' '.join(command[1:])}", flush=True)
        codes.append(_wait(command))
        if codes[-1] == _STOPPED:
            raise SystemExit(_STOPPED)
        return codes[-1]

    hydra_defaults()
    name = "hydra.job.config.override_dirname"
    sys.argv = [
        str(program),
        "--multirun",
        *overrides,
        f"hydra.sweep.dir='{run_dir}'",
        "hydra.sweep.subdir=${hydra.job.override_dirname}",
        f"{name}.kv_sep=_",
        f"{name}.item_sep=-",
        f"{name}.exclude_keys=[{','.join(fixed)}]",
        "hydra.output_subdir=null",
        "hydra/job_logging=none",
        "hydra/hydra_logging=none",
        f"hydra.searchpath={[f'file://{path}' for path in paths]}",
        *of_hydra,
    ]
    hydra.main(config_path=str(config_dir), config_name="config", version_base="1.3")(run)()
    return next((code for code in codes if code), 0)


def _wait(command: Sequence[str]) -> int:
    """The exit code of a command, to which signals are handed on: it saves first."""
    with subprocess.Popen(command) as child:
        before = {number: signal.signal(number, lambda number, _: child.send_signal(number)) for number in SIGNALS}
        try:
            return child.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
