"""Errors of speculation.

SpecDecError
├── VocabularyMismatch  the draft's tokens cannot be read as the target's
├── BadProfile          a cost profile that is damaged or belongs to something else
└── BadOption           an option that is unknown, malformed or cannot take effect
"""


class SpecDecError(Exception):
    """Root of everything `specdec` raises on purpose."""


class VocabularyMismatch(SpecDecError):
    """The draft's vocabulary does not fit the target's."""


class BadProfile(SpecDecError):
    """A cost profile is damaged or not of this model, plan or build."""


class BadOption(SpecDecError):
    """An option is unknown, malformed or inert."""
