"""Wrong input of every kind is refused in one line that names the value and the remedy."""

import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_fp4.config.checks import check_launch
from megatron_fp4.config.compose import compose_config
from megatron_fp4.config.schema import ConfigError
from tests.composing import CONFIGS, changed, composed, validate

PHASE = "data.phases=[{{name: a, {}}}]"
TE = "precision.backend=transformer_engine"
EDEN = ["precision.wgrad.gradient.rounding=ms_eden", "precision.wgrad.rht=128", "precision.rht_signs=fresh"]
SWITCH_TO_NVFP4 = "precision.switch.target=nvfp4"
FRESH = ["precision.fprop.rht=16", "precision.rht_signs=fresh", "precision.switch.target=mxfp4"]
EACH = ["parallel.reduce_gradients=each"]
EXPERTS_2 = ["model=moe_tiny", "parallel.expert=2"]
EXPERTS_UP = ["model=moe_tiny", "precision.bf16_blocks.names=[*.experts_down]"]
WEB = ["data=indexed", "data.sources={web: /d/web}"]
READ_WEB = [*WEB, "data.phases=[{name: a, blend: {web: 1}}]"]

# (overrides, words of the line, perhaps the remedy)
SYNTAX = [
    ("10", "cannot parse '10'; write key=value as one word"),
    ("--train.steps=5", "cannot parse '--train.steps=5'; write train.steps=5, without dashes"),
    ("--chek", "cannot parse '--chek'; there is no such option; see --help"),
    ("data.sources={web:", "quote all of it for the shell, 'data.sources={name: ...}', and close"),
    ("~precision", "~precision: nothing can be deleted"),
    ("run.seed=choice(1,2)", "run.seed=choice(1,2) gives several values; give one, or add --multirun"),
    ("precision.bf16_blocks.names=a,b", "give one, or a list: precision.bf16_blocks.names=[...], or add --multirun"),
    ("run.dir=runs/${now:%Y}", "${now:...} differs between ranks and restarts; write a fixed name"),
    ("run.dir=${oc.env:NOT_SET_ANYWHERE}", "run.dir: Environment variable 'NOT_SET_ANYWHERE' not found; set it"),
    ("train.steps=${train.nowhere}", "train.steps: Interpolation key 'train.nowhere' not found; set it, or give"),
    (["experiment=nemotron_h_8b", "data.sources={web: /d}"], "'data.blends.first' not found; set it, or give"),
    ("train.steps=???", "train.steps: Missing mandatory value: steps; set it, or give train.steps=..."),
]
GROUPS = [
    ("model=foo", "model=foo: there is no model config of that name; choose one of hybrid_30m"),
    ("model=nemotron_8b", "did you mean nemotron_h_8b? There are"),
    ("+precision=mxfp4", "+precision=mxfp4: write precision=..., without a sign"),
    ("precision.switch.target=bf61", "precision.switch.target=bf61 is not a precision config; did you mean bf16?"),
    ("precision.exceptions=[{precision: mxfp9}]", "precision.exceptions[0].precision=mxfp9 is not a precision config"),
    ("precision.exceptions=[{precision: nvfp4_nemotron_3}]", "has exceptions itself; choose a precision config"),
]
KEYS = [
    ("train.stepz=3", "train.stepz is not a key; did you mean train.steps?"),
    ("parallel.tp=2", "parallel.tp is not a key; did you mean parallel.tensor?"),
    ("train.horizon=3", "train.horizon is not a key; train has steps, "),
    ("parallel.timeout_seconds=1", "parallel.timeout_seconds=1: Input should be greater than or equal to 5"),
    ("foo=1", "foo is not a key; the top level has model, precision, data"),
    (PHASE.format("blend: {code: 1}, frac: 1"), "data.phases[0].frac is not a key; did you mean data.phases[0].frac"),
    ("data.phases.0.steps=3", "give the whole list: data.phases=[...]"),
    ("precision.exceptions=[{recipe: {name: a}}]", "precision.exceptions[0].recipe is not a key"),
    ("after_switch.name=bf16", "after_switch.name is not a key"),
    ("from_environment={run.dir: x}", "from_environment is not a key"),
    ("precision.dgrad.weight.reuse_fprop=true", "dgrad.weight.reuse_fprop is no longer a key: write source=codes"),
    ("precision.fprop.weight.source=forward", "precision.fprop.weight.source is not a key; did you mean"),
]
VALUES = [
    ("train.steps=10x", "train.steps=10x: Input should be a valid integer"),
    ("train.sequence_length=100", "train.sequence_length=100: Input should be a multiple of 16"),
    ("optimizer.lr=inf", "optimizer.lr=inf: Input should be a finite number"),
    ("precision.wgrad.rht=12", "precision.wgrad.rht=12: Input should be 0, 2, 4, 8, 16, 32, 64 or 128"),
    ("run.dir=' '", "run.dir= : give a path"),
    ("data.cache_dir={a: b}", "data.cache_dir={a: b}: Input should be a valid string"),
    ("train=3", "train=3: give a mapping, such as 'train={steps: ...}'"),
    ("data.phases={a: 1}", "data.phases={a: 1}: give a list, such as 'data.phases=[...]'"),
    ("data.sources={my.web: '${oc.env:HOME}/d'}", "data.sources.my.web=${oc.env:HOME}/d: a name with one of .[]"),
    (PHASE.format("blend: hello"), "data.phases[0].blend=hello: Input should be a valid dictionary or Input should be"),
    (PHASE.format("blend: {code: 0}"), "data.phases[0]: blend={'code': 0.0} has no weight above 0; give some"),
    ("data.phases=[{name: a, blend: {code: 1}}, {name: a, blend: {code: 1}}]", "data: phases[1].name=a is the name of"),
]
TOGETHER = [
    # --- sections
    ("data.boundary_loss=false", "no effect with documents=joined; set documents=masked", "data.documents=masked"),
    ("parallel.sequence=true", "parallel: sequence=true has no effect with tensor=1; raise tensor"),
    ("logging.profile_steps=[5]", "logging: profile_steps=[5] is no window; give first and last step"),
    ("logging.profile_steps=[5,400]", "logging.profile_steps=[5, 400] is not within this run's 300 steps"),
    (["run.replay_interval=50", "run.deterministic=false"], "replay_interval=50 compares bits", "true"),
    (["spikes.action=skip", "train.steps=64"], "spikes.window=128 is not half full in train.steps=64"),
    (["spikes.action=rollback", "checkpoint.interval=0"], "no checkpoint to roll back to", "100"),
    # --- batch, schedule, phases
    ("train.global_batch_size=6", "=6 is not a multiple of train.micro_batch_size=4 x 1 data-parallel r", "4", "8"),
    (["train.sequence_length=8e8", "train.micro_batch_size=4"], "more than kernels can index (2,147,483,647)"),
    (["train.steps=1e9", "train.global_batch_size=1e9"], "more than a run can count (1e18); lower train.steps"),
    (PHASE.format("blend: {code: 1}, sequence_length: 96"), "data.phases[0].sequence_length=96 does not divide"),
    ([*WEB, "data.phases=[]"], "data.phases is empty; give at least one"),
    ("schedule.warmup_fraction=0.9", "overlap: their sum must not exceed 1"),
    (["schedule.decay=exponential", "schedule.min_lr_ratio=0"], "schedule.decay=exponential never reaches"),
    ("schedule.decay_fraction=0", "precision.switch.when=before_decay, but schedule.decay_fraction never decays"),
    ("precision.switch.when=soon", "precision.switch.when=soon is not never"),
    ("precision.switch.when=700", "precision.switch.when=700"),
    ("data.phases=[{name: a, steps: 1k, blend: {code: 1}}]", "1000 steps"),
    # --- model
    ("model.pattern=MXM", "model.pattern=MXM: 'X' at position 1 is no block; use"),
    ("model.pattern=M-/*-/*", "model.pattern=M-/*-/*: every depth of multi-token prediction has the same blocks"),
    ("model.pattern=/*-", "model.pattern=/*- has no blocks; give one letter per block"),
    (["model.pattern=M-/*-", "model.mtp_use_repeated_layer=true"], "has no effect with 1 depths of multi-token"),
    ("model.num_kv_heads=3", "model.num_kv_heads=3; use one of 1, 2, 4, 8", "4"),
    (["model=moe_tiny", "model.moe_ffn_dim=100"], "model.moe_ffn_dim=100 is not a multiple of 16; use 112", "112"),
    (["model=moe_tiny", "model.moe_top_k=1"], "model.moe_top_k=1: a token's only weight is always", "2"),
    (["model=moe_tiny", "model.moe_top_k=9"], "model.moe_top_k=9 is more than the 8 experts in model.moe_top_g", "8"),
    (["model=moe_tiny", "model.moe_num_groups=3"], "is not a multiple of model.moe_num_groups=3; use one of 1, 2", "4"),
    (["model=moe_tiny", "model.moe_top_groups=2"], "model.moe_top_groups=2 is more than model.moe_num_groups=1", "1"),
    (["model=moe_tiny", "model.moe_top_groups=2", "model.moe_num_groups=8"], "one of 8 experts in a group, and", "4"),
    (["model=moe_tiny", "model.moe_group_score=top_share"], "has no effect with model.moe_num_groups=1", "top_2"),
    (["model.rope=true", "model.head_dim=33"], "model.head_dim=33", "34"),
    (["model.hidden_dim=999999984", "model.vocab_size=1e9"], "more than any run can hold (1e+14); lower"),
    # --- machine
    ("run.device=cuda", "this machine has no CUDA device; use run.device=auto or cpu", "cpu"),
    ("checkpoint.resume=/no/such", "checkpoint.resume=/no/such is not a folder; give a checkpoint"),
    ("logging.wandb=online", "logging.wandb=online needs a key, and there is neither WANDB_API_KEY nor ~/.netrc"),
    ("precision.bf16_blocks.file=/no/such", "precision.bf16_blocks.file=/no/such: there is no such file"),
    # --- data
    ("data=my_corpus", "choose one of builtin, indexed, or write configs/data/my_corpus.yaml"),
    ("data.kind=csv", "data.kind=csv is not known; choose one of"),
    ("data.sources={web: /d/web}", "data.sources={'web': '/d/web'} has no effect"),
    (["data=indexed", PHASE.format("blend: {web: 1}")], "'data.sources={web: /data/web}'"),
    ([*READ_WEB, "data.validation={web: 'x://b/k'}"], "Protocol not known: x"),
    ([*READ_WEB, "data.validation={b: ['/d/../d/web.bin']}"], "data.validation.b reads too: the validation loss"),
    ([*WEB, PHASE.format("blend: {code: 1}")], "blend names code, which is not in data.sources; its sources: web"),
    ([*READ_WEB, "data.tokenizer=/no/such"], "data.tokenizer=/no/such: there is no such"),
    ([*READ_WEB, "validation.prompts=[Once]"], "needs the tokenizer that made the data"),
]
RECIPES = [
    ("precision.fprop.activation.block=1x32", "=1x32 does not go with format=nvfp4", "16x16"),
    ("precision.fprop.weight.format=nvfp5", "format=nvfp5 is not known; choose one of bf16"),
    (["precision=mxfp8", "precision.dgrad.gradient.rounding=stochastic"], "=mxfp8; use nearest", "nearest"),
    (["precision=mxfp8", "precision.fprop.weight.four_over_six=true"], "=mxfp8; use none", "none"),
    ("precision.wgrad.activation.source=codes", "precision.wgrad.rht=16", "precision.wgrad.rht=0"),
    (["precision.dgrad.weight.source=codes", "precision.dgrad.weight.block=1x16"], "block=1x16 differs from precision"),
    (["precision.wgrad.activation.source=forward", "precision.fprop.activation.format=bf16"], "bf16 makes no codes"),
    (["precision.wgrad.activation.source=forward", "precision.fprop.rht=16"], "precision.fprop.rht=16"),
    ([*EDEN, "precision.rht_signs=fixed"], "precision.rht_signs=fixed", "fresh"),
    ([*EDEN, "precision.wgrad.rht=64"], "set precision.wgrad.rht=128", "128"),
    ([*EDEN, "precision.fprop.activation.rounding=ms_eden"], "is for dgrad and", "nearest"),
    ("precision.bf16_blocks.first=4", "leaves none of the 12 linears quantized (blocks.0.mixer.in_proj: block 0 is"),
    ("precision.bf16_blocks.names=['*.outproj']", "precision.bf16_blocks.names has '*.outproj', which matches no"),
    ("precision.exceptions=[{blocks: X}]", "exceptions[0].blocks=X has 'X'"),
    ("precision.exceptions=[{names: ['*.in_proj'], sections: [q]}]", "['*.in_proj']; these have z, x, B, C, dt"),
    ("precision.exceptions=[{names: ['*.up_proj'], sections: [z]}]", "these have none; remove sections"),
    (SWITCH_TO_NVFP4, "precision.switch.when=never", "precision.switch.when=never"),
    (["precision=bf16", "precision.recheck_interval=10"], "interval=10 has no effect", "precision=nvfp4"),
    (["precision=bf16", "precision.wgrad.rht=16"], "precision.wgrad.rht=16 has no effect"),
    (["precision=bf16", "precision.bf16_blocks.last=2"], "precision.bf16_blocks.last=2 has no effect"),
    (["precision=bf16", "precision.diagnostics.interval=5"], "precision.diagnostics.interval=5"),
    (["precision=bf16", "precision.switch.when=gradient_noise", SWITCH_TO_NVFP4], "never switches"),
    (["precision.wgrad.rht=0", "precision.rht_signs=fresh"], "precision.rht_signs=fresh"),
    (["precision.switch.when=0.5", "precision.switch.interval=5"], "precision.switch.interval=5"),
    (["precision=bf16", "precision.sums=blackwell"], "precision.sums=blackwell has no effect: nothing is quantized"),
    (["precision=mxfp8", "precision.sums=blackwell"], "precision.fprop multiplies mxfp8", "precision.sums=fp32"),
    (["precision=nvfp4_best", "precision.sums=blackwell"], ".precision=mxfp8: precision.fprop multiplies mxfp8"),
    (["precision.sums=blackwell", "precision.fprop.weight.format=bf16"], "precision.fprop multiplies nvfp4 and bf16"),
    (["precision.sums=blackwell", "precision.wgrad.activation.source=codes", "precision.wgrad.rht=0"], "source=codes"),
    ("model.hidden_dim=200", "is not a multiple of 16, as its format or transform requires; use a multiple, or choose"),
    (["model.hidden_dim=64", "precision=fp8_block"], "is not a multiple of 128"),
    (TE, "this run is on cpu", "precision.backend=emulated"),
]
# (overrides, ranks, words of the line, perhaps the remedy), on GPUs
ON_GPUS = [
    (["parallel.tensor=3"], 4, "=3 x parallel.expert=1 x parallel.replicate=1 does not divide the 4 ranks of"),
    (["parallel.tensor=2"], 1, "one rank of this run; their product must be one of 1, or the ranks a multiple of 2"),
    (["parallel.tensor=4"], 8, "parallel.tensor=4 does not divide model.num_kv_heads=2; sizes that work for this"),
    (["parallel.tensor=2", "model.mamba_num_groups=1"], 2, "model.mamba_num_groups=1"),
    (["parallel.tensor=2", "parallel.expert=8", "model=moe_tiny"], 16, "moe_num_experts=8 / parallel.expert=8; sizes"),
    (["parallel.tensor=2", "model=moe_tiny", "model.moe_latent_dim=16"], 2, "does not divide the 1 tiles of 16 in mo"),
    (["parallel.expert=2"], 2, "parallel.expert=2, but nothing in this run is divided among the ranks of", "1"),
    (["parallel.expert=2", "model=moe_tiny"], 3, "does not divide the 3 ranks of this run"),
    (["parallel.expert=3", "model=moe_tiny"], 3, "parallel.expert=3 does not divide model.moe_num_experts=8; sizes"),
    ([*EXPERTS_2, "parallel.reshard=true"], 2, "parallel.reshard=true does not go with parallel.expert=2", "false"),
    ([*EXPERTS_2, *EACH], 2, "parallel.reduce_gradients=each does not go with parallel.expert=2", "once"),
    ([*EXPERTS_2, "parallel.reproducible=true"], 2, "reproducible=true does not go with parallel.expert=2", "false"),
    (["parallel.tensor=2", "model.ffn_dim=1152", "precision=fp8_block"], 2, "of parallel.tensor=2 x 128 = 256"),
    (["parallel.tensor=2", "train.micro_batch_size=1", "train.sequence_length=48"], 2, "use", "64"),
    (["train.micro_batch_size=1", "train.global_batch_size=736"], 512, "ranks = 512; use 512 ", "1024"),
    (["parallel.reproducible=true", "run.deterministic=false"], 2, "and run.deterministic is false", "true"),
    (["parallel.reproducible=true", "train.global_batch_size=12"], 3, "this run has 3; make it 2 or 4"),
    ([*EACH, "parallel.reproducible=true", "train.global_batch_size=24"], 2, "=24; this run has 6; make it 4 or 8"),
    (["parallel.reduce_gradients=each"], 1, "no effect with one shard", "once"),
    (["parallel.reshard=true", *EACH], 2, "no effect with parallel.reshard=true and steps of one micro-batch", "once"),
    ([TE, "precision.compute_dtype=float32"], 1, "precision.compute_dtype=float32", "bfloat16"),
    ([TE, "precision.wgrad.rht=32"], 1, "precision.wgrad.rht=32", "16"),
    ([TE, "precision.rht_signs=fresh"], 1, "precision.rht_signs=fresh", "fixed"),
    ([TE, "precision.dgrad.weight.source=forward"], 1, "dgrad.weight.source=forward"),
    ([TE, "precision.wgrad.gradient.block=16x16"], 1, "precision.wgrad.gradient.block=16x16"),
    ([TE, "model.hidden_dim=272"], 1, "multiple of 32"),
    ([TE, "precision.exceptions=[{names: ['*.out_proj'], precision: mxfp4}]"], 1, "exceptions[0].precision=mxfp4:"),
    (["model=moe_tiny", "model.moe_ffn_dim=224", TE], 1, "up: 224 outputs are not a multiple of 128", "auto"),
    (["model=moe_tiny", "precision.backend=torch"], 1, "=torch does not go with blocks.1.mixer.experts_up: it", "auto"),
    ([*EXPERTS_UP, "precision=fp8_block", "model.moe_ffn_dim=192"], 1, "192 output features of"),
    (["precision.sums=blackwell", TE], 1, "backend=transformer_engine adds in the order of its", "emulated"),
    (["precision=mxfp4", "precision.backend=torch"], 1, "use nvfp4 or mxfp8 or bf16", "precision=nvfp4"),
]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = ["WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NETRC"]
    for name in [*names, *(name for name in os.environ if name.startswith("WANDB_"))]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def refused(overrides: str | Sequence[str], message: str, ranks=1, device="cpu", configs=CONFIGS) -> str:
    with pytest.raises(ConfigError) as error:
        config = compose_config([overrides] if isinstance(overrides, str) else overrides, configs)
        validate(config, ranks, device)
    assert message in str(error.value) and "\n" not in str(error.value)
    return str(error.value)


