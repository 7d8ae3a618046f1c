from __future__ import annotations

import unicodedata
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from rag_explain import Explainer
from rag_explain.encoder.batch import Batch
from rag_explain.encoder.model import Encoder
from rag_explain.encoder.unread import reading_notices
from rag_explain.results.notices import SPELLED, TRUNCATED, UNKNOWN
from rag_explain.texts.passage import Passage
from rag_explain.texts.segments import word_spans
from rag_explain.texts.tokens import Token
from tests.support.models import ARCHITECTURES, CORPUS, tiny
from tests.support.models import tokenizer as tokenizer_of

PARIS = "paris is the capital of france"


@cache
def encoder(architecture: str) -> Encoder:
    return Encoder(tiny(architecture))


def notices(text: str | Passage, architecture: str = "bert", **settings: Any) -> dict[str, str]:
    if not settings:
        return said(encoder(architecture).read([text], "document"))
    model = tiny(architecture, dtype=torch.float32)
    side = settings.pop("truncation_side", "right")
    model.tokenizer.truncation_side = side
    for name, value in settings.items():
        setattr(model, name, value)
    return said(Encoder(model).read([text], "document"))


def said(batch: Batch) -> dict[str, str]:
    (found,) = batch.notices
    assert all(notice.side == batch.role for notice in found)
    return {notice.code: notice.text for notice in found}


def counted(sentence: str | None) -> int:
    """The number that a sentence begins with, in words or digits; 0 without a sentence."""
    if sentence is None:
        return 0
    first, second, *_ = sentence.split()
    return 1 if (first, second) == ("The", "only") else int((second if first == "All" else first).replace(",", ""))


def slow_count(text: str, architecture: str) -> int:
    """Unknown words, from the definition: words that share a token are one; one is unknown if a token in it is, unless
    the text spells that token out, or if it can be seen and no token is in it.
    """
    tokenizer = tokenizer_of(ARCHITECTURES[architecture].tokenizer)
    output = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    tokens = [
        (set(range(start, end)), number == tokenizer.unk_token_id and text[start:end].strip() != tokenizer.unk_token)
        for number, (start, end) in zip(output["input_ids"], output["offset_mapping"], strict=True)
        if tokenizer.convert_ids_to_tokens(number) not in ("▁", "Ġ")
    ]
    words = [set(range(start, end)) for start, end in word_spans(text)]
    for characters, _ in tokens:
        together = [word for word in words if word & characters]
        if together:
            words = [word for word in words if not word & characters] + [set.union(*together)]
    count = 0
    for word in words:
        inside = [unknown for characters, unknown in tokens if characters & word]
        is_seen = any(unicodedata.category(text[at])[0] in "LNPS" for at in word)
        count += any(inside) if inside else is_seen
    return count


TEXTS = st.text(alphabet="abcp the.,-'!éß中文東。ไทयЖ한🐝🚗☃\ufffd\u200b\u0301\u0007[UNK]0", max_size=30)


@pytest.mark.parametrize("architecture", ["bert", "roberta", "xlm-roberta"])
@given(text=TEXTS)
@example(text="the [UNK] 🐝")
@example(text="🚗 fly 🍕")
@settings(max_examples=150, deadline=None)
def test_unknown_words_are_counted_as_the_definition_says(architecture: str, text: str) -> None:
    if text.strip():
        assert counted(notices(text, architecture).get(UNKNOWN)) == slow_count(text, architecture)


@pytest.mark.parametrize("architecture", ["bert", "roberta", "xlm-roberta"])
def test_known_words_are_not_mentioned(architecture: str) -> None:
    assert not encoder(architecture).read([PARIS], "query").notices[0]


