"""Megatron-core's checkpoints, without megatron-core: compared with listings of its keys, with torch's own reader and
with orders of rows by hand; folders of other writers; damaged ones; and that no code in them is run."""

import argparse
import functools
import json
import pickle
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from data.tokenizer import train_tokenizer
from exchange import weights_only
from exchange.checkpoint import Checkpoint, open_checkpoint
from exchange.hf_export import sequence_length
from exchange.megatron import MegatronFolder, export_megatron, import_megatron
from exchange.megatron_model import arguments_of, as_shell, extra_states, parameters
from exchange.tokenizer import tokenizer_of
from megatron_fp4.checkpoint.files import DamagedCheckpointError
from megatron_fp4.checkpoint.shards import METADATA, read_metadata
from megatron_fp4.config.schema import ModelConfig
from models.published import shape_of
from pretrain import CONFIGS
from scripts import convert
from tests.checkpoint.test_saves import Command
from tests.exchange.models import checkpoint_of

# All sizes differ, so that a wrong axis is noticed.
SIZES = ModelConfig(
    vocab_size=300, hidden_dim=64, ffn_dim=96, num_query_heads=4, num_kv_heads=2, head_dim=24, mamba_num_heads=8,
    mamba_head_dim=16, mamba_num_groups=2, mamba_state_dim=40, mamba_chunk_size=16, moe_num_experts=4, moe_top_k=3,
    moe_ffn_dim=48, moe_shared_ffn_dim=32, moe_weight="before_down",
)  # fmt: skip
CASES = {
    "hybrid": replace(SIZES, pattern="M-*-M-"),
    "hybrid with RoPE": replace(SIZES, pattern="*MM-", rope=True, rope_base=5000.0),
    "transformer": replace(SIZES, pattern="*-*-", rope=True),
    "gated": replace(SIZES, pattern="*G*G", rope=True),
    "gated hybrid": replace(SIZES, pattern="M*G"),
    "experts": replace(SIZES, pattern="ME/*E/*E", moe_latent_dim=16, moe_scaling=2.5, moe_z_loss=0.1),
    "gated experts": replace(SIZES, pattern="*E", moe_activation="swiglu"),
    "one set of weights": replace(
        SIZES, pattern="E/*/*", mtp_use_repeated_layer=True, mtp_loss_scaling_factor=0.3, moe_num_groups=2, moe_top_k=2,
        moe_group_score="top_share",
    ),
}  # fmt: skip
ITERATION = "iter_0000000"
FP32 = ("A_log", ".D", "dt_bias", "router.weight", "expert_bias")
Change = Callable[[dict[str, Tensor], dict[str, Any]], Any]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    generator, found = torch.Generator().manual_seed(0), {}
    for case, config in CASES.items():
        shapes = {each.name: shape_of(each.sections) for each in parameters(config)}
        tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        found[case] = checkpoint_of(tmp_path_factory.mktemp("ours") / "checkpoint", config, tensors)
    return found


