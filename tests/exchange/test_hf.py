"""Folders in transformers itself: the same logits, and none of the known traps."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from data.tokenizer import train_tokenizer
from exchange.checkpoint import load_model, open_checkpoint
from exchange.folder_check import Folder, check_folder
from exchange.hf.architectures import architecture_of
from exchange.hf.encoder import PlainEncoder
from exchange.hf.export import export_again, export_hf
from exchange.hf.importing import import_hf
from exchange.hf.model_card import _losses
from exchange.hf.sections import Section
from exchange.hf.shards import Shards
from exchange.tokenizer import tokenizer_of
from megatron_fp4.parallel.mesh import ParallelMesh
from models.hybrid import HybridModel
from pretrain import CONFIGS
from tests.exchange.models import CASES, checkpoint_of, strong_model, tensors_of
from tests.models.builders import small_config, tokens_and_targets

FP32 = PlainEncoder(torch.float32)


def exported(tmp_path: Path, name: str, mesh: ParallelMesh, **options: object) -> tuple[HybridModel, Path]:
    model = strong_model(CASES[name], mesh)
    checkpoint = checkpoint_of(tmp_path / "checkpoint", CASES[name], tensors_of(model))
    settings: dict[str, object] = {"encoder": FP32, "tokenizer": None} | options
    export_hf(checkpoint, tmp_path / "hf", **settings)  # type: ignore[arg-type]
    return model, tmp_path / "hf"


def logits(folder: Path, tokens: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    with torch.no_grad():
        return model(tokens).logits


@pytest.mark.parametrize("name", CASES)
def test_transformers_has_our_logits(name: str, tmp_path: Path, mesh: ParallelMesh) -> None:
    model, folder = exported(tmp_path, name, mesh)
    tokens, _ = tokens_and_targets(CASES[name], batch=2, length=45)
    with torch.no_grad():
        ours = model(tokens)
    assert ours.abs().max() > 1
    assert (logits(folder, tokens) - ours).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["hybrid", "transformer"])
def test_bf16_is_no_further_from_fp64_than_transformers_own(name: str, tmp_path: Path, mesh: ParallelMesh) -> None:
    """Ours in BF16 against the folder in BF16, both against the folder's weights in FP64."""
    _, folder = exported(tmp_path, name, mesh, encoder=PlainEncoder(torch.bfloat16))
    import_hf(folder, tmp_path / "back", CONFIGS)
    ours = load_model(open_checkpoint(tmp_path / "back", CONFIGS), compute_dtype=torch.bfloat16)
    tokens, _ = tokens_and_targets(CASES[name], batch=4, length=45)
    exact = logits(folder, tokens, torch.float64)
    with torch.no_grad():
        error = (ours(tokens).double() - exact).norm() / exact.norm()
    theirs = (logits(folder, tokens, torch.bfloat16).double() - exact).norm() / exact.norm()
    assert 1e-4 < error < 1.1 * theirs, (error, theirs)


def test_step_sizes_are_not_clamped(tmp_path: Path, mesh: ParallelMesh) -> None:
    """With steps far below transformers' usual time_step_min, a clamp would move the logits; in BF16 nobody sees it."""
    config = CASES["mamba"]
    model = strong_model(config, mesh)
    tensors = tensors_of(model)
    for name, values in tensors.items():
        if name.endswith("dt_bias"):
            values.fill_(-9.0)  # softplus: 1.2e-4
        elif name.endswith("ssm.D"):
            values.zero_()  # nothing but the scan passes
    tokens, _ = tokens_and_targets(config, length=45)
    export_hf(checkpoint_of(tmp_path / "c", config, tensors), tmp_path / "hf", encoder=FP32, tokenizer=None)
    with torch.no_grad():
        ours = model(tokens)
    assert (logits(tmp_path / "hf", tokens) - ours).abs().max() < 1e-4
    written = json.loads((tmp_path / "hf/config.json").read_text())
    assert written["time_step_min"] == 0.0
    (tmp_path / "hf/config.json").write_text(json.dumps(written | {"time_step_min": 0.001}))
    assert (logits(tmp_path / "hf", tokens) - ours).abs().max() > 1e-3, "the test would not see a clamp"


