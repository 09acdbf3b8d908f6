"""Generate text with a checkpoint's model.

    python scripts/generate.py runs/default --prompt "def main("
    python scripts/generate.py runs/default/checkpoints/step_00000200 --prompt Once --prompt Twice --samples 3
    python scripts/generate.py runs/default --file prompts.txt          one prompt per line
    git diff | python scripts/generate.py runs/default                  the input is one prompt

Prints every prompt with its continuation; a single one is printed while it is generated. A text ends at the
end-of-document token or after --max-tokens. An empty prompt begins a new document. The same prompt, seed and settings
give the same text, independent of other prompts; each sample has its own random draws.

--weights master uses the FP32 masters in the compute dtype. --weights trained uses, in the linears whose weights were
quantized in the forward pass at the end of training, the same codes and scales. Activations are not quantized in either
case: their amax would make a text depend on the others in its batch. Attention, scan and convolution run in plain
PyTorch on any device, in one process.

Exit codes: 0; 2 wrong arguments or logits that are not finite, with one line on stderr; 130 Ctrl-C; 141 the output was
closed.
"""

from __future__ import annotations

if __name__ == "__main__":
    import _command  # noqa: F401

import argparse
import sys
import time
from pathlib import Path

import torch

from data.tokenizer import TextTokenizer
from exchange.checkpoint import Checkpoint, load_model, open_checkpoint
from exchange.tokenizer import tokenizer_of
from inference import generation
from inference.models import device_named
from megatron_fp4.precision.plan import plan_in_effect
from megatron_fp4.runtime.errors import run_command
from megatron_fp4.training.build import plans_of
from models import provider as models
from models.hybrid import HybridModel
from pretrain import CONFIGS


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code."""
    options = parse(arguments)
    refusals = (ValueError, OSError, generation.NotFiniteError)
    remedy = "lower --max-tokens or --batch, or shorten the prompts"
    return run_command("generate.py", lambda: run(options), refusals=refusals, less_memory=remedy)


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("checkpoint", type=Path, help="folder of a checkpoint, or of a run (its newest checkpoint)")
    add("--prompt", action="append", default=[], help="a text to continue; may be repeated")
    add("--file", type=Path, help="a file with one prompt per line; empty lines are skipped")
    add("--max-tokens", type=int, default=128, metavar="N", help="new tokens of a text (default: 128)")
    add("--temperature", type=float, default=0.8, metavar="T", help="0: the most likely token (default: 0.8)")
    add("--top-p", type=float, default=0.95, metavar="P", help="draw from the most likely tokens (default: 0.95)")
    add("--seed", type=int, default=0, help="of the random draws (default: 0)")
    add("--samples", type=int, default=1, metavar="N", help="continuations of each prompt (default: 1)")
    add("--weights", choices=("master", "trained"), default="master", help="see above")
    add("--device", help="cpu, cuda or cuda:N (default: cuda if there is one)")
    add("--dtype", choices=("float32", "bfloat16"), help="of the computation (default: BF16 on CUDA, else FP32)")
    add("--tokenizer", help="path of the run's tokenizer, if it was moved")
    add("--trust-config", action="store_true", help="the run is yours: use its paths and environment")
    add("--batch", type=int, default=16, metavar="N", help="texts generated at the same time (default: 16)")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> int:
    """Load the model, generate, print."""
    for name in ("samples", "batch"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} {getattr(options, name)} is less than 1")
    sampling = generation.Sampling(options.temperature, options.top_p, options.seed)
    if options.temperature == 0 and options.samples > 1:
        raise ValueError(f"--samples {options.samples} with --temperature 0 would all be equal; leave one of them out")
    given = given_prompts(options)
    checkpoint = open_checkpoint(options.checkpoint, CONFIGS, options.trust_config)
    tokenizer = tokenizer_of(checkpoint, options.tokenizer)
    if tokenizer is None:
        problem = f"the run of {checkpoint.folder} has no tokenizer"
        raise ValueError(f"{problem}; give the one that made its data as --tokenizer PATH")
    settings = generation.Settings(options.max_tokens, sampling, stop=tokenizer.eod_id, num_ids=tokenizer.vocab_size)
    prompts = [generation.prompt_tokens(tokenizer, prompt) for prompt in given]
    checkpoint.verify()
    model, weights = load(checkpoint, options)
    where = f"{str(model.embedding.dtype).removeprefix('torch.')} on {model.mesh.device.type}"
    say(f"{checkpoint.folder}: step {checkpoint.step:,}, {checkpoint.tokens:,} tokens; {weights}, {where}")
    longest, trained_on = max(map(len, prompts)) + settings.max_tokens, checkpoint.config.train.sequence_length
    if longest > trained_on:
        say(f"texts of up to {longest} tokens, but the model was trained on sequences of {trained_on}")
    began = time.monotonic()
    requests = [generation.Request(prompt, sample) for prompt in prompts for sample in range(options.samples)]
    if len(requests) == 1:
        count = follow(model, tokenizer, settings, requests[0])
    else:
        count = write_all(model, tokenizer, settings, requests, options)
    seconds = time.monotonic() - began
    say(f"{count} new tokens in {seconds:.1f} s ({count / max(seconds, 1e-9):.0f} a second)")
    return 0


def given_prompts(options: argparse.Namespace) -> list[str]:
    """The prompts of --prompt and --file, or the standard input."""
    prompts = list(options.prompt)
    if options.file is not None:
        try:
            prompts += [line for line in options.file.read_text(encoding="utf-8").splitlines() if line.strip()]
        except UnicodeDecodeError as error:
            raise ValueError(f"{options.file} is not UTF-8 ({error}); convert it to UTF-8") from error
    elif not prompts and not sys.stdin.isatty():
        prompts = list(filter(None, [sys.stdin.read().removesuffix("\n")]))
    if not prompts:
        raise ValueError("there is no prompt: give --prompt, a --file with lines, or a text on standard input")
    return prompts


def load(checkpoint: Checkpoint, options: argparse.Namespace) -> tuple[HybridModel, str]:
    """The model, and which weights it uses, as text."""
    device = device_named(options.device)
    name = options.dtype or ("float32" if device == "cpu" else "bfloat16")
    model = load_model(checkpoint, compute_dtype=getattr(torch, name), device=device)
    weights = "master weights"
    if options.weights == "trained":
        config = checkpoint.config
        switched_at = (checkpoint.trainer.get("switch") or {}).get("switched_at")
        plan = plan_in_effect(plans_of(config, models), switched_at)
        trained_in = getattr(torch, config.precision.compute_dtype)
        count = generation.weights_as_trained(model, plan, trained_in, config.parallel.tensor)
        if not count or checkpoint.weights_only:
            when = "of its training" if switched_at is None else "since the precision switch"
            raise ValueError(
                f"--weights trained: {checkpoint.folder} has no linear whose weights were quantized in the forward "
                f"pass {when}; use --weights master"
            )
        weights = f"weights of {count} of {len(plan.rows)} linears as trained"
    generation.lower_weights(model, model.embedding.dtype)
    return model, weights


def follow(
    model: HybridModel, tokenizer: TextTokenizer, settings: generation.Settings, request: generation.Request
) -> int:
    """Print a prompt and its continuation while it is generated; returns the number of new tokens."""
    count, text = 0, generation.TextStream(tokenizer, request.tokens)
    print(tokenizer.decode(request.tokens), end="", flush=True)
    for (token,) in generation.stream(model, [request], settings):
        if token is not None:
            print(text.add(token), end="", flush=True)
            count += 1
    print(text.end(), flush=True)
    return count


def write_all(
    model: HybridModel,
    tokenizer: TextTokenizer,
    settings: generation.Settings,
    requests: list[generation.Request],
    options: argparse.Namespace,
) -> int:
    """Print every text under a header; returns the number of new tokens."""
    count = 0
    for first in range(0, len(requests), options.batch):
        part = requests[first : first + options.batch]
        found = generation.generate(model, part, settings)
        for number, (request, new) in enumerate(zip(part, found, strict=True), start=first):
            sample = f", sample {request.sample + 1}" if options.samples > 1 else ""
            text = tokenizer.decode([*request.tokens, *new.tokens])
            print(f"--- prompt {number // options.samples + 1}{sample}\n{text}", flush=True)
            count += len(new.tokens)
    return count


def say(text: str) -> None:
    """Print to stderr."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