def read_by_torch(folder: Path) -> dict[str, Tensor]:
    """All tensors of a Megatron folder, read by torch.distributed.checkpoint."""
    reader = dcp.FileSystemReader(folder)
    state = {
        key: torch.empty(saved.size, dtype=saved.properties.dtype)
        for key, saved in reader.read_metadata().state_dict_metadata.items()
        if isinstance(saved, TensorStorageMetadata)
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def test_keys_are_those_that_megatron_saves() -> None:
    """megatron_golden.json lists keys and shapes that megatron-core 0.16.1 saves, from its own models; with experts
    0.19.0."""
    for name, each in json.loads((Path(__file__).parent / "megatron_golden.json").read_text()).items():
        config = CASES[each["case"]]
        layers = "numbered" if each["numbered"] else "stacked"
        shapes = {s.name: list(p.stored_shape(s)) for p in parameters(config, layers) for s in p.sections}
        theirs = {key: shape for key, shape in each["keys"].items() if shape is not None}
        assert shapes == theirs, name
        objects = {key for key, shape in each["keys"].items() if shape is None}
        ours = set(extra_states(config, layers))
        # Megatron's GPTModel has no such state for the head, and its own norms have none.
        assert objects <= ours, name
        assert all("norm._" in key or key.startswith("output_layer") for key in ours - objects), name


def test_exported_rows_are_in_megatrons_order(checkpoints: dict[str, Checkpoint], tmp_path: Path) -> None:
    ours = checkpoints["hybrid"].tensor
    export_megatron(checkpoints["hybrid"], tmp_path / "out", dtype=torch.float32)
    theirs = read_by_torch(tmp_path / "out" / ITERATION)
    # 2 groups of 4 heads of dimension 16, state dimension 40: rows of a group's z, x, B, C, dt.
    for name, published, sizes in (
        ("in_proj.weight", "in_proj.weight", {"z": 64, "x": 64, "B": 40, "C": 40, "dt": 4}),
        ("conv.weight", "conv1d.weight", {"x": 64, "B": 40, "C": 40}),
        ("conv.bias", "conv1d.bias", {"x": 64, "B": 40, "C": 40}),
    ):
        groups = ours(f"blocks.0.mixer.{name}").unflatten(0, (2, -1)).split(list(sizes.values()), 1)
        for section, part in zip(sizes, groups, strict=True):
            found = theirs[f"decoder.layers.0.mixer.{published}.{section}"]
            assert torch.equal(found.squeeze(1) if found.dim() == 3 else found, part.flatten(0, 1)), (name, section)
    qkv = theirs["decoder.layers.2.self_attention.linear_qkv.weight"]
    assert torch.equal(qkv, ours("blocks.2.mixer.qkv_proj.weight"))
    export_megatron(checkpoints["gated hybrid"], tmp_path / "gated", dtype=torch.float32)
    gate_and_up = read_by_torch(tmp_path / "gated" / ITERATION)["decoder.layers.2.mlp.linear_fc1.weight"]
    packed = checkpoints["gated hybrid"].tensor("blocks.2.mixer.gate_up_proj.weight").unflatten(0, (6, 2, 16))
    assert torch.equal(gate_and_up, packed.transpose(0, 1).flatten(0, 2))
    export_megatron(checkpoints["gated experts"], tmp_path / "experts", dtype=torch.float32)
    gates_and_ups = read_by_torch(tmp_path / "experts" / ITERATION)[
        "decoder.layers.1.mlp.experts.experts.linear_fc1.weight"
    ]
    packed = checkpoints["gated experts"].tensor("blocks.1.mixer.experts_up.weight").unflatten(1, (3, 2, 16))
    assert torch.equal(gates_and_ups, packed.transpose(1, 2).flatten(1, 3))
    assert torch.equal(theirs["decoder.layers.4.mixer.A_log"], ours("blocks.4.mixer.ssm.A_log"))


@pytest.mark.parametrize(("case", "dtype"), [*((case, torch.float32) for case in CASES), ("experts", torch.bfloat16)])
def test_an_export_imported_again_has_the_same_weights_and_settings(
    case: str, dtype: torch.dtype, checkpoints: dict[str, Checkpoint], tmp_path: Path, monkeypatch: Any
) -> None:
    """FP32 exports keep the masters, BF16 exports the BF16 weights. No override is needed for the settings."""
    monkeypatch.setattr(weights_only, "FILE_BYTES", 50_000)
    checkpoint = checkpoints[case]
    assert arguments_of(checkpoint.config.model, 64, bf16=True)["swiglu"] == ("gated" in case)
    export_megatron(checkpoint, tmp_path / "theirs", dtype=dtype)
    assert len(list((tmp_path / "theirs" / ITERATION).glob("*.distcp"))) > 2
    stored = read_by_torch(tmp_path / "theirs" / ITERATION)
    assert {v.dtype for k, v in stored.items() if k.endswith(FP32)} <= {torch.float32}
    settings = import_megatron(tmp_path / "theirs", tmp_path / "back", CONFIGS)
    back = open_checkpoint(tmp_path / "back", CONFIGS)
    assert back.weights_only and settings["name"] == "theirs"
    for name in checkpoint.tensors:
        ours = checkpoint.tensor(name)
        whole = ".ssm." in name or ".router." in name
        assert torch.equal(back.tensor(name), ours if whole else ours.to(dtype).float()), name
    for key in settings.keys() - {"name", "mamba_chunk_size"}:
        assert getattr(back.config.model, key) == getattr(checkpoint.config.model, key), key
    rows = MegatronFolder(tmp_path / "theirs").tensor("output_layer.weight", (7, checkpoint.config.model.hidden_dim))
    assert torch.equal(rows, checkpoint.tensor("head.weight")[:7].to(dtype).float())


def test_what_only_megatron_has_is_refused_with_its_command(checkpoints: Any, tmp_path: Path, capsys: Any) -> None:
    assert convert.main(["export-hf", str(checkpoints["gated experts"].folder), str(tmp_path / "hf")]) == 2
    assert "nemotron_h has only squared_relu; use export-megatron" in capsys.readouterr().err


def test_flags_survive_a_shell(tmp_path: Path) -> None:
    (tmp_path / "M-x-M-").touch()  # an unquoted pattern would become this name
    (tmp_path / "args.sh").write_text(as_shell(arguments_of(CASES["hybrid"], 64, bf16=True)))
    command = 'source args.sh; printf "%s\\n" "${MEGATRON_ARGS[@]}"'
    words = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    flags = words.splitlines()
    assert flags[flags.index("--hybrid-override-pattern") + 1] == "M-*-M-"
    assert flags[flags.index("--num-layers") + 1] == "6" and "--squared-relu" in flags and "--bf16" in flags
    assert flags[flags.index("--make-vocab-size-divisible-by") + 1] == "4"  # 300 rows
    assert not {"--swiglu", "--layernorm-epsilon", "--add-bias-linear"} & {*flags}


def test_models_that_megatron_does_not_support_are_refused() -> None:
    for case, key, value in (
        ("hybrid", "norm_eps", 1e-6),
        ("hybrid", "mamba_conv_width", 3),
        ("transformer", "rope_base", 500.5),
        ("experts", "moe_score", "softmax"),
    ):
        with pytest.raises(ValueError, match=f"model.{key}={value}: Megatron"):
            arguments_of(replace(CASES[case], **{key: value}), 64, bf16=True)


@pytest.fixture(scope="module")
def theirs(checkpoints: dict[str, Checkpoint], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a folder as Megatron does, with tensors of an optimizer and other objects beside the model's."""

    @functools.cache
    def exported(case: str) -> dict[str, Tensor]:
        export_megatron(checkpoints[case], folder := tmp_path_factory.mktemp("theirs") / "out", dtype=torch.float32)
        return read_by_torch(folder / ITERATION)

    def write(folder: Path, case: str, change: Change, common_is_file: bool = True) -> Path:
        tensors, arguments = {**exported(case)}, arguments_of(checkpoints[case].config.model, 64, bf16=False)
        change(tensors, arguments)
        optimizer = {f"optimizer.state.exp_avg.{key}": values for key, values in tensors.items()}
        state = {**tensors, **optimizer, "rng_state/shard_0.0_1.1": argparse.Namespace(seed=1)}
        common = {"args": argparse.Namespace(**arguments), "iteration": 30} if arguments else {"iteration": 30}
        state |= {} if common_is_file else {"common_state/shard_0_1": [common]}
        writer, planner = dcp.FileSystemWriter(folder), dcp.DefaultSavePlanner(flatten_state_dict=False)
        dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)
        if common_is_file:
            torch.save(common, folder / "common.pt")
        (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
        return folder

    return write


def add(key: str, *shape: int) -> Change:
    return lambda tensors, _: tensors.update({key: torch.zeros(shape)})


def argument(**changes: Any) -> Change:
    return lambda _, arguments: arguments.update(changes)


def with_cross_attention(tensors: dict[str, Tensor], _: dict[str, Any]) -> None:
    for key in [key for key in tensors if key.startswith("decoder.layers.1.mlp")]:
        tensors[key.replace("mlp", "cross_attention")] = tensors.pop(key)


def as_gpt_with_experts(tensors: dict[str, Tensor], arguments: dict[str, Any]) -> None:
    tensors["decoder.final_layernorm.weight"] = tensors.pop("decoder.final_norm.weight")
    arguments["num_experts"] = 4


def test_numbered_layers_are_read(checkpoints: dict[str, Checkpoint], theirs: Any, tmp_path: Path) -> None:
    """Megatron numbers them with non_homogeneous_layers. From 0.19 on it saves its arguments beside the tensors."""
    ours = checkpoints["transformer"].tensor

    def unstack(tensors: dict[str, Tensor], _: dict[str, Any]) -> None:
        up = torch.stack([ours(f"blocks.{block}.mixer.up_proj.weight") for block in (1, 3)])
        assert torch.equal(tensors["decoder.layers.mlp.linear_fc1.weight"], up)
        for key in [key for key in tensors if key.startswith("decoder.layers.")]:
            for layer, values in enumerate(tensors.pop(key)):
                tensors[key.replace("layers.", f"layers.{layer}.")] = values

    import_megatron(theirs(tmp_path / "theirs", "transformer", unstack, False), tmp_path / "back", CONFIGS)
    back = open_checkpoint(tmp_path / "back", CONFIGS)
    assert all(torch.equal(back.tensor(name), ours(name)) for name in back.tensors)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors, _: tensors.pop("output_layer.weight"), "untie-embeddings-and-output-weights"),
        (lambda tensors, _: tensors.pop("decoder.layers.4.mixer.D"), r"4.mixer.D is missing, but \[8\] in"),
        (add("decoder.layers.1.mlp.linear_fc1.bias", 96), r"linear_fc1.bias is \[96\], but missing in"),
        (add("decoder.layers.1.mlp.linear_fc1.weight", 97, 64), r"is \[97, 64\], but \[96, 64\]"),
        (with_cross_attention, "layer 1 has cross_attention"),
        (argument(squared_relu=False), "squared_relu=False, swiglu=False; models here support only one of them"),
        (as_gpt_with_experts, "num_experts=4 can be imported from a MambaModel, not from a GPTModel"),
        (argument(swiglu=True), r"linear_fc1.weight is \[96, 64\], but \[192, 64\]"),
        (argument(num_attention_heads="4"), "num_attention_heads='4' is not a positive number"),
        (argument(mamba_num_groups="2"), "the shapes of its tensors do not fit a model"),
        (add("decoder.layers.0.mixer.A_log", 0), "do not fit a model"),
        (lambda tensors, arguments: arguments.clear(), "add model.norm_eps=... model.mamba_num_groups=... model.num_q"),
        (lambda tensors, _: tensors.update({"output_layer.weight": torch.zeros(300, 64).long()}), "torch.int64; FP32"),
    ],
)
def test_unsupported_models_are_refused(change: Change, words: str, theirs: Any, tmp_path: Path) -> None:
    folder = theirs(tmp_path / "theirs", "hybrid", change)
    with pytest.raises(ValueError, match=words) as raised:
        import_megatron(folder, tmp_path / "back", CONFIGS)
    assert "\n" not in str(raised.value)
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_damaged_folders_are_refused(checkpoints: dict[str, Checkpoint], tmp_path: Path) -> None:
    for number, (name, content, words) in enumerate(
        (
            ("latest_checkpointed_iteration.txt", b"7", "iter_0000007 is missing; give another iter_"),
            (f"{ITERATION}/metadata.json", b'{"sharded_backend": "zarr"}', "metadata.json has the format zarr; save"),
            (f"{ITERATION}/.metadata", b"x", ".metadata is not readable"),
            (f"{ITERATION}/common.pt", b"x", "common.pt is not readable"),
            (f"{ITERATION}/__0_0.distcp", b"x", "embedding.word_embeddings.weight is not readable"),
        )
    ):
        export_megatron(checkpoints["hybrid"], tmp_path / f"{number}")
        (tmp_path / f"{number}" / name).write_bytes(content)
        with pytest.raises(ValueError, match=words) as raised:
            import_megatron(tmp_path / f"{number}", tmp_path / "back", CONFIGS)
        assert "\n" not in str(raised.value) and not (tmp_path / "back").exists()


