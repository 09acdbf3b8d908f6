from dataclasses import replace

from megatron_fp4.checkpoint.identity import identity_differences, run_identity
from megatron_fp4.config.schema import Bf16BlocksDefault, Config, ModelConfig, ParallelConfig, RunConfig, TrainConfig

DATA = {"tokenizer": "abc", "train": {"web": {"sha256": "1", "num_tokens": 10}}, "validation": {}}


def test_same_run_on_another_mesh_and_for_longer() -> None:
    other = Config(
        parallel=ParallelConfig(tensor=4),
        train=TrainConfig(steps=7),
        model=ModelConfig(
            name="renamed", nvfp4_bf16_blocks=Bf16BlocksDefault(2, 8), fp8_bf16_blocks=Bf16BlocksDefault(2, 4)
        ),
        run=RunConfig(dir="elsewhere"),
    )
    assert identity_differences(run_identity(Config(), DATA), run_identity(other, DATA)) == []


def test_names_each_field_with_both_values() -> None:
    other = Config(
        model=replace(ModelConfig(), pattern="M-M-", hidden_dim=64),
        train=TrainConfig(sequence_length=512, global_batch_size=32),
        run=RunConfig(seed=5),
    )
    data = {"tokenizer": "abd", "train": {"web": {"sha256": "2", "num_tokens": 10}, "code": {"sha256": "3"}}}
    lines = identity_differences(run_identity(Config(), DATA), run_identity(other, data))
    assert [line.split(":")[0] for line in lines] == [
        "data.tokenizer",
        "data.train.code.sha256",
        "data.train.web.sha256",
        "data.validation",
        "model.hidden_dim",
        "model.pattern",
        "run.seed",
        "train.global_batch_size",
        "train.sequence_length",
    ]
    assert "train.sequence_length: 256 in the checkpoint, 512 now" in lines
    assert "data.train.code.sha256: '(absent)' in the checkpoint, '3' now" in lines
