"""Loads libllama's models, and answers questions on their vocabularies."""

from __future__ import annotations

import ctypes as C
import functools
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from offload.errors import BadModel, DoesNotFit
from offload.ggml.library import interrupt, log
from offload.ggml.library.callback import Pending, guard
from offload.ggml.library.lib import library
from offload.ggml.library.override_array import override_array
from offload.ggml.memory import HasAddress
from offload.kv_overrides import FLAG, KvOverride, override_flags, words_of

if TYPE_CHECKING:
    from offload.ggml.expert_watch import ExpertWatch

LOAD_MODES = {"auto": -1, "none": 0, "mmap": 1, "mlock": 2, "dio": 4}
_CUT_KINDS = {1, 2}  # LLAMA_VOCAB_TYPE_SPM, _BPE
_UNKNOWN, _CONTROL, _USER_DEFINED = 1, 8, 16  # LLAMA_TOKEN_ATTR_*
_MOST_PIECES = 1 << 16  # most token texts in the cache; typical texts use fewer
# What the library puts around the reason of a refusal.
_LEVELS_OF_LOADING = re.compile(
    r"error loading model( hyperparameters| vocabulary)?: |; failed to load model|"
    r"(check_tensor_dims|done_getting_tensors): "
)
_HOST_BUFFER = re.compile(r"allocate \S*(CPU|Host)\S* buffer")
_FOR_HOST = "make room in RAM, or use --mmap"
_FOR_DEVICE = "lower --n-gpu-layers or --vram"


@dataclass(frozen=True)
class ModelPlacement:
    """Options for placing weights. Devices and buffer types must live as long as the model."""

    devices: tuple[HasAddress, ...] = ()  # empty: the CPU alone
    overrides: tuple[tuple[str, HasAddress], ...] = ()  # (pattern of names, buffer type)
    tensor_split: tuple[float, ...] = ()  # share of the layers of each device; one device: empty
    n_gpu_layers: int = 0
    use_extra_bufts: bool = True
    load_mode: str = "auto"
    load_mtp: bool = False  # also load the layers for multi-token prediction
    no_alloc: bool = False  # only count the memory; nothing can be computed
    watch: ExpertWatch | None = None  # called by the contexts of this model
    kv_overrides: tuple[KvOverride, ...] = ()  # in place of the file's metadata


@contextmanager
def making(pending: Pending, close: Callable[[], None]) -> Iterator[None]:
    """Let the block make an object of libllama's, with the log's errors from then on.

    Afterwards raises what callbacks kept in `pending`, and a Ctrl-C. Calls `close` before.
    """
    log.take_errors()
    with interrupt.deferred(pending):
        yield
    try:
        pending.raise_first()
        log.pending.raise_first()
    except BaseException:
        close()
        raise


