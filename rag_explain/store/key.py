"""The name under which a text's factors are kept.

The key covers everything that the factors depend on, so that a changed model, prompt, method or setting is a
miss and never a wrong answer. Fields are hashed with their lengths: no two different lists of fields give the
same bytes.
"""

import json
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from rag_explain.errors import InvalidInput
from rag_explain.texts.passage import Passage
from rag_explain.texts.tokens import Role

KEY_BYTES = 32
# Equal settings give one string, whatever their order. Made here: json.dumps would make an encoder for every key.
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"))


def factors_key(
    text: str | Passage, *, role: Role, fingerprint: str, method: str, settings: Mapping[str, Any], precision: str
) -> bytes:
    """The 32-byte key of one text's factors, kept in `precision`.

    `text` is the exact string that goes into the encoder, and where the caller's own text begins and ends in it: the
    tokens' offsets point there. The fingerprint is what `Store.identify` calls the model; the settings, the method's,
    are plain data.
    """
    passage = text if isinstance(text, Passage) else Passage(text)
    try:
        plain = _ENCODER.encode(dict(settings))
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"settings must be plain data (numbers, strings, lists, dicts): {error}") from error
    where = f"{passage.start}:{passage.end}" + ("" if passage.within is None else f" {passage.within}")
    digest = blake2b(digest_size=KEY_BYTES, person=b"rag_explain.v1")
    for field in (passage.string, where, role, fingerprint, method, plain, precision):
        data = field.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()
