"""Words, sentences, and which tokens belong to them."""

from __future__ import annotations

import unicodedata
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from rag_explain.texts.segments import group, sentence_spans, word_spans
from tests.support.strategies import TEXTS, cut

# Letters, marks, joiners, blanks, scripts without spaces, emoji, full stops: what makes segmentation go wrong.


def words(text: str) -> list[str]:
    return [text[start:end] for start, end in word_spans(text)]


def sentences(text: str) -> list[str]:
    return [text[start:end] for start, end in sentence_spans(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Don't stop, e.g. now!", ["Don't", "stop", ",", "e.g", ".", "now", "!"]),
        ("state-of-the-art 1,000.5 snake_case", ["state-of-the-art", "1,000.5", "snake_case"]),
        ("e\u0301te\u0301", ["e\u0301te\u0301"]),
        ("नमस्ते दुनिया।", ["नमस्ते", "दुनिया", "।"]),
        ("می\u200cخواهم", ["می\u200cخواهم"]),
        ("한국어 문장", ["한국어", "문장"]),
        ("東京に住む", ["東", "京", "に", "住", "む"]),
        ("コンピューター", ["コンピューター"]),
        ("ดีครับ", ["ดี", "ค", "รั", "บ"]),
        ("👩\u200d👧🇫🇷🙂🙂!!", ["👩\u200d👧", "🇫🇷", "🙂", "🙂", "!!"]),
        ("5\ufe0f\u20e3", ["5\ufe0f\u20e3"]),
        ("", []),
        (" \n\t", []),
    ],
)
def test_words(text: str, expected: list[str]) -> None:
    assert words(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "Dr. Smith of the U.S. Army met J. K. Rowling. He left.",
            ["Dr. Smith of the U.S. Army met J. K. Rowling.", "He left."],
        ),
        ('He said: "Hi!" Then he left... and came back.', ['He said: "Hi!"', "Then he left...", "and came back."]),
        ("It is 3.5 kg. See Fig. 3. End", ["It is 3.5 kg.", "See Fig. 3.", "End"]),
        ("It was I. You know.", ["It was I.", "You know."]),
        ("A line that\nis wrapped.\n\nNext paragraph", ["A line that\nis wrapped.", "Next paragraph"]),
        (
            "# Title\n- one\n- two\n1. First thing\n2. Second",
            ["# Title", "- one", "- two", "1. First thing", "2. Second"],
        ),
        ("今日は。明日も！はい", ["今日は。", "明日も！", "はい"]),
        ("नमस्ते। अच्छा", ["नमस्ते।", "अच्छा"]),
        ("나는 학생입니다. 너는 누구니?", ["나는 학생입니다.", "너는 누구니?"]),
        (
            "Shown before.[12][b] Denied.² And (see below.) Then",
            ["Shown before.[12][b]", "Denied.²", "And (see below.)", "Then"],
        ),
        (
            "She left Apple Inc. He joined Ltd. Ltd. They met in Oct. 1999 at 5 p.m. In the U.S. Army",
            ["She left Apple Inc.", "He joined Ltd. Ltd.", "They met in Oct. 1999 at 5 p.m.", "In the U.S. Army"],
        ),
        (
            "Am 3. Mai kam er, d. h. Anfang des 20. Jahrhunderts. Um 9 v. Chr. Die Stadt war z.B. Rom.",
            ["Am 3. Mai kam er, d. h. Anfang des 20. Jahrhunderts.", "Um 9 v. Chr.", "Die Stadt war z.B. Rom."],
        ),
        ("We solve for x. Then for z. But", ["We solve for x.", "Then for z.", "But"]),
        (
            "Run:\n\n```\nx.append(1)\n\nprint(x)\n```\n> quoted\n+ item",
            ["Run:", "```\nx.append(1)", "print(x)\n```", "> quoted", "+ item"],
        ),
        ("  no end  ", ["no end"]),
        ("", []),
    ],
)
def test_sentences(text: str, expected: list[str]) -> None:
    assert sentences(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("we met at noon. it rained. then we left", ["we met at noon.", "it rained.", "then we left"]),
        ("no. i will not. I was ill. sorry", ["no.", "i will not.", "I was ill.", "sorry"]),
        ("see fig. 3 and no. 4 .  at mach 2.5 it rose .", ["see fig. 3 and no. 4 .", "at mach 2.5 it rose ."]),
        ("e.g. by j. k. smith et al. on n.a.c.a. wings, i.e. thin. next", None),
        ("lift, drag etc. were measured by ref. 3, resp. ref. 4. next", None),
        ("Measured by the inst. of physics. Then sold.", ["Measured by the inst. of physics.", "Then sold."]),
        ("He said no. Then he left.", ["He said no.", "Then he left."]),
        ("1. the first\n2. the second. and more", ["1. the first", "2. the second.", "and more"]),
    ],
)
def test_sentences_of_texts_without_capitals(text: str, expected: list[str] | None) -> None:
    assert sentences(text) == (expected or [text.removesuffix(" next"), "next"])


