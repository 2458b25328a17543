"""A projector: makes rows of images with libmtmd, and decodes them in a model's context."""

from __future__ import annotations

import ctypes as C
import os
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from offload.errors import BadModel, BadRequest, DeviceFailed, DoesNotFit
from offload.ggml.backend import Device
from offload.ggml.context import Context
from offload.ggml.library import log
from offload.ggml.library.callback import Pending, guard
from offload.ggml.model import Model, making
from offload.images.decoding import Bitmap
from offload.images.place_tokens import LEAST_PLACES, place_tokens

_TEXT, _IMAGE = 0, 1  # MTMD_INPUT_CHUNK_TYPE_*
_KEY_TOKENS = LEAST_PLACES  # first numbers by which an image is found


class Image:
    """Rows of one image, or of one part of it, for a place in a prompt.

    `tokens` are its numbers in the prompt (`offload/images/place_tokens.py`).
    """

    def __init__(
        self, binding: ModuleType, chunk: int, tokens: list[int], *, is_causal: bool
    ) -> None:
        """`chunk`: libmtmd's mtmd_input_chunk, which is freed with this object."""
        self.chunk, self.tokens, self.is_causal = chunk, tokens, is_causal
        weakref.finalize(self, binding.mtmd_input_chunk_free, chunk)


class ImagePrompt(list[int]):
    """A prompt's tokens, with numbers in the places of its images.

    `images` must live until the prompt was evaluated, because the projector finds them by number.
    """

    def __init__(self, tokens: Sequence[int], images: Sequence[Image]) -> None:
        super().__init__(tokens)
        self.images = tuple(images)