@pytest.mark.parametrize(
    ("tensor", "what"),
    [
        ("backbone.layers.0.mixer.in_proj.weight", "the order of in_proj's rows"),
        ("backbone.layers.0.mixer.conv1d.weight", "the order of the convolution's channels"),
        ("backbone.layers.2.mixer.q_proj.weight", "the order of query heads"),
    ],
)
def test_a_wrong_order_of_rows_would_be_seen(tensor: str, what: str, tmp_path: Path, mesh: ParallelMesh) -> None:
    model, folder = exported(tmp_path, "hybrid", mesh)
    from safetensors.torch import load_file, save_file

    content = load_file(folder / "model.safetensors")
    rows = content[tensor].shape[0]
    content[tensor] = content[tensor].view(3 if rows % 3 == 0 else 2, -1, *content[tensor].shape[1:]).transpose(0, 1)
    content[tensor] = content[tensor].reshape(rows, *content[tensor].shape[2:]).contiguous()
    save_file(content, folder / "model.safetensors", metadata={"format": "pt"})
    tokens, _ = tokens_and_targets(CASES["hybrid"], length=30)
    with torch.no_grad():
        assert (logits(folder, tokens) - model(tokens)).abs().max() > 1e-2, what


def test_the_gated_norm_is_by_group(tmp_path: Path, mesh: ParallelMesh) -> None:
    _, folder = exported(tmp_path, "hybrid", mesh)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = CASES["hybrid"]
    assert model.model.layers[0].mixer.norm.group_size == config.mamba_inner_dim // config.mamba_num_groups


@pytest.mark.parametrize("name", CASES)
def test_what_comes_back_is_what_was_exported(name: str, tmp_path: Path, mesh: ParallelMesh) -> None:
    tokenizer = train_tokenizer(["some text " * 50, "and other text"], 280)
    given = tokenizer if name == "hybrid" else None
    model, folder = exported(tmp_path, name, mesh, tokenizer=given, shard_bytes=30_000)
    assert len(Shards(folder).files) > 1
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(values.nbytes for values in tensors_of(model).values())
    settings = import_hf(folder, tmp_path / "back", CONFIGS)
    back = open_checkpoint(tmp_path / "back", CONFIGS)
    assert all(torch.equal(back.tensor(n), values) for n, values in tensors_of(model).items())
    irrelevant = {"name", "nvfp4_bf16_blocks", "fp8_bf16_blocks"}
    for key, value in settings.items():
        assert key in irrelevant or getattr(CASES[name], key) == value, key
    export_again(back, tmp_path / "again")
    assert contents(tmp_path / "again") == contents(folder)


def test_an_import_is_written_into_its_folder_alone(tmp_path: Path, mesh: ParallelMesh) -> None:
    _, folder = exported(tmp_path, "mamba", mesh)
    import_hf(folder, tmp_path / "back", CONFIGS)
    back = open_checkpoint(tmp_path / "back", CONFIGS)
    shards = back.trainer["imported"]["shards"]
    for names in (dict(zip(["../elsewhere"], shards.values(), strict=True)), {"model.safetensors": ["lm_head.weight"]}):
        back.trainer["imported"]["shards"] = names
        with pytest.raises(ValueError, match="does not describe the folder it was imported from; add --dtype"):
            export_again(back, tmp_path / "again")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "checkpoint", "hf"]


