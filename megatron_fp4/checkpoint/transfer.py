"""A rank's part of a local checkpoint, sent from one node's disk to another's.

What is sent: two numbers (bytes of the record, bytes of the files), the record, and the files one after the other, in
the order of their names, in messages of `_CHUNK` bytes at most. Whatever fails on one side, the number of messages
stays what was announced: a sender that cannot read sends zeros, a receiver that cannot write throws away; so neither
waits for the other for ever. The receiver hashes what arrives, and writes the record only if it is all as recorded.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fp4.checkpoint import files
from megatron_fp4.checkpoint.files import DamagedCheckpointError
from megatron_fp4.checkpoint.local_files import RECORD, Key, Part, decode

_CHUNK = 1 << 24
_HEADER = struct.Struct("<qq")


class Outgoing:
    """A part that this rank sends to rank `to`. folder: where it lies. error: why it could not be read, if so."""

    def __init__(self, folder: Path, to: int) -> None:
        self.to = to
        self.error: Exception | None = None
        self._folder = folder

    def messages(self) -> Iterator[Tensor]:
        """What to send; each is to be sent before the next is asked for."""
        try:
            raw = (self._folder / RECORD).read_bytes()
            part = decode(raw)
        except (OSError, DamagedCheckpointError) as error:
            self.error = error
            yield _tensor(_HEADER.pack(0, 0))
            return
        sizes = {name: part.files[name].size for name in sorted(part.files)}
        yield _tensor(_HEADER.pack(len(raw), sum(sizes.values())))
        yield _tensor(raw)
        buffer, filled = bytearray(_CHUNK), 0
        for name, size in sizes.items():
            for length, read in self._pieces(name, size):
                while length > 0:
                    now = min(length, _CHUNK - filled)
                    read(memoryview(buffer)[filled : filled + now])
                    filled, length = filled + now, length - now
                    if filled == _CHUNK:
                        yield torch.frombuffer(buffer, dtype=torch.uint8)
                        filled = 0
        if filled:
            yield torch.frombuffer(buffer, dtype=torch.uint8)[:filled]

    def _pieces(self, name: str, size: int) -> Iterator[tuple[int, Callable[[memoryview], None]]]:
        """The file as (bytes, how to read so many into memory at a time)."""
        try:
            file: BinaryIO | None = open(self._folder / name, "rb")  # noqa: SIM115
        except OSError as error:
            file, self.error = None, error

        def read(into: memoryview) -> None:
            got = 0
            try:
                while file is not None and got < len(into) and (now := file.readinto(into[got:])):  # type: ignore[attr-defined]
                    got += now
            except OSError as error:
                self.error = error
            into[got:] = bytes(len(into) - got)

        try:
            yield size, read
        finally:
            if file is not None:
                file.close()


class Incoming:
    """A part that this rank receives from rank `source`, into the new folder `folder`.

    key: which part it must be.
    """

    def __init__(self, folder: Path, source: int, key: Key) -> None:
        self.source = source
        self._folder, self._key = folder, key
        self._error: Exception | None = None
        self._part: Part | None = None
        self._raw = b""
        self._steps = self._receive()
        self.expected: int | None = next(self._steps)
        """Bytes of the next message; None if there is none."""

    def take(self, message: memoryview) -> None:
        """A message has come."""
        try:
            self.expected = self._steps.send(message)
        except StopIteration:
            self.expected = None

    def finish(self) -> Part:
        """Write the record. Raises OSError, and DamagedCheckpointError if what came is not as it was written."""
        if self._error is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise self._error
        assert self._part is not None
        files.write_file(self._folder / RECORD, self._raw)
        files.sync_folder(self._folder)
        return self._part

    def _receive(self) -> Generator[int, memoryview, None]:
        record_bytes, total = _HEADER.unpack((yield _HEADER.size))
        if record_bytes == 0:
            self._error = DamagedCheckpointError(f"rank {self.source} could not read its copy")
            return
        self._raw = bytes((yield record_bytes))
        store = self._store(total)
        self._advance(store, None)
        while total > 0:
            message = yield min(total, _CHUNK)
            total -= len(message)
            self._advance(store, message)

    def _advance(self, store: Generator[None, memoryview | None, None], message: memoryview | None) -> None:
        if self._error is None:
            try:
                store.send(message)
            except StopIteration:
                pass
            except (OSError, DamagedCheckpointError) as error:
                self._error = error

    def _store(self, total: int) -> Generator[None, Any, None]:
        """Write messages as they come, file by file."""
        self._part = part = decode(self._raw)
        if part.key != self._key or total != sum(record.size for record in part.files.values()):
            raise DamagedCheckpointError(f"rank {self.source} sent another part than that of {self._key}")
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        message = memoryview(b"")
        for name in sorted(part.files):
            digest, left = hashlib.sha256(), part.files[name].size
            with open(self._folder / name, "xb") as file:
                while left > 0:
                    if not message:
                        message = yield
                    piece, message = message[:left], message[left:]
                    file.write(piece)
                    digest.update(piece)
                    left -= len(piece)
                file.flush()
                os.fsync(file.fileno())
            if digest.hexdigest() != part.files[name].sha256:
                raise DamagedCheckpointError(files.changed(name))


def exchange(group: dist.ProcessGroup, outgoing: Outgoing | None, incoming: Incoming | None) -> Part | None:
    """Send and receive side by side, with a message of each in memory; returns what was received.

    Every rank that is sent to must receive. Raises OSError and DamagedCheckpointError, once all was sent and received.
    """
    messages = outgoing.messages() if outgoing is not None else iter(())
    while True:
        message, work = next(messages, None), None
        if outgoing is not None and message is not None:
            work = dist.isend(message, outgoing.to, group=group)
        if incoming is not None and incoming.expected is not None:
            received = torch.empty(incoming.expected, dtype=torch.uint8)
            dist.recv(received, incoming.source, group=group)
            incoming.take(memoryview(received.numpy()))  # type: ignore[arg-type]
        elif message is None:
            break
        if work is not None:
            work.wait()
    part = incoming.finish() if incoming is not None else None
    if outgoing is not None and outgoing.error is not None:
        raise outgoing.error
    return part


def _tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
