"""Errors of speculation.

SpecDecError
├── VocabularyMismatch  the draft's vocabulary does not fit the target's
├── BadProfile          a cost profile is damaged or of another model, plan or build
└── BadOption           an option is unknown, malformed or without effect
"""


class SpecDecError(Exception):
    """Base class of the errors that `specdec` raises on purpose."""


class VocabularyMismatch(SpecDecError):
    """The draft's vocabulary does not fit the target's."""


class BadProfile(SpecDecError):
    """A cost profile is damaged or not of this model, plan or build."""


class BadOption(SpecDecError):
    """An option is unknown, malformed or without effect."""