class Projector:
    """An opened projector file (mmproj) for a model. Close it before the model."""

    def __init__(
        self,
        path: Path,
        binding: ModuleType,
        model: Model,
        pending: Pending,
        *,
        device: Device | None,
        n_threads: int,
        least_tokens: int | None = None,
        most_tokens: int | None = None,
        on_progress: Callable[[float], None] | None = None,
    ) -> None:
        """Open the file `path`. `device` computes (None: the CPU).

        `least_tokens` and `most_tokens` limit the places of an image, if the model's images have no
        fixed size. Raises BadModel with libmtmd's reason.
        """
        self._lib, self._model, self._pending = binding, model, pending
        self._known: weakref.WeakValueDictionary[tuple[int, ...], Image] = (
            weakref.WeakValueDictionary()
        )
        self._file_key = f"{path.name} {path.stat().st_size}".encode()
        params = binding.mtmd_context_params_default()
        params.use_gpu = device is not None
        params.device = None if device is None else device.address
        params.print_timings, params.n_threads = False, n_threads
        params.image_min_tokens = -1 if least_tokens is None else least_tokens
        params.image_max_tokens = -1 if most_tokens is None else most_tokens

        def progress(done: float, _: object) -> bool:
            if on_progress is not None:
                on_progress(done)
            return pending.first is None

        thunk, _ = guard(binding.mtmd_progress_callback, pending, False, progress)
        params.progress_callback = thunk
        with making(pending, self.close):
            self._handle = binding.mtmd_init_from_file(os.fsencode(path), model.handle, params)
        if not self._handle:
            raise BadModel(f"{path}: libmtmd refuses this projector ({log.take_reason()})")
        if not binding.mtmd_support_vision(self._handle):
            self.close()
            raise BadModel(f"{path}: this projector reads no images, and only images are supported")

    def close(self) -> None:
        handle, self._handle = getattr(self, "_handle", None), None
        if handle:
            self._lib.mtmd_free(handle)

    def prompt(
        self, parts: Sequence[str | Bitmap], n_ubatch: int, *, add_special: bool
    ) -> ImagePrompt:
        """Return the tokens of texts and images in turn, with the marks that the model expects.

        Special tokens in the texts are read as such. If an image lacks its pixels, the tokens can
        only be counted. Raises BadRequest for an image that the projector refuses, and DoesNotFit
        if an image has to fit a ubatch and does not. Another thread may call this during a decode.
        """
        lib = self._lib
        has_pixels = all(isinstance(part, str) or part.pixels is not None for part in parts)
        texts = [part.encode() if isinstance(part, str) else b"" for part in parts]
        inputs = (lib.mtmd_input_part * len(parts))()
        structs = []  # the library keeps pointers to them until it returns
        bitmaps: list[int] = []
        chunks = lib.mtmd_input_chunks_init()
        try:
            for at, part in enumerate(parts):
                if isinstance(part, str):
                    struct = lib.mtmd_input_text(texts[at], len(texts[at]), False, True)
                    structs.append(struct)
                    inputs[at].text = C.pointer(struct)
                    continue
                pixels = part.read()
                data = None if pixels is None else pixels.ctypes.data_as(C.POINTER(C.c_uint8))
                bitmap = lib.mtmd_bitmap_init(part.width, part.height, data)  # copies the pixels
                bitmaps.append(bitmap)
                lib.mtmd_bitmap_set_id(bitmap, part.identity.hex().encode())
                inputs[at].bitmap = bitmap
            pointers = (C.POINTER(lib.mtmd_input_part) * len(parts))(*map(C.pointer, inputs))
            log.take_errors()
            if lib.mtmd_tokenize_from_parts(
                self._handle, chunks, pointers, len(parts), add_special
            ):
                raise BadRequest(f"the projector refuses an image ({log.take_reason()})")
            return self._prompt_of(chunks, n_ubatch, has_pixels=has_pixels)
        finally:
            lib.mtmd_input_chunks_free(chunks)
            for bitmap in bitmaps:
                lib.mtmd_bitmap_free(bitmap)

    def _prompt_of(self, chunks: Any, n_ubatch: int, *, has_pixels: bool) -> ImagePrompt:
        lib = self._lib
        tokens: list[int] = []
        images: list[Image] = []
        n_images = 0
        for at in range(lib.mtmd_input_chunks_size(chunks)):
            chunk = lib.mtmd_input_chunks_get(chunks, at)
            kind, n = lib.mtmd_input_chunk_get_type(chunk), C.c_size_t()
            if kind == _TEXT:
                first = lib.mtmd_input_chunk_get_tokens_text(chunk, C.byref(n))
                tokens += first[: n.value]
                continue
            if kind != _IMAGE:
                raise BadRequest("only images are supported, no sound")
            numbers, is_causal = self._numbers(chunk, n_images, n_ubatch)
            n_images += 1
            tokens += numbers
            if has_pixels:
                images.append(self._image(chunk, numbers, is_causal=is_causal))
        return ImagePrompt(tokens, images)

    def _numbers(self, chunk: Any, nth: int, n_ubatch: int) -> tuple[list[int], bool]:
        """Return the numbers of the prompt's `nth` image, and whether its places see only those
        before them. Raises BadRequest or DoesNotFit."""
        lib = self._lib
        n = int(lib.mtmd_input_chunk_get_n_tokens(chunk))
        n_positions = int(lib.mtmd_input_chunk_get_n_pos(chunk))
        if n < LEAST_PLACES:
            raise BadRequest(f"an image takes {n} tokens, and at least {LEAST_PLACES} are needed")
        is_causal = not lib.mtmd_decode_use_non_causal(self._handle, chunk)
        if not is_causal and n > n_ubatch:
            raise DoesNotFit(
                f"an image takes {n} tokens, which this model reads in one batch of at most "
                f"{n_ubatch}: raise --ubatch-size"
            )
        # Parts of one file have the file's id, and some models number a prompt's images.
        identity = b"|".join(
            (lib.mtmd_input_chunk_get_id(chunk), str(nth).encode(), self._file_key)
        )
        return place_tokens(n, n_positions, identity), is_causal

    def _image(self, chunk: Any, tokens: list[int], *, is_causal: bool) -> Image:
        """Return the image of `chunk`, which may be kept longer than it."""
        lib = self._lib
        key = tuple(tokens[:_KEY_TOKENS])
        known = self._known.get(key)
        if known is not None:
            return known
        image = Image(lib, lib.mtmd_input_chunk_copy(chunk), tokens, is_causal=is_causal)
        self._known[key] = image
        return image

    def image(self, tokens: Sequence[int]) -> Image:
        """Return the image with these numbers. Raises BadRequest if its prompt is gone."""
        image = self._known.get(tuple(tokens[:_KEY_TOKENS]))
        if image is None or len(image.tokens) != len(tokens):
            raise BadRequest("an image of the prompt is no longer known: send the request again")
        return image

    def decode(self, image: Image, context: Context, sequence: int, position: int) -> None:
        """Compute the image's rows, and append them to the sequence, which ends before `position`.

        Raises DeviceFailed if the projector fails, and the errors of `Context.decode`. The memory
        may then hold a part of the image.
        """
        lib = self._lib
        log.take_errors()
        if lib.mtmd_encode_chunk(self._handle, image.chunk):
            raise DeviceFailed(f"the projector fails on an image ({log.take_reason()})")
        rows = lib.mtmd_get_output_embd(self._handle)
        end = lib.llama_cpp.llama_pos()

        def computed(handle: int | None, n_batch: int) -> int:
            return int(
                lib.mtmd_helper_decode_image_chunk(
                    self._handle, handle, image.chunk, rows, position, sequence, n_batch,
                    C.byref(end), lib.mtmd_helper_post_decode_callback(), None,
                )
            )  # fmt: skip

        context.decode_image(computed, len(image.tokens), sequence, position)