def test_overrides_replace_missing_arguments(checkpoints: dict[str, Checkpoint], theirs: Any, tmp_path: Path) -> None:
    folder = theirs(tmp_path / "theirs", "hybrid", lambda tensors, arguments: arguments.clear())
    model_settings = {"norm_eps": 1e-5, "num_query_heads": 4, "num_kv_heads": 2, "head_dim": 24, "rope": False}
    overrides = [f"model.{key}={value}" for key, value in {**model_settings, "mamba_num_groups": 2}.items()]
    import_megatron(folder, tmp_path / "one", CONFIGS, overrides=overrides)
    back, ours = open_checkpoint(tmp_path / "one", CONFIGS), checkpoints["hybrid"].tensor
    assert all(getattr(back.config.model, key) == value for key, value in model_settings.items())
    assert all(torch.equal(back.tensor(name), ours(name)) for name in back.tensors)
    with pytest.raises(ValueError, match=r"give model.key=value"):
        import_megatron(folder, tmp_path / "two", CONFIGS, overrides=["train.steps=3"])


def test_padded_vocabularies_are_cut_and_the_sequence_length_is_kept(
    checkpoints: dict[str, Checkpoint], theirs: Any, tmp_path: Path
) -> None:
    def pad(tensors: dict[str, Tensor], arguments: dict[str, Any]) -> None:
        arguments["max_position_embeddings"] = 8191
        for key in ("embedding.word_embeddings.weight", "output_layer.weight"):
            tensors[key] = torch.cat([tensors[key], torch.ones(84, 64)])

    checkpoint = checkpoints["transformer"]
    folder = theirs(tmp_path / "theirs", "transformer", pad)
    assert import_megatron(folder, tmp_path / "all", CONFIGS)["vocab_size"] == 384
    import_megatron(folder, tmp_path / "cut", CONFIGS, overrides=["model.vocab_size=300"])
    back = open_checkpoint(tmp_path / "cut", CONFIGS)
    assert torch.equal(back.tensor("head.weight"), checkpoint.tensor("head.weight"))
    assert sequence_length(back) == 8191
    with pytest.raises(ValueError, match=r"word_embeddings.weight is \[384, 64\], but \[400, 64\]"):
        import_megatron(folder, tmp_path / "more", CONFIGS, overrides=["model.vocab_size=400"])


