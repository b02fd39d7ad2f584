"""Token ids to text, one at a time, whatever bytes the tokens split a character into.

The texts of all tokens, joined, are the text of all their bytes decoded at once; bytes that are not UTF-8 become
U+FFFD just as there. Rebuilt from the same ids it is in the same state: nothing else goes in.
"""

import codecs
from collections.abc import Sequence

_Utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """token_bytes[id] are a token's bytes: none for control tokens, and for ids after the table's end."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = _Utf8(errors="replace")

    def feed(self, token_id: int) -> str:
        """The text that this token brings to an end: nothing while it is inside a character."""
        return self._decoder.decode(self._token_bytes[token_id]) if token_id < len(self._token_bytes) else ""

    @property
    def inside(self) -> bool:
        """Whether the tokens so far end inside a character."""
        return self._decoder.getstate()[0] != b""

    def flush(self) -> str:
        """The text of an unfinished character, U+FFFD, at the end of all tokens."""
        return self._decoder.decode(b"", final=True)