@pytest.mark.parametrize("model_class", ["NemotronHForCausalLM", "ArceeForCausalLM"])
def test_a_folder_of_transformers_own_comes_back_byte_for_byte(
    model_class: str, tmp_path: Path, mesh: ParallelMesh
) -> None:
    """What others save: its own keys, `layers_block_type`, BF16 throughout, shards cut its way."""
    import transformers

    config = CASES["hybrid" if model_class.startswith("N") else "transformer"]
    made = architecture_of(config).to_hf(config)
    torch.manual_seed(1)
    made["time_step_min"] = 0.001  # with 0, its random weights cannot be drawn
    model_type = getattr(transformers, model_class)
    model = model_type(model_type.config_class(**made)).to(torch.bfloat16).eval()
    model.save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    import_hf(tmp_path / "hf", tmp_path / "c", CONFIGS)
    back = open_checkpoint(tmp_path / "c", CONFIGS)
    export_again(back, tmp_path / "again")
    assert contents(tmp_path / "again") == contents(tmp_path / "hf")
    ours = load_model(back)
    tokens, _ = tokens_and_targets(config, length=12)
    with torch.no_grad():
        assert (ours(tokens) - model.float()(tokens).logits).abs().max() < 2e-2  # its clamp of dt


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_an_import_is_checked_and_exported_in_another_type(tmp_path: Path, mesh: ParallelMesh) -> None:
    tokenizer = train_tokenizer(["def function(argument): return argument\n" * 20, "some prose, and more"], 290)
    _, folder = exported(tmp_path, "hybrid", mesh, tokenizer=tokenizer, encoder=PlainEncoder(torch.bfloat16))
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": "{{ messages }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    import_hf(folder, tmp_path / "back", CONFIGS)
    back = open_checkpoint(tmp_path / "back", CONFIGS)
    kept = tokenizer_of(back)
    export_again(back, tmp_path / "again")
    export_hf(back, tmp_path / "float32", encoder=FP32, tokenizer=kept)
    for name in ("again", "float32"):
        findings = list(check_folder(Folder(tmp_path / name), back, None, kept))
        assert json.loads((tmp_path / name / "config.json").read_text())["max_position_embeddings"] == 64
        assert len(findings) == 4 and not any(finding.problem for finding in findings), (name, findings)
        written = json.loads((tmp_path / name / "tokenizer_config.json").read_text())
        assert written == settings, "what came with the weights goes with them"
    card = (tmp_path / "float32/README.md").read_text()
    assert "imported by megatron_fp4" in card and "from hf.\n" in card and "made for | 64 tokens" in card, card
    tensors = load_file(tmp_path / "again/model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].float()
    save_file(tensors, tmp_path / "again/model.safetensors")
    assert any(finding.problem for finding in check_folder(Folder(tmp_path / "again"), back, None, None))


def test_a_number_that_float16_has_not_is_refused() -> None:
    section = Section("lm_head.weight", (2, 2))
    encoder, weight = PlainEncoder(torch.float16), torch.tensor([[1.0, -7e4], [2.0, 3.0]])
    with pytest.raises(ValueError, match=r"lm_head.weight has values up to 7e\+04, beyond float16"):
        encoder.tensors("head.weight", [section], weight)
    assert encoder.tensors("head.weight", [section], weight / 2)["lm_head.weight"][0, 1] == -35008


def test_losses_that_are_not_finite_are_said(tmp_path: Path) -> None:
    """metrics.jsonl has `null` for them."""
    records: list[dict[str, object]] = [
        {"kind": "validation", "step": step, "losses": {"code": loss, "prose": 2.5}, "bits_per_byte": {"code": loss}}
        for step, loss in ((2, 1.5), (4, None), (6, 3.5))
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)) + '\n{"kind": "vali')
    checkpoint = SimpleNamespace(folder=tmp_path / "checkpoints/step_00000004", step=4, weights_only=False)
    assert _losses(checkpoint)[-2:] == ["| code | not finite | not finite |", "| prose | 2.5000 |  |"]  # type: ignore[arg-type]


def test_rope_stands_where_older_readers_look() -> None:
    """transformers before 5.0 takes 10000 where there is no `rope_theta` beside the other keys."""
    config = architecture_of(CASES["transformer"]).to_hf(CASES["transformer"])
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 500.0


def test_the_tokenizer_encodes_as_in_training(tmp_path: Path, mesh: ParallelMesh) -> None:
    tokenizer = train_tokenizer(["def function(argument): return argument\n" * 20, "some prose, and more"], 290)
    _, folder = exported(tmp_path, "hybrid", mesh, tokenizer=tokenizer)
    theirs = AutoTokenizer.from_pretrained(folder)
    text = "def f(x):\n    return 'ü 你好' + x  \n"
    assert theirs(text, add_special_tokens=False)["input_ids"] == tokenizer.encode_batch([text])[0]
    assert theirs(text)["input_ids"] == tokenizer.encode_batch([text])[0], "nothing is put in front"
    assert theirs.decode(theirs(text)["input_ids"]) == text
    assert theirs.eos_token_id == tokenizer.eod_id == json.loads((folder / "config.json").read_text())["eos_token_id"]
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == tokenizer.eod_id


