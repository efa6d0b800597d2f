"""The toy language: a seeded grammar over 300 ids with structure at several ranges.

A document is a header and numbered sentences:

    BOS topic (@ name name name) x 3 SEP  { high low lead ... "." }  EOS

- Local: words of one to three tokens, spelled the same way everywhere, with shared first tokens; asides
  in brackets, in which each token has four successors, weighted by the two tokens before.
- Middle: `lead` fixes the order of a sentence's parts; a verb's ending agrees with its subject; brackets
  close as they opened; quotations copy the opening of an earlier sentence; new names are said twice.
- Long: the topic chooses which words exist and turns the templates; names come from the header; sentences
  are numbered in base 8, and number and topic weigh every word. So greedy text goes on instead of looping:
  the number changes, and with it the most likely words.

The tokens determine the choices that made them, so the surprise counted at each choice adds up to the exact
log-probability of the text, and its mean is the language's entropy.
"""

import bisect
import math
from collections.abc import Callable

import numpy as np

VOCAB_SIZE = 320  # rows of the embedding
NUM_TOKENS = 300  # ids that the language has
BOS, EOS, SEP = 0, 1, 2
TOPICS = range(3, 11)
HIGH = range(11, 19)
LOW = range(19, 27)
LEADS = range(27, 35)
STOP, AND, AT, INTO, MEET, LINK, QUOTE, UNQUOTE = range(35, 43)
OPENS = range(43, 45)
CLOSES = range(45, 47)
NAMES = range(47, 79)
ASIDE = range(79, 119)  # five levels of eight: an aside climbs a level a token, so it always ends
STARTS = range(119, 189)
MIDDLES = range(189, 253)
FINALS = range(253, 292)
ENDINGS = range(292, 300)

SECTIONS = 64  # sentence numbers: a document ends behind the last
_SIZES = {"noun": 48, "verb": 32, "place": 20, "adjective": 24}
_GENDERS = 4
# Parts by lead: Subject, Reference to a name, Verb, Noun, adJective, Place, Aside, Quotation, new name (X).
_TEMPLATES = ("SVN", "SVJNP", "RVNA", "SVMR", "SVNQ", "JSVP", "RVPA", "SVX")


