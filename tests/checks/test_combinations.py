import sys
from dataclasses import replace

import pytest

from assembly import check as validate
from data.kinds import KINDS
from megatron_fp4.checks.precision import validate_precision
from megatron_fp4.config.data_schema import PhaseConfig
from tests.checks.composed import DATA, changed, composed, refusal


@pytest.mark.parametrize("precision", ["bf16", "nvfp4", "mxfp4", "mxfp8", "fp8_block", "nvfp4_all_the_way"])
@pytest.mark.parametrize("model", ["tiny", "hybrid_60m", "transformer_60m"])
def test_every_small_model_goes_with_every_recipe(model, precision):
    config = composed(f"model={model}", f"precision={precision}")
    for world_size in (1, 2, 4):
        validate(changed(config, {"train.micro_batch_size": 8 // world_size}), world_size, "cpu")
    validate(changed(config, {"parallel.tensor": 2}), 4, "cuda")
    if config.after_switch is not None:
        validate_precision(config.after_switch, config, "cpu", key="target")


@pytest.mark.parametrize(
    ("experiment", "world_size", "tensor"),
    [("transformer_1_2b", 64, 8), ("nemotron_h_8b", 256, 4), ("nemotron_h_12b", 32, 8), ("nemotron_h_12b", 736, 1)],
)
def test_the_papers_runs_are_possible(experiment, world_size, tensor):
    for precision in ("nvfp4", "fp8_block", "mxfp4", "mxfp8", "bf16"):
        config = composed(f"experiment={experiment}", f"precision={precision}", *DATA)
        validate(changed(config, {"parallel.tensor": tensor}), world_size, "cuda")


def test_qaf_is_possible():
    validate(composed("experiment=qaf"), 1, "cpu")


MODEL = [
    ({"model.pattern": ""}, "model.pattern is empty", "M (Mamba-2)"),
    ({"model.pattern": "M-xM"}, "model.pattern=M-xM: 'x' at position 2", "- (FFN)"),
    ({"model.pattern": "M- M"}, "' ' at position 2", "without spaces"),
    ({"model.num_kv_heads": 3}, "model.num_query_heads=8", "KV heads that work: 1, 2, 4, 8"),
    ({"model.mamba_num_groups": 3}, "model.mamba_num_groups=3", "groups that work: 1, 2, 4, 8"),
    ({"model.rope": True, "model.head_dim": 33}, "model.head_dim=33", "use 34"),
    ({"model.ffn_dim": 1000}, "model.ffn_dim=1000", "992 or 1008"),
]
SCHEDULE = [
    ({"schedule.decay_fraction": 0.99}, "schedule.decay_fraction 0.99", "must not exceed 1"),
    ({"schedule.decay": "exponential", "schedule.min_lr_ratio": 0.0}, "schedule.decay=exponential", "above 0"),
    ({"schedule.decay_fraction": 0.0}, "precision.switch.when=before_decay", "give a fraction above 0"),
    ({"precision.switch.when": "soon"}, "precision.switch.when=soon", "before_decay"),
    ({"precision.switch.when": "700"}, "precision.switch.when=700", "train.steps=300"),
]
DOCUMENTS = [
    ({"data.boundary_loss": False}, "data.boundary_loss=false", "set data.documents=masked"),
]
PATHS = [
    ({"run.dir": " "}, "run.dir is empty", "runs/first"),
    ({"run.device": "cuda"}, "run.device=cuda", "run.device=auto or cpu"),
    ({"checkpoint.resume": "/nowhere"}, "checkpoint.resume=/nowhere", "auto, never or the path"),
    ({"precision.bf16_blocks.file": "/nowhere"}, "precision.bf16_blocks.file=/nowhere", "correct the path"),
]


@pytest.mark.parametrize(("changes", "value", "remedy"), [*MODEL, *SCHEDULE, *DOCUMENTS, *PATHS])
def test_refusals_name_the_value_and_the_remedy(changes, value, remedy):
    message = refusal(changes)
    assert value in message
    assert remedy in message


def test_masked_documents_with_and_without_their_boundaries():
    for boundary_loss in (True, False):
        validate(changed(composed(), {"data.documents": "masked", "data.boundary_loss": boundary_loss}), 1, "cpu")


def test_unused_mixers_are_not_checked():
    validate(changed(composed(), {"model.pattern": "M-M-M-", "model.num_kv_heads": 3}), 1, "cpu")
    validate(changed(composed(), {"model.pattern": "*-*-*-", "model.mamba_num_groups": 3}), 1, "cpu")


def test_batch_that_does_not_divide_names_sizes_that_work():
    message = refusal({"train.global_batch_size": 6})
    assert "train.global_batch_size=6" in message
    assert "micro batch sizes that work: 1, 2, 3, 6" in message
    assert "global batch sizes that work: 4 or 8" in message
    message = refusal({}, world_size=3)
    assert "3 data-parallel ranks" in message
    assert "global batch sizes that work: 12" in message
    assert "micro batch" not in message.split("; ", 1)[1]  # 16 sequences never divide by 3 ranks
    for remedy in ({"train.micro_batch_size": 3}, {"train.global_batch_size": 8}):
        validate(changed(composed(), {"train.global_batch_size": 6, **remedy}), 1, "cpu")
    assert changed(composed(), {"parallel.tensor": 2}).parallel.data_parallel_size(8) == 4


def test_a_batch_that_no_mesh_of_these_ranks_divides_names_meshes_that_do():
    changes = {"train.micro_batch_size": 1, "train.global_batch_size": 736}
    message = refusal(changes, world_size=512)
    assert message.endswith(
        "train.global_batch_size=736 is not a multiple of train.micro_batch_size=1 x 512 data-parallel ranks = 512; "
        "global batch sizes that work: 512 or 1024; "
        "data-parallel sizes that work with 736 = 2^5 x 23: 32, 46, 92, 184, 368, 736"
    )
    for ranks in (32, 46, 92, 184, 368, 736):
        validate(changed(composed(), changes), ranks, "cpu")
    # A phase's own batch too; where a micro-batch is more than one sequence, it counts.
    phases = [PhaseConfig("first", None, {"stdlib": 1.0}, global_batch_size=12)]
    message = refusal({"data.phases": phases, "train.micro_batch_size": 2, "train.global_batch_size": 16}, world_size=4)
    assert "data.phases[0].global_batch_size=12 is not" in message
    assert message.endswith("work: 8 or 16; data-parallel sizes that work with 12 = 2^2 x 3: 1, 2, 3, 6")
    assert "data-parallel sizes" not in refusal({"train.micro_batch_size": 3})


def test_gradients_are_reduced_after_each_micro_batch_only_where_that_does_something():
    each = {"parallel.reduce_gradients": "each", "train.micro_batch_size": 1, "train.global_batch_size": 16}
    validate(changed(composed(), each), 4, "cpu")
    message = refusal(each)
    assert "parallel.reduce_gradients=each has no effect" in message and "one shard of 1 rank" in message
    assert "parallel.replicate=4 leave one shard of 4" in refusal({**each, "parallel.replicate": 4}, world_size=4)
    message = refusal({**each, "train.global_batch_size": 4}, world_size=4)
    assert "one micro-batch a step" in message and "set it to once" in message
    # One phase with several is enough.
    names = {"blend": {"stdlib": 1.0}, "fraction": 0.5}
    phases = [PhaseConfig("small", global_batch_size=4, **names), PhaseConfig("large", global_batch_size=8, **names)]
    validate(changed(composed(), {**each, "train.global_batch_size": 4, "data.phases": phases}), 4, "cpu")


def test_settings_of_data_that_do_nothing():
    message = refusal({"data.num_workers": 0, "data.prefetch": 4})
    assert "data.prefetch=4 has no effect with data.num_workers=0" in message
    validate(changed(composed(), {"data.num_workers": 0}), 1, "cpu")
    validate(changed(composed(), {"data.prefetch": 4}), 1, "cpu")
    assert "data.max_epochs={} limits no source" in refusal({"data.max_epochs": {}})
    validate(changed(composed(), {"data.max_epochs": {"code": 4.0, "prose": 4.0}}), 1, "cpu")


def test_sequence_length_in_tiles():
    assert "train.sequence_length=250 is not a multiple of 16; use 240 or 256" in refusal(
        {"train.sequence_length": 250}
    )
    assert "use 16" in refusal({"train.sequence_length": 9})
    validate(changed(composed(), {"train.sequence_length": 272}), 1, "cpu")


def test_mesh():
    assert refusal({"parallel.tensor": 3}, world_size=4).endswith("tensor sizes that work: 1, 2")  # 2 KV heads
    assert "tensor sizes that work: 1, 2" in refusal({"parallel.tensor": 4, "parallel.replicate": 2}, world_size=4)
    assert "replicate sizes that work: 1, 2, 4" in refusal({"parallel.replicate": 3}, world_size=4)
    message = refusal({"parallel.tensor": 2, "parallel.replicate": 4}, world_size=12)
    assert message.endswith("tensor sizes that work: 1; replicate sizes that work: 1, 2, 3, 6")
    message = refusal({"parallel.tensor": 4, "parallel.replicate": 5}, world_size=12)
    assert message.endswith("set parallel.replicate=1; tensor sizes that work then: 1, 2")
    assert "raise parallel.tensor" in refusal({"parallel.sequence": True})
    message = refusal({"parallel.tensor": 4}, world_size=8)
    assert "parallel.tensor=4 does not divide model.num_kv_heads=2" in message
    assert message.endswith("1, 2")
    message = refusal({"parallel.tensor": 8}, "experiment=nemotron_h_8b", *DATA, world_size=64, device_type="cuda")
    assert "model.num_kv_heads=4" in message
    assert message.endswith("1, 2, 4")
    assert "model.vocab_size=4097" in refusal({"parallel.tensor": 2, "model.vocab_size": 4097}, world_size=2)
    assert "the 65 tiles of 16 in model.ffn_dim=1040" in refusal(
        {"parallel.tensor": 2, "model.ffn_dim": 1040}, world_size=2
    )
    assert "model.mamba_num_groups=1" in refusal({"parallel.tensor": 2, "model.mamba_num_groups": 1}, world_size=2)


def test_sequence_parallel_slices():
    changes = {"parallel.tensor": 2, "train.micro_batch_size": 1, "train.sequence_length": 48}
    message = refusal(changes, world_size=2)
    assert "48 tokens" in message
    assert "train.sequence_length=64 or parallel.sequence=false" in message
    for remedy in ({"train.sequence_length": 64}, {"parallel.sequence": False}):
        validate(changed(composed(), {**changes, **remedy}), 2, "cpu")


def test_data():
    phases = [PhaseConfig("a", 0.5, {"web": 1.0}), PhaseConfig("b", 0.4, {"web": 1.0})]
    indexed = {"data.kind": "indexed", "data.sources": {"web": "/d/web"}}
    assert refusal({"data.kind": "csv"}) == f"data.kind=csv is not known; choose one of {', '.join(KINDS)}"
    assert "data.sources={'web': '/d/web'} has no effect" in refusal({"data.sources": {"web": "/d/web"}})
    assert "choose data=indexed" in refusal({"data.eod_token": "</s>"})
    assert "'data.sources={web: /data/web}'" in refusal({"data.kind": "indexed"})
    assert "data.cache_dir=/c has no effect" in refusal({**indexed, "data.cache_dir": "/c"})
    assert "data.remote_cache=/c has no effect without a URL" in refusal({**indexed, "data.remote_cache": "/c"})
    assert "data.remote_cache=/c has no effect with data.kind=builtin" in refusal({"data.remote_cache": "/c"})
    assert "data.sources.web=gone.yaml: cannot be read" in refusal({**indexed, "data.sources": {"web": "gone.yaml"}})
    assert "data.validation.web=x://b/k: x:// is no kind" in refusal({**indexed, "data.validation": {"web": "x://b/k"}})
    assert "give at least one: 'data.phases=" in refusal({**indexed, "data.phases": []})
    message = refusal({**indexed, "data.phases": phases})
    assert "the fractions of the phases a, b sum to 0.9; they must sum to 1" in message
    assert "data.phases[1].name=a is taken" in refusal({**indexed, "data.phases": [phases[0], phases[0]]})
    one = PhaseConfig("a", 1.0, {"web": 1.0})
    for phase, expected in {
        "data.phases[0].blend is empty; give source weights": replace(one, blend={}),
        "data.phases[0].blend names code, which is not in data.sources; its sources: web": replace(
            one, blend={"code": 1.0}
        ),
        "has no weight above 0": replace(one, blend={"web": 0.0}),
    }.items():
        assert phase in refusal({**indexed, "data.phases": [expected]})
    assert "data.tokenizer=/nowhere" in refusal({**indexed, "data.phases": [one], "data.tokenizer": "/nowhere"})


@pytest.mark.parametrize(
    ("module", "changes", "message"),
    [
        (
            "wandb",
            {"logging.wandb": "offline"},
            'logging.wandb=offline needs the package wandb; pip install "megatron_fp4[wandb]", or set disabled',
        ),
        ("tensorboard", {}, "logging.tensorboard=true needs the package tensorboard; pip install tensorboard, or set"),
    ],
)
def test_a_log_whose_package_is_missing(module, changes, message, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    assert refusal(changes).startswith(message)
    validate(changed(composed(), {"logging.tensorboard": False}), 1, "cpu")


def test_a_folder_called_wandb_is_no_package(tmp_path, monkeypatch):
    """wandb itself leaves one where it ran."""
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    assert "needs the package wandb" in refusal({"logging.wandb": "offline", "logging.tensorboard": False})


def test_a_file_mode_that_is_none():
    assert refusal({"run.file_mode": "0440"}).startswith("run.file_mode=0440 would keep the run from its own files")
