"""What a checkpoint remembers a dataset by: a hash that is the same wherever its two files lie.

It tells another tokenizer, another corpus or another preparation apart, in milliseconds for any size. It is no guard
against a bit flipped between the blocks that it reads.
"""

from __future__ import annotations

import hashlib

from data.byte_file import ByteFile

_SCHEME = "blocks-1"
_BLOCKS, _BLOCK_BYTES = 16, 4096
_BEFORE_BYTES = 1 << 20


def blocks_identity(index: ByteFile, tokens: ByteFile) -> str:
    """`blocks-1:` and a sha256 of, for the `.idx` and then the `.bin`: the size (u64), and 16 blocks of 4 KiB, evenly
    spaced from end to end (block i begins at byte i * (size - 4096) // 15). A file of 64 KiB or less enters whole."""
    digest = hashlib.sha256()
    for file in (index, tokens):
        digest.update(file.size.to_bytes(8, "little"))
        if file.size <= _BLOCKS * _BLOCK_BYTES:
            digest.update(file.peek(0, file.size))
        else:
            for block in range(_BLOCKS):
                digest.update(file.peek(block * (file.size - _BLOCK_BYTES) // (_BLOCKS - 1), _BLOCK_BYTES))
    return f"{_SCHEME}:{digest.hexdigest()}"


def has_scheme(identity: str) -> bool:
    """Whether an identity says how it was made; those of checkpoints of version 0.2 do not."""
    return ":" in identity


def identity_before(index: ByteFile, tokens: ByteFile) -> str:
    """The identity as version 0.2 wrote it, a bare sha256: all of `.idx`, the first and the last MiB of `.bin`."""
    digest = hashlib.sha256()
    for offset in range(0, index.size, _BEFORE_BYTES):
        digest.update(index.read(offset, min(_BEFORE_BYTES, index.size - offset)))
    # Of a small file the two overlap.
    digest.update(tokens.read(0, min(_BEFORE_BYTES, tokens.size)))
    rest = max(0, tokens.size - _BEFORE_BYTES)
    digest.update(tokens.read(rest, tokens.size - rest))
    return digest.hexdigest()
