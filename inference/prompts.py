"""What a model writes while it is trained: `validation.prompts` continued after each validation.

With the weights of the moment in the compute dtype, no operand quantized (as scripts/generate.py has it), drawn at
temperature 0.8 with the run's seed. The draws are the same every time, so that texts differ by what was learned.
Training is not disturbed: recipes, mode and StepState are as before afterwards, parameters are sharded, nothing is
drawn from a generator.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from inference.generation import Continuation, NotFiniteError, Request, Sampling, Settings, generate, prompt_tokens
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
        found: list[Continuation] | None = None
        # Numbers that are not finite end a run elsewhere, with a diagnosis, if they have to.
        with suppress(NotFiniteError), evaluation_mode(trainer.model), trainer.precision.other_recipes(lambda _: BF16):
            found = generate(trainer.model, requests, settings, trainer.progress.alive)
        samples: list[dict[str, Any]] = []
        for i, (prompt, request) in enumerate(zip(config.prompts, requests, strict=True)):
            text = None
            if found is not None:
                text = tokenizer.decode([*request.tokens, *found[i].tokens])[len(tokenizer.decode(request.tokens)) :]
            samples.append({"prompt": prompt, "text": text, "ended": found is not None and found[i].ended})
        trainer.log.texts(done, samples)
