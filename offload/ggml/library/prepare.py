"""The variables that the library reads for itself, set right before it is loaded.

The C environment is changed, not Python's: children of this process inherit it.
"""

from __future__ import annotations

import ctypes as C
import functools

# Without the first ggml refuses to pin memory of ours; without the second an assertion starts a
# debugger. What is set already stays.
_SET = (b"GGML_CUDA_REGISTER_HOST", b"GGML_NO_BACKTRACE")
# It runs branches of a graph on several streams, and takes the nodes it is given for ggml's own.
_CLEARED = b"GGML_CUDA_GRAPH_OPT"


@functools.cache
def prepare() -> tuple[str, ...]:
    """Call before the first load. A sentence for each thing that the user had set otherwise."""
    libc = C.CDLL(None)
    libc.getenv.restype = C.c_char_p
    libc.getenv.argtypes = [C.c_char_p]
    for name in _SET:
        libc.setenv(name, b"1", 0)
    if libc.getenv(_CLEARED) in (None, b"0"):
        return ()
    libc.unsetenv(_CLEARED)
    return (
        f"{_CLEARED.decode()} is ignored: with it CUDA reorders graphs, and weights that stream "
        "are put into graphs behind its back",
    )
