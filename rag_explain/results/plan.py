"""What an explanation, or a corpus, will cost where embeddings cost money: known before anything is sent."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be embedded.

    Attributes:
        documents: how many were given.
        kept: how many of them are in the store already, and cost nothing.
        embeddings: how many texts are to be embedded, none of them twice.
        characters: of all these texts together.
        tokens: about as many as a model will count of them: four for three words or marks.
        left: how many texts may still be sent; None: there is no limit.
        is_most: whether it may be less: which sentences are the best, whose words come next, is not known before.
    """

    documents: int
    kept: int
    embeddings: int
    characters: int
    tokens: int
    left: int | None = None
    is_most: bool = False

    def __str__(self) -> str:
        most = "at most " if self.is_most else ""
        found = f"{most}{self.embeddings} embeddings, {self.characters} characters, about {self.tokens} tokens"
        limit = "" if self.left is None else f"; {self.left} texts may still be sent"
        return f"{found} ({self.kept} of {self.documents} documents are in the store){limit}"
