"""What a model writes while it is trained: `validation.prompts` continued after each validation.

With the weights of the moment in the compute dtype, no operand quantized (as scripts/generate.py has it), drawn at
temperature 0.8 with the run's seed. The draws are the same every time, so that texts differ by what was learned.
Training is not disturbed: recipes, mode and StepState are as before afterwards, parameters are sharded, nothing is
drawn from a generator.
"""

from __future__ import annotations

from dataclasses import dataclass

from data.tokenizer import TextTokenizer
from inference.generation import (
    Continuation,
    NotFiniteError,
    Request,
    Sampling,
    Settings,
    prompt_tokens,
    stream,
)
from megatron_fp4.config.schema import ValidationConfig
from megatron_fp4.precision.plan import PrecisionController
from megatron_fp4.precision.recipe import BF16
from megatron_fp4.runtime.progress import Progress
from megatron_fp4.training.callbacks.validation import AtValidation, evaluation_mode
from models.hybrid import HybridModel

TEMPERATURE = 0.8


@dataclass(frozen=True)
class TextSample:
    """text: the continuation alone; None if the model's logits were not finite. ended: by itself, rather than because
    it was long enough."""

    prompt: str
    text: str | None
    ended: bool


class Prompts(AtValidation):
    """Records what the model writes after each of `validation.prompts`, whenever it is validated."""

    def record(self, done: int) -> None:
        trainer, config = self.trainer, self.trainer.config
        trainer.make_room()
        trainer.progress.at(done, "text samples")
        parts = trainer.model, trainer.precision, trainer.data.bundle.tokenizer
        trainer.log.texts(done, text_samples(*parts, config.validation, config.run.seed, trainer.progress))


def text_samples(
    model: HybridModel,
    controller: PrecisionController,
    tokenizer: TextTokenizer,
    config: ValidationConfig,
    seed: int,
    progress: Progress,
) -> list[TextSample]:
    """The prompts of `config`, continued; the same on all ranks, which call it together.

    progress: is told that this rank is alive.
    """
    sampling = Sampling(TEMPERATURE, seed=seed)
    settings = Settings(config.prompt_tokens, sampling, stop=tokenizer.eod_id, num_ids=tokenizer.vocab_size)
    requests = [Request(prompt_tokens(tokenizer, prompt)) for prompt in config.prompts]
    found = [Continuation() for _ in requests]
    finite = True
    try:
        with evaluation_mode(model), controller.other_recipes(lambda _: BF16):
            for tokens in stream(model, requests, settings):
                progress.alive()
                for continuation, token in zip(found, tokens, strict=True):
                    continuation.tokens += [] if token is None else [token]
    except NotFiniteError:  # which ends a run elsewhere, with a diagnosis, if it has to
        finite = False
    samples = []
    for prompt, request, continuation in zip(config.prompts, requests, found, strict=True):
        text = tokenizer.decode([*request.tokens, *continuation.tokens])[len(tokenizer.decode(request.tokens)) :]
        ended = finite and len(continuation.tokens) < config.prompt_tokens
        samples.append(TextSample(prompt, text if finite else None, ended))
    return samples
