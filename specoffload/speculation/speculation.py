"""A session's speculation: drafter, policy and calibration, kept from one prompt to the next."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from copy import deepcopy
from typing import NamedTuple

import numpy as np

from offload.engine import Engine
from offload.sampling.answers import AnswerSampler
from offload.sequences.block_draft import BlockDraft
from specdec.build import build_acceptance, build_drafter, build_policy
from specdec.costs.profile import CostProfile
from specdec.decoding.acceptance import AcceptanceRule, MatchAcceptance, RejectionAcceptance
from specdec.decoding.drafting import ChainDrafting, DraftCounters
from specdec.decoding.loop import DecodingLoop, StepReport
from specdec.decoding.member import BatchMember
from specdec.drafters.chain import ChainDrafter
from specdec.drafters.memory import DraftMemory
from specdec.drafters.model import ModelDrafter
from specdec.drafters.ngram_cache import NgramCache
from specdec.drafters.rows import BlockDrafter, RowDrafter
from specdec.options import AcceptRule, DrafterName, SpecOptions
from specdec.types import Drafter, Policy, Round, holds_trees
from specoffload.config.speculation import SpecConfig
from specoffload.errors import NotStored
from specoffload.generation.logits_log import TRACE, LoggedMatch, LoggedRejection
from specoffload.opening.draft_model import DraftModel
from specoffload.opening.translation import translation
from specoffload.speculation.costs import SessionCosts
from specoffload.speculation.surplus_cells import SurplusCells

N_CANDIDATES = 3  # likeliest tokens that the log shows of each drafted position

log = logging.getLogger("specoffload.speculation")


class DraftingParts(NamedTuple):
    """What proposes drafts, and what decides their lengths."""

    drafter: Drafter
    policy: Policy


class Speculation:
    """The drafter, policy and acceptance of a session. Needs opened engines and costs."""

    def __init__(
        self,
        config: SpecConfig,
        target: Engine,
        draft: DraftModel | None,
        costs: SessionCosts,
    ) -> None:
        """Build the drafters and the policy. Raises SpecDecError if options do not fit together."""
        self._config = config
        self._target = target
        options = config.options
        self._costs = costs
        self._n_logged = 0
        drafts = costs.drafts
        policy = build_policy(
            options, drafts.profile, drafts.calibration, costs.priced, drafts.several_s
        )
        self._sampling = RequestSampling()
        self._draft_sequences = None if draft is None else draft.sequences
        self.draft_memory: DraftMemory | None = None  # of the draft model, if there is one
        self._model = self._model_drafter(draft) if draft is not None else None
        self._own = self._row_drafter()
        self.drafter: Drafter = self._built_drafter()
        self._cells: SurplusCells | None = None
        if self.logs_rounds:
            self._cells = SurplusCells(target.sequences, target.layout.context.n_sequences)
            for drafter in (self.drafter, *getattr(self.drafter, "every", ())):
                if isinstance(drafter, ModelDrafter):
                    drafter.n_candidates = N_CANDIDATES
        draws = options.accept is AcceptRule.REJECT
        self._drafting = ChainDrafting(target.sequences, self.drafter, policy, draws=draws)

    # -- parts ----------------------------------------------------------------------------------

    def _model_drafter(self, draft: DraftModel) -> Drafter:
        options = self._config.options
        replacements = options.replacements
        self.draft_memory = DraftMemory(draft.sequences)
        drafter = ModelDrafter(
            draft.sequences,
            memory=self.draft_memory,
            sampling=self._sampling if options.accept is AcceptRule.REJECT else None,
            # Padding is cut off only if the draft has the target's vocabulary.
            n_vocab=self._target.n_vocab if replacements is None else None,
        )
        if replacements is None:
            return drafter
        only_appends = not draft.sequences.can_rewind
        translate = translation(self._target, draft, replacements, only_appends=only_appends)
        return translate(drafter)

    def _built_drafter(self) -> Drafter:
        """The named drafters. Those without a model remember no text yet."""
        return build_drafter(
            self._config.options, self._model, self._tokenize, self._target.n_vocab, self._own
        )

    def _row_drafter(self) -> Drafter | None:
        layers, options = self._target.opened.row_draft, self._config.options
        if layers is None or options.from_rows is None:
            return None
        sampling = self._sampling if options.accept is AcceptRule.REJECT else None
        name, n_vocab = options.from_rows, self._target.n_vocab
        if isinstance(layers, BlockDraft):
            return BlockDrafter(
                layers, name=name, sampling=sampling, n_vocab=n_vocab, n_max=options.n_max
            )
        return RowDrafter(layers, name=name, sampling=sampling, n_vocab=n_vocab)

    def _tokenize(self, text: str) -> Sequence[int]:
        return self._target.tokenize(text, add_special=False, parse_special=False)

    # -- what a session asks ----------------------------------------------------------------------

    @property
    def notes(self) -> tuple[str, ...]:
        """Start-up lines on the drafters, the policy and the longest draft."""
        options = self._config.options
        names = ", ".join(options.drafters)
        line = f"speculation: drafts by {names}, lengths by {self.policy.name}"
        if self.policy.n_max < 1:
            line += "; the profile has one batch size only, which leaves no room to draft"
        elif not self.policy.times:
            line += f" (at most {self.policy.n_max})"
        elif self._may_branch:
            line += "; trees instead of chains where larger batches are nearly free"
        lines = (line, *self._config.reasons)
        wanted, n_max = options.n_max, self.policy.n_max
        if wanted is None or wanted <= n_max:
            return lines
        n_sizes = self._costs.drafts.profile.n_max
        why = f"the profile has batches of up to {n_sizes} tokens, so drafts have up to {n_max}"
        return (*lines, f"{options.name('n_max')} {wanted}: {why}")

    @property
    def _may_branch(self) -> bool:
        """True if the target can hold trees, and a draft model or a block draft proposes them."""
        draft, layers = self._draft_sequences, self._target.opened.row_draft
        proposes = draft is not None and holds_trees(draft)
        proposes = proposes or (isinstance(layers, BlockDraft) and layers.has_lattice)
        return proposes and holds_trees(self._target.sequences)

    @property
    def counters(self) -> DraftCounters:
        """Numbers of drafts and decisions made together for several sequences."""
        return self._drafting.counters

    @property
    def policy(self) -> Policy:
        """The decider of draft lengths."""
        return self._drafting.policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self.use(DraftingParts(self.drafter, policy))

    @property
    def parts(self) -> DraftingParts:
        """The drafter and the policy in use."""
        return DraftingParts(self.drafter, self.policy)

    def begun(self, options: SpecOptions) -> DraftingParts:
        """A drafter and the policy of `options`, as in a session that was just opened.

        N-gram drafters remember no text. The policy has a copy of the calibration so far, which a
        next start would have too. Raises BadProfile if the policy does not fit the measured T(n).
        """
        drafts = self._costs.drafts
        steps_s = None if drafts.several_s is None else dict(drafts.several_s)
        calibration = deepcopy(drafts.calibration)
        policy = build_policy(options, drafts.profile, calibration, self._costs.priced, steps_s)
        return DraftingParts(self._built_drafter(), policy)

    def use(self, parts: DraftingParts) -> None:
        """Draft with `parts` from the next text on. No request may be running."""
        self.drafter = parts.drafter
        self._drafting.use(parts.drafter, parts.policy)
        if (rows := self._target.opened.row_draft) is not None:
            rows.is_paused = False  # the policy before may have wanted no drafts of own layers

    @property
    def costs(self) -> CostProfile:
        """T(n) as it was measured or kept."""
        return self._costs.drafts.profile

    def loop(self) -> DecodingLoop:
        """A decoding loop of the target that drafts."""
        return DecodingLoop(self._target.sequences, self._drafting)

    def acceptance(
        self, sequence: int, chooser: AnswerSampler, temperature: float, rng: np.random.Generator
    ) -> AcceptanceRule:
        """The acceptance rule for the drafts of a request that begins in `sequence`.

        `rng` gives the request's random numbers for drawing drafts and for judging them.
        """
        options, logs_logits = self._config.options, log.isEnabledFor(TRACE)
        if options.accept is AcceptRule.REJECT:
            self._sampling.begin(sequence, temperature, rng)
            if chooser.has_distribution:
                return (LoggedRejection if logs_logits else RejectionAcceptance)(chooser, rng)
        made = build_acceptance(options, chooser, rng)
        return LoggedMatch(chooser) if logs_logits and isinstance(made, MatchAcceptance) else made

    @property
    def logs_rounds(self) -> bool:
        """True if `log_step` does anything."""
        return log.isEnabledFor(logging.DEBUG)

    def log_step(self, report: StepReport) -> None:
        """Log each round of a step."""
        for member, round_ in report.rounds:
            self._log_round(member, round_)

    def _log_round(self, member: BatchMember, round_: Round) -> None:
        """Log the draft of a member's last round, its accepted tokens and its times."""
        self._n_logged += 1
        draft = round_.draft
        probs = (*draft.probs, *(p for _, p in draft.dropped))
        n_best = len(draft.tokens)
        n_surplus = None if self._cells is None else self._cells.count()
        log.debug(
            "round %d: %d drafted by %s, at most %d possible, %d verified, probability of all "
            "%.3f, %d accepted, draft %.2f ms, verify %.2f ms, best %d, gap %d, "
            "surplus KV cells %s: %s",
            self._n_logged,
            len(probs),
            draft.source,
            self._drafting.n_possible(member, round_),
            n_best,
            math.prod(probs),
            round_.n_accepted,
            1e3 * round_.draft_s,
            1e3 * round_.verify_s,
            n_best,
            len(probs) - n_best if n_best else 0,
            "not counted" if n_surplus is None else n_surplus,
            draft.decision.reason,
        )
        for position, candidates in enumerate(draft.candidates):
            words = ", ".join(
                f"{token} {self._target.detokenize([token], special=True)!r} {p:.3f}"
                for token, p in candidates
            )
            log.debug("  position %d: %s", position, words)

    def close(self) -> None:
        """Write the lookup cache. Raises NotStored if that fails."""
        options = self._config.options
        path = options.lookup_dynamic
        drafters = [
            self.drafter,
            *(self.drafter.free if isinstance(self.drafter, ChainDrafter) else ()),
        ]
        for drafter in drafters:
            if path is None or not isinstance(drafter, NgramCache):
                continue
            if drafter.dynamic is not None:
                try:
                    drafter.dynamic.save(path)
                except OSError as e:
                    words = f"the lookup cache {path} was not written: {e.strerror}"
                    raise NotStored(words) from e


class RequestSampling:
    """Temperatures and random numbers of each sequence's request, for rejection sampling."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[float, np.random.Generator]] = {}

    def begin(self, sequence: int, temperature: float, rng: np.random.Generator) -> None:
        """Set the temperature and the random numbers of the request in `sequence`."""
        # A greedy request accepts only the likeliest token. Its drafts are drawn at a low
        # temperature nevertheless, so that the draft still gives probabilities.
        self._of[sequence] = (temperature if temperature > 0 else 0.3, rng)

    def temperature(self, sequence: int) -> float:
        return self._of[sequence][0]

    def rng(self, sequence: int) -> np.random.Generator:
        return self._of[sequence][1]


def drafts_anything(options: SpecOptions, *, has_draft: bool) -> bool:
    """True if some drafter can work: one needs the draft model, the others do not."""
    return options.is_on and (has_draft or DrafterName.DRAFT not in options.drafters)
