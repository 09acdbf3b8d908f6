"""Text samples during training: continuations of `validation.prompts` after each validation.

They use the current weights in the compute dtype without quantization (like scripts/generate.py), temperature 0.8 and
the run's seed. The random draws are the same every time, so only training changes the texts. Training is not affected:
recipes, mode and StepState are restored, parameters stay sharded, and no generator is used.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from inference.generation import Continuation, NotFiniteError, Request, Sampling, Settings, generate, prompt_tokens
from megatron_fp4.precision.recipe import BF16
from megatron_fp4.training.callbacks.validation import AtValidation, evaluation_mode

TEMPERATURE = 0.8


class Prompts(AtValidation):
    """Records a continuation of each of `validation.prompts` at every validation."""

    def record(self, done: int) -> None:
        trainer, config = self.trainer, self.trainer.config.validation
        trainer.make_room()
        trainer.progress.at(done, "text samples")
        tokenizer, sampling = trainer.data.bundle.tokenizer, Sampling(TEMPERATURE, seed=trainer.config.run.seed)
        settings = Settings(config.prompt_tokens, sampling, stop=tokenizer.eod_id, num_ids=tokenizer.vocab_size)
        requests = [Request(prompt_tokens(tokenizer, prompt)) for prompt in config.prompts]
        found: list[Continuation] | None = None
        # Training itself handles numbers that are not finite, with a diagnosis.
        with suppress(NotFiniteError), trainer.precision.other_recipes(lambda _: BF16), evaluation_mode(trainer.model):
            found = generate(trainer.model, requests, settings, trainer.progress.alive)
        samples: list[dict[str, Any]] = []
        for i, (prompt, request) in enumerate(zip(config.prompts, requests, strict=True)):
            text = None
            if found is not None:
                text = tokenizer.decode([*request.tokens, *found[i].tokens])[len(tokenizer.decode(request.tokens)) :]
            samples.append({"prompt": prompt, "text": text, "ended": found is not None and found[i].ended})
            shown = "nothing, because its logits are not finite" if text is None else repr(text)
            trainer.log.console.event(done, f"the model continues {prompt!r}: {shown}")
        trainer.log.metrics.texts(done, samples)
