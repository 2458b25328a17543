"""Errors of placement.

NumaError
├── BadTopology       /sys describes something this code does not understand
├── NoSuchNode        a node, core or thread count that this machine does not have
└── PlacementRefused  the kernel refused a binding; the message says what was done instead
"""


class NumaError(Exception):
    """Base class of the errors that `numa` raises on purpose."""


class BadTopology(NumaError):
    """The kernel's description of the machine is not understood."""


class NoSuchNode(NumaError):
    """A node, core or thread count that does not exist here."""


class PlacementRefused(NumaError):
    """The kernel refused a binding."""
