"""The decoding loop: draft, verify in one batch, accept, rewind.

A single request is a loop of one member. A server's requests share a loop, and so the rows and the
price of each batch. After every step the target holds a member's whole history except the last
token. So a generation may stop after any step, and the next one can continue its sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from sys import maxsize
from time import perf_counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specdec.decoding.acceptance import Verdict
from specdec.decoding.drafting import ChainDrafting
from specdec.decoding.member import BatchMember, Rounds
from specdec.decoding.tree import SamplerFailed, verified_tree
from specdec.errors import SpecDecError
from specdec.types import Decision, Draft, Round, Target

NO_DRAFT = Draft((), (), "none", Decision(0, "no drafter", rest=maxsize))
PromptPart = tuple[BatchMember, list[int]]  # a part of a prompt


class StepReport(NamedTuple):
    """The outcome of one step: a round of each ready member, and members whose prompts were read.

    The step began and ended at `began_s` and `ended_s` (perf_counter). Members in `failed` have
    left the loop; the exception of each concerns only that member. `decodes` holds (tokens, seconds
    including judging) of each batch without prompt tokens.
    """

    began_s: float
    ended_s: float
    rounds: Rounds = ()
    read: Sequence[BatchMember] = ()
    failed: Sequence[tuple[BatchMember, Exception]] = ()
    decodes: Sequence[tuple[int, float]] = ()


class DecodingLoop:
    """Decodes one batch a step for all its members, which share a target."""

    def __init__(self, target: Target, drafting: ChainDrafting | None = None) -> None:
        """Without `drafting`, every round decodes one token."""
        self._target, self._drafting = target, drafting
        self._ready: list[BatchMember] = []  # the target holds all but their last token
        self._reading: list[BatchMember] = []  # prompts that wait to be evaluated, in order
        self._drafts: list[Draft] = []  # drafts of the last step; they hold while `_rest` > 0
        self._rest = 0  # further steps that draft nothing and ask no drafter

    @property
    def is_idle(self) -> bool:
        return not (self._ready or self._reading)

    @property
    def n_ready(self) -> int:
        """Number of members whose prompts are evaluated."""
        return len(self._ready)

    @property
    def reading(self) -> Sequence[BatchMember]:
        """Members whose prompts are to be evaluated, in the order of their arrival."""
        return self._reading

    def is_reading(self, member: BatchMember) -> bool:
        """True while a part of the member's prompt is still to be evaluated."""
        return member in self._reading

    @property
    def members(self) -> list[BatchMember]:
        """All members; those with an evaluated prompt come first."""
        return [*self._ready, *self._reading]

    def add(self, member: BatchMember) -> None:
        """Add a member to the loop.

        Raises SpecDecError if its prompt is empty, or if the sequence does not hold exactly the
        first `n_cached` tokens of the prompt.
        """
        check_start(self._target, member.sequence, member.history, member.n_cached)
        if self._drafting is not None:
            self._drafting.forget(member.sequence)
        self._place(member)

    def remove(self, member: BatchMember) -> None:
        """Remove a member from the loop. Its sequence is not changed."""
        for members in (self._ready, self._reading):
            if member in members:
                members.remove(member)
        self._rest = 0

    def step(
        self,
        n_prompt_tokens: int | None = None,
        prompts: Sequence[BatchMember] | None = None,
    ) -> StepReport:
        """Decode one batch: every ready member's last token and draft, and parts of prompts.

        At most `n_prompt_tokens` tokens of waiting prompts are evaluated (None: as many as a decode
        takes): those of `prompts`, in this order, or of all (None) in the order of their arrival.
        Exceptions of the target or a draft model pass through after the step is undone.
        """
        began_s = perf_counter()
        most = self._target.n_batch
        n_tokens = most if n_prompt_tokens is None else min(n_prompt_tokens, most)
        prompts = self._reading if prompts is None else prompts
        if prompts and n_tokens > 0:
            return self._read(n_tokens, prompts, began_s)
        if not self._ready:
            return StepReport(began_s, perf_counter())
        if len(self._ready) == 1 and self._rest:
            self._rest -= 1
            return self._plain(self._ready[0], self._drafts[0], 0.0, began_s, rests=True)
        drafts = self._proposed(trees=True)
        if len(drafts) == 1 and drafts[0].parents:
            return self._branched(self._ready[0], drafts[0], began_s)
        if len(drafts) == 1 and not drafts[0].tokens:
            draft_s = perf_counter() - began_s - drafts[0].catch_up_s
            return self._plain(self._ready[0], drafts[0], draft_s, began_s)
        return self._verified(drafts, [], began_s)

    # -- prompts ---------------------------------------------------------------------------------

    def _place(self, member: BatchMember) -> None:
        """Add a member to the reading or the ready members, or set its end."""
        self._rest = 0
        if self._target.length(member.sequence) < len(member.history) - 1:
            self._reading.append(member)
        elif member.n_left <= 0:
            member.end = "length"
        elif len(member.history) > self._target.n_ctx:
            member.end = "context"
        else:
            self._ready.append(member)

    def _read(self, n_tokens: int, prompts: Sequence[BatchMember], began_s: float) -> StepReport:
        """Evaluate up to `n_tokens` prompt tokens, in one batch with the ready members' rounds."""
        target = self._target
        if self._ready:
            drafts = self._proposed()
            n_rows = sum([1 + len(draft.tokens) for draft in drafts])
            room = min(n_tokens, target.n_batch - n_rows)
            pieces = self._pieces(prompts, room, target.n_outputs - n_rows)
            report = self._verified(drafts, pieces, began_s)
        else:
            pieces = self._pieces(prompts, n_tokens, target.n_outputs)
            _tell(target, pieces, target.extend_batch([_part(piece) for piece in pieces]))
            report = StepReport(began_s, perf_counter())
        report = report._replace(read=[member for member, _ in pieces])
        for member in report.read:
            if self._drafting is not None:
                self._drafting.heard(member)
            if target.length(member.sequence) == len(member.history) - 1:
                self._reading.remove(member)
                self._place(member)
        return report

    def _pieces(
        self, prompts: Sequence[BatchMember], n_tokens: int, n_logits: int
    ) -> list[PromptPart]:
        """The next tokens of the prompts, at most `n_tokens`, first those of the first prompts.

        At most `n_logits` of them are tokens whose logits are wanted. An image is a piece of its
        own, and may have more tokens than asked for.
        """
        pieces = []
        for member in prompts:
            if n_tokens <= 0:
                break
            held = self._target.length(member.sequence)
            n_most = n_tokens if member.hear_prompt is None else min(n_tokens, n_logits)
            end = min(held + n_most, len(member.history) - 1)
            if member.stops:
                end = min([end, *(stop for stop in member.stops if stop > held)])
            piece = member.history[held:end]
            if member.images:
                piece = _without_cut_images(member, held, piece)
            if not piece:
                continue  # no row of logits is left, but later members may need none
            pieces.append((member, piece))
            n_tokens -= len(piece)
            n_logits -= _n_logits((member, piece))
        return pieces

    # -- rounds ----------------------------------------------------------------------------------

    def _proposed(self, *, trees: bool = False) -> list[Draft]:
        """A draft for each ready member. While drafting rests, the last empty drafts are reused.

        With `trees`, the draft of an only member may be a tree.
        """
        if self._rest:
            self._rest -= 1
        elif self._drafting is None:
            self._drafts, self._rest = [NO_DRAFT] * len(self._ready), NO_DRAFT.decision.rest
        else:
            self._drafts = drafts = self._drafting.propose(self._ready, trees=trees)
            self._rest = min([draft.decision.rest for draft in drafts])
            if self._rest:  # a round of rest must not learn again from what was proposed before
                self._drafts = [draft.resting for draft in drafts]
            return drafts
        return self._drafts

    def _plain(
        self,
        member: BatchMember,
        draft: Draft,
        draft_s: float,
        began_s: float,
        *,
        rests: bool = False,
    ) -> StepReport:
        """A round of the only member without a draft: one decode of its last token.

        The step began at `began_s` (perf_counter), and an attempt to draft took `draft_s` seconds.
        With `rests`, nobody was asked for a draft.
        It does what `_verified` does, at a fraction of the cost. Most rounds take this path while a
        drafter does not pay.
        """
        history, target = member.history, self._target
        n_history = len(history)
        drafted_s = perf_counter()
        try:
            rows = target.extend(member.sequence, history[-1:])
            try:
                verdict = member.accept(draft, rows, history, member.is_end)
            except Exception as e:
                del history[n_history:]
                _take_back(target, member.sequence, n_history - 1)
                self.remove(member)
                return StepReport(began_s, perf_counter(), failed=[(member, e)])
        except BaseException:
            del history[n_history:]
            _take_back(target, member.sequence, n_history - 1)
            self._sort_out()
            raise
        verify_s = perf_counter() - drafted_s
        round_ = self._closed(member, Round(draft, 0, tuple(verdict.emitted), draft_s, verify_s))
        rounds = ((member, round_),)
        if self._drafting is not None:
            if rests:
                self._drafting.rested(member, round_)
            else:
                self._drafting.learn(rounds, draft_s, is_priced=True)
        if round_.end:
            self._leave()
        return StepReport(began_s, perf_counter(), rounds, decodes=((1, verify_s),))

    def _branched(self, member: BatchMember, draft: Draft, began_s: float) -> StepReport:
        """A round of the only member with a tree. Drafting began at `began_s` (perf_counter)."""
        drafted_s = perf_counter()
        draft_s = drafted_s - began_s - draft.catch_up_s
        try:
            try:
                verdict = verified_tree(self._target, member, draft)
            except SamplerFailed as e:
                self.remove(member)
                return StepReport(began_s, perf_counter(), failed=[(member, e.error)])
        except BaseException:
            self._sort_out()
            raise
        verify_s = perf_counter() - drafted_s
        n, emitted = verdict.n_accepted, tuple(verdict.emitted)
        round_ = self._closed(member, Round(draft, n, emitted, draft_s, verify_s))
        rounds = ((member, round_),)
        if self._drafting is not None:
            self._drafting.learn(rounds, draft_s, is_priced=True)
        self._leave()
        decodes = ((1 + len(draft.tokens), verify_s),)
        return StepReport(began_s, perf_counter(), rounds, decodes=decodes)

    def _verified(
        self, drafts: list[Draft], pieces: list[PromptPart], began_s: float
    ) -> StepReport:
        """Decode every ready member's last token and draft, judge the drafts, and rewind.

        The same batch has the prompts' `pieces`. Drafting began at `began_s` (perf_counter).
        """
        members = self._ready
        drafted_s = perf_counter()
        draft_s = drafted_s - began_s - max([draft.catch_up_s for draft in drafts])
        fed = [[m.history[-1], *d.tokens] for m, d in zip(members, drafts, strict=True)]
        verdicts, rollbacks = self._judged(members, drafts, fed, pieces)
        verify_s = perf_counter() - drafted_s
        for tokens, verdict, rollback in zip(fed, verdicts, rollbacks, strict=True):
            if isinstance(verdict, Verdict):
                rollback.keep(tokens, len(verdict.emitted))
        rollback_s = perf_counter() - drafted_s - verify_s
        rounds, failed = [], []
        for member, draft, verdict in zip(members, drafts, verdicts, strict=True):
            if isinstance(verdict, Verdict):
                n, emitted = verdict.n_accepted, tuple(verdict.emitted)
                round_ = Round(draft, n, emitted, draft_s, verify_s, "", rollback_s)
                rounds.append((member, self._closed(member, round_)))
            else:
                failed.append((member, verdict))
        if self._drafting is not None:
            self._drafting.learn(rounds, draft_s, is_priced=not (pieces or failed))
        for member, _ in failed:
            self.remove(member)
        self._leave()
        decodes = [] if pieces else [(sum(map(len, fed)), verify_s)]
        return StepReport(began_s, perf_counter(), rounds, failed=failed, decodes=decodes)

    def _judged(
        self,
        members: list[BatchMember],
        drafts: list[Draft],
        fed: list[list[int]],
        pieces: list[PromptPart],
    ) -> tuple[list[Verdict | Exception], list[Rollback]]:
        """Decode and judge.

        If a member's sampler raises an Exception, the member is restored and its verdict is that
        exception. If the decode raises, all members are restored and the exception passes through.
        """
        target = self._target
        lengths = [len(member.history) for member in members]
        parts = [(m.sequence, f, len(f)) for m, f in zip(members, fed, strict=True)]
        parts += map(_part, pieces)
        n_droppable = 0
        if not target.can_rewind:
            n_droppable = target.n_droppable([(s, len(tokens)) for s, tokens, _ in parts])
        rollbacks = [
            Rollback(target, m.sequence, len(d.tokens), n_droppable)
            for m, d in zip(members, drafts, strict=True)
        ]
        verdicts: list[Verdict | Exception] = []
        try:
            rows = target.extend_batch(parts)
            for i, member in enumerate(members):
                try:
                    verdict = member.accept(drafts[i], rows[i], member.history, member.is_end)
                except Exception as e:
                    del member.history[lengths[i] :]
                    rollbacks[i].undo()
                    verdicts.append(e)
                else:
                    verdicts.append(verdict)
        except BaseException:
            for member, length, rollback in zip(members, lengths, rollbacks, strict=True):
                del member.history[length:]
                rollback.undo()
            self._sort_out()
            raise
        _tell(target, pieces, rows[len(members) :])
        return verdicts, rollbacks

    # -- ends --------------------------------------------------------------------------------------

    def _closed(self, member: BatchMember, round_: Round) -> Round:
        """Count the round's tokens. Returns it, with `end` set if it was the member's last."""
        history = member.history
        member.n_left -= len(round_.emitted)
        if member.is_end(history[-1]):
            member.end = "end"
        elif member.n_left <= 0:
            member.end = "length"
        elif len(history) > self._target.n_ctx:
            member.end = "context"
        return replace(round_, end=member.end) if member.end else round_

    def _leave(self) -> None:
        """Remove the members that have ended."""
        if any([member.end for member in self._ready]):
            self._ready = [member for member in self._ready if not member.end]
            self._rest = 0

    def _sort_out(self) -> None:
        """Place the ready members again after a failed decode.

        A recurrent memory may have lost a member's text, which then has to be read again.
        """
        members, self._ready = self._ready, []
        for member in members:
            self._place(member)


