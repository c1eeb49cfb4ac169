"""Shadow state of every block and slot: makes the misuse of a block an error with a name on it."""

from pagedkv.cache.sanitizer.hook import asked_for_by_environment, watched
from pagedkv.cache.sanitizer.sanitizer import Sanitizer

__all__ = ["Sanitizer", "asked_for_by_environment", "watched"]