def test_a_sentence_of_more_than_48_words_is_cut_where_a_clause_ends_nearest_to_the_middle() -> None:
    left, right = " ".join(["left"] * 26), " ".join(["right"] * 28)
    assert sentences(" ".join(["word"] * 48)) == [" ".join(["word"] * 48)]
    for mark in (";", ":", " —", " -", ", and", ", während"):
        joined = f"{left}{mark} {right}".split()
        cut = 27 if mark in (" —", " -") else 26  # a conjunction belongs to the clause that it begins
        assert sentences(" ".join(joined)) == [" ".join(joined[:cut]), " ".join(joined[cut:])]
    listed = f"one, {left}, {right}"  # only commas: better than in the middle of a clause, but not after one word
    assert sentences(listed) == [f"one, {left},", right]
    assert sentences(f"{left} pre- and post- {right}")[0].endswith(" right")  # a hyphen ends no clause
    assert sentences("a " * 100) == ["a " * 47 + "a"] * 2 + ["a a a a"]


def test_languages_without_spaces_are_cut_by_the_words_that_are_known_of_them() -> None:
    assert [len(part) for part in sentences("京" * 100)] == [48, 48, 4]
    assert sentences("京" * 30 + "、" + "都" * 30) == ["京" * 30 + "、", "都" * 30]


LONG = st.lists(
    st.sampled_from(
        ["word", "I", "The", "fig.", "al.", "no.", "3.5", "no", ",", ";", "—", "-", "and", ".", "e.g.", "\n"]
    ),
    min_size=30,
    max_size=200,
).map(" ".join)


@given(st.one_of(TEXTS, LONG, st.text(alphabet="東京、。 a,", min_size=40, max_size=200)))
def test_no_sentence_has_more_than_48_words_and_none_is_lost(text: str) -> None:
    spans = sentence_spans(text)
    assert all(sum(word.isalnum() for word in words(text[start:end])) <= 48 for start, end in spans)
    assert "".join("".join(text[start:end].split()) for start, end in spans) == "".join(text.split())
    assert spans == sentence_spans(text)
    if len(words(text)) <= 48:  # a part of a longer sentence may begin with a small letter where the sentence did not
        assert all(sentence_spans(text[start:end]) == [(0, end - start)] for start, end in spans)


@given(TEXTS)
def test_spans_are_valid_ordered_and_cover_everything_that_is_not_blank(text: str) -> None:
    for spans in (word_spans(text), sentence_spans(text)):
        position = 0
        for start, end in spans:
            assert position <= start < end <= len(text)
            assert not text[position:start].strip()
            position = end
        assert not text[position:].strip()


@given(TEXTS)
def test_a_word_never_begins_with_a_mark_of_the_one_before(text: str) -> None:
    for start, _ in word_spans(text):
        if start and unicodedata.category(text[start]).startswith("M"):
            assert text[start - 1].isspace() or unicodedata.category(text[start - 1])[0] in "CSPZ"