ON_CPU = [*SYNTAX, *GROUPS, *KEYS, *VALUES, *TOGETHER, *RECIPES]
ROWS = [*((overrides, 1, "cpu", *words) for overrides, *words in ON_CPU)]
ROWS += [(overrides, ranks, "cuda", *words) for overrides, ranks, *words in ON_GPUS]


@pytest.mark.parametrize("row", ROWS, ids=[str(row[0])[:60] for row in ROWS])
def test_wrong_overrides_give_one_line(row: tuple[Any, ...]) -> None:
    """A row may end with the remedy: an override, or a value for the last one, that the line offers and that is then
    accepted."""
    overrides, ranks, device, message, *remedies = row
    given = [overrides] if isinstance(overrides, str) else overrides
    said = refused(given, message, ranks, device)
    for remedy in remedies:
        key, _, value = (remedy if "=" in remedy else f"{given[-1].partition('=')[0]}={remedy}").partition("=")
        offered = said.partition("; ")[2]
        assert value in re.findall(r"[\w.]+", offered.replace("=", " ")), offered
        kept = [override for override in given if override.partition("=")[0] != key]
        validate(compose_config([*kept, f"{key}={value}"], CONFIGS), ranks, device)


ACCEPTED = [
    FRESH,
    [*FRESH, "precision.switch.scope=backward", "precision.switch.when=never"],
    ["experiment=qaf"],
    ["precision.fprop.weight.format=bf16"],  # its block of 16x16 stays
    ["precision.wgrad.gradient.format=bf16", "precision.wgrad.activation.format=bf16"],  # the transform stays too
    ["precision.fprop.activation.format=bf16", "precision.fprop.rht=16"],
    ["precision.switch.when=never", "precision.switch.target=fp8_block", "precision.switch.threshold=2.0"],
    ["precision=bf16", SWITCH_TO_NVFP4, "precision.switch.when=0.5", "precision.diagnostics.interval=5"],
    ["precision.wgrad.activation.source=codes", "precision.dgrad.weight.source=codes", "precision.wgrad.rht=0"],
    ["precision.exceptions=[{names: ['*.in_proj'], precision: fp8_block}]", "model.mamba_head_dim=66"],
    ["model.head_dim=33", "precision.bf16_blocks.first=3"],  # the only attention block is in BF16
    ["model.pattern=M-M-M-", "model.num_kv_heads=3"],  # no attention block, so these heads are not used
    ["spikes.action=skip", "checkpoint.interval=0", "spikes.threshold=5", "spikes.window=64"],
    ["validation.prompts=['def main(', '']", "validation.prompt_tokens=10"],
    ["train.steps=4"],  # phases may round to none
]


