"""Texts on a terminal: tokens to text while they come, a whole character at a time; a single text while it is made,
several one after the other, or in turn with who types."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from data.tokenizer import TextTokenizer
from inference.generation import Continuation, Request, Settings, generate, stream
from models.hybrid import HybridModel

# What an unfinished character decodes to.
_REPLACEMENT = "\ufffd"
# Tokens of the prompt that are decoded with the new ones: tokenizers leave out the space in front of a first word.
_CONTEXT = 64


class TextStream:
    """The text of new tokens after `prompt`, in pieces that joined are the whole: a token may be part of a character,
    and then its text comes with the token that completes it."""

    def __init__(self, tokenizer: TextTokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt[-_CONTEXT:])
        self._said = len(self._ids)

    def add(self, token: int) -> str:
        """What can be said now; may be empty."""
        self._ids.append(token)
        return self._new(end=False)

    def end(self) -> str:
        """What is left, with a replacement character for a part of one."""
        return self._new(end=True)

    def _new(self, end: bool) -> str:
        before, now = (self._tokenizer.decode(ids) for ids in (self._ids[: self._said], self._ids))
        if len(now) <= len(before) or (now.endswith(_REPLACEMENT) and not end):
            return ""
        # What has been said now is the context of what follows, and ends with a whole character.
        self._ids = self._ids[self._said :]
        self._said = len(self._ids)
        return now[len(before) :]


def prompt_tokens(tokenizer: TextTokenizer, text: str) -> list[int]:
    """The tokens of a prompt; of an empty one the end of a document, after which another begins.

    Raises ValueError for text that is no Unicode, as a command line in another encoding makes it.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the prompt {text!r} is not UTF-8") from error
    return tokenizer.encode_batch([text])[0] or [tokenizer.eod_id]


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


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 2) -> str:
    """A table whose columns also stand below each other on a terminal; all but the first `left` to the right."""
    widths = [max(3, *map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = (c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True)))
        return "| " + " | ".join(padded) + " |"

    rule = ["-" * w if i < left else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join([line(header), line(rule), *map(line, rows)])


class ProgressLine:
    """How far it is, on a terminal's stderr once a second; elsewhere nothing."""

    def __init__(self, what: str) -> None:
        self._what, self._last = what, 0.0

    def __call__(self, done: int, total: int) -> None:
        if sys.stderr.isatty() and (done == total or time.monotonic() - self._last > 1.0):
            self._last = time.monotonic()
            end = "\r" if done < total else "\033[K\r"
            text = f"{self._what}: {done:,} of {total:,}" if done < total else ""
            print(f"\r{text}", end=end, file=sys.stderr, flush=True)
