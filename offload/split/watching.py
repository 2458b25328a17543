"""`--hybrid auto` while serving: both ways are compared on real decodes, the faster one stays."""

from __future__ import annotations

import logging
from collections.abc import Callable

from offload.split.choosing import Watch
from offload.split.switch import HybridSwitch

_logger = logging.getLogger(__name__)


class Watcher:
    """Hears what decodes took, and has the switch follow what the watch decides."""

    def __init__(
        self,
        switch: HybridSwitch,
        n_most: int,
        build_anew: Callable[[], None],
        say: Callable[[str], None] = _logger.warning,
    ) -> None:
        """Of batches of up to `n_most` tokens those are split at first that the switch splits.
        `build_anew` has the next decode build its graph: libllama would reuse the one before,
        computed the other way. `say` gets a sentence on each change."""
        self._switch, self._n_most, self._build_anew = switch, n_most, build_anew
        self._say = say
        self.n_trials = self.n_changes = 0
        self._watch = Watch([n for n in switch.sizes if n <= n_most])

    def took(self, n_tokens: int, seconds: float) -> None:
        """A decode of so many tokens was done, nothing is under way."""
        switch, watch = self._switch, self._watch
        if n_tokens > self._n_most or switch.declined or not switch.is_active:
            return
        before = watch.last_change
        changed = watch.took(n_tokens, seconds)
        if watch.last_change is not before and watch.last_change is not None:
            self.n_changes += 1
            self._say(f"--hybrid auto: {watch.last_change.words}")
        if changed:
            self.n_trials += watch.splits(n_tokens) != watch.prefers(n_tokens)
            others = switch.unsplit - {n_tokens}
            switch.unsplit = others if watch.splits(n_tokens) else others | {n_tokens}
            self._build_anew()
