"""Every recipe on a whole model: the loss and the error of the gradient in the first step, and whether later tokens
change earlier outputs."""

import itertools
import re
import subprocess
from typing import Any

import pytest
import torch

from megatron_fp4.config.schema import ConfigError
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.precision.rng import StepState
from megatron_fp4.training.build import initialized_model, plans_of
from models import provider as models
from pretrain import configure
from tests.composing import CONFIGS, composed

pytestmark = pytest.mark.slow

RECIPES = sorted(path.stem for path in (CONFIGS / "precision").glob("*.yaml"))


def test_a_head_in_4_bits_has_the_loss_of_its_logits_and_noise_in_its_gradient(mesh: ParallelMesh) -> None:
    def head(*overrides: str) -> tuple[float, float, torch.Tensor]:
        """The loss, that of the logits, and the gradient of the head."""
        config = composed("precision=nvfp4", "train.sequence_length=128", *overrides)
        model = initialized_model(config, models, mesh, StepState(seed=3))[0]
        model.head.weight.data.mul_(4)
        tokens, targets = torch.randint(0, config.model.vocab_size, (2, 2, 128), generator=torch.manual_seed(0))
        loss = model(tokens, targets)
        loss.backward()
        with torch.no_grad():
            logits = model(tokens).flatten(0, 1).float()
        gradient = model.head.weight.grad.to_local()
        return loss.item(), torch.nn.functional.cross_entropy(logits, targets.flatten()).item(), gradient.double()

    (loss, of_logits, exact), quantized = head(), head("precision.exceptions=[{names:[head],precision:nvfp4}]")
    assert loss == pytest.approx(of_logits, rel=1e-6) and quantized[0] == pytest.approx(quantized[1], rel=1e-6)
    assert 1e-5 < abs(quantized[0] - loss) < 0.05
    assert 0.05 < (quantized[2] - exact).norm() / exact.norm() < 0.3
    assert ((quantized[2] * exact).sum() / exact.square().sum()).item() == pytest.approx(1, abs=0.02)


def model_and_tokens(mesh: ParallelMesh, name: str) -> tuple[Any, torch.Tensor]:
    """The tiny model with a recipe, and random tokens [2, 2, 128]."""
    config = composed(f"precision={name}", "train.sequence_length=128")
    model = initialized_model(config, models, mesh, StepState(seed=3))[0]
    return model, torch.randint(0, config.model.vocab_size, (2, 2, 128), generator=torch.Generator().manual_seed(0))


def first_step(mesh: ParallelMesh, name: str) -> tuple[float, torch.Tensor]:
    """Loss and flattened gradient of the first micro-batch with a recipe."""
    model, (tokens, targets) = model_and_tokens(mesh, name)
    loss = model(tokens, targets)
    loss.backward()
    gradients = [p.grad.to_local().flatten() for p in model.parameters() if p.grad is not None]  # type: ignore[attr-defined]
    return loss.item(), torch.cat(gradients).double()


@pytest.fixture(scope="module")
def exact(mesh: ParallelMesh) -> tuple[float, torch.Tensor]:
    return first_step(mesh, "bf16")


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "bf16"])
def test_first_step_of_every_recipe(mesh: ParallelMesh, exact: tuple[float, torch.Tensor], name: str) -> None:
    """The relative error of the gradient is in the range of the recipe's bits, and its gain is one."""
    loss, gradient = first_step(mesh, name)
    assert abs(loss - exact[0]) < 1e-2
    error = ((gradient - exact[1]).norm() / exact[1].norm()).item()
    coarse = 0.7 if name in ("mxfp4", "nvfp4_all_the_way") else 0.6
    assert 1e-3 < error <= (0.15 if "fp8" in name else coarse)
    gain = (gradient @ exact[1] / exact[1].square().sum()).item()
    assert 0.9 < gain < 1.1


@pytest.mark.parametrize(("name", "causal"), [("bf16", True), ("mxfp8", True), ("fp8_block", True), ("nvfp4", False)])
def test_later_tokens_change_earlier_outputs_only_through_tensor_maxima(mesh, name: str, causal: bool) -> None:
    model, (tokens, others) = model_and_tokens(mesh, name)
    later = torch.arange(128) >= 96
    with torch.no_grad():
        logits, changed = (model(rows)[:, :96].float() for rows in (tokens, torch.where(later, others, tokens)))
    moved = (logits - changed).norm() / logits.norm()
    assert moved == 0 if causal else 0.1 < moved < 0.2  # less than NVFP4's own error, 0.25


def experiments() -> dict[str, list[str]]:
    """From docs/recipes.md: each experiment of the papers -> its overrides, expanded by bash."""
    page = (CONFIGS.parent / "docs/recipes.md").read_text().partition("## The papers' experiments")[2]
    setup = page.partition("```bash\n")[2].partition("```")[0]
    found = []
    for row in re.findall(r"^\| .+ \| (`.+) \|$", page, re.MULTILINE):
        for fragment, values in re.findall(r"`([^`]+)`((?: \([A-Z]+ = [^)]+\))*)", row):
            names, choices = zip(*re.findall(r"\(([A-Z]+) = ([^)]+)\)", values), strict=True) if values else ((), ())
            for chosen in itertools.product(*(choice.split(", ") for choice in choices)):
                text = fragment
                for name, value in zip(names, chosen, strict=True):
                    text = text.replace(name, value)
                found.append(text)
    script = setup + "".join(f"echo {text}\n" for text in found)
    lines = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()
    return dict(zip(found, map(str.split, lines), strict=True))


def test_every_experiment_of_the_papers_is_a_valid_run() -> None:
    """As `--check` sees it; and a GPU's own kernels are refused by name where a format has none."""
    found = experiments()
    assert len(found) > 60
    for name, overrides in found.items():
        config = configure(["model=transformer_60m", "run.device=cpu", *overrides])
        assert plans_of(config, models)[0].num_quantized, name
    with pytest.raises(ConfigError, match=r"format=e2m1_e5m3 does not go with precision.backend=torch"):
        configure(["precision.backend=torch", "precision.fprop.activation.format=e2m1_e5m3"])
