"""Has the images of requests decoded, beside the engine and within limits for all requests.

The decoder (`offload/images/decoder.cpp`) is a process for each request. It lowers its own priority
after half a second, so that a file which takes long delays neither the model nor other images. The
pixels stay in memory without a name, which the engine process maps, until the prompt is accepted.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import weakref
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from offload.errors import BadRequest
from offload.images.decoding import Bitmap, DecodedImage, decoder_command, decoder_input, found_in

MOST_BYTES = 3 << 30  # that the images of all requests may take at once
MOST_CLIENT_BYTES = 2 << 30  # of these, for one client
MOST_DECODERS = 16
MOST_CLIENT_DECODERS = 8
_WORKING_BYTES = 24  # that the decoder takes for a pixel of the image at hand, an upper estimate
_TIME_LIMIT_S = 120.0  # for a decoder that gets too little of the processor


class Amount(NamedTuple):
    """What decoding takes: memory, and running decoders."""

    n_bytes: int
    n_decoders: int


@dataclass(frozen=True)
class _Waiter:
    client: str
    amount: Amount
    is_granted: asyncio.Future[None]


class DecodingGate:
    """Shares memory and processes among requests with images, in the order of their arrival.

    A client that has its own share waits, and lets others pass.
    """

    def __init__(self) -> None:
        self._bytes: Counter[str] = Counter()  # by client
        self._decoders: Counter[str] = Counter()
        self._waiting: deque[_Waiter] = deque()

    async def take(self, client: str, amount: Amount) -> None:
        """Wait for this amount. A single request always gets what it needs in the end."""
        waiter = _Waiter(client, amount, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        self._grant()
        try:
            await waiter.is_granted
        except asyncio.CancelledError:
            if waiter.is_granted.done() and not waiter.is_granted.cancelled():
                self.free(client, amount)
            raise

    def free(self, client: str, amount: Amount) -> None:
        self._add(client, Amount(-amount.n_bytes, -amount.n_decoders))
        self._grant()

    def _add(self, client: str, amount: Amount) -> None:
        self._bytes[client] += amount.n_bytes
        self._decoders[client] += amount.n_decoders
        if not self._bytes[client] and not self._decoders[client]:
            del self._bytes[client], self._decoders[client]

    def _grant(self) -> None:
        kept: deque[_Waiter] = deque()
        while self._waiting:
            waiter = self._waiting.popleft()
            if waiter.is_granted.done():
                continue  # it was cancelled
            n_bytes, n_decoders = self._bytes[waiter.client], self._decoders[waiter.client]
            own = Amount(MOST_CLIENT_BYTES, MOST_CLIENT_DECODERS)
            if not self._fits(waiter, n_bytes, n_decoders, own):
                kept.append(waiter)
                continue
            n_bytes, n_decoders = self._bytes.total(), self._decoders.total()
            if not self._fits(waiter, n_bytes, n_decoders, Amount(MOST_BYTES, MOST_DECODERS)):
                self._waiting.appendleft(waiter)
                break
            self._add(waiter.client, waiter.amount)
            waiter.is_granted.set_result(None)
        self._waiting.extendleft(reversed(kept))

    @staticmethod
    def _fits(waiter: _Waiter, n_bytes: int, n_decoders: int, most: Amount) -> bool:
        is_alone = not n_bytes and not n_decoders
        return is_alone or (
            n_bytes + waiter.amount.n_bytes <= most.n_bytes
            and n_decoders + waiter.amount.n_decoders <= most.n_decoders
        )


class StoredImages:
    """The pixels of one request, and the share of the gate's memory that they take."""

    def __init__(self, gate: DecodingGate, client: str, n_bytes: int) -> None:
        self.descriptor = os.memfd_create("images", os.MFD_CLOEXEC)
        self.path = f"/proc/{os.getpid()}/fd/{self.descriptor}"
        self._n_shares = 0
        loop = asyncio.get_running_loop()
        amount = Amount(n_bytes, 0)
        self.close = weakref.finalize(self, _close, self.descriptor, loop, gate, client, amount)

    def share(self) -> StoredImages:
        """Return this object, which one more user will give back."""
        self._n_shares += 1
        return self

    def give_back(self) -> None:
        """Free the memory after the last user."""
        self._n_shares -= 1
        if not self._n_shares:
            self.close()


def _close(
    descriptor: int, loop: asyncio.AbstractEventLoop, gate: DecodingGate, client: str, held: Amount
) -> None:
    os.close(descriptor)
    with contextlib.suppress(RuntimeError):  # the loop is closed
        # A forgotten request is collected in any thread.
        loop.call_soon_threadsafe(gate.free, client, held)


async def image_sizes(files: Sequence[bytes], decoder: Path) -> list[DecodedImage]:
    """Return the images without their pixels, by the headers of their files."""
    return found_in(await _said(files, decoder, None), files)


async def image_pixels(
    files: Sequence[bytes],
    sizes: Sequence[Bitmap],
    decoder: Path,
    gate: DecodingGate,
    client: str,
) -> tuple[list[DecodedImage], StoredImages]:
    """Decode the files, whose sizes are known. Close the second result to free the memory.

    A cancelled call ends the decoder.
    """
    stored_bytes = sum(size.n_bytes for size in sizes)
    largest = max(size.width * size.height for size in sizes)
    working = Amount(_WORKING_BYTES * largest, 1)
    await gate.take(client, Amount(stored_bytes + working.n_bytes, 1))
    stored: StoredImages | None = None
    try:
        stored = StoredImages(gate, client, stored_bytes)
        images = found_in(await _said(files, decoder, stored.descriptor), files, stored.path)
    except BaseException:
        if stored is not None:
            stored.close()
        else:
            gate.free(client, Amount(stored_bytes, 0))
        raise
    finally:
        gate.free(client, working)
    return images, stored


async def _said(files: Sequence[bytes], decoder: Path, descriptor: int | None) -> bytes:
    try:
        async with _running(decoder, descriptor) as process, asyncio.timeout(_TIME_LIMIT_S):
            assert process.stdin is not None
            assert process.stdout is not None
            reading = asyncio.create_task(process.stdout.read())
            try:
                with contextlib.suppress(ConnectionError):  # it ended, and says why
                    for part in decoder_input(files):
                        process.stdin.write(part)
                        await process.stdin.drain()
                    process.stdin.close()
                return await reading
            finally:
                reading.cancel()
    except TimeoutError as e:
        raise BadRequest(f"decoding the images takes over {_TIME_LIMIT_S:g} s") from e
    except OSError as e:
        raise BadRequest(f"the decoder of images does not start ({e})") from e


@asynccontextmanager
async def _running(
    decoder: Path, descriptor: int | None
) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *decoder_command(decoder, descriptor),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        pass_fds=() if descriptor is None else (descriptor,),
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()  # its child dies with it
        await asyncio.shield(process.wait())
