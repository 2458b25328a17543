"""Keeps prompts in files, so that the next start finds them (--cache-disk).

A prompt comes here when it leaves host memory (--cache-ram), and when the server stops. It has the
form of prompt_format.py, sealed with the folder's secret (own_folder.py), so that nobody else can
make a state that is loaded. It is written under another name and renamed, so it is whole or not
there. A file that is damaged, half or foreign is logged once and deleted. Its prompt is then
evaluated again. Several servers may share a folder. Each finds the others' prompts of its own model
and settings, which are in the names of files as a hash.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import stat
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from offload.notes import Note, NoteKind
from specdec.whole_file import whole_file
from specoffload.slots.choosing import StoredPrompt, common
from specoffload.slots.own_folder import foreign_writers, made_folder, secret_of
from specoffload.slots.prompt_format import (
    MOST_HEAD_BYTES,
    Head,
    Unusable,
    key_of,
    read_head,
    read_payload,
    unsealed_key_of,
    write_prompt,
)
from specoffload.slots.prompt_index import BLOCK, PromptIndex, StoredFile, reusable, to_evict

LEAST_TOKENS = 2 * BLOCK  # a shorter prompt is evaluated faster than it is kept and found
_SUFFIX = ".prompt"
_MOST_COMPARED = 2  # candidates of each kind whose tokens are compared
_MOST_WAITING_BYTES = 1 << 30  # of prompts that wait to be written
_SPARE_BYTES = 1 << 30  # bytes that stay free on the disk
_OLD_S = 3600.0  # age of an unfinished file that no server writes any more

log = logging.getLogger("specoffload.slots")


@dataclass(frozen=True)
class FoundPrompt:
    """A stored prompt that begins like a new one. `n_tokens` of the new one need no evaluation."""

    name: str
    n_tokens: int


class PromptFolder:
    """The prompts of one model with one group of settings, in a folder that others may share.

    One thread looks prompts up, reads and keeps them. A second one writes.
    """

    def __init__(
        self, folder: Path, limit_bytes: int, made_by: Mapping[str, str], *, can_cut: bool
    ) -> None:
        """`made_by`: all that a state depends on, by name. `can_cut`: a state can be shortened.

        All files of the folder take at most `limit_bytes`. Raises NotWritten if the folder cannot
        be made or written to.
        """
        self._folder, self._limit_bytes, self._can_cut = folder, limit_bytes, can_cut
        self._key = key_of(made_by)
        self._index = PromptIndex(can_cut=can_cut)
        self._lock = threading.Lock()  # of the index and the queue
        self._work = threading.Condition(self._lock)
        self._queue: deque[StoredPrompt] = deque()
        self._waiting_bytes = 0  # of the queue and the prompt that is being written
        self._is_writing = self._is_closed = False
        self._can_write = True  # False after a failure, until a prompt is written
        self._seen_ns = -1  # time of the folder's last change that the index knows
        self.n_written = self.n_read = 0
        made_folder(folder)
        self._secret = secret_of(folder)
        self._drop_unfinished()
        self._drop_unsealed(unsealed_key_of(made_by))
        self._look()
        self._writer: threading.Thread | None = None

    def __len__(self) -> int:
        """Number of prompts that this model can use."""
        with self._lock:
            return len(self._index)

    @property
    def notes(self) -> tuple[Note, ...]:
        """What a start says of the folder."""
        n = len(self)
        prompts = "1 prompt" if n == 1 else f"{n} prompts"
        kept = Note(
            NoteKind.PROMPTS,
            f"prompts: kept in {self._folder}, in files that only their owner can read, up to "
            f"{self._limit_bytes / 2**30:.1f} GiB; {prompts} of this model found (--cache-disk)",
        )
        warning = foreign_writers("--cache-disk", self._folder, "delete the prompts in it")
        return (kept,) if warning is None else (kept, warning)

    # -- finding and reading -----------------------------------------------------------------------

    def find(self, tokens: Sequence[int], salt: str = "") -> FoundPrompt | None:
        """Return the stored prompt that spares most evaluation of `tokens`, or None.

        Only prompts with the same `salt` count.
        """
        if len(tokens) <= BLOCK:
            return None
        self._look()
        with self._lock:
            candidates = self._index.candidates(tokens, _MOST_COMPARED, salt)
        longest: FoundPrompt | None = None
        for entry in candidates:
            held = self._tokens_of(entry.name)
            n = 0 if held is None else reusable(entry, common(held, tokens), can_cut=self._can_cut)
            if n > (0 if longest is None else longest.n_tokens):
                longest = FoundPrompt(entry.name, n)
        return longest

    def read(self, name: str) -> StoredPrompt | None:
        """Read a found prompt, or return None if it cannot be used. It is then forgotten."""
        path = self._folder / name
        try:
            with _opened(path) as file:
                head, tokens = self._head_of(file)
                prompt = read_payload(file, head, tokens, self._secret)
            os.utime(path)  # this use counts for evictions, also for other servers
        except (OSError, Unusable, MemoryError) as e:
            self._unusable(name, e)
            return None
        self.n_read += 1
        return prompt

    def drop(self, name: str, why: str) -> None:
        """Forget and delete a prompt that the library does not take."""
        self._unusable(name, Unusable(why))

    def _head_of(self, file: BinaryIO) -> tuple[Head, array[int]]:
        """Read the head and the tokens of a file. Raises what `read_head` raises."""
        return read_head(file, self._key, os.fstat(file.fileno()).st_size, self._secret)

    def _tokens_of(self, name: str) -> array[int] | None:
        try:
            with _opened(self._folder / name) as file:
                return self._head_of(file)[1]
        except (OSError, Unusable) as e:
            self._unusable(name, e)
            return None

    def _unusable(self, name: str, why: BaseException) -> None:
        with self._lock:
            self._index.remove(name)
        if isinstance(why, FileNotFoundError):  # another server evicted it
            return
        log.warning("the prompt in %s is not used, and is evaluated again: %s", name, _reason(why))
        if isinstance(why, Unusable):
            with contextlib.suppress(OSError):
                (self._folder / name).unlink()

    def _look(self) -> None:
        """Learn of files that came or went since the last look."""
        try:
            changed_ns = self._folder.stat().st_mtime_ns
            if changed_ns == self._seen_ns:
                return
            self._seen_ns = changed_ns
            names = {name for name in os.listdir(self._folder) if self._is_ours(name)}
        except OSError as e:
            log.warning("%s cannot be read: %s", self._folder, _reason(e))
            return
        with self._lock:
            known = self._index.names
            for name in known - names:
                self._index.remove(name)
        for name in sorted(names - known):
            self._learn(name)

    def _learn(self, name: str) -> None:
        try:
            with _opened(self._folder / name) as file:
                head, tokens = self._head_of(file)
        except (OSError, Unusable) as e:
            self._unusable(name, e)
            return
        with self._lock:
            self._index.add(head.entry(name), tokens)

    def _is_ours(self, name: str) -> bool:
        return name.startswith(f"{self._key}-") and name.endswith(_SUFFIX)

    def _drop_unfinished(self) -> None:
        """Delete files that a server was writing when it was killed."""
        long_ago_s = time.time() - _OLD_S
        for path in self._folder.glob(f"*{_SUFFIX}.*.new"):
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < long_ago_s:
                    path.unlink()

    def _drop_unsealed(self, key: str) -> None:
        """Delete this model's prompts of an earlier version, which had no seals."""
        n = 0
        for path in self._folder.glob(f"{key}-*{_SUFFIX}"):
            with contextlib.suppress(OSError):
                path.unlink()
                n += 1
        if n:
            log.warning(
                "prompts that an earlier version kept in %s without seals are deleted, and "
                "evaluated again: %d", self._folder, n,
            )  # fmt: skip

    # -- keeping -----------------------------------------------------------------------------------

    def keep(self, prompt: StoredPrompt) -> None:
        """Let the second thread write a prompt. It is lost if too many others wait.

        Prompts of less than LEAST_TOKENS tokens are not kept.
        """
        if len(prompt.tokens) < LEAST_TOKENS:
            return
        prompt = replace(prompt, draft=None)  # which files do not have
        with self._work:
            n_bytes = self._waiting_bytes + prompt.size_bytes
            is_full = self._waiting_bytes > 0 and n_bytes > _MOST_WAITING_BYTES
            if not is_full:
                self._waiting_bytes = n_bytes
                self._queue.append(prompt)
                self._work.notify_all()
        if is_full:
            self._failed(prompt, "the disk is slower than prompts come")
        elif self._writer is None:
            self._writer = threading.Thread(target=self._write_all, name="prompts", daemon=True)
            self._writer.start()

    def keep_now(self, prompt: StoredPrompt, on_written: Callable[[float], None]) -> None:
        """Wait for the writing thread, and then write a prompt on this one.

        `on_written` gets the share of it that is written.
        """
        self.settle()
        if len(prompt.tokens) >= LEAST_TOKENS:
            self._keep(replace(prompt, draft=None), on_written)

    def settle(self) -> None:
        """Wait until all prompts are written that `keep` was called with."""
        with self._work:
            self._work.wait_for(lambda: not self._queue and not self._is_writing)

    def close(self) -> None:
        """Write what waits, and end the second thread."""
        self.settle()
        with self._work:
            self._is_closed = True
            self._work.notify_all()
        if self._writer is not None:
            self._writer.join()

    def _write_all(self) -> None:
        while True:
            with self._work:
                self._work.wait_for(lambda: self._queue or self._is_closed)
                if not self._queue:
                    return
                prompt = self._queue.popleft()
                self._is_writing = True
            try:
                self._keep(prompt)
            finally:
                with self._work:
                    self._is_writing = False
                    self._waiting_bytes -= prompt.size_bytes
                    self._work.notify_all()

    def _keep(
        self, prompt: StoredPrompt, on_written: Callable[[float], None] = lambda share: None
    ) -> None:
        """Write a prompt, unless a stored one serves as well. Delete those that it replaces."""
        tokens = prompt.tokens
        named = prompt.salt.encode() + array("i", tokens).tobytes()
        digest = hashlib.sha256(named).hexdigest()[:16]
        path = self._folder / f"{self._key}-{digest}{_SUFFIX}"
        try:
            if self._has(tokens, path.name, prompt.salt):
                return
            self._make_room(prompt.size_bytes + len(tokens) * 4 + MOST_HEAD_BYTES)
            head = self._write(path, prompt, on_written)
        except (OSError, MemoryError, Unusable) as e:
            self._failed(prompt, _reason(e))
            return
        self._can_write = True
        self.n_written += 1
        with self._lock:
            self._index.add(head.entry(path.name), tokens)
            shorter = self._index.beginnings(tokens, prompt.salt) if self._can_cut else []
        for name in shorter:
            held = self._tokens_of(name)
            if held is not None and tuple(held) == tokens[: len(held)]:
                self._delete(name)

    def _has(self, tokens: tuple[int, ...], name: str, salt: str) -> bool:
        """True if a stored prompt serves every text that this one does. Counts as its use."""
        with self._lock:
            names = [name] * (name in self._index)
            if self._can_cut:
                names += self._index.extensions(tokens, salt)[:_MOST_COMPARED]
        for one in names:
            held = self._tokens_of(one)
            if held is not None and tuple(held[: len(tokens)]) == tokens:
                with contextlib.suppress(OSError):
                    os.utime(self._folder / one)
                return True
        return False

    def _make_room(self, new_bytes: int) -> None:
        """Delete prompts that were used long ago. Raises Unusable if there is no room."""
        files = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):  # another server deleted it
                    about = entry.stat(follow_symlinks=False)
                    if entry.name.endswith(_SUFFIX) and stat.S_ISREG(about.st_mode):
                        files.append(StoredFile(entry.name, about.st_size, about.st_mtime))
        free_bytes = shutil.disk_usage(self._folder).free
        gone = to_evict(files, new_bytes, self._limit_bytes, free_bytes, _SPARE_BYTES)
        if gone is None:
            raise Unusable(
                f"it needs {new_bytes / 2**20:.0f} MiB; --cache-disk is "
                f"{self._limit_bytes / 2**20:.0f} MiB, and the disk has "
                f"{free_bytes / 2**20:.0f} MiB free, of which {_SPARE_BYTES >> 20} stay free"
            )
        for name in gone:
            self._delete(name)

    def _delete(self, name: str) -> None:
        with self._lock:
            self._index.remove(name)
        with contextlib.suppress(FileNotFoundError):
            (self._folder / name).unlink()

    def _write(self, path: Path, prompt: StoredPrompt, on_written: Callable[[float], None]) -> Head:
        with whole_file(path) as file:
            os.fchmod(file.fileno(), stat.S_IRUSR | stat.S_IWUSR)
            return write_prompt(file, self._key, prompt, on_written, self._secret)

    def _failed(self, prompt: StoredPrompt, why: str) -> None:
        """Log the first of several failures in a row."""
        if self._can_write:
            n = len(prompt.tokens)
            log.warning("a prompt of %d tokens is not kept on the disk: %s", n, why)
        self._can_write = False


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error) or "there is not enough memory"


def _opened(path: Path) -> BinaryIO:
    """Open a regular file to read. Raises OSError, and Unusable for anything else."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise Unusable("it is not a regular file")
    return os.fdopen(handle, "rb", buffering=0)
