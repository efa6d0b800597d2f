"""The text of one row as it grows: incomplete UTF-8 held back, cut at the first stop string."""

from collections.abc import Iterable, Sequence

from graft_jax.tokenizer import Tokenizer


class RowText:
    """Turns a row's tokens into text, piece by piece.

    The pieces, put together, are `text`: the decoded tokens up to, and without, the first stop string. Text
    is held back while it may still change or may be the beginning of a stop string.

    Attributes:
        text: what was given out so far.
        count: tokens taken; after a stop, up to the one that completed the stop string.
        stopped: whether a stop string was found.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()):
        self._stream, self._stop = tokenizer.stream(), tuple(stop)
        self._held = ""
        self.text, self.count, self.stopped = "", 0, False

    def push(self, ids: Iterable[int]) -> str:
        """Takes the next tokens and returns the text that is now certain."""
        start = len(self.text)
        for token in ids:
            if self.stopped:
                break
            self.count += 1
            self._take(self._stream.push([token]), last=False)
        return self.text[start:]

    def flush(self) -> str:
        """Returns what was held back: nothing more will come."""
        start = len(self.text)
        if not self.stopped:
            self._take(self._stream.flush(), last=True)
        return self.text[start:]

    def _take(self, piece: str, last: bool) -> None:
        self._held += piece
        found = [at for at in (self._held.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.text, self._held, self.stopped = self.text + self._held[: min(found)], "", True
            return
        keep = 0 if last else max((_overlap(self._held, stop) for stop in self._stop), default=0)
        free = len(self._held) - keep
        self.text, self._held = self.text + self._held[:free], self._held[free:]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