def check_start(target: Target, sequence: int, prompt: Sequence[int], n_cached: int) -> None:
    """Raises SpecDecError unless `sequence` holds `n_cached` tokens and `prompt` is longer."""
    if not prompt:
        raise SpecDecError("the prompt is empty: decoding starts from at least one token")
    if not 0 <= n_cached < len(prompt):
        raise SpecDecError(
            f"{n_cached} of {len(prompt)} prompt tokens are cached; the last must be evaluated "
            "anew, so rewind the target by one"
        )
    held = target.length(sequence)
    if held != n_cached:
        raise SpecDecError(
            f"sequence {sequence} holds {held} tokens where {n_cached} are said to be cached"
        )


def _n_logits(piece: PromptPart) -> int:
    """Number of rows of logits wanted for a part of a prompt."""
    member, tokens = piece
    return 0 if member.hear_prompt is None else len(tokens)


def _part(piece: PromptPart) -> tuple[int, list[int], int]:
    member, tokens = piece
    return member.sequence, tokens, _n_logits(piece)


def _tell(
    target: Target, pieces: Sequence[PromptPart], rows: Sequence[NDArray[np.float32]]
) -> None:
    """Give the logits of evaluated prompts to the members that want them."""
    for (member, tokens), logits in zip(pieces, rows, strict=True):
        if member.hear_prompt is not None:
            member.hear_prompt(target.length(member.sequence) - len(tokens), logits)


