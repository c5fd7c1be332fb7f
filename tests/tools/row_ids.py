"""The mix of ids once more, with whole numbers: as the contract has it, and as a client in another language would."""

from __future__ import annotations

_FACTOR, _WORD = 0xD6E8FEB86659FD93, 2**64 - 1


def mixed(number: int) -> int:
    """Returns the mix of one id, of which the lowest 64 bits count."""
    number &= _WORD
    for _ in range(2):
        number ^= number >> 32
        number = number * _FACTOR & _WORD
    return number ^ number >> 32
