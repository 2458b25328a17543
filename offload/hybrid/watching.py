"""`--hybrid auto` while serving: both ways are compared on real decodes, the faster one stays."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from offload.hybrid.choosing import Watch
from offload.hybrid.switch import MOST_TOKENS, HybridSwitch

_logger = logging.getLogger(__name__)


class Watcher:
    """Hears what decodes took, and has the switch follow what the watch decides."""

    def __init__(
        self, switch: HybridSwitch, chosen: Collection[int], build_anew: Callable[[], None]
    ) -> None:
        """`chosen`: sizes of batches that are split at first. `build_anew` has the next decode
        build its graph: libllama would reuse the one before, computed the other way."""
        self._switch, self._build_anew = switch, build_anew
        self._watch = Watch(chosen)

    def took(self, n_tokens: int, seconds: float) -> None:
        """A decode of so many tokens was done, nothing is under way."""
        if n_tokens > MOST_TOKENS or self._switch.declined:
            return
        before = self._watch.prefers(n_tokens)
        changed = self._watch.took(n_tokens, seconds)
        after = self._watch.prefers(n_tokens)
        if before != after:
            _logger.warning(
                "--hybrid auto: layers of batches of %d tokens are %s from now on, "
                "which was measured to be faster while answering",
                n_tokens,
                "split" if after else "not split",
            )
        if changed:
            split = self._watch.splits(n_tokens)
            others = self._switch.unsplit - {n_tokens}
            self._switch.unsplit = others if split else others | {n_tokens}
            self._build_anew()