def test_one_unknown_word_is_told_and_advice_is_given_where_there_are_many() -> None:
    few = f"{CORPUS[0]} {CORPUS[0]} 🐝"
    assert notices(few) == {
        UNKNOWN: "1 of 23 words of the document is unknown to this encoder, "
        "which cannot tell it from other unknown words."
    }
    assert notices("the 🐝 中 文") == {
        UNKNOWN: "3 of 4 words of the document are unknown to this encoder, which cannot tell them apart: "
        "a multilingual model may know them."
    }
    assert notices("🐝")[UNKNOWN].startswith("The only word of the document is unknown")
    assert notices("🐝 🚗")[UNKNOWN].startswith("All 2 words of the document are unknown")


def test_a_typed_unknown_token_stands_for_itself() -> None:
    assert notices("the [UNK] sat") == {}
    assert notices("the [UNK] 🐝")[UNKNOWN].startswith("1 of 3 words")


def test_a_word_that_the_tokenizer_drops_is_unknown() -> None:
    tokens = [Token("the", 0, 3, "text", "the")]
    found = reading_notices(tokens, Passage("the �"), "query", {"[UNK]"}, None)
    assert found[0].text.startswith("1 of 2 words of the query is unknown")
    assert reading_notices(tokens, Passage("the \u200b\ufeff"), "query", {"[UNK]"}, None) == ()


def test_the_backend_names_the_unknown_piece_where_the_wrapper_does_not() -> None:
    model = tiny("bert")
    model.tokenizer.unk_token = None
    assert UNKNOWN in said(Encoder(model).read(["🐝"], "query"))


@pytest.mark.parametrize("text", ["xyzzy", "Жук", "🐝", "中文", "xyzzy the cat sat on"])
def test_letters_and_bytes_are_spelled(text: str) -> None:
    assert "read letter by letter" in notices(text, "roberta")[SPELLED]


@pytest.mark.parametrize("text", ["12345 67", "!!! ... ---", "U.S.A.", "é the", "xyzzy the cat sat on the mat, moon"])
def test_numbers_marks_abbreviations_and_single_names_are_not_spelled(text: str) -> None:
    assert SPELLED not in notices(text, "roberta")


def test_byte_fallback_is_spelled() -> None:
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] + ["t", "h", "e", "th", "the", "a"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("t", "h"), ("th", "e")], byte_fallback=True))
    for text, count in (("中", 1), ("中a", 1), ("the", 0), ("한", 1), ("🐝", 1)):
        output = tokenizer.encode(text)
        found = zip(output.tokens, output.offsets, strict=True)
        tokens = [Token(text[start:end], start, end, "text", piece) for piece, (start, end) in found]
        read = reading_notices(tokens, Passage(text), "query", set(), None)
        assert [notice.code for notice in read] == [SPELLED] * count, text


@pytest.mark.parametrize("architecture", ["bert", "roberta", "xlm-roberta"])
def test_what_was_cut_off_is_said_to_the_character(architecture: str) -> None:
    text = " ".join(CORPUS[:3])
    model = tiny(architecture, dtype=torch.float32)
    model.max_seq_length = 12
    batch = Encoder(model).read([text], "document")
    last = max(token.end for token in batch.tokens[0] if token.part == "text")
    assert said(batch)[TRUNCATED] == (
        f"The encoder read only the first {last} of {len(text)} characters of the document; "
        "the rest has no influence on the score."
    )
    assert batch.truncated == (True,)


def test_a_tokenizer_that_cuts_the_beginning_says_so() -> None:
    text = CORPUS[2]
    sentence = notices(text, max_seq_length=8, truncation_side="left")[TRUNCATED]
    count = int(sentence.split("only the last ")[1].split()[0])
    assert f"of {len(text)} characters of the document;" in sentence
    assert notices(text[-count:], max_seq_length=8) == {}
    assert TRUNCATED in notices(text[-count - 8 :], max_seq_length=8, truncation_side="left")


def test_words_that_were_not_read_are_not_counted() -> None:
    text = "🐝 the cat " + "🚗 " * 50
    assert notices(text, max_seq_length=5)[UNKNOWN].startswith("1 of 3 words read of the document is unknown")