@pytest.mark.parametrize("overrides", ACCEPTED, ids=" ".join)
def test_unusual_overrides_are_accepted(overrides: list[str]) -> None:
    validate(composed(*overrides), 1, "cpu")


SMALL = [("tiny", name) for name in ("bf16", "nvfp4", "mxfp4", "mxfp8", "fp8_block", "nvfp4_quartet2")]
SMALL += [(name, recipe) for name in ("hybrid_60m", "transformer_60m") for recipe in ("nvfp4", "fp8_block")]


@pytest.mark.parametrize(("model", "precision"), SMALL)
def test_small_models_can_be_combined_with_recipes(model: str, precision: str) -> None:
    config = composed(f"model={model}", f"precision={precision}")
    validate(changed(config, {"train.micro_batch_size": 2}), 4, "cpu")
    validate(changed(config, {"parallel.tensor": 2}), 4, "cuda")


@pytest.mark.parametrize(
    ("experiment", "ranks", "tensor"),
    [("transformer_1_2b", 64, 8), ("nemotron_h_8b", 256, 4), ("nemotron_h_12b", 32, 8), ("nemotron_h_12b", 736, 1)],
)
def test_the_runs_of_the_papers_are_valid(experiment: str, ranks: int, tensor: int) -> None:
    data = ("data.sources={web: /d/web}", "data.blends={first: {web: 1}, second: {web: 1}, third: {web: 1}}")
    for precision in ("nvfp4", "fp8_block"):
        config = composed(f"experiment={experiment}", f"precision={precision}", *data)
        validate(changed(config, {"parallel.tensor": tensor}), ranks, "cuda")


