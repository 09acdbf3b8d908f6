"""Configurations composed from files, overrides and checkpoints; shipped ones against the tables of the papers."""

from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_fp4.checkpoint.config_diff import configuration_changes
from megatron_fp4.config.compose import as_saved, compose_config, config_from_saved, group_options, to_yaml
from megatron_fp4.config.help import help_text
from megatron_fp4.config.precision_schema import ComposedException, RecipeConfig
from megatron_fp4.config.schema import Config, ConfigError
from scripts import configuration_reference as reference
from tests.composing import CONFIGS, changed, composed, saved_of

BLENDS = "data.blends={first: {web: 1.0}, second: {web: 0.5, code: 0.5}, third: {code: 1.0}}"
SOURCES = "data.sources={web: /data/web, code: /data/code}"


def test_a_tilde_is_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    given = ["run.dir=~/x", "checkpoint.resume='~/y'", "data=indexed", "data.sources={web: ['~/w']}", "data.phases=[]"]
    config = composed(*given)
    assert (config.run.dir, config.checkpoint.resume) == ("/home/me/x", "/home/me/y")
    assert config.data.sources == {"web": ["/home/me/w"]}
    assert config_from_saved(as_saved(config), ["run.dir=~/z"], CONFIGS, trusted=True).run.dir == "/home/me/z"


def test_values_are_converted_to_the_type_of_their_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPS", "17")
    config = composed("optimizer.lr=1", "train.steps=${oc.env:STEPS}", "run.dir=5", "train.cuda_graphs=true")
    assert (config.optimizer.lr, config.train.steps, config.run.dir) == (1.0, 17, "5")
    assert isinstance(config.optimizer.lr, float) and config.train.cuda_graphs == "true"
    for text, number in {"1e3": 1000, "10k": 10_000, "1_000": 1000, "1.001M": 1_001_000, "'2e1'": 20}.items():
        steps = composed(f"train.steps={text}").train.steps
        assert steps == number and type(steps) is int
    assert composed("optimizer.eps='1e-30'").optimizer.eps == 1e-30


def test_defaults_are_valid() -> None:
    """pydantic does not validate defaults."""
    nodes: list[Any] = [Config()]
    while nodes:
        node = nodes.pop()
        assert type(node)(**{field.name: getattr(node, field.name) for field in fields(node)}) == node
        nodes += [child for child in vars(node).values() if is_dataclass(child)]


def test_overrides_of_every_form() -> None:
    config = composed(
        "parallel.sequence=false", "precision.bf16_blocks.names=['blocks.3.*', '*.out_proj']", "data=indexed", SOURCES,
        "data.validation.web=/data/web_valid", "data.blends={first: {web: 1}}", "+data.seed=3", "data.phases=[]",
        "precision.fprop.weight.block=1x16", "precision.fprop.weight.four_over_six=true",
    )  # fmt: skip
    assert config.parallel.sequence is False and config.data.seed == 3
    assert config.precision.bf16_blocks.names == ["blocks.3.*", "*.out_proj"]
    assert config.data.sources == {"web": "/data/web", "code": "/data/code"}
    assert config.data.validation == {"web": "/data/web_valid"} and config.data.blends == {"first": {"web": 1.0}}
    # The override of fprop's weight also holds for dgrad's.
    weight, again = config.precision.fprop.weight, config.precision.dgrad.weight
    assert again.block == "1x16" and asdict(again) == {**asdict(weight), "source": "tensor"}


def test_the_name_of_a_changed_recipe_lists_its_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RHT", "0")
    for same in ("precision.switch.when=0.5", "precision.wgrad.rht=16"):
        assert composed(same).precision.name == "nvfp4"
    config = composed("precision.wgrad.rht=0", "precision.fprop.weight.block=1x16")
    assert config.precision.name == "nvfp4 with fprop.weight.block=1x16 wgrad.rht=0"
    saved = saved_of(config)
    assert config_from_saved(saved, [], CONFIGS) == config
    one = config_from_saved(saved, ["precision.wgrad.rht=16"], CONFIGS)
    assert one.precision.name == "nvfp4 with fprop.weight.block=1x16"
    assert config_from_saved(saved, ["precision=mxfp8"], CONFIGS).precision.name == "mxfp8"
    assert composed("precision.wgrad.rht='${oc.decode:${oc.env:RHT}}'").precision.name == "nvfp4 with wgrad.rht=..."
    given = "exceptions=[{names: [head], precision: mxfp8}]"
    assert composed(f"precision.{given}").precision.name == f"nvfp4 with {given}"