def test_metadata_that_was_cut_off_is_told_apart_from_the_text() -> None:
    before, after = "title: the moon\n", "\nsource: the old bridge"
    whole = Passage(before + PARIS + after, len(before), len(before) + len(PARIS))
    assert TRUNCATED not in notices(whole)
    room = len(encoder("bert").read([Passage(before + PARIS, len(before))], "document").tokens[0])
    assert notices(whole, max_seq_length=room)[TRUNCATED] == (
        "The encoder read the whole document, but not all of the metadata after it."
    )
    cut = notices(whole, max_seq_length=room - 2)[TRUNCATED]
    assert cut.startswith("The encoder read only the first ")
    assert f"of {len(PARIS)} characters of the document and none of the metadata after it;" in cut
    assert notices(whole, max_seq_length=4)[TRUNCATED] == (
        "The encoder read nothing of the document: what stands around it filled all that the encoder reads."
    )
    left = notices(whole, max_seq_length=room, truncation_side="left")[TRUNCATED]
    assert "metadata before it" in left


def test_a_text_of_which_only_blanks_were_cut_off_was_read() -> None:
    tokens = [Token("the cat", 0, 7, "text", "the cat")]
    assert reading_notices(tokens, Passage("the cat \n "), "query", set(), "right") == ()


@given(text=TEXTS)
@settings(max_examples=60, deadline=None)
def test_no_sentence_quotes_the_text(text: str) -> None:
    if text.strip():
        told = "".join(notices(text * 20).values())
        assert told.isascii()
        assert "'" not in told


ORDINARY = [
    "Honeybees navigate back to the hive by the position of the sun and by landmarks they have learned.",
    "Dr. Krzyzewski and Ms. O'Neill-Nguyen met at NATO's HQ in Brussels on 3 May 2021, at 10:30 a.m.",
    "e.g. the U.S.A., the U.K. and the E.U. (see Fig. 3, p. 12) signed it; cf. R&D at AT&T, i.e. §4.2.",
    "for (int i = 0; i < n; i++) { a[i] = b[i] ^ 0xff; } // x y z",
    "TGF-β1 and IL-6 levels fell by 12.5 % (p < 0.05, n = 1,234) in BRCA1-mutated mice.",
    "Die Donaudampfschifffahrtsgesellschaft haftet nach dem Kraftfahrzeughaftpflichtversicherungsgesetz.",
    "Où est la bibliothèque ? Zażółć gęślą jaźń. İstanbul'a hoş geldiniz. Hà Nội là thủ đô.",
    "!!! ??? ... --- *** ===== 1234567890 3.14159 2024-05-06 https://example.org/a/b?c=d&e=f",
]
FOREIGN = {
    "🚗 fly 🍕": {UNKNOWN: "2 of 3 words"},
    "北京是中国的首都": {UNKNOWN: "2 of 8 words"},
    "서울은 대한민국의 수도이며 가장 큰 도시입니다.": {SPELLED: "6 of 7 words"},
    "Москва является столицей России": {SPELLED: "3 of 4 words"},
    "القاهرة هي عاصمة مصر": {SPELLED: "3 of 4 words"},
    "กรุงเทพมหานครเป็นเมืองหลวง": {UNKNOWN: "The only word"},
    "what is XQZ": {SPELLED: "1 of 3 words"},
}


@pytest.mark.slow
def test_a_real_encoder_is_silent_about_ordinary_texts_and_tells_foreign_ones() -> None:
    with Explainer("all-MiniLM-L6-v2") as explainer:
        read = explainer.scorer.read([Passage(text) for text in (*ORDINARY, *FOREIGN)], "query").notices
        assert read[: len(ORDINARY)] == ((),) * len(ORDINARY)
        for found, (text, expected) in zip(read[len(ORDINARY) :], FOREIGN.items(), strict=True):
            assert {notice.code for notice in found} == set(expected), text
            assert all(notice.text.startswith(expected[notice.code]) for notice in found), text
        bee = explainer.explain("🐝", "🚗 fly 🍕")
    assert [(notice.code, notice.side) for notice in bee.notices] == [(UNKNOWN, "query"), (UNKNOWN, "document")]
