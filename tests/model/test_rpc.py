"""Devices of other machines, over ggml's RPC on loopback."""

from __future__ import annotations

import pytest

from offload.errors import LibraryMismatch
from offload.ggml import rpc
from offload.ggml.library.lib import library


def test_a_library_without_rpc_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library(), "ggml_backend_reg_by_name", lambda name: None)
    assert not rpc.has_rpc()
    with pytest.raises(LibraryMismatch, match="without ggml's RPC: run scripts/setup again, or"):
        rpc.add_worker("127.0.0.1:1")
