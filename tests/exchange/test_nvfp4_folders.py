"""NVFP4 folders exported from trained checkpoints: checked by the command, and read by the packages of the formats."""

import functools
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor

from data.indexed import IndexedDataset
from exchange.architectures import sections_of
from exchange.checkpoint import load_model, open_checkpoint
from exchange.nvfp4 import COMPRESSED_TENSORS, MODELOPT, multiplied_weight, trained_plan
from inference.models import open_folder
from megatron_fp4.parallel.mesh import leave_distributed
from megatron_fp4.precision.plan import PrecisionController
from megatron_fp4.precision.rng import StepState
from megatron_fp4.runtime.revision import revision
from models.published import from_published
from pretrain import CONFIGS
from scripts import convert
from tests.composing import plans_of
from tests.exchange import test_nvfp4
from tests.exchange.models import text_data
from tests.quantization.oracle import block_values
from tests.test_pretrain import run

pytestmark = pytest.mark.slow
FORMATS = {"nvfp4": MODELOPT, "nvfp4-compressed-tensors": COMPRESSED_TENSORS}
HYBRID = [
    *test_nvfp4.HYBRID, "model.vocab_size=300", "model.num_query_heads=8", "model.ffn_dim=96",
    "model.nvfp4_bf16_blocks.last=1",
]  # fmt: skip
TRANSFORMER = [
    *test_nvfp4.TRANSFORMER, "model.pattern='*-*-'", "model.vocab_size=300", "model.hidden_dim=48",
    "model.nvfp4_bf16_blocks.last=1",
]  # fmt: skip
EXPERTS = [
    *test_nvfp4.HYBRID, "model.pattern='ME*E'", "model.vocab_size=300", "model.num_query_heads=8",
    "model.moe_num_experts=4", "model.moe_ffn_dim=48", "model.moe_shared_ffn_dim=32", "model.moe_latent_dim=16",
    "model.moe_scaling=2.5", "model.nvfp4_bf16_blocks.last=1",
]  # fmt: skip
RUN = [
    "train.global_batch_size=2", "train.micro_batch_size=1", "train.sequence_length=32", "train.steps=2",
    "validation.interval=0", "checkpoint.interval=1", "checkpoint.asynchronous=false", "run.device=cpu",
    "logging.report=false", "schedule.warmup_fraction=0",
]  # fmt: skip
# The hybrid's forward pass switches to BF16 before its second step.
RUNS: dict[str, tuple[list[str], int]] = {
    "hybrid": ([*HYBRID, "precision=nvfp4", "precision.switch.when=1", "parallel.tensor=2"], 2),
    "transformer": ([*TRANSFORMER, "precision=nvfp4", "precision.fprop.weight.four_over_six=true"], 1),
    "experts": ([*EXPERTS, "precision=nvfp4_nemotron_3", "precision.switch.when=never"], 1),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """By model: the checkpoint after one step of a run on a little text. That of the second step is beside it."""
    root = tmp_path_factory.mktemp("runs")
    data = text_data(root)
    for name, (overrides, ranks) in RUNS.items():
        run(ranks, [*data, *overrides, *RUN, f"run.dir={root / name}"])
    yield {name: root / name / "checkpoints/step_00000001" for name in RUNS}
    leave_distributed()


@pytest.fixture(scope="module")
def exported(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Exports a model in a format; returns the folder. Each is written once."""
    root = tmp_path_factory.mktemp("exported")

    @functools.cache
    def folder(name: str, form: str, *more: str) -> Path:
        output = root / "_".join([name, form, *more])
        given = [str(checkpoints[name]), str(output), "--format", form, *more]
        assert convert.main(["export-hf", "--trust-config", *given]) == 0
        return output

    return folder


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert convert.main([str(argument) for argument in arguments]) == 2
    output = capsys.readouterr()
    assert output.err.count("\n") == 1 and output.err.startswith(f"convert.py {arguments[0]}: "), output
    return output.err


def compared(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    capsys.readouterr()
    code = convert.main(["check", "--trust-config", *(str(argument) for argument in arguments)])
    output = capsys.readouterr()
    return code, output.out + output.err


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def test_a_checkpoint_of_two_ranks_is_read_as_one(checkpoints: dict[str, Path]) -> None:
    """Tensors split by rows and by columns are those that torch reads, and the model computes its loss with them."""
    checkpoint = open_checkpoint(checkpoints["hybrid"], CONFIGS)
    checkpoint.verify()
    assert checkpoint.step == 1 and checkpoint.tokens == 2 * 32 and not checkpoint.weights_only
    expected = {f"model.{name}": torch.empty(shape) for name, shape in checkpoint.tensors.items()}
    dcp.load(expected, checkpoint_id=str(checkpoint.folder), no_dist=True)
    assert all(torch.equal(checkpoint.tensor(name), expected[f"model.{name}"]) for name in checkpoint.tensors)
    model = load_model(checkpoint)
    assert {name: parameter.shape for name, parameter in model.named_parameters()} == checkpoint.tensors
    tokens = torch.arange(33)[None]
    by_hand = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[0, 1:])
    assert model(tokens[:, :-1], tokens[:, 1:]).item() == pytest.approx(by_hand.item(), rel=1e-6)


@pytest.mark.parametrize(
    ("name", "form"), [*((name, "nvfp4") for name in RUNS), ("hybrid", "nvfp4-compressed-tensors")]
)
def test_a_folder_has_the_weights_that_training_used(name, form, checkpoints, exported, capsys):
    code, table = compared(capsys, exported(name, form), checkpoints[name])
    assert code == 0 and table.count(" equal\n") == 6, table
    checkpoint, layout = open_checkpoint(checkpoints[name], CONFIGS), FORMATS[form]
    trained, stored = trained_plan(checkpoint, plans_of(checkpoint.config)), weights(exported(name, form))
    if name != "experts":
        assert len(trained.nvfp4_linears()) == len(trained.plan.rows) - 2  # those of the last block
    scales = [tensor for key, tensor in stored.items() if key.endswith(f".{layout.weight_scale}")]
    assert len(scales) > len(trained.nvfp4_linears())
    assert {scale.shape for scale in scales} == {(1,) if layout.inverse else ()}


def test_experts_have_scales_of_their_own_and_an_import_decodes_them(checkpoints, exported, tmp_path, capsys):
    """Also the router, which stays FP32. compressed-tensors has no layout for experts without gates."""
    folder, source = exported("experts", "nvfp4", "--calibrate", "1"), open_checkpoint(checkpoints["experts"], CONFIGS)
    found = [key for key in weights(folder) if re.fullmatch(r"backbone.layers.1.mixer.experts.\d.up_proj.*", key)]
    assert len(found) == 4 * len(("weight", "weight_scale", "weight_scale_2", "input_scale"))
    ignored = config_of(folder)["quantization_config"]["ignore"]
    assert {"backbone.layers.3.mixer.experts", "backbone.layers.1.mixer.gate"} <= {*ignored}
    assert not any("layers.1.mixer.experts" in module for module in ignored)
    assert convert.main(["import-hf", str(folder), str(tmp_path / "back")]) == 0
    back = open_checkpoint(tmp_path / "back", CONFIGS)
    assert all(torch.equal(back.tensor(name), source.tensor(name)) for name in source.tensors if "router" in name)
    row = trained_plan(source, plans_of(source.config)).nvfp4_linears()["blocks.1.mixer.experts_up"]
    master, decoded = (of.tensor("blocks.1.mixer.experts_up.weight") for of in (source, back))
    for expert in range(4):
        values, scale = multiplied_weight(master[expert], row, torch.bfloat16)
        assert torch.allclose(decoded[expert], values * scale, rtol=2e-7, atol=0)
    arguments = ("--trust-config", checkpoints["experts"], tmp_path / "no", "--format", "nvfp4-compressed-tensors")
    assert "experts in NVFP4 only in ModelOpt's layout (nvfp4)" in refusal(capsys, "export-hf", *arguments)


@pytest.mark.parametrize("form", FORMATS)
def test_an_import_decodes_the_weights(form, checkpoints, exported, tmp_path, capsys):
    """Other writers add input scales, and may say only in hf_quant_config.json that the folder is NVFP4."""
    folder = Path(shutil.copytree(exported("hybrid", form), tmp_path / "out"))
    packed = weights(folder) | {"backbone.layers.1.mixer.up_proj.input_scale": torch.ones(())}
    save_file(packed, folder / "model.safetensors", metadata={"format": "pt"})
    if form == "nvfp4":
        plain = {key: value for key, value in config_of(folder).items() if key != "quantization_config"}
        (folder / "config.json").write_text(json.dumps(plain))
    assert convert.main(["import-hf", str(folder), str(tmp_path / "back")]) == 0
    source, back = (open_checkpoint(folder, CONFIGS) for folder in (checkpoints["hybrid"], tmp_path / "back"))
    rows = trained_plan(source, plans_of(source.config)).nvfp4_linears()
    for name in source.tensors:
        ours, found = source.tensor(name), back.tensor(name)
        if row := rows.get(name.removesuffix(".weight")):
            values, scale = multiplied_weight(ours, row, torch.bfloat16)
            assert torch.allclose(found, values * scale, rtol=2e-7, atol=0) and not torch.equal(found, ours)
        else:
            assert torch.equal(found, ours if ".ssm." in name else ours.bfloat16().float()), name
    packed.pop(next(name for name in packed if name.endswith(("weight_scale_2", "weight_global_scale"))))
    save_file(packed, folder / "model.safetensors", metadata={"format": "pt"})
    capsys.readouterr()
    assert "has no tensor" in refusal(capsys, "import-hf", folder, tmp_path / "other")


# (format, change of tensors and config, words of the line that reports it)
TAMPERED: dict[str, tuple[str, Callable[[dict[str, Tensor], dict[str, Any]], object], str]] = {
    "a nibble": (
        "nvfp4", lambda t, _: t["backbone.layers.1.mixer.up_proj.weight"][3, 5].bitwise_xor_(1),
        "backbone.layers.1.mixer.up_proj, decoded, differ in 1 of 6144, first at [3, 10]: ",
    ),
    "an ulp of a tensor scale": (
        "nvfp4", lambda t, _: t["backbone.layers.1.mixer.up_proj.weight_scale_2"].view(torch.int32).add_(1),
        "backbone.layers.1.mixer.up_proj.weight_scale_2 differ in 1 of 1, ",
    ),
    "a tensor of nothing": (
        "nvfp4", lambda t, _: t.update({"backbone.layers.1.mixer.up_proj.input_scale": torch.ones(())}),
        "backbone.layers.1.mixer.up_proj.input_scale belongs to no parameter",
    ),
    "an exclusion that is too short": (
        "nvfp4", lambda _, c: c["quantization_config"]["ignore"].append("backbone.layers.1"),
        "backbone.layers.1 is excluded, though no such module is in BF16",
    ),
    "a missing exclusion": (
        "nvfp4-compressed-tensors", lambda _, c: c["quantization_config"]["ignore"].remove("lm_head"),
        "lm_head is not excluded, though it is in BF16",
    ),
    "no groups": (
        "nvfp4", lambda _, c: c["quantization_config"].update(config_groups=None, ignore=None),
        "backbone.layers.0.mixer.conv1d is not excluded, though it is in BF16 (and",
    ),
    "a field of the model": (
        "nvfp4", lambda _, c: c.update(time_step_min=0.001), "time_step_min is 0.001 and should be 1e-30",
    ),
}  # fmt: skip


def test_the_check_finds_every_change(checkpoints, exported, tmp_path, capsys):
    folder = tmp_path / "changed"
    for what, (form, change, line) in TAMPERED.items():
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(exported("hybrid", form), folder)
        tensors, config = weights(folder), config_of(folder)
        change(tensors, config)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config))
        code, table = compared(capsys, folder, checkpoints["hybrid"], "--no-tokenizer")
        assert line in table and code == 4, (what, table)
    (folder / "hf_quant_config.json").write_text("{}")
    _, table = compared(capsys, folder, checkpoints["hybrid"], "--no-tokenizer")
    assert "hf_quant_config.json is missing, or does not match what is quantized" in table, table


@pytest.mark.parametrize("form", FORMATS)
def test_input_scales_come_from_the_largest_inputs_on_held_out_text(form, checkpoints, exported, tmp_path, capsys):
    layout, calibrate = FORMATS[form], ("--trust-config", "--calibrate", "2")
    unasked = ("export-hf", checkpoints["hybrid"], tmp_path / "none", "--format", form, *calibrate[1:])
    assert "which is not used without your consent; give --trust-config" in refusal(capsys, *unasked)
    folder = Path(shutil.copytree(exported("hybrid", form, *calibrate), tmp_path / "out"))
    code, table = compared(capsys, folder, checkpoints["hybrid"])
    assert code == 0 and "scales of inputs" in table, table
    amax = largest_by_hand(checkpoints["hybrid"], 2)
    tensors = weights(folder)
    scales = {name: tensor for name, tensor in tensors.items() if name.endswith(f".{layout.input_scale}")}
    assert len(scales) == 12
    for name, scale in scales.items():
        block, _, linear = name.removesuffix(f".{layout.input_scale}").partition(".mixer.")
        ours = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "o_proj": "out_proj"}
        largest = amax[f"blocks.{block.rpartition('.')[2]}.mixer.{ours.get(linear, linear)}"]
        assert torch.equal(scale, torch.tensor([2688.0]) / largest if layout.inverse else largest / 2688), name
    assert len({float(scale) for scale in scales.values()}) > 6
    tensors[next(name for name in scales if "k_proj" in name)] *= 2
    save_file(tensors, folder / "model.safetensors")
    code, table = compared(capsys, folder, checkpoints["hybrid"])
    assert code == 4 and "are not equal" in table, table


def largest_by_hand(folder: Path, samples: int) -> dict[str, Tensor]:
    """The largest input of every linear over `samples` windows of each held-out source."""
    checkpoint = open_checkpoint(folder, CONFIGS)
    model = load_model(checkpoint, compute_dtype=torch.bfloat16)
    trained = trained_plan(checkpoint, plans_of(checkpoint.config))
    PrecisionController({n: m.context for n, m in model.linears()}, trained.plan, StepState(seed=0))
    found: dict[str, list[Tensor]] = {}
    for name, module in model.linears():
        keep = found.setdefault(name, [])
        module.register_forward_pre_hook(lambda _, given, keep=keep: keep.append(given[0].detach().abs().max().float()))
    for path in checkpoint.config.data.validation.values():
        text = IndexedDataset(path)
        tokens = text.tokens(0, text.num_tokens).astype("int64")
        windows = (len(tokens) - 1) // 32
        for start in (window * windows // samples * 32 for window in range(samples)):
            with torch.no_grad():
                model(torch.from_numpy(tokens[start : start + 32])[None])
    return {name: torch.stack(values).max() for name, values in found.items()}


@pytest.mark.parametrize("name", ["hybrid", "transformer"])
def test_compressed_tensors_and_transformers_read_the_codes(name, checkpoints, exported):
    """The package unpacks our codes and packs them to the same bytes. Decompressed, the folder has the logits of our
    model with the same weights."""
    from compressed_tensors.compressors.nvfp4 import pack_fp4_to_uint8, unpack_fp4_from_uint8
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    folder = exported(name, "nvfp4-compressed-tensors")
    checkpoint, tensors = open_checkpoint(checkpoints[name], CONFIGS), weights(folder)
    packed = [tensor for key, tensor in tensors.items() if key.endswith(".weight_packed")]
    assert packed
    for each in packed:
        codes = unpack_fp4_from_uint8(each, each.shape[0], each.shape[1] * 2, dtype=torch.float32)
        assert torch.equal(codes, block_values(each, torch.ones(len(each), each.shape[1] // 8).to(torch.float8_e4m3fn)))
        assert torch.equal(pack_fp4_to_uint8(codes), each)
    sections = sections_of(checkpoint.config.model)
    ours = load_model(checkpoint)
    tokens = torch.randint(290, (2, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        masters = ours(tokens)
        for parameter, values in ours.named_parameters():
            published = {part.name: _as_compressed_tensors(tensors, part.name) for part in sections[parameter]}
            values.to_local().copy_(from_published(sections[parameter], published))
        expected = ours(tokens)
        decompressed = CompressedTensorsConfig(dequantize=True)
        fp32 = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=decompressed)
        moved = (masters - expected).abs().max()
        assert moved > 1e-3
        assert (fp32.eval()(tokens).logits - expected).abs().max() < min(1e-4, 1e-2 * moved)


def _as_compressed_tensors(tensors: dict[str, Tensor], name: str) -> Tensor:
    """A published weight as the package decompresses it: code * (scale / global scale), in BF16."""
    if name in tensors:
        return tensors[name]
    codes, blocks, scale = (tensors[f"{name}_{part}"] for part in ("packed", "scale", "global_scale"))
    ones = torch.ones(blocks.shape).to(torch.float8_e4m3fn)
    return (block_values(codes, ones) * (blocks.float() / scale).repeat_interleave(16, dim=1)).bfloat16()


def test_after_a_switch_the_plan_before_it_can_be_exported(checkpoints, tmp_path, capsys):
    after_1, after_2 = (checkpoints["hybrid"].with_name(f"step_0000000{step}") for step in (1, 2))
    before, out = ["--plan", "before"], tmp_path / "out"
    assert convert.main(["export-hf", "--trust-config", str(after_2), str(out), "--format", "nvfp4", *before]) == 0
    code, table = compared(capsys, out, after_2, *before)
    assert code == 0, table
    card = (out / "README.md").read_text()
    assert card.count(f"({revision()})") == 2  # the commits of the run and of the export
    assert "by the plan before the precision switch" in card
    assert "there was no precision switch before" in refusal(capsys, "check", out, after_1, *before)


def test_the_check_compares_plain_folders_and_tokenizers(checkpoints, exported, tmp_path, capsys):
    folder = Path(shutil.copytree(exported("transformer", "hf"), tmp_path / "out"))
    code, table = compared(capsys, folder, checkpoints["transformer"])
    assert code == 0 and table.count(" equal\n") == 4 and "arcee, bfloat16" in table, table
    code, table = compared(capsys, folder, checkpoints["hybrid"], "--no-tokenizer")
    assert code == 4 and "DIFFERS" in table and "no tokenizer" in table
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:-1]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    code, table = compared(capsys, folder, checkpoints["transformer"])
    assert code == 4 and "which made the data of the run" in table, table


def test_evaluation_decodes_weights_and_computes_in_any_type(exported: Callable[..., Path]) -> None:
    """With scales of inputs and without."""
    tokens, found = torch.arange(40)[None], list[Tensor]()
    for more in ((), ("--calibrate", "2")):
        opened = open_folder(exported("hybrid", "nvfp4-compressed-tensors", *more), "cpu", "float32")
        found.append(opened.model(tokens).logits)
    assert found[0].dtype == torch.float32 and torch.equal(*found)
