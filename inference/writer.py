"""Texts on a terminal: a single one while it is made, several one after the other, or in turn with who types."""

from __future__ import annotations

import sys
import time

from data.tokenizer import TextTokenizer
from inference.generation import Continuation, Request, Settings, generate, stream
from inference.text import TextStream, prompt_tokens
from models.hybrid import HybridModel


class Writer:
    """Prints texts.

    tokenizer: None where prompts and texts are ids. trained_length: of the sequences that the model was trained on.
    """

    def __init__(
        self,
        model: HybridModel,
        tokenizer: TextTokenizer | None,
        settings: Settings,
        trained_length: int,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.settings, self.trained_length = settings, trained_length

    def write(self, prompts: list[list[int]], samples: int, batch: int) -> None:
        """Every prompt with its continuations, under a header each if there are several."""
        requests = [Request(prompt, sample) for prompt in prompts for sample in range(samples)]
        self.warn_of_length(prompts)
        began, count = time.monotonic(), 0
        if len(requests) == 1:
            count = self.follow(requests[0], with_prompt=True)
        else:
            for first in range(0, len(requests), batch):
                part = requests[first : first + batch]
                for number, (request, found) in enumerate(
                    zip(part, generate(self.model, part, self.settings), strict=True), start=first
                ):
                    of = f"prompt {number // samples + 1}" + (f", sample {request.sample + 1}" if samples > 1 else "")
                    print(f"--- {of}\n{self.whole(request, found)}", flush=True)
                    count += len(found.tokens)
        seconds = time.monotonic() - began
        what = "1 token" if count == 1 else f"{count} tokens"
        say(f"{what} in {seconds:.1f} s ({count / max(seconds, 1e-9):.0f} a second)")

    def follow(self, request: Request, with_prompt: bool) -> int:
        """Print a text while it is made; returns how many tokens are new."""
        count = 0
        if self.tokenizer is None:
            write(" ".join(map(str, request.tokens)) if with_prompt else "")
        else:
            text = TextStream(self.tokenizer, request.tokens)
            write(self.tokenizer.decode(request.tokens) if with_prompt else "")
        for (token,) in stream(self.model, [request], self.settings):
            if token is not None:
                count += 1
                between = " " if with_prompt or count > 1 else ""
                write(f"{between}{token}" if self.tokenizer is None else text.add(token))
        write("\n" if self.tokenizer is None else text.end() + "\n")
        return count

    def whole(self, request: Request, found: Continuation) -> str:
        """Prompt and continuation."""
        tokens = [*request.tokens, *found.tokens]
        return " ".join(map(str, tokens)) if self.tokenizer is None else self.tokenizer.decode(tokens)

    def warn_of_length(self, prompts: list[list[int]]) -> None:
        """Say if texts become longer than what was trained on."""
        longest = max(map(len, prompts)) + self.settings.max_tokens
        if longest > self.trained_length:
            say(f"texts of up to {longest} tokens, of a model trained on sequences of {self.trained_length}")

    def converse(self, samples: int, batch: int) -> None:
        """A line in, a continuation out, each by itself; until the end of the input."""
        import readline  # noqa: F401  input() then edits lines

        say("a line in, a continuation out; Ctrl-D ends")
        while True:
            try:
                line = input("> ")
            except EOFError:
                print()
                return
            if not line.strip():
                continue
            try:
                prompt = tokens_of(self.tokenizer, line)
                if samples > 1:
                    self.write([prompt], samples, batch)
                else:
                    self.follow(Request(prompt), with_prompt=False)
            except ValueError as error:
                say(str(error))


def tokens_of(tokenizer: TextTokenizer | None, prompt: str) -> list[int]:
    """Of a text, or of ids (without a tokenizer)."""
    if tokenizer is not None:
        return prompt_tokens(tokenizer, prompt)
    try:
        tokens = [int(word) for word in prompt.replace(",", " ").split()]
    except ValueError:
        tokens = []
    if not tokens:
        raise ValueError(f"the prompt {prompt!r} is no list of token ids; give such as '17 4 256'")
    return tokens


def write(text: str) -> None:
    """To stdout, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def say(text: str) -> None:
    """To stderr."""
    print(text, file=sys.stderr, flush=True)
