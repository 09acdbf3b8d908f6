"""Exported folders in transformers: the same logits and greedy texts, and none of the known traps."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM

from data.tokenizer import train_tokenizer
from exchange.architectures import architecture_of, sections_of, to_hf
from exchange.check import FolderCheck
from exchange.checkpoint import Checkpoint, load_model, open_checkpoint
from exchange.hf_export import export_hf
from exchange.hf_import import Folder, import_hf
from exchange.tokenizer import tokenizer_of
from inference.generation import Request, Settings, generate
from megatron_fp4.config.schema import ModelConfig
from megatron_fp4.parallel.mesh import ParallelMesh
from models.hybrid import HybridModel
from models.published import from_published
from pretrain import CONFIGS
from tests.exchange.models import CASES, checkpoint_of, strong_model, tensors_of
from tests.models.builders import local, relative_error, small_config, tokens_and_targets

FP32 = torch.float32
TEXTS = ["def function(argument): return argument\n" * 20, "some prose, and more"]


def exported(tmp_path: Path, name: str, mesh: ParallelMesh, **options: object) -> tuple[HybridModel, Path]:
    model = strong_model(CASES[name], mesh, seed=5)  # a seed with few repetitions in the greedy texts
    checkpoint = checkpoint_of(tmp_path / "checkpoint", CASES[name], tensors_of(model))
    settings: dict[str, object] = {"dtype": FP32} | options
    export_hf(checkpoint, tmp_path / "hf", **settings)  # type: ignore[arg-type]
    return model, tmp_path / "hf"


def imported(folder: Path, checkpoint: Path) -> Checkpoint:
    import_hf(folder, checkpoint, CONFIGS)
    return open_checkpoint(checkpoint, CONFIGS)


def logits(folder: Path, tokens: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    with torch.no_grad():
        return model(tokens).logits


def assert_same_gradients(model: HybridModel, theirs: Any, config: ModelConfig, tokens: Tensor) -> None:
    """Gradients of all parameters, for the same gradient of the logits. In memory, experts are 3-D in transformers."""
    for computed in (model(tokens), theirs(tokens).logits):
        (computed.sin().sum() / computed.numel()).backward()
    published = dict[str, Tensor]()
    for key, parameter in theirs.named_parameters():
        on_disk = key.replace("model.", "backbone.", 1) if architecture_of(config) == "nemotron_h" else key
        block, experts, projection = on_disk.partition(".experts.")
        if experts:
            for number, gradient in enumerate(parameter.grad):
                published[f"{block}.experts.{number}.{projection}.weight"] = gradient
        else:
            published[on_disk] = parameter.grad
    sections = sections_of(config)
    for name, parameter in model.named_parameters():
        assert relative_error(local(parameter.grad), from_published(sections[name], published)) < 2e-4, name


@pytest.mark.parametrize("name", CASES)
def test_transformers_computes_the_same_and_an_import_returns_the_exported_weights(
    name: str, tmp_path: Path, mesh: ParallelMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exchange.hf_export.SHARD_BYTES", 30_000)
    monkeypatch.setattr("exchange.weights_only.FILE_BYTES", 4096)
    tokenizer = train_tokenizer(TEXTS, 280) if name == "hybrid" else None
    model, folder = exported(tmp_path, name, mesh, tokenizer=tokenizer)
    tokens, _ = tokens_and_targets(CASES[name], batch=2, length=45)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=FP32)
    with torch.no_grad():
        ours = model(tokens)
        assert ours.abs().max() > 1 and (theirs(tokens).logits - ours).abs().max() < 1e-4
    assert_same_gradients(model, theirs, CASES[name], tokens)
    for prompt in (tokens[:1, :1], tokens[:1, :40]):
        mask, new = torch.ones_like(prompt), {"max_new_tokens": 24, "min_new_tokens": 24, "do_sample": False}
        (found,) = generate(model, [Request(prompt[0].tolist())], Settings(24))
        assert found.tokens == theirs.generate(prompt, attention_mask=mask, **new)[0, prompt.shape[1] :].tolist()
        assert len(set(found.tokens)) > 1

    assert len(list(folder.glob("model-*.safetensors"))) > 1
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(values.nbytes for values in tensors_of(model).values())
    settings = import_hf(folder, tmp_path / "back", CONFIGS)
    back = open_checkpoint(tmp_path / "back", CONFIGS)
    assert back.weights_only and back.step == 0 and len(list(back.folder.glob("*.distcp"))) > 5
    assert all(torch.equal(back.tensor(n), values) for n, values in tensors_of(model).items())
    assert all(getattr(CASES[name], key) == value for key, value in settings.items() if key != "name")
    # Exporting the import gives the same folder: tokenizer and sequence length are kept; the check finds nothing.
    kept = tokenizer_of(back)
    export_hf(back, tmp_path / "again", dtype=FP32, tokenizer=kept)
    findings = list(FolderCheck(Folder(tmp_path / "again"), back, None, kept).findings())
    assert len(findings) == 3 + (kept is not None) and not any(finding.problems for finding in findings), findings
    assert (tmp_path / "again/config.json").read_bytes() == (folder / "config.json").read_bytes()


def test_our_bf16_is_as_close_to_fp64_as_that_of_transformers(tmp_path: Path, mesh: ParallelMesh) -> None:
    """The same folder is computed in BF16 here and in transformers, and in FP64."""
    _, folder = exported(tmp_path, "hybrid", mesh, dtype=torch.bfloat16)
    ours = load_model(imported(folder, tmp_path / "back"), compute_dtype=torch.bfloat16)
    tokens, _ = tokens_and_targets(CASES["hybrid"], batch=4, length=45)
    exact = logits(folder, tokens, torch.float64)
    with torch.no_grad():
        error = (ours(tokens).double() - exact).norm() / exact.norm()
    theirs = (logits(folder, tokens, torch.bfloat16).double() - exact).norm() / exact.norm()
    assert 1e-4 < error < 1.1 * theirs, (error, theirs)


@pytest.mark.parametrize("model_class", ["NemotronHForCausalLM", "ArceeForCausalLM", "LlamaForCausalLM"])
def test_a_folder_written_by_transformers_can_be_imported(model_class: str, tmp_path: Path, mesh: ParallelMesh) -> None:
    """Such folders have other keys, `layers_block_type`, BF16 throughout and other shards."""
    config = CASES[{"N": "hybrid", "A": "transformer", "L": "llama"}[model_class[0]]]
    torch.manual_seed(1)
    model_type = getattr(transformers, model_class)
    model = model_type(model_type.config_class(**to_hf(config))).to(torch.bfloat16).eval()
    model.save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    back = imported(tmp_path / "hf", tmp_path / "c")
    export_hf(back, tmp_path / "again", dtype=torch.bfloat16)
    theirs, again = Folder(tmp_path / "hf"), Folder(tmp_path / "again")
    assert theirs.names == again.names
    assert all(torch.equal(theirs.tensor(name).float(), again.tensor(name).float()) for name in theirs.names)
    tokens, _ = tokens_and_targets(config, length=12)
    with torch.no_grad():
        assert (load_model(back)(tokens) - model.float()(tokens).logits).abs().max() < 2e-2  # transformers clamps dt


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory, mesh: ParallelMesh) -> Path:
    return exported(tmp_path_factory.mktemp("good"), "hybrid", mesh)[1]


def changed(good: Path, folder: Path, changes: dict) -> None:
    """Copy the valid folder and change its configuration. A value of None removes the key."""
    for path in good.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text()) | changes
    kept = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))


def test_transformers_ignores_multi_token_prediction_and_an_import_reads_it(tmp_path: Path, mesh: ParallelMesh) -> None:
    """Its tensors have the names of published models, of which each layer is one block."""
    config = replace(CASES["experts"], pattern="ME*E/*E/*E")
    model = strong_model(config, mesh)
    checkpoint = checkpoint_of(tmp_path / "checkpoint", config, tensors_of(model))
    export_hf(checkpoint, tmp_path / "out", dtype=FP32)
    names = {name for name in Folder(tmp_path / "out").names if name.startswith("mtp.") and ".mixer." not in name}
    around = {"0.enorm", "0.hnorm", "0.eh_proj", "0.norm", "1.norm", "1.final_layernorm"}
    around |= {"2.enorm", "2.hnorm", "2.eh_proj", "2.norm", "3.norm", "3.final_layernorm"}
    assert names == {f"mtp.layers.{name}.weight" for name in around}
    tokens, _ = tokens_and_targets(config)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=FP32)
    with torch.no_grad():
        assert (theirs(tokens).logits - model(tokens)).abs().max() < 1e-4
    settings = import_hf(tmp_path / "out", tmp_path / "back", CONFIGS)
    back = open_checkpoint(tmp_path / "back", CONFIGS)
    assert settings["pattern"] == config.pattern and {*back.tensors} == {*tensors_of(model)}
    assert all(torch.equal(back.tensor(name), values) for name, values in tensors_of(model).items())


def test_keys_of_published_configurations_are_written_and_read(good: Path, tmp_path: Path) -> None:
    """Inference engines find the keys that they read; an import accepts these instead of transformers' own. Token ids
    of a folder without a tokenizer are kept."""
    config, model = json.loads((good / "config.json").read_text()), CASES["hybrid"]
    wanted = {"rms_norm_eps": model.norm_eps, "attention_head_dim": model.head_dim, "mamba_ssm_cache_dtype": "float32"}
    assert {key: config[key] for key in wanted} == wanted
    assert config["bos_token_id"] is config["eos_token_id"] is None
    ids = {"bos_token_id": 1, "eos_token_id": [2, 11]}
    changed(good, tmp_path, {"head_dim": None, "layer_norm_epsilon": None, **ids})
    back = imported(tmp_path, tmp_path / "back")
    assert (back.config.model.head_dim, back.config.model.norm_eps) == (model.head_dim, model.norm_eps)
    export_hf(back, tmp_path / "out")
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert (written["bos_token_id"], written["eos_token_id"], written["pad_token_id"]) == (1, [2, 11], None)
    assert json.loads((tmp_path / "out/generation_config.json").read_text())["eos_token_id"] == [2, 11]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pattern": "M*", "rope": True}, "model.rope=true, but nemotron_h attends without positions"),
        ({"pattern": "*-", "rope": True, "num_query_heads": 6, "hidden_dim": 32}, "to be a multiple of"),
        ({"pattern": "*G"}, "nemotron_h has no gated FFN blocks, and llama none without positions"),
        ({"pattern": "M*-/*G"}, "nemotron_h has no gated FFN blocks, and llama none in model.pattern=M"),
    ],
)
def test_a_model_that_no_architecture_computes_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        architecture_of(small_config(**changes))


BAD_CONFIGS = [
    ({"model_type": "gemma"}, "model_type=gemma cannot be imported; arcee, llama, nemotron_h can"),
    ({"hybrid_override_pattern": "M-X*"}, "'X' at position 2 is no block"),
    ({"hybrid_override_pattern": None}, "neither hybrid_override_pattern nor layers_block_type"),
    ({"mlp_bias": True}, "mlp_bias=True, but only False"),
    ({"time_step_limit": [0.001, 0.1]}, "does not clamp"),
    ({"hidden_size": "large"}, "hidden_dim"),
    ({"vocab_size": 301}, r"backbone.embeddings.weight is \[300, 32\], \[301, 32\] by its config.json"),
    ({"hybrid_override_pattern": "M-*-"}, "has a tensor backbone.layers.4"),
    ({"hybrid_override_pattern": "M-*-M-M"}, "has no tensor backbone.layers.6"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quant_method is 'fp8', not one of"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_CONFIGS)
def test_a_folder_with_an_unsupported_model_is_refused(changes: dict, message: str, good: Path, tmp_path: Path) -> None:
    changed(good, tmp_path, changes)
    with pytest.raises(ValueError, match=message) as caught:
        import_hf(tmp_path, tmp_path / "c", CONFIGS)
    assert "\n" not in str(caught.value)