class Language:
    """The grammar's tables. One seed is one language; documents are drawn with a generator of their own."""

    def __init__(self, seed: int = 0):
        rng = np.random.default_rng(seed)
        self._spell_words(rng)
        self.known = {kind: rng.random((len(TOPICS), size)) < 0.4 for kind, size in _SIZES.items()}
        for table in self.known.values():
            words = np.arange(table.shape[1])
            table[words % len(TOPICS), words] = True  # every word has a topic
        self.gender = rng.integers(0, _GENDERS, _SIZES["noun"]).tolist()

        def effects(causes: int, results: int, scale: float) -> np.ndarray:
            return scale * rng.standard_normal((causes, results))

        low, high, topics = len(LOW), len(HIGH), len(TOPICS)
        nouns, verbs, places, adjectives = _SIZES.values()
        self.effects = {
            "subject": (effects(high, nouns, 1.5), effects(low, nouns, 1.5)),
            "verb": (effects(nouns + _GENDERS, verbs, 1.6), effects(low, verbs, 1.4)),
            "noun": (effects(verbs, nouns, 1.6), effects(high, nouns, 1.4)),
            "place": (effects(verbs, places, 1.6), effects(high, places, 1.4)),
            "adjective": (effects(low, adjectives, 1.6), effects(high, adjectives, 1.4)),
            "name": (effects(topics, len(NAMES), 0.8), effects(high + 1, len(NAMES), 1.0)),
            "name after": (effects(len(NAMES), len(NAMES), 1.6), np.zeros((1, len(NAMES)))),
            "lead": (effects(topics, len(LEADS), 0.6), effects(high, len(LEADS), 0.6)),
        }
        self.aside_next = [rng.permutation(8)[:4] for _ in ASIDE]
        self.aside_effect = effects(len(ASIDE) + len(OPENS), len(ASIDE), 1.2)
        self._cache: dict[tuple, tuple[list[float], list[float]]] = {}

    def _spell_words(self, rng: np.random.Generator) -> None:
        """Words share first tokens, within a class and between classes, yet none begins another."""
        pool = np.concatenate([rng.permutation(STARTS), rng.permutation(STARTS)])
        middles = np.concatenate([rng.permutation(MIDDLES) for _ in range(3)]).tolist()
        finals = np.concatenate([rng.permutation(FINALS) for _ in range(3)]).tolist()
        self.words: dict[str, list[tuple[int, ...]]] = {}
        taken = 0
        for kind, size in _SIZES.items():
            count = round(0.7 * size)
            starts, taken = pool[taken : taken + count].tolist(), taken + count
            words = []
            for i in range(size):
                start = starts[i % count]
                alone = i >= size - count and i < count and rng.random() < 0.3
                if alone:  # the only word with this start: it needs no second token
                    words.append((start,))
                elif rng.random() < 0.45 or kind == "verb":
                    words.append((start, middles.pop()))
                else:
                    words.append((start, middles.pop(), finals.pop()))
            self.words[kind] = words

    def choose(self, rng: np.random.Generator, key: tuple, logits: Callable[[], np.ndarray]) -> tuple[int, float]:
        """Draws from softmax(logits()), which must depend on `key` alone: (index, surprise in nats)."""
        entry = self._cache.get(key)
        if entry is None:
            x = np.asarray(logits(), np.float64)
            p = np.exp(x - x.max())
            p /= p.sum()
            nats = -np.log(np.maximum(p, 1e-300))
            entry = self._cache[key] = (np.cumsum(p)[:-1].tolist(), nats.tolist())
        index = bisect.bisect_right(entry[0], rng.random())
        return index, entry[1][index]

    def document(self, rng: np.random.Generator, first: int | None = None) -> tuple[list[int], list[float]]:
        """Writes one document.

        Args:
            rng: where the choices come from.
            first: number of the first sentence, below `SECTIONS`; drawn if None. Sentences average 17 tokens.

        Returns:
            The tokens, and the surprise in nats by token; a word's surprise stands at its first token.
        """
        return _Writer(self, rng, int(rng.integers(0, SECTIONS - 4)) if first is None else first).write()

    def rows(self, rng: np.random.Generator, count: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows of documents, one behind the other, cut at `length`: tokens and nats, both [count, length]."""
        tokens, nats = np.zeros((count, length), np.int32), np.zeros((count, length), np.float32)
        for row in range(count):
            line: list[int] = []
            costs: list[float] = []
            while len(line) < length:
                more, cost = self.document(rng)
                line += more
                costs += cost
            tokens[row], nats[row] = line[:length], costs[:length]
        return tokens, nats


class _Writer:
    """One document in the making."""

    def __init__(self, language: Language, rng: np.random.Generator, number: int):
        self.language, self.rng, self.number = language, rng, number
        self.tokens: list[int] = []
        self.nats: list[float] = []
        self.openings: list[list[int]] = []  # "low lead ... verb" of each sentence, for quotations

    def put(self, token: int, cost: float = 0.0) -> None:
        self.tokens.append(token)
        self.nats.append(cost)

    def pick(self, weights: tuple[float, ...]) -> tuple[int, float]:
        return self.language.choose(self.rng, ("weights", *weights), lambda: np.log(weights))

    def draw(self, effect: str, cause: int, other: int, kind: str | None = None) -> tuple[int, float]:
        """A choice weighted by two additive effects, among the words that the topic knows."""
        first, second = self.language.effects[effect]

        def logits() -> np.ndarray:
            x = first[cause] + second[other]
            return x if kind is None else np.where(self.language.known[kind][self.topic], x, -np.inf)

        return self.language.choose(self.rng, (effect, cause, other, self.topic if kind else -1), logits)

    def word(self, effect: str, cause: int, other: int, kind: str) -> int:
        index, cost = self.draw(effect, cause, other, kind)
        for i, token in enumerate(self.language.words[kind][index]):
            self.put(token, 0.0 if i else cost)
        return index

    def name(self, other: int) -> list[int]:
        """Three name tokens; the second and third depend on the one before."""
        name, cost = self.draw("name", self.topic, other)
        names = [name]
        self.put(NAMES[name], cost)
        for _ in range(2):
            name, cost = self.draw("name after", name, 0)
            names.append(name)
            self.put(NAMES[name], cost)
        return [NAMES[n] for n in names]

    def copy(self, tokens: list[int], cost: float = 0.0) -> None:
        for i, token in enumerate(tokens):
            self.put(token, 0.0 if i else cost)

    def write(self) -> tuple[list[int], list[float]]:
        self.topic = int(self.rng.integers(0, len(TOPICS)))
        self.put(BOS)
        self.put(TOPICS[self.topic], math.log(len(TOPICS)))
        self.people = []
        for _ in range(3):
            self.put(AT)
            self.people.append(self.name(len(HIGH)))
        self.put(SEP)
        cost = math.log(SECTIONS - 4)
        while self.number < SECTIONS:
            self.sentence(cost)
            step, cost = self.pick((0.85, 0.15))
            self.number += step + 1
        self.put(EOS, cost)
        return self.tokens, self.nats

    def sentence(self, cost: float) -> None:
        self.high, self.low = divmod(self.number, 8)
        self.put(HIGH[self.high], cost)
        begin = len(self.tokens)
        self.put(LOW[self.low])
        usual = (self.low + 3 * self.topic) % len(LEADS)

        def logits() -> np.ndarray:
            first, second = self.language.effects["lead"]
            return first[self.topic] + second[self.high] + 3.5 * (np.arange(len(LEADS)) == usual)

        lead, cost = self.language.choose(self.rng, ("lead", self.topic, self.high, self.low), logits)
        self.put(LEADS[lead], cost)
        for part in _TEMPLATES[lead]:
            self.part(part)
            if part == "V":
                opening = self.tokens[begin:]
        more, cost = self.pick((0.8, 0.2))
        if more:
            self.put(AND, cost)
            self.part("V")
            self.part("N")
            cost = 0.0
        self.put(STOP, cost)
        self.openings.append(opening)

    def part(self, part: str) -> None:
        match part:
            case "S":
                noun = self.word("subject", self.high, self.low, "noun")
                self.subject, self.agrees = noun, self.language.gender[noun]
            case "R":
                self.reference()
            case "V":
                self.verb = self.word("verb", self.subject, self.low, "verb")
                self.put(ENDINGS[self.agrees + _GENDERS * (self.topic % 2)])
            case "N":
                self.word("noun", self.verb, self.high, "noun")
            case "J":
                self.word("adjective", self.low, self.high, "adjective")
            case "P":
                self.put(INTO)
                self.word("place", self.verb, self.high, "place")
            case "A":
                self.aside(self.pick((0.6, 0.4)), nested=False)
            case "Q":
                self.quotation()
            case "M":
                self.put(LINK)
            case "X":
                self.put(MEET)
                name = self.name(self.high)
                self.put(LINK)
                self.copy(name)

    def reference(self) -> None:
        """A name out of the header; whose turn it is follows the sentence number."""
        turn, cost = self.pick((0.7, 0.2, 0.1))
        person = self.people[(self.low + turn) % len(self.people)]
        self.put(AT)
        self.copy(person, cost)
        self.agrees = person[-1] % _GENDERS
        self.subject = _SIZES["noun"] + self.agrees

    def quotation(self) -> None:
        if not self.openings:
            return
        weights = (0.6, 0.25, 0.15)[: len(self.openings)]
        back, cost = self.pick(tuple(w / sum(weights) for w in weights))
        self.put(QUOTE)
        self.copy(self.openings[-1 - back], cost)  # its first token, the low digit, says which sentence
        self.put(UNQUOTE)

    def aside(self, kind: tuple[int, float], nested: bool) -> None:
        """The bracket says at which level the aside begins; a nested one may open behind level 2."""
        bracket, cost = kind
        self.put(OPENS[bracket], cost)
        before, last = len(ASIDE) + bracket, (0, 2)[bracket] * 8 + self.low
        level, cost = (0, 2)[bracket], 0.0
        self.put(ASIDE[last])
        while level < 4:
            if level == 2 and bracket == 0 and not nested:
                deeper, cost = self.pick((0.75, 0.25))
                if deeper:
                    self.aside((1, cost), nested=True)
                    cost = 0.0
            level += 1
            following = [level * 8 + int(i) for i in self.language.aside_next[last]]
            effect = self.language.aside_effect[before, following] + (0.0, -0.6, -1.2, -1.8)
            index, more = self.language.choose(self.rng, ("aside", before, last), lambda x=effect: x)
            before, last = last, following[index]
            self.put(ASIDE[last], cost + more)
            cost = 0.0
        self.put(CLOSES[bracket])
