"""Decides when an idle conversation leaves the cells of the KV cache. Pure.

Each decode of others passes over the cells of an idle conversation. The conversation is charged
that time. It leaves before the decode that would raise its account above the cost of moving out
and back. This is the rule for renting or buying skis: nobody has to know how often others will
decode, and the whole cost is at most twice that of the best choice in hindsight. Source: Karlin,
Manasse, Rudolph and Sleator, "Competitive snoopy caching", Algorithmica 3 (1988).

A long conversation moves out part by part, between several decodes, and pays for these too. It
leaves so much earlier that the bound holds. If it is used again meanwhile, it stays, and only the
copied parts are lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping


def _nothing(_: int, __: float) -> float:
    return 0.0


class IdleRents:
    """The accounts of idle conversations, in seconds."""

    def __init__(self) -> None:
        self._paid_s: dict[int, float] = {}

    def leaving(
        self,
        rents_s: Mapping[int, float],
        cost_s: Callable[[int], float],
        lead_s: Callable[[int, float], float] = _nothing,
    ) -> list[int]:
        """Charge each conversation for the next decode. Returns those that leave before it.

        `cost_s` returns the seconds of moving a conversation out and back. `lead_s` returns what it
        pays while it moves out, from its rent for the next decode: it leaves earlier by that. The
        account of one that leaves is closed. If it cannot leave, it begins anew, so failures cost
        no more than rents.
        """
        leaving = []
        for who, rent_s in rents_s.items():
            paid_s = self._paid_s.get(who, 0.0) + rent_s
            if rent_s > 0.0 and paid_s + lead_s(who, rent_s) > cost_s(who):
                leaving.append(who)
                paid_s = 0.0
            self._paid_s[who] = paid_s
        return leaving

    def close(self, who: int) -> None:
        """Close the account of a conversation that is no longer idle."""
        self._paid_s.pop(who, None)


class MoveCosts:
    """Seconds of moving a state out and back: estimated, and then as recent moves took."""

    _WEIGHT = 0.5  # of the latest move in the mean

    def __init__(self, estimated_bytes_per_s: float) -> None:
        self._out_s = self._back_s = 1.0 / estimated_bytes_per_s  # for a byte
        self._have_out = self._have_back = False

    def took(self, n_bytes: int, seconds: float, *, is_out: bool) -> None:
        """Learn from a move of `n_bytes`."""
        if n_bytes <= 0:
            return
        each_s = seconds / n_bytes
        if is_out:
            self._out_s = self._mean(self._out_s, each_s, known=self._have_out)
            self._have_out = True
        else:
            self._back_s = self._mean(self._back_s, each_s, known=self._have_back)
            self._have_back = True

    def seconds(self, n_bytes: int) -> float:
        """Return the seconds of moving `n_bytes` out and back."""
        return n_bytes * (self._out_s + self._back_s)

    def out_seconds(self, n_bytes: int) -> float:
        """Return the seconds of moving `n_bytes` out."""
        return n_bytes * self._out_s

    def _mean(self, before: float, latest: float, *, known: bool) -> float:
        return before + (self._WEIGHT if known else 1.0) * (latest - before)
