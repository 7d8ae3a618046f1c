"""What of a text is written: the text, a masked copy, or only its hash.

Redacted spans are masked character for character, so that offsets into a text stay true.
"""

import hashlib
import hmac
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain, count
from typing import Any, Literal, TypeVar, cast

import regex

from rag_explain.errors import InvalidInput
from rag_explain.results.metric import Metric

T = TypeVar("T")
Span = tuple[int, int]
Redactor = Callable[[str], Iterable[Span]]  # gives the `(start, end)` spans of a text that must not be written
Texts = Literal["kept", "redacted", "none"]  # what happened to the texts of a record
MASK = "█"
_KEYED = "hmac-sha256:"
# What the library itself writes about a computation: methods, measures, and the words of settings, references and
# provenance. No text of the host is among them.
_OWN_WORDS = frozenset(
    """bilrp|hxp|ij|ij-exact|pooled|static|occlusion|shapley|alignment|bti|embeddings|gradient|integrated-gradients
    |random|cosine|dot|MaxSim|mean MaxSim|precision of MaxSim|F1 of MaxSim|optimal transport|logit|layer|rules|lrp
    |attnlrp|tolerance|max_nodes|biases|position|apart|score|maxsim|recall|precision|f1|transport|saliency|product
    |activation|clusters|samples|seed|nodes|query_nodes|document_nodes|query_error|document_error|query_sum
    |document_sum|f(a, r_b)|f(r_a, b)|f(r_a, r_b)|along references|reference|padding|mask|zero|mean|along_reference
    |query standard error|document standard error|rest|pairs|path|seconds|subspace|cold|pair|built|memory|disk
    |remote|gradient-input|cut|label""".replace("\n    ", "").split("|")
)


@dataclass(frozen=True)
class Policy:
    """What of an answer is written; the fields are arguments of `ExplanationLog`, which explains them."""

    top: int = 20
    matrices: bool = False
    keep_text: bool = True
    redact: Redactor | None = None
    hash_key: bytes | None = None

    def __post_init__(self) -> None:
        if self.top < 0:
            raise InvalidInput(f"top must be 0 or more pairs, not {self.top}")
        if self.hash_key is not None and len(self.hash_key) < 16:
            raise InvalidInput("hash_key needs at least 16 bytes, or it can be guessed: use secrets.token_bytes(32)")

    @property
    def texts(self) -> Texts:
        """What happens to the texts of a record under this policy."""
        return "none" if not self.keep_text else "kept" if self.redact is None else "redacted"

    def written(self, value: T) -> T | None:
        """A text, or plain data with texts in it, as it stands in the record; None where texts are not kept."""
        return mask(value, self.redact) if self.keep_text else None

    def described(self, value: T) -> T:
        """What a computation says of itself; strings that are not the library's own words are masked, or hashed."""
        return with_texts(value, self._described)

    def _described(self, text: str) -> str:
        if text in _OWN_WORDS or Metric.find(text) is not None:
            return text
        return mask(text, self.redact) if self.keep_text else digest(text, self.hash_key)

    def hashed(self, text: str | None) -> str | None:
        """The hash of the text as it was before redaction."""
        return None if text is None else digest(text, self.hash_key)


def patterns(*expressions: str) -> Redactor:
    """A redactor that masks whatever matches one of the regular expressions.

    ExplanationLog(path, redact=patterns(r"[\\w.+-]+@[\\w-]+\\.[\\w.]+", r"\\b\\d{13,19}\\b"))
    """
    if not expressions:
        raise InvalidInput("patterns needs at least one regular expression")
    try:
        compiled = [regex.compile(expression) for expression in expressions]
    except regex.error as error:
        raise InvalidInput(f"this is not a regular expression: {error}") from error
    return lambda text: [match.span() for expression in compiled for match in expression.finditer(text)]


def mask(value: T, redact: Redactor | None) -> T:
    """Plain data with every redacted character of every string, keys too, replaced by one █."""
    return value if redact is None else with_texts(value, lambda text: _mask_text(text, redact))


def with_texts(value: T, change: Callable[[str], str]) -> T:
    """Plain data with every string changed, keys too; keys that become equal are numbered, so that none is lost."""
    changed: Any = value
    if isinstance(value, str):
        changed = change(value)
    elif isinstance(value, Mapping):
        changed = {}
        for key, item in value.items():
            name = change(key)
            names = chain([name], (f"{name} ({number})" for number in count(2)))
            changed[next(free for free in names if free not in changed)] = with_texts(item, change)
    elif isinstance(value, list | tuple):
        changed = type(value)(with_texts(item, change) for item in value)
    return cast(T, changed)


def _mask_text(text: str, redact: Redactor) -> str:
    characters = list(text)
    for start, end in redact(text):
        if not 0 <= start <= end <= len(text):
            raise InvalidInput(f"the redaction hook gave the span ({start}, {end}) of a text of {len(text)} characters")
        characters[start:end] = MASK * (end - start)
    return "".join(characters)


def digest(text: str, key: bytes | None = None) -> str:
    """`sha256:...` of the UTF-8 text, or `hmac-sha256:...` with a key."""
    raw = text.encode("utf-8", "surrogatepass")
    if key is None:
        return "sha256:" + hashlib.sha256(raw).hexdigest()
    return _KEYED + hmac.new(key, raw, hashlib.sha256).hexdigest()


def needs_key(expected: str) -> bool:
    """Whether a hash can only be checked with the log's key."""
    return expected.startswith(_KEYED)


def is_hash_of(text: str, expected: str, key: bytes | None) -> bool:
    """Whether `expected` is the hash of this text. A hash that was made without a key is compared without one."""
    return digest(text, key if needs_key(expected) else None) == expected
