"""Which Crosstie this is: said here alone, since a source tree has no metadata of an installation beside it."""

__version__ = "0.1.0"