def test_exceptions_have_the_complete_recipe_that_they_name() -> None:
    """The same holds in the target of a switch and after a round trip through a checkpoint."""
    model = "model=nemotron_h_12b"
    config = composed("precision=nvfp4_nemotron_3", model)
    _, attention, mamba, _ = config.precision.exceptions
    assert (attention.names, attention.blocks, mamba.names, mamba.blocks) == (["*"], "*", ["*.out_proj"], "M")
    for exception, name in ((attention, "bf16"), (mamba, "mxfp8")):
        whole = composed(f"precision={name}").precision
        assert isinstance(exception, ComposedException)
        gemms = {gemm: getattr(whole, gemm) for gemm in ("fprop", "dgrad", "wgrad")}
        assert exception.recipe == RecipeConfig(name=name, amax=whole.amax, rht_signs="fixed", **gemms)
    assert (config.precision.bf16_blocks.first, config.precision.bf16_blocks.last) == (0, 8)
    usual = composed(model).precision
    own = replace(config.precision, name=usual.name, exceptions=[], bf16_blocks=usual.bf16_blocks)
    assert own == usual
    switched = composed(model, "precision.switch.when=0.5", "precision.switch.target=nvfp4_nemotron_3").after_switch
    assert switched is not None and switched.exceptions == config.precision.exceptions
    assert config_from_saved(saved_of(config), [], CONFIGS) == config
    assert config_from_saved(saved_of(config), ["precision=mxfp8"], CONFIGS).precision.exceptions == []


def test_the_best_recipe_combines_the_codes_of_one_with_the_exceptions_of_another() -> None:
    names = ("nvfp4_best", "nvfp4_4over6_1x16", "nvfp4_nemotron_3")
    best, codes, plan = (composed(f"precision={name}", "model=hybrid_30m").precision for name in names)
    assert best == replace(codes, name="nvfp4_best", exceptions=plan.exceptions) and len(best.exceptions) == 4


def test_a_saved_switch_that_is_off_may_name_a_config_that_is_gone() -> None:
    config = composed("precision.switch.when=never")
    saved = saved_of(config)
    saved["precision"]["switch"]["target"] = "gone"
    gone = config_from_saved(saved, ["train.steps=7"], CONFIGS)
    assert (gone.precision.switch.target, gone.train.steps, gone.after_switch) == ("gone", 7, None)
    saved["precision"]["switch"]["when"] = "0.5"
    off = config_from_saved(saved, ["precision.switch.when=never"], CONFIGS)
    assert off == changed(config, {"precision.switch.target": "gone"})
    with pytest.raises(ConfigError, match=r"precision\.switch\.target=gone is not a precision config"):
        config_from_saved(saved, [], CONFIGS)


@pytest.mark.parametrize(
    ("model", "blocks", "bf16", "fp8_bf16", "init_std"),
    [
        ("transformer_1_2b", {"*": 20, "-": 20, "M": 0}, (0, 8), ("*-", "*-*-"), 0.02),
        ("nemotron_h_8b", {"*": 4, "-": 24, "M": 24}, (0, 8), ("M", "M-"), 0.014),
        ("nemotron_h_12b", {"*": 6, "-": 28, "M": 28}, (2, 8), ("M", "M-"), 0.0125),
        ("hybrid_60m", {"*": 2, "-": 11, "M": 11}, (0, 4), ("M", "M-"), 0.02),
        ("transformer_60m", {"*": 15, "-": 15, "M": 0}, (0, 6), ("*-", "*-*-"), 0.02),
    ],
)
def test_models_have_the_papers_blocks(model: str, blocks: dict[str, int], bf16, fp8_bf16, init_std: float) -> None:
    config = composed(f"model={model}", "precision=fp8_block")
    fp8, pattern = config.precision.bf16_blocks, config.model.pattern
    assert {letter: pattern.count(letter) for letter in "*-M"} == blocks
    assert (config.model.nvfp4_bf16_blocks.first, config.model.nvfp4_bf16_blocks.last) == bf16
    # FP8 runs keep the first block and the last two in BF16; a Transformer block is two letters.
    assert (pattern[: fp8.first], pattern[len(pattern) - fp8.last :]) == fp8_bf16
    assert (config.model.init_std, config.model.rope) == (init_std, model.startswith("transformer"))


@pytest.mark.parametrize(
    ("experiment", "lr", "decay", "batch", "tokens", "fractions"),
    [
        ("transformer_1_2b", 1.2e-3, 0.15, 768, 1e12, [0.6, 0.4]),
        ("nemotron_h_8b", 8e-4, 0.15, 768, 1e12, [0.6, 0.4]),
        ("nemotron_h_12b", 4.5e-4, 0.2, 736, 1e13, [0.7, 0.2, 0.1]),
    ],
)
def test_experiments_are_the_runs_of_the_papers(
    experiment: str, lr: float, decay: float, batch: int, tokens: float, fractions: list[float]
) -> None:
    config = composed(f"experiment={experiment}", SOURCES, BLENDS)
    assert (config.model.name, config.precision.name, config.precision.switch.when) == (experiment, "nvfp4", "never")
    optimizer = config.optimizer
    assert (optimizer.lr, optimizer.beta1, optimizer.beta2, optimizer.weight_decay) == (lr, 0.9, 0.95, 0.1)
    assert (config.schedule.decay_fraction, config.schedule.min_lr_ratio) == (decay, 0.01)
    assert (config.train.global_batch_size, config.train.sequence_length) == (batch, 8192)
    assert 0 <= config.train.steps * batch * 8192 - tokens < batch * 8192
    assert [phase.fraction for phase in config.data.phases] == fractions
    assert config.data.phases[1].blend == {"web": 0.5, "code": 0.5}