def test_generation_by_transformers_is_its_own_full_forward(tmp_path: Path, mesh: ParallelMesh) -> None:
    """With the cache, which decodes one token at a time without a clamp."""
    model, folder = exported(tmp_path, "hybrid", mesh)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens, _ = tokens_and_targets(CASES["hybrid"], batch=1, length=11)
    written = theirs.generate(tokens, max_new_tokens=12, do_sample=False, attention_mask=torch.ones_like(tokens))
    for _ in range(12):
        with torch.no_grad():
            tokens = torch.cat((tokens, model(tokens)[:, -1:].argmax(-1)), 1)
    assert written.tolist() == tokens.tolist()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pattern": "M*", "rope": True}, "model.rope=true, and its attention knows no positions"),
        ({"pattern": "*--", "rope": True}, r"its layers are attention and FFN in turn"),
        ({"pattern": "*-", "rope": True, "num_query_heads": 6, "hidden_dim": 32}, "is not a multiple of"),
    ],
)
def test_a_model_that_nothing_computes_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        architecture_of(small_config(**changes))


BAD_CONFIGS = [
    ({"model_type": "llama"}, "model_type=llama cannot be imported; arcee, nemotron_h can"),
    ({"hybrid_override_pattern": "M-E*"}, "'E' at position 2 is no block"),
    ({"hybrid_override_pattern": None}, "neither hybrid_override_pattern nor layers_block_type"),
    ({"layers_block_type": ["mamba", "moe"]}, "'E' at position 1 is no block"),
    ({"layers_block_type": ["mamba", "conv"]}, "layers_block_type has 'conv'"),
    ({"mlp_bias": True}, "mlp_bias=True, where only False"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings=True"),
    ({"mlp_hidden_act": "silu"}, "mlp_hidden_act=silu"),
    ({"time_step_limit": [0.001, 0.1]}, "does not clamp"),
    ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers=1"),
    ({"n_groups": 4}, "mamba_num_groups"),
    ({"hidden_size": "large"}, "hidden_dim"),
    ({"vocab_size": 301}, r"backbone.embeddings.weight is \[300, 32\], \[301, 32\] by its config.json"),
    ({"hybrid_override_pattern": "M-*-"}, "has a tensor backbone.layers.4"),
    ({"hybrid_override_pattern": "M-*-M-M"}, "has no tensor backbone.layers.6"),
    ({"quantization_config": {"quant_method": "fp8"}}, "has a quantization_config"),
]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory, mesh: ParallelMesh) -> Path:
    return exported(tmp_path_factory.mktemp("good"), "hybrid", mesh, shard_bytes=60_000)[1]


@pytest.mark.parametrize(("changes", "message"), BAD_CONFIGS)
def test_a_folder_that_is_no_model_of_ours_is_refused(changes: dict, message: str, good: Path, tmp_path: Path) -> None:
    for path in good.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message) as caught:
        import_hf(tmp_path, tmp_path / "c", CONFIGS)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("c*")) or not (tmp_path / "c").exists()


def test_missing_and_damaged_shards_are_named(good: Path, tmp_path: Path) -> None:
    def refusal() -> str:
        with pytest.raises(ValueError) as caught:
            import_hf(tmp_path, tmp_path / "c", CONFIGS)
        assert "\n" not in str(caught.value) and not (tmp_path / "c").exists()
        return str(caught.value)

    assert "config.json is missing" in refusal()
    for path in good.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    content = shard.read_bytes()
    shard.write_bytes(content[:-5])
    assert f"{shard.name} is not readable" in refusal()
    shard.unlink()
    assert f"{shard.name} is missing" in refusal()
    shard.write_bytes(sorted(good.glob("*.safetensors"))[0].read_bytes())
    assert "does not hold" in refusal()
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    assert "index.json is not readable" in refusal()


def test_nothing_is_overwritten_and_nothing_half_written(tmp_path: Path, mesh: ParallelMesh) -> None:
    _, folder = exported(tmp_path, "mamba", mesh)
    checkpoint = open_checkpoint(tmp_path / "checkpoint", CONFIGS)
    with pytest.raises(ValueError, match="exists already"):
        export_hf(checkpoint, folder, encoder=FP32, tokenizer=None)
    with pytest.raises(ValueError, match="lies inside the checkpoint"):
        export_hf(checkpoint, checkpoint.folder / "hf", encoder=FP32, tokenizer=None)

    class Full(PlainEncoder):
        def tensors(self, name: str, *rest: object) -> dict[str, Tensor]:
            if name == "head.weight":
                raise OSError("No space left on device")
            return super().tensors(name, *rest)  # type: ignore[arg-type]

    with pytest.raises(OSError, match="No space"):
        export_hf(checkpoint, tmp_path / "new", encoder=Full(torch.float32), tokenizer=None, shard_bytes=1000)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "hf"]
