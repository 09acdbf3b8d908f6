"""Whole folders: written from trained checkpoints, compared by the script, read by the packages that define them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from data.indexed import IndexedDataset
from exchange.architectures import ours_of, sections_of
from exchange.checkpoint import load_model, open_checkpoint
from exchange.nvfp4 import LAYOUTS, multiplied_weight, trained_plan
from megatron_fp4.parallel.mesh import leave_distributed
from megatron_fp4.precision.plan import PrecisionController
from megatron_fp4.precision.rng import StepState
from megatron_fp4.runtime.revision import revision
from pretrain import CONFIGS
from scripts import convert
from tests.composing import plans_of
from tests.exchange.decoding import block_values
from tests.exchange.trained import HYBRID, TRANSFORMER, train

FORMATS = tuple(f"nvfp4-{name}" for name in LAYOUTS)
# The hybrid's forward pass is in BF16 from its second step on.
RUNS: dict[str, tuple[list[str], int]] = {
    "hybrid": ([*HYBRID, "precision=nvfp4", "precision.switch.when=1"], 2),
    "transformer": ([*TRANSFORMER, "precision=nvfp4", "precision.fprop.weight.four_over_six=true"], 1),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints after one step and after two, by model."""
    root = tmp_path_factory.mktemp("runs")
    return {name: train(root / name, o, ranks=r) for name, (o, r) in RUNS.items()}


@pytest.fixture
def checkpoints(runs: dict[str, Path]) -> Iterator[dict[str, Path]]:
    yield {name: run / "checkpoints/step_00000001" for name, run in runs.items()}
    leave_distributed()