def test_wandb_without_its_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb").mkdir()  # a folder without a package, as wandb leaves one where it ran
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    refused("logging.wandb=offline", "logging.wandb=offline needs the package wandb; pip install")


# --- files ------------------------------------------------------------------------------------------------------------

TARGET = "precision.switch.target=mine"
BINARY = bytes(range(256))
ODD = b"defaults: [nvfp4, _self_]\nname: mine\nbf16_blocks: {names: ['*.outproj']}\n"
FILES = [
    ("model/mine.yaml", b"- a\n- b\n", "model=mine", "mine.yaml has no keys, but [a, b]; write each `key: value`"),
    ("model/mine.yaml", BINARY, "model=mine", "mine.yaml is not UTF-8 text"),
    ("model/mine.yaml", b"hidden_dim: [3\n", "model=mine", "mine.yaml, line 2: not valid YAML"),
    ("model/mine.yaml", b"hidden_dim: 3\0\n", "model=mine", "mine.yaml: not valid YAML (unreadable); correct that"),
    ("model/mine.yaml", b"a: 1\na: 2\n", "model=mine", "mine.yaml, line 2: not valid YAML (found duplicate key a)"),
    ("model/mine.yaml", b"hidden: 3\n", "model=mine", "mine.yaml: model.hidden is not a key; did you mean"),
    ("model/mine.yaml", b"defaults: [nope]\n", "model=mine", "mine.yaml: model=nope: there is no model config of that"),
    ("optimizer/mine.yaml", b"implementation: apex\n", "optimizer=mine", "optimizer.implementation is no longer a key"),
    ("precision/mine.yaml", ODD, TARGET, "target=mine: precision.bf16_blocks.names has '*.outproj'"),
    ("precision/mine.yaml", b"fprop: {weight: {fomat: nvfp4}}\n", TARGET, "did you mean precision"),
    ("plan.yaml", BINARY, "precision.bf16_blocks.file=FOLDER/plan.yaml", "plan.yaml cannot be used"),
    ("plan.yaml", b"- x\n", "precision.bf16_blocks.file=FOLDER/plan.yaml", "has no list of linears under `bf16`"),
    ("plan.yaml", b"bf16: [x]\n", "precision.bf16_blocks.file=FOLDER/plan.yaml", "this model has no linear 'x'"),
    ("empty/x", b"", "checkpoint.resume=FOLDER/empty", "is neither a checkpoint nor a run with checkpoints"),
    ("a/manifest.json", BINARY, "checkpoint.resume=FOLDER/a", "is damaged: manifest.json is not readable"),
    ("a/checkpoints/step_00000002/x", b"", "checkpoint.resume=FOLDER/a", "step_00000002: manifest.json is missing"),
    ("empty/x", b"", "checkpoint.initialize_from=FOLDER/empty", "empty is neither a checkpoint nor a run with"),
    ("a/x", b"", "checkpoint.initialize_from=FOLDER checkpoint.resume=FOLDER/a", "loads only weights"),
]


