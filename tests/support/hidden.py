"""Numbers where neither a key nor a run before a capture finds them."""

from ctypes import c_int64


class HiddenCount:
    """An iterator over 1, 2, ... whose position nothing shows: no key, and nothing is put back."""

    def __init__(self) -> None:
        self._last = c_int64(0)

    def __iter__(self) -> "HiddenCount":
        return self

    def __next__(self) -> int:
        self._last.value += 1
        return self._last.value