def test_tokenizers_are_exported_and_imported(checkpoints: dict[str, Checkpoint], theirs: Any, tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["some words, and some more words"] * 20, 290)
    export_megatron(checkpoints["transformer"], tmp_path / "out", tokenizer=tokenizer)
    bare = theirs(tmp_path / "theirs", "transformer", lambda tensors, arguments: None)
    given = tmp_path / "out" / "tokenizer" / "tokenizer.json"
    for source, option in ((tmp_path / "out" / ITERATION, None), (bare, None), (bare, given)):
        name = f"{source.name}_{option is None}"
        import_megatron(source, tmp_path / name, CONFIGS, tokenizer=option)
        found = tokenizer_of(open_checkpoint(tmp_path / name, CONFIGS))
        wanted = None if source == bare and option is None else tokenizer.fingerprint()
        assert (found and found.fingerprint()) == wanted
    with pytest.raises(ValueError, match="has neither tokenizer"):
        import_megatron(bare, tmp_path / "two", CONFIGS, tokenizer=tmp_path / "theirs")


class _Theirs(dict):
    """Stands for a class that the importing process does not have; its pickle fills it like a dictionary."""


def test_an_import_runs_no_pickled_code(checkpoints: dict[str, Checkpoint], tmp_path: Path) -> None:
    """Unknown objects are left out."""
    export_megatron(checkpoints["hybrid"], tmp_path / "theirs")
    iteration, trace = tmp_path / "theirs" / ITERATION, tmp_path / "ran"
    command = Command(f"mkdir {trace}")
    common = torch.load(iteration / "common.pt", weights_only=False)
    torch.save({**common, "rerun": command, "more": _Theirs(a=command)}, iteration / "common.pt")
    metadata: Metadata = pickle.loads((iteration / METADATA).read_bytes())
    metadata.mcore_data = {"a": _Theirs(b=1), "c": [command]}
    (iteration / METADATA).write_bytes(pickle.dumps(metadata))
    import_megatron(tmp_path / "theirs", tmp_path / "back", CONFIGS)
    assert not trace.exists()
    with pytest.raises(DamagedCheckpointError, match="which no checkpoint holds"):
        read_metadata((iteration / METADATA).read_bytes())
    pickle.loads((iteration / METADATA).read_bytes())  # shows that the file is dangerous
    assert trace.exists()