def export(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    """What the command says."""
    given = convert.main(["export-hf", *(str(argument) for argument in arguments)])
    output = capsys.readouterr()
    assert given == code, output
    assert not output.err or code
    return output.err if code else output.out


def compared(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    code = convert.main(["check", *(str(argument) for argument in arguments)])
    output = capsys.readouterr()
    return code, output.out + output.err


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", RUNS)
def test_a_folder_holds_what_training_multiplied_with(name, form, checkpoints, tmp_path, capsys):
    checkpoint = open_checkpoint(checkpoints[name], CONFIGS)
    assert "MiB" in export(capsys, checkpoints[name], tmp_path / "out", "--format", form)
    code, table = compared(capsys, tmp_path / "out", checkpoints[name])
    assert code == 0 and table.count(" equal\n") == 7, table
    layout, tensors = LAYOUTS[form.removeprefix("nvfp4-")], weights(tmp_path / "out")
    trained = trained_plan(checkpoint, plans_of(checkpoint.config))
    sections = sections_of(checkpoint.config.model)
    assert len(trained.fp4()) == len(trained.plan.rows) - 2  # those of the last block
    for linear, row in trained.fp4().items():
        values, scale = multiplied_weight(checkpoint.tensor(f"{linear}.weight"), row, torch.bfloat16)
        for part in sections[f"{linear}.weight"]:
            module = part.name.removesuffix(".weight")
            codes, blocks = tensors[f"{module}.{layout.codes}"], tensors[f"{module}.weight_scale"]
            assert torch.equal(block_values(codes, blocks), values if part.rows is None else values[part.rows])
            stored = tensors[f"{module}.{layout.weight_scale}"]
            assert stored.shape == (() if layout.name == "modelopt" else (1,))
            given = stored if layout.name == "modelopt" else 1 / stored
            assert float(given) == pytest.approx(float(scale), rel=0 if layout.name == "modelopt" else 2e-7)
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    group = config["config_groups"]["group_0"]
    assert group.get("input_activations") is None and not any(name.endswith("input_scale") for name in tensors)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
def test_codes_become_weights_again(form, checkpoints, tmp_path, capsys):
    """With input scales beside them, and from a folder that says so in ModelOpt's own file alone."""
    options = ["--format", form, "--trust-config", "--activations", "calibrated", "--calibrate-samples", 1]
    export(capsys, checkpoints["hybrid"], tmp_path / "out", *options)
    config = json.loads((tmp_path / "out/config.json").read_text())
    if form == "nvfp4-modelopt":
        del config["quantization_config"]
        (tmp_path / "out/config.json").write_text(json.dumps(config))
    assert convert.main(["import-hf", str(tmp_path / "out"), str(tmp_path / "back")]) == 0
    capsys.readouterr()
    source, back = (open_checkpoint(folder, CONFIGS) for folder in (checkpoints["hybrid"], tmp_path / "back"))
    rows = trained_plan(source, plans_of(source.config)).fp4()
    for name in source.tensors:
        ours, found = source.tensor(name), back.tensor(name)
        if row := rows.get(name.removesuffix(".weight")):
            values, scale = multiplied_weight(ours, row, torch.bfloat16)
            assert torch.allclose(found, values * scale, rtol=2e-7, atol=0) and not torch.equal(found, ours)
        else:
            assert torch.equal(found, ours if ".ssm." in name else ours.bfloat16().float()), name
    # It is no folder that could be written again byte for byte.
    said = export(capsys, tmp_path / "back", tmp_path / "plain")
    assert "MiB" in said and json.loads((tmp_path / "plain/config.json").read_text())["dtype"] == "bfloat16"
    packed = weights(tmp_path / "out")
    packed.pop(next(name for name in packed if name.endswith(("weight_scale_2", "weight_global_scale"))))
    save_file(packed, tmp_path / "out/model.safetensors", metadata={"format": "pt"})
    assert convert.main(["import-hf", str(tmp_path / "out"), str(tmp_path / "other")]) == 2
    assert "has no tensor" in capsys.readouterr().err


# One change of a folder in each layout, and the line that it has to be found by.
TAMPERED: dict[str, tuple[str, Callable[[dict[str, Tensor], dict[str, Any]], object], str]] = {
    "a nibble": (
        "modelopt", lambda t, _: t["backbone.layers.1.mixer.up_proj.weight"][3, 5].bitwise_xor_(1),
        "backbone.layers.1.mixer.up_proj, decoded: 1 of 6144 elements differ; [3, 10] is",
    ),
    "an ulp of a tensor scale": (
        "modelopt", lambda t, _: t["backbone.layers.1.mixer.up_proj.weight_scale_2"].view(torch.int32).add_(1),
        "backbone.layers.1.mixer.up_proj.weight_scale_2: 1 of 1 elements differ",
    ),
    "q's tensor scale": (
        "modelopt", lambda t, _: t["backbone.layers.2.mixer.q_proj.weight_scale_2"].mul_(2),
        "backbone.layers.2.mixer.v_proj.weight_scale_2 differ, and engines take the largest",
    ),
    "a tensor in BF16": (
        "modelopt", lambda t, _: t["backbone.layers.5.mixer.up_proj.weight"][0, 0].add_(1),
        "backbone.layers.5.mixer.up_proj.weight: 1 of 6144 elements differ; [0, 0] is",
    ),
    "a tensor of nothing": (
        "modelopt", lambda t, _: t.update({"backbone.layers.1.mixer.up_proj.input_scale": torch.ones(())}),
        "backbone.layers.1.mixer.up_proj.input_scale belongs to nothing",
    ),
    "an exclusion that is too short": (
        "modelopt", lambda _, c: c["quantization_config"]["ignore"].append("backbone.layers.1"),
        "backbone.layers.1.mixer.up_proj is excluded, though it has codes",
    ),
    "a missing exclusion": (
        "compressed-tensors", lambda _, c: c["quantization_config"]["ignore"].remove("lm_head"),
        "lm_head is not excluded, though it is in BF16",
    ),
    "a field of the model": (
        "modelopt", lambda _, c: c.update(time_step_min=0.001), "time_step_min is 0.001 and should be 0.0",
    ),
}  # fmt: skip


@pytest.mark.slow
def test_the_check_finds_what_is_changed(checkpoints, tmp_path, capsys):
    for layout in LAYOUTS:
        export(capsys, checkpoints["hybrid"], tmp_path / layout, "--format", f"nvfp4-{layout}")
    for what, (layout, change, line) in TAMPERED.items():
        folder = tmp_path / "changed"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / layout, folder)
        tensors, config = weights(folder), json.loads((folder / "config.json").read_text())
        change(tensors, config)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config))
        code, table = compared(capsys, folder, checkpoints["hybrid"], "--no-tokenizer")
        assert line in table and code == (4 if line else 0), (what, table)
    for content in ("{}", None):
        folder = tmp_path / "modelopt"
        (folder / "hf_quant_config.json").unlink()
        if content is not None:
            (folder / "hf_quant_config.json").write_text(content)
        code, table = compared(capsys, folder, checkpoints["hybrid"], "--no-tokenizer")
        assert "hf_quant_config.json is missing or does not say what is quantized" in table and code == 4, table


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_compressed_tensors_reads_the_codes(name, checkpoints, tmp_path, capsys):
    """Its unpacking gives our codes, packing them again our bytes, and its decompression our values in BF16."""
    from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor, pack_fp4_to_uint8, unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationScheme

    export(capsys, checkpoints[name], tmp_path / "out", "--format", "nvfp4-compressed-tensors")
    tensors, config = weights(tmp_path / "out"), json.loads((tmp_path / "out/config.json").read_text())
    scheme = QuantizationScheme(**config["quantization_config"]["config_groups"]["group_0"])
    modules = [key.removesuffix(".weight_packed") for key in tensors if key.endswith(".weight_packed")]
    assert modules
    for module in modules:
        own = {key.removeprefix(f"{module}."): t for key, t in tensors.items() if key.startswith(f"{module}.")}
        packed = own["weight_packed"]
        codes = unpack_fp4_from_uint8(packed, packed.shape[0], packed.shape[1] * 2, dtype=torch.float32)
        ones = torch.ones_like(own["weight_scale"].float()).to(torch.float8_e4m3fn)
        assert torch.equal(codes, block_values(packed, ones))
        assert torch.equal(pack_fp4_to_uint8(codes), packed)
        value = block_values(packed, own["weight_scale"]) / own["weight_global_scale"]
        decompressed = NVFP4PackedCompressor.decompress(own, scheme)["weight"]
        assert decompressed.dtype == torch.bfloat16
        # Rounded once more, to BF16, and in another order: where ours lies between two, it may take the other.
        assert ((decompressed.float() - value).abs() <= value.abs() * 2.0**-8).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_transformers_loads_the_folder_of_compressed_tensors(name, checkpoints, tmp_path, capsys):
    """Decompressed when it is loaded, it has the logits of our model with the same weights; decompressed at the first
    forward pass, which goes in BF16 only, the same bits."""
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    export(capsys, checkpoints[name], tmp_path / "out", "--format", "nvfp4-compressed-tensors")
    checkpoint, tensors = open_checkpoint(checkpoints[name], CONFIGS), weights(tmp_path / "out")
    sections = sections_of(checkpoint.config.model)
    ours = load_model(checkpoint)
    tokens = torch.randint(290, (2, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        masters = ours(tokens)
        for parameter, values in ours.named_parameters():
            published = {part.name: _as_compressed_tensors(tensors, part.name) for part in sections[parameter]}
            values.to_local().copy_(ours_of(sections[parameter], published))
        expected = ours(tokens)
        fp32 = AutoModelForCausalLM.from_pretrained(
            tmp_path / "out", dtype=torch.float32, quantization_config=CompressedTensorsConfig(dequantize=True)
        )
        moved = (masters - expected).abs().max()
        assert moved > 1e-3
        assert (fp32.eval()(tokens).logits - expected).abs().max() < min(1e-4, 1e-2 * moved)
        bf16, found = AutoModelForCausalLM.from_pretrained(
            tmp_path / "out", dtype=torch.bfloat16, output_loading_info=True
        )
        assert not any(found.values()), found
        same = AutoModelForCausalLM.from_pretrained(
            tmp_path / "out", dtype=torch.bfloat16, quantization_config=CompressedTensorsConfig(dequantize=True)
        )
        assert torch.equal(bf16.eval()(tokens).logits, same.eval()(tokens).logits)


def _as_compressed_tensors(tensors: dict[str, Tensor], name: str) -> Tensor:
    """A published weight as the package decompresses it: code * (scale / global scale), in BF16."""
    if name in tensors:
        return tensors[name]
    codes, blocks, scale = (tensors[f"{name}_{part}"] for part in ("packed", "scale", "global_scale"))
    ones = torch.ones(blocks.shape).to(torch.float8_e4m3fn)
    return (block_values(codes, ones) * (blocks.float() / scale).repeat_interleave(16, dim=1)).bfloat16()


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
def test_input_scales_are_the_largest_inputs_of_held_out_text(form, checkpoints, tmp_path, capsys):
    layout, options = (
        LAYOUTS[form.removeprefix("nvfp4-")],
        ["--trust-config", "--activations", "calibrated", "--calibrate-samples", 3],
    )
    said = export(capsys, checkpoints["hybrid"], tmp_path / "out", "--format", form, *options)
    assert "calibrated on 3 held-out sequences, 96 tokens (loss " in said
    code, table = compared(capsys, tmp_path / "out", checkpoints["hybrid"])
    assert code == 0 and "4-bit activations" in table, table
    tensors = weights(tmp_path / "out")
    amax = inputs_by_hand(checkpoints["hybrid"], 3)
    scales = {name: tensor for name, tensor in tensors.items() if name.endswith(f".{layout.input_scale}")}
    assert len(scales) == 12
    for name, scale in scales.items():
        module = name.removesuffix(f".{layout.input_scale}").removeprefix("backbone.layers.")
        block, _, linear = module.partition(".mixer.")
        ours = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "o_proj": "out_proj"}
        largest = amax[f"blocks.{block}.mixer.{ours.get(linear, linear)}"]
        expected = largest / 2688 if layout.name == "modelopt" else torch.tensor([2688.0]) / largest
        assert torch.equal(scale, expected), name
    assert len({float(scale) for scale in scales.values()}) > 6 and all(scale != 1 for scale in scales.values())


def inputs_by_hand(folder: Path, samples: int) -> dict[str, Tensor]:
    """By hooks on the linears' modules, one sequence after the other: first, second, first source; spread over each."""
    checkpoint = open_checkpoint(folder, CONFIGS)
    model = load_model(checkpoint, compute_dtype=torch.bfloat16)
    trained = trained_plan(checkpoint, plans_of(checkpoint.config))
    PrecisionController({n: m.context for n, m in model.linears()}, trained.plan, StepState(seed=0))
    found: dict[str, list[Tensor]] = {}
    for name, module in model.linears():
        keep = found.setdefault(name, [])
        module.register_forward_pre_hook(lambda _, given, keep=keep: keep.append(given[0].detach().abs().max().float()))
    streams = {name: IndexedDataset(path) for name, path in checkpoint.config.data.validation.items()}
    first, second = (stream.tokens(0, stream.num_tokens).astype("int64") for stream in streams.values())
    windows = (len(first) - 1) // 32
    for text, start in ((first, 0), (second, 0), (first, windows // 2 * 32))[:samples]:
        with torch.no_grad():
            model(torch.from_numpy(text[start : start + 32])[None])
    return {name: torch.stack(values).max() for name, values in found.items()}


NVFP4, MEASURED = "--format nvfp4", "--format nvfp4 --trust-config --activations calibrated"
REFUSED = {
    "behind the switch": (2, NVFP4, "is after the precision switch (before step 2)"),
    "before what": (1, f"{NVFP4} --plan before", "this checkpoint is not after a precision switch; leave it out"),
    "a type": (1, f"{NVFP4} --dtype float32", "with --format nvfp4 all else is bfloat16; leave it out"),
    "no samples": (1, f"{MEASURED} --calibrate-samples 0", "0 measures nothing; give 1 or more"),
    "data that is gone": (1, f"{MEASURED} --data-override data.validation.first=/nowhere/text", "/nowhere/text"),
}


@pytest.mark.slow
def test_refusals_are_one_line_and_leave_nothing(checkpoints, tmp_path, capsys):
    step_1 = checkpoints["hybrid"]
    for what, (step, options, line) in REFUSED.items():
        folder = step_1.with_name(f"step_0000000{step}")
        said = export(capsys, folder, tmp_path / "out", *options.split(), code=2)
        assert line in said and said.startswith("convert.py export-hf: ") and said.count("\n") == 1, (what, said)
        assert list(tmp_path.iterdir()) == [], what
    said = export(capsys, step_1.with_name("step_00000002"), tmp_path / "out", "--format", "nvfp4", "--plan", "before")
    code, table = compared(capsys, tmp_path / "out", step_1.with_name("step_00000002"), "--plan", "before")
    assert code == 0, table
    card = (tmp_path / "out/README.md").read_text()
    assert card.count(f"({revision()})") == 2  # of the run, and of the export
    assert "by the plan before the run's precision switch" in card
    said = export(
        capsys, step_1, tmp_path / "out", "--format", "nvfp4", "--trust-config", "--activations", "calibrated", code=2
    )
    assert "exists already; name another folder" in said
    code, table = compared(capsys, tmp_path / "out", step_1, "--plan", "before")
    assert code == 2 and "not after a precision switch" in table
    code, table = compared(capsys, tmp_path, step_1)
    assert (
        code == 2
        and table == f"convert.py check: {tmp_path}/config.json is missing; give the folder of a Hugging Face model\n"
    )


@pytest.mark.slow
def test_the_check_compares_plain_folders_and_tokenizers(checkpoints, tmp_path, capsys):
    export(capsys, checkpoints["transformer"], tmp_path / "out")
    code, table = compared(capsys, tmp_path / "out", checkpoints["transformer"])
    assert code == 0 and table.count(" equal\n") == 4 and "arcee, bfloat16" in table, table
    code, table = compared(capsys, tmp_path / "out", checkpoints["hybrid"], "--no-tokenizer")
    assert code == 4 and "DIFFERS" in table and "not compared" in table
    tokenizer = json.loads((tmp_path / "out/tokenizer.json").read_text())
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:-1]
    (tmp_path / "out/tokenizer.json").write_text(json.dumps(tokenizer))
    code, table = compared(capsys, tmp_path / "out", checkpoints["transformer"])
    assert code == 4 and "which made the data of the run" in table, table