class Model:
    """A loaded model. Close it after its contexts."""

    def __init__(
        self,
        path: Path,
        placement: ModelPlacement,
        pending: Pending,
        on_progress: Callable[[float], None] | None = None,
    ) -> None:
        """Load the model file `path`. `on_progress` receives the loaded share, 0 to 1.

        Raises BadModel with libllama's reason, DoesNotFit if memory is missing, or an exception
        that a callback raised.
        """
        self._lib = lib = library()
        self.path, self.has_mtp, self.watch = path, placement.load_mtp, placement.watch
        params = lib.llama_model_default_params()
        params.n_gpu_layers = placement.n_gpu_layers
        params.use_extra_bufts = placement.use_extra_bufts
        params.load_mode = LOAD_MODES[placement.load_mode]
        params.no_alloc = placement.no_alloc
        params.load_mtp = placement.load_mtp
        addresses = [device.address for device in placement.devices]
        devices = (C.c_void_p * (len(addresses) + 1))(*addresses, None)
        params.devices = C.cast(devices, C.c_void_p)
        if placement.tensor_split:  # libllama reads one number per device that it could have
            shares = (C.c_float * lib.llama_max_devices())(*placement.tensor_split)
            params.tensor_split = C.cast(shares, C.POINTER(C.c_float))
        patterns = [C.create_string_buffer(p.encode()) for p, _ in placement.overrides]
        pairs = (C.c_void_p * (2 * len(patterns) + 2))()
        for i, (pattern, (_, buft)) in enumerate(zip(patterns, placement.overrides, strict=True)):
            pairs[2 * i], pairs[2 * i + 1] = C.addressof(pattern), buft.address
        params.tensor_buft_overrides = C.cast(pairs, C.c_void_p)
        kv_overrides = override_array(lib.structs, placement.kv_overrides)
        params.kv_overrides = C.cast(kv_overrides, type(params.kv_overrides))

        def progress(done: float, _: object) -> bool:
            if on_progress is not None:
                on_progress(done)
            return pending.first is None

        thunk, _ = guard(lib.structs.llama_progress_callback, pending, False, progress)
        params.progress_callback = thunk
        log.take_overridden()
        with making(pending, self.close):
            self.handle: int | None = lib.llama_model_load_from_file(os.fsencode(path), params)
        if not self.handle:
            reason = _LEVELS_OF_LOADING.sub("", log.take_reason())
            if "unable to allocate" in reason:
                remedy = _FOR_HOST if _HOST_BUFFER.search(reason) else _FOR_DEVICE
                raise DoesNotFit(f"{path} does not fit ({reason}); {remedy}")
            changes = override_flags(placement.kv_overrides)
            changed = f" with {' '.join(changes)}" if changes else ""
            raise BadModel(f"{path}{changed}: the library refuses it ({reason})")
        read = log.take_overridden()
        if unread := [each.key for each in placement.kv_overrides if each.key not in read]:
            self.close()
            raise BadModel(
                f"{FLAG} {words_of(placement.kv_overrides)}: the library reads no "
                f"{', '.join(unread)} of this model, so it would change nothing: correct the key, "
                "or leave it out"
            )
        self.vocab: int = lib.llama_model_get_vocab(self.handle)
        self.n_vocab: int = lib.llama_vocab_n_tokens(self.vocab)
        # Cached answers for single tokens; the library takes ten times as long.
        self._pieces: dict[tuple[int, bool], bytes] = {}
        self._is_end: dict[int, bool] = {}

    def close(self) -> None:
        handle, self.handle = self.handle, None
        if handle:
            self._lib.llama_model_free(handle)

    @property
    def n_ctx_train(self) -> int:
        return int(self._lib.llama_model_n_ctx_train(self.handle))

    @property
    def n_params(self) -> int:
        return int(self._lib.llama_model_n_params(self.handle))

    @property
    def size_bytes(self) -> int:
        return int(self._lib.llama_model_size(self.handle))

    @property
    def n_mtp_layers(self) -> int:
        """Number of layers for multi-token prediction, from the file's header."""
        return int(self._lib.llama_model_n_layer_nextn(self.handle))

    @property
    def row_width(self) -> int:
        """Number of values in a token's hidden row."""
        return int(self._lib.llama_model_n_embd_out(self.handle))

    @property
    def is_recurrent(self) -> bool:
        """True for recurrent and hybrid models. Their memory cannot be cut (llama.cpp #19493)."""
        return self.is_hybrid or bool(self._lib.llama_model_is_recurrent(self.handle))

    @property
    def is_hybrid(self) -> bool:
        """True if the model has both attention layers and recurrent layers."""
        return bool(self._lib.llama_model_is_hybrid(self.handle))

    @property
    def has_tokenizer(self) -> bool:
        return bool(self._lib.llama_vocab_type(self.vocab))

    def chat_template(self, name: str | None = None) -> str | None:
        """Return the file's template of that name (None: its default template), or None."""
        encoded = None if name is None else name.encode()
        text: bytes | None = self._lib.llama_model_chat_template(self.handle, encoded)
        return text.decode("utf-8", "replace") if text else None

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Return the token ids of `text`. Raises BadModel if the file has no tokenizer."""
        if not self.has_tokenizer:
            raise BadModel(f"{self.path}: has no tokenizer, so it cannot read text")
        raw = text.encode("utf-8", "surrogatepass")
        capacity = len(raw) + 8
        while True:
            out = (C.c_int32 * capacity)()
            n = self._lib.llama_tokenize(
                self.vocab, raw, len(raw), out, capacity, add_special, parse_special
            )
            if n >= 0:
                return list(out[:n])
            capacity = -n

    @property
    def may_cut_texts(self) -> bool:
        """True for BPE and SentencePiece vocabularies that append nothing to a text."""
        kind = self._lib.llama_vocab_type(self.vocab)
        return kind in _CUT_KINDS and not self._lib.llama_vocab_get_add_eos(self.vocab)

    def special_texts(self, *, parse_special: bool) -> list[str]:
        """Return the texts of the tokens at which the library splits a text first."""
        attribute = self._lib.llama_vocab_get_attr
        kinds = _USER_DEFINED | (_CONTROL | _UNKNOWN if parse_special else 0)
        ids = (i for i in range(self.n_vocab) if attribute(self.vocab, i) & kinds)
        return [self.token_text(i) for i in ids]

    def piece(self, token: int, *, special: bool) -> bytes:
        """Return the bytes of a token. With `special`, control tokens give their text."""
        piece = self._pieces.get((token, special))
        if piece is None:
            piece = self._read_piece(token, special=special)
            if len(self._pieces) < _MOST_PIECES:
                self._pieces[token, special] = piece
        return piece

    def _read_piece(self, token: int, *, special: bool) -> bytes:
        size = 64
        while True:
            buffer = C.create_string_buffer(size)
            n = self._lib.llama_token_to_piece(self.vocab, token, buffer, size, 0, special)
            if n >= 0:
                return buffer.raw[:n]
            size = -n

    def is_end(self, token: int) -> bool:
        is_end = self._is_end.get(token)
        if is_end is None:
            is_end = self._is_end[token] = bool(self._lib.llama_vocab_is_eog(self.vocab, token))
        return is_end

    @functools.cached_property
    def ends(self) -> tuple[int, ...]:
        """The tokens that end a generation."""
        return tuple(i for i in range(self.n_vocab) if self.is_end(i))

    @functools.cached_property
    def suppressed(self) -> tuple[int, ...]:
        """The tokens that must never be chosen, according to the file."""
        n = C.c_int32(0)
        address = self._lib.llama_vocab_get_suppress_tokens(self.vocab, C.addressof(n))
        return tuple((C.c_int32 * n.value).from_address(address)) if address and n.value else ()

    def token_text(self, token: int) -> str:
        text: bytes = self._lib.llama_vocab_get_text(self.vocab, token)
        return text.decode("utf-8", "replace")

    @property
    def bos(self) -> int:
        return int(self._lib.llama_vocab_bos(self.vocab))

    @property
    def eos(self) -> int:
        return int(self._lib.llama_vocab_eos(self.vocab))

    @property
    def eot(self) -> int:
        """The token that ends a turn; -1 if the file has none."""
        return int(self._lib.llama_vocab_eot(self.vocab))

    @functools.cached_property
    def control_tokens(self) -> tuple[int, ...]:
        """The special tokens, which are no text."""
        attribute = self._lib.llama_vocab_get_attr
        return tuple(i for i in range(self.n_vocab) if attribute(self.vocab, i) & _CONTROL)

    def fim_tokens(self) -> tuple[int, int, int, int, int]:
        """Return the tokens before prefix, suffix, middle, repository and file; -1 if missing."""
        lib, vocab = self._lib, self.vocab
        return (
            int(lib.llama_vocab_fim_pre(vocab)),
            int(lib.llama_vocab_fim_suf(vocab)),
            int(lib.llama_vocab_fim_mid(vocab)),
            int(lib.llama_vocab_fim_rep(vocab)),
            int(lib.llama_vocab_fim_sep(vocab)),
        )
