"""What a model writes while it is trained: `validation.prompts` continued after each validation.

With the weights of the moment in the compute dtype, no operand quantized (as scripts/generate.py has it), drawn at
temperature 0.8 with the run's seed. The draws are the same every time, so that texts differ by what was learned.
Training is not disturbed: recipes, mode and StepState are as before afterwards, parameters are sharded, nothing is
drawn from a generator.
"""

from __future__ import annotations

from inference.generation import Continuation, NotFiniteError, Request, Sampling, Settings, prompt_tokens, stream
from megatron_fp4.precision.recipe import BF16
from megatron_fp4.training.callbacks.validation import AtValidation, evaluation_mode

TEMPERATURE = 0.8


class Prompts(AtValidation):
    """Records what the model writes after each of `validation.prompts`, whenever it is validated."""

    def record(self, done: int) -> None:
        trainer, config = self.trainer, self.trainer.config.validation
        trainer.make_room()
        trainer.progress.at(done, "text samples")
        tokenizer, sampling = trainer.data.bundle.tokenizer, Sampling(TEMPERATURE, seed=trainer.config.run.seed)
        settings = Settings(config.prompt_tokens, sampling, stop=tokenizer.eod_id, num_ids=tokenizer.vocab_size)
        requests = [Request(prompt_tokens(tokenizer, prompt)) for prompt in config.prompts]
        found = [Continuation() for _ in requests]
        finite = True
        try:
            with evaluation_mode(trainer.model), trainer.precision.other_recipes(lambda _: BF16):
                for tokens in stream(trainer.model, requests, settings):
                    trainer.progress.alive()
                    for continuation, token in zip(found, tokens, strict=True):
                        continuation.tokens += [] if token is None else [token]
        except NotFiniteError:  # which ends a run elsewhere, with a diagnosis, if it has to
            finite = False
        samples = []
        for prompt, request, continuation in zip(config.prompts, requests, found, strict=True):
            text = tokenizer.decode([*request.tokens, *continuation.tokens])[len(tokenizer.decode(request.tokens)) :]
            ended = finite and len(continuation.tokens) < config.prompt_tokens
            samples.append({"prompt": prompt, "text": text if finite else None, "ended": ended})
        trainer.log.texts(done, samples)