@given(TEXTS, st.integers(0, 99), st.booleans(), st.booleans(), st.booleans())
def test_grouping_any_tokens(text: str, seed: int, join: bool, clip: bool, by_sentence: bool) -> None:
    tokens = [(0, 0), *cut(text, seed), (len(text), len(text))]
    if clip:
        tokens = tokens[: len(tokens) // 2 + 1]
    spans = sentence_spans(text) if by_sentence else word_spans(text)
    found, index = group(tokens, spans, join=join, clip=clip)
    assert all(a < b for a, b in found)
    assert all(left[1] <= right[0] for left, right in pairwise(found))
    assert set(index) - {-1} == set(range(len(found)))
    for (start, end), where in zip(tokens, index, strict=True):
        if where >= 0:
            assert start < found[where][1]
            assert end > found[where][0]
            if join:  # the whole of the token that is not blank lies in its word
                left = start + len(text[start:end]) - len(text[start:end].lstrip())
                assert found[where][0] <= left
                assert start + len(text[start:end].rstrip()) <= found[where][1]
        else:
            assert not text[start:end].strip()
    if clip and found:
        assert found[-1][1] <= max(end for _, end in tokens)


def test_wordpiece_bpe_and_sentencepiece_give_the_same_words() -> None:
    text = "unbelievable results"
    wordpiece = [(0, 2), (2, 9), (9, 12), (13, 20)]
    bpe = [(0, 2), (2, 12), (12, 20)]  # the blank belongs to the token after it
    for tokens in (wordpiece, bpe):
        found, index = group(tokens, word_spans(text), join=True, clip=False)
        assert found == [(0, 12), (13, 20)]
        assert index[0] == 0
        assert index[-1] == 1


CORPUS = [
    "The bank's customers couldn't remember unbelievable passwords, e.g. “hunter2”.",
    "Straße naïve cafe\u0301 日本語のテキスト 東京都 ภาษาไทย 🙂👩\u200d👧 emoji",
    "tokenizers split words into pieces: un ##believ ##able",
] * 20
MODELS: dict[str, tuple[models.Model, pre_tokenizers.PreTokenizer, trainers.Trainer]] = {
    "wordpiece": (
        models.WordPiece(unk_token="[UNK]"),
        pre_tokenizers.BertPreTokenizer(),
        trainers.WordPieceTrainer(vocab_size=150, special_tokens=["[UNK]"], show_progress=False),
    ),
    "bpe": (
        models.BPE(),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        trainers.BpeTrainer(vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False),
    ),
    "sentencepiece": (
        models.Unigram(),
        pre_tokenizers.Metaspace(),
        trainers.UnigramTrainer(vocab_size=160, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False),
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    model, split, trainer = MODELS[request.param]
    trained = Tokenizer(model)
    trained.pre_tokenizer = split
    trained.train_from_iterator(CORPUS, trainer)
    return trained


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "Unbelievable: the bank couldn't  remember passwords!",
            ["Unbelievable", ":", "the", "bank", "couldn't", "remember", "passwords", "!"],
        ),
        ("cafe\u0301  🙂👩\u200d👧 end", ["cafe\u0301", "🙂", "👩\u200d👧", "end"]),
        ("\n\n  leading and trailing \n", ["leading", "and", "trailing"]),
    ],
)
def test_real_tokenizers_of_every_kind_give_the_same_words(
    tokenizer: Tokenizer, text: str, expected: list[str]
) -> None:
    encoding = tokenizer.encode(text)
    found, index = group(encoding.offsets, word_spans(text), join=True, clip=False)
    assert "".join(text[a:b] for a, b in found) == "".join(expected)
    if "🙂" not in text:  # a tokenizer may well make one token of two emoji
        assert [text[a:b] for a, b in found] == expected
    assert all(text[a:b].isspace() or a == b for (a, b), k in zip(encoding.offsets, index, strict=True) if k < 0)


def test_real_tokenizers_leave_no_character_without_a_word(tokenizer: Tokenizer) -> None:
    for text in ("日本語のテキスト 東京都", "ภาษาไทย", "🙂👩\u200d👧"):
        encoding = tokenizer.encode(text)
        found, _ = group(encoding.offsets, word_spans(text), join=True, clip=False)
        assert "".join(text[a:b] for a, b in found) == text.replace(" ", "")
        for start, end in encoding.offsets:
            words_met = sum(a < end and start < b for a, b in found)
            assert words_met == bool(text[start:end].strip())  # a token that is not blank is in one word, and whole


def test_a_token_that_covers_several_characters_makes_them_one_word() -> None:
    text = "東京都に住む"
    found, index = group([(0, 2), (2, 3), (3, 6)], word_spans(text), join=True, clip=False)
    assert [text[a:b] for a, b in found] == ["東京", "都", "に住む"]
    assert index == [0, 1, 2]


def test_byte_level_tokens_of_one_emoji_share_it() -> None:
    text = "ok 🙂"
    found, index = group([(0, 2), (2, 4), (3, 4), (3, 4)], word_spans(text), join=True, clip=False)
    assert found == [(0, 2), (3, 4)]
    assert index == [0, 1, 1, 1]


def test_a_sentence_is_not_joined_with_the_next_by_a_token_over_their_border() -> None:
    text = "はい。「いいえ」"
    found, index = group([(0, 2), (2, 4), (4, 8)], sentence_spans(text), join=False, clip=False)
    assert found == [(0, 3), (3, 8)]
    assert index == [0, 0, 1]


def test_a_word_that_was_read_in_part_ends_where_reading_did() -> None:
    text = "very unbelievable results"
    found, _ = group([(0, 4), (5, 7)], word_spans(text), join=True, clip=True)
    assert [text[a:b] for a, b in found] == ["very", "un"]


@pytest.mark.parametrize(
    "unit",
    [
        "word ",
        "a",
        ".",
        "\n",
        "1.",
        " ",
        "a. ",
        "A. a ",
        "1. ",
        "I ",
        "I. i ",
        "no. ",
        "word, ",
        "; ",
        "東",
        "東、",
        "fig. a ",
        "u. a. ",
        "Inc. In ",
        ".[1]",
    ],
)
def test_long_texts_are_segmented_in_linear_time(unit: str) -> None:
    text = unit * (200_000 // len(unit))
    word_spans(text)  # in quadratic time these would take hours: pytest's timeout ends them
    sentence_spans(text)