@pytest.mark.parametrize(("name", "content", "override", "message"), FILES, ids=lambda value: str(value)[:40])
def test_wrong_files_give_one_line(name: str, content: bytes, override: str, message: str, tmp_path: Path) -> None:
    configs = shutil.copytree(CONFIGS, tmp_path / "configs")
    path = (configs if (configs / name.partition("/")[0]).is_dir() else tmp_path) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    refused(override.replace("FOLDER", str(tmp_path)).split(), message, configs=configs)


def test_a_config_folder_of_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("defaults: [tiny, _self_]\nname: mine\nhidden_dim: 128\n")
    (tmp_path / "precision").mkdir()
    (tmp_path / "precision" / "odd.yaml").write_text("defaults: [nvfp4, _self_]\nname: mine\nwgrad: {rht: 0}\n")
    given = ["--config-dir", str(tmp_path), "model=mine", "precision.switch.target=odd"]
    config = compose_config(given, CONFIGS)
    assert (config.model.name, config.model.hidden_dim) == ("mine", 128)
    assert config.after_switch is not None and config.after_switch.wgrad.rht == 0
    said = refused([f"--config-dir={tmp_path}", "model=mini"], "did you mean mine? There are hybrid_30m")
    assert said.endswith(f", or write {tmp_path}/model/mini.yaml")
    installed = shutil.copytree(CONFIGS, tmp_path / "package" / "configs")  # its files are not the user's
    refused("data=mine", "or write FOLDER/data/mine.yaml and add --config-dir=FOLDER", configs=installed)
    refused("--config-dir=/no/such", "--config-dir=/no/such: there is no such folder")
    refused("--config-dir", "--config-dir: there is no such folder; give --config-dir=FOLDER")
    refused([], "has no config.yaml; name the folder", configs=tmp_path)


# --- the launcher's environment ---------------------------------------------------------------------------------------

RANK = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
ENVIRONMENTS = [
    ({}, ""),
    ({**RANK, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, ""),
    ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0 is not an integer between 1 and 1,048,576"),
    ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4, but RANK is not set"),
    ({**RANK, "RANK": "2"}, "RANK=2 is not an integer between 0 and 1"),
    ({"RANK": "0"}, "RANK=0 is set and WORLD_SIZE is not"),
    ({**RANK, "LOCAL_RANK": "4", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK=4 is not an integer between 0 and 1"),
    ({**RANK, "MASTER_PORT": "70000"}, "MASTER_PORT=70000 is not an integer between 1 and 65,535"),
    ({**RANK, "MASTER_ADDR": " "}, "RANK=0 is set and MASTER_ADDR is not"),
]


@pytest.mark.parametrize(("environment", "message"), ENVIRONMENTS, ids=str)
def test_the_launchers_environment_is_checked(environment: dict[str, str], message: str, monkeypatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if not message:
        return check_launch()
    with pytest.raises(ConfigError) as error:
        check_launch()
    assert message in str(error.value) and "\n" not in str(error.value)