def test_qaf_can_be_combined_with_experiments_and_recipes() -> None:
    config = composed("experiment=[nemotron_h_8b,qaf]", SOURCES, BLENDS)
    switch = config.precision.switch
    assert (config.model.name, config.precision.name) == ("nemotron_h_8b", "nvfp4_all_the_way")
    assert (switch.when, switch.scope, switch.target, switch.rewarm_steps) == ("before_decay", "backward", "bf16", 40)
    assert composed("experiment=qaf", "precision=nvfp4").precision.switch.rewarm_steps == 40


def test_switch_target_resolves_with_the_runs_model() -> None:
    model = ("model=nemotron_h_12b", "model.nvfp4_bf16_blocks.last=3", "precision=bf16")
    target = composed(*model, "precision.switch.when=0.5", "precision.switch.target=mxfp4").after_switch
    assert target is not None and target.name == "mxfp4"
    assert (target.bf16_blocks.first, target.bf16_blocks.last) == (2, 3)


def test_configs_are_named_as_their_files() -> None:
    for group in ("precision", "model"):
        for path in (CONFIGS / group).glob("*.yaml"):
            assert yaml.safe_load(path.read_text())["name"] == path.stem


def test_to_yaml_composes_to_the_same_configuration(tmp_path: Path) -> None:
    config = composed("train.steps=123", "data.phases=[{name: a, fraction: 1.0, blend: {code: 2}}]")
    (tmp_path / "config.yaml").write_text("defaults:\n  - schema\n  - _self_\n\n" + to_yaml(config))
    (tmp_path / "precision").mkdir()
    (tmp_path / "precision" / "bf16.yaml").write_text("name: bf16\n")
    assert compose_config([], tmp_path) == config and config.train.steps == 123


def test_help_lists_groups_options_keys_and_examples() -> None:
    text = help_text(CONFIGS)
    for group, options in group_options(CONFIGS).items():
        assert f"\n  {group}\n" in text and all(f" {option}  " in text for option in options)
    for part in ("* tiny", "  train:  steps=", "precision.fprop.weight:  format=nvfp4", "Examples:"):
        assert part in text
    assert max(len(line) for line in text.splitlines()) <= 120


def test_checkpoints_with_removed_keys_can_be_read() -> None:
    saved = saved_of(composed())
    saved["optimizer"] |= {"implementation": "apex", "deoscillation": {"interval": 0, "window": 50}}
    saved["logging"] |= {"wandb_project": "mine", "memory_history": False}
    saved["precision"]["switch"]["patience"] = saved["after_switch"]["switch"]["patience"] = 5
    assert config_from_saved(saved, ["train.steps=7"], CONFIGS).train.steps == 7
    assert configuration_changes(saved, composed()) == []


def test_operands_saved_by_an_earlier_version_can_be_read() -> None:
    saved = saved_of(composed("precision=fp8_block"))
    old = {"four_over_six": False, "four_over_six_error": "absolute", "power_of_two_scales": True}
    for gemm in ("fprop", "dgrad", "wgrad"):
        for tensor in saved["precision"][gemm].keys() - {"rht"}:
            saved["precision"][gemm][tensor] |= {**old, "reuse_fprop": tensor == "weight", "source": "tensor"}
    saved["precision"]["fprop"]["activation"] |= {"four_over_six": True, "four_over_six_error": "squared"}
    read = config_from_saved(saved, [], CONFIGS).precision
    assert read.fp8_power_of_two_scales and read.fprop.activation.four_over_six == "squared"
    assert (read.dgrad.weight.source, read.wgrad.activation.source) == ("codes", "tensor")


def test_the_page_of_the_configuration_is_current_and_explains_every_key() -> None:
    page = reference.PAGE.read_text()
    assert page == reference.page(), "not current; run python scripts/configuration_reference.py"
    empty = [line for line in page.splitlines() if line.startswith("| `") and line.endswith("|  |")]
    assert empty == [], "the docstrings of the classes in megatron_fp4/config do not explain these keys"
    for row in (
        "AdamW; 1-D parameters and biases are not decayed.\n",
        "| `beta1`; `beta2`; `eps` | number ≥ 0 and < 1; number > 0 | 0.9; 0.95; 1e-08 | of Adam. |",
        "| `keep` | integer ≥ 0 | 3 | how many to keep (0: all). |",
        "| `eod_token` | text or null | null |",
        "| `blend` | mapping of names to number ≥ 0 or `tokens` |",
    ):
        assert row in page