# -- taking tokens back ----------------------------------------------------------------------------


class Rollback:
    """Undoes the rejected part of one verification of `sequence`.

    Create it before the sequence is extended and call `keep` afterwards. Memory that can be cut is
    rewound, and so is recurrent memory with snapshots of its last tokens. For other recurrent
    memory a checkpoint is taken before verification. On partial acceptance it is restored, and
    the accepted tokens are decoded again without logits.
    """

    __slots__ = ("_checkpoint", "_length", "_sequence", "_target")

    def __init__(self, target: Target, sequence: int, n_drafted: int, n_droppable: int) -> None:
        """`n_droppable` is what `target.n_droppable` returned for the decode that verifies."""
        self._target = target
        self._sequence = sequence
        self._length = target.length(sequence)
        needs_checkpoint = not target.can_rewind and n_drafted > n_droppable
        self._checkpoint = target.checkpoint(sequence) if needs_checkpoint else None

    def keep(self, fed: Sequence[int], n: int) -> None:
        """Keep the first `n` of the tokens `fed` since creation, and rewind the others."""
        if n == len(fed):
            return
        target, sequence = self._target, self._sequence
        if self._checkpoint is None:
            target.rewind(sequence, self._length + n)
            return
        target.restore(sequence, self._checkpoint)
        if n:
            target.extend(sequence, fed[:n], 0)

    def undo(self) -> None:
        """Restore the sequence to its state at creation, after a failed round."""
        target, sequence = self._target, self._sequence
        if self._checkpoint is None:
            _take_back(target, sequence, self._length)
        elif target.length(sequence) > self._length:
            target.restore(sequence, self._checkpoint)


def _without_cut_images(member: BatchMember, held: int, piece: list[int]) -> list[int]:
    """Return the piece of the prompt from `held` on: the image there, or the text before one."""
    for start, end in member.images:
        if start == held:
            return member.history[start:end]
        if held < start < held + len(piece):
            return member.history[held:start]
    return piece


def _take_back(target: Target, sequence: int, length: int) -> None:
    """Rewind to `length` tokens, without a checkpoint, after a decode that may have failed.

    A recurrent memory keeps one more token: the first token fed, which is part of the history.
    """
    if target.length(sequence) > length:
        target.rewind(sequence, length + (0 if target.can_rewind else 1))
