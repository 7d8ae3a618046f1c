"""Hit and Hits: what a search returns, with the explanation of each document on demand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, SupportsIndex, get_args, overload

from rag_explain.errors import InvalidInput
from rag_explain.results.calibration import Calibration
from rag_explain.results.contrast import Contrast, stage_differences
from rag_explain.results.deferred import Deferred, Parts, Status, load
from rag_explain.results.display import Displayable
from rag_explain.results.documents import Documents
from rag_explain.results.evidence import Evidence
from rag_explain.results.explanation import Explanation
from rag_explain.results.highlights import Highlights
from rag_explain.results.metric import Metric
from rag_explain.results.notices import OTHER_SCORE, Notice
from rag_explain.results.overview import Overview
from rag_explain.results.serialization import to_plain
from rag_explain.results.stages import Stage, expanded, ranking_notices
from rag_explain.results.what_if import WhatIf

Part = Literal["explanation", "highlights", "evidence", "sentences", "what_if"]


class _Stages:
    """A field that may be given as a function: the stages are then read when they are first asked for."""

    def __get__(self, hit: Hit | None, kind: type[Hit] | None = None) -> tuple[Stage, ...]:
        if hit is None:
            return ()
        told = hit.__dict__["_stages"]
        if callable(told):
            told = hit.__dict__["_stages"] = told()
        stages: tuple[Stage, ...] = told
        return stages

    def __set__(self, hit: Hit, stages: tuple[Stage, ...] | Callable[[], tuple[Stage, ...]]) -> None:
        hit.__dict__["_stages"] = stages


@dataclass(frozen=True, eq=False, kw_only=True)
class Hit(Displayable):
    """A retrieved document: rank and score as they finally are, the exact similarity, the explanation on demand."""

    id: str
    text: str | None
    rank: int
    score: float | None  # what the last stage that gave one returned, in its own metric; None where that is not told
    metric: str  # the name of a `rag_explain.results.metric.Metric`, or what else the index calls it
    stages: _Stages = (
        _Stages()
    )  # a tuple of Stage: what set rank and score, in the order in which it ran: the search comes first
    metadata: Mapping[str, Any] = field(default_factory=dict)
    handle: Deferred[Explanation] = field(default_factory=lambda: Deferred.skipped("not asked for"), repr=False)
    parts: Parts | None = field(default=None, repr=False)  # "highlights", "evidence", "sentences": each on demand
    query: str | None = field(default=None, repr=False)  # what the retriever was asked, where that is known
    # What the encoder read before and after the text: metadata, where they were embedded with it.
    around: tuple[str, str] = field(default=("", ""), repr=False)
    # Where in the text the chunk stands that was embedded and found; None where that is the whole text.
    chunk: tuple[int, int] | None = None
    # What unrelated pairs score, where the retriever was calibrated.
    calibration: Calibration | None = field(default=None, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_stages": self.stages}

    @property
    def explanation(self) -> Explanation | None:
        """The explanation, computed on first use; None when it was skipped or failed (`reason` says why)."""
        return self._noted(self.handle.get())

    def peek(self) -> Explanation | None:
        """The explanation if it is computed already, if only by sentences; never computes."""
        return self._noted(self.handle.peek() or self.brief_handle.peek())

    def brief(self) -> Explanation | None:
        """The explanation if it is computed already, else one by sentences: for what runs on every answer."""
        return self._noted(self.brief_handle.get())

    @property
    def brief_handle(self) -> Deferred[Explanation]:
        """What `brief` computes."""
        return self._part("sentences") if self.handle.status == "pending" and self.parts is not None else self.handle

    def _part(self, name: str) -> Deferred[Any]:
        return Deferred.skipped("not asked for") if self.parts is None else self.parts[name]

    @property
    def highlights(self) -> Highlights | None:
        """What each word of the document carries, computed on first use, without the pairs of words."""
        known = self.handle.peek()
        if known is not None and known.unit != "sentence":
            return Highlights.of(known).with_notices(*ranking_notices(self.stages))
        found: Highlights | None = self._part("highlights").get()
        return None if found is None else found.with_notices(*ranking_notices(self.stages))

    @property
    def evidence(self) -> Evidence | None:
        """The sentences to read, computed on first use."""
        found: Evidence | None = self._part("evidence").get()
        return found

    def _noted(self, explanation: Explanation | None) -> Explanation | None:
        """What is computed may be shared with copies of this hit that went through other stages."""
        return None if explanation is None else explanation.with_notices(*ranking_notices(self.stages))

    def contrast(self, got: Hit) -> Contrast:
        """Why this hit, which was wanted, stands where it does beside another one of its search, which was got."""
        if not isinstance(got, Hit):
            raise InvalidInput(f"contrast takes another Hit, not {type(got).__name__}")
        wanted, other = self.explanation, got.explanation
        for hit, explanation in ((self, wanted), (got, other)):
            if explanation is None:
                raise InvalidInput(f"the hit {hit.id!r} has no explanation to contrast: {hit.reason}")
        load(stage.split for stage in (*self.stages, *got.stages))
        assert wanted is not None and other is not None  # noqa: PT018
        return Contrast(wanted, other, stage_differences(self.stages, got.stages))

    @property
    def notices(self) -> tuple[Notice, ...]:
        """What a reader must know before trusting the numbers, as far as they are computed."""
        explanation = self.peek()
        return ranking_notices(self.stages) if explanation is None else explanation.notices

    @property
    def status(self) -> Status:
        """Where the explanation stands: ready, pending (not looked at yet), skipped or failed."""
        return self.handle.status

    @property
    def reason(self) -> str | None:
        """Why there is no explanation, when it was skipped or failed."""
        return self.handle.reason

    @property
    def similarity(self) -> float | None:
        """The exact similarity, recomputed by the encoder; None as long as the explanation is not computed.

        Also None where the explanation is of another score, such as MaxSim.
        """
        known = self.handle.peek() or self.brief_handle.peek() or self._part("highlights").peek()
        if known is None or any(notice.code == OTHER_SCORE for notice in known.notices):
            return None
        return float(known.score)

    @property
    def gap(self) -> float | None:
        """The search's score as a similarity - `similarity`: zero up to rounding when the scorer is this encoder."""
        searched = [(one.metric, one.score) for one in self.stages if one.kind == "search" and one.query is None]
        told = [(Metric.find(name), score) for name, score in searched or [(self.metric, self.score)]]
        found = [None if metric is None else metric.similarity(score) for metric, score in told]
        claimed, exact = next((one for one in found if one is not None), None), self.similarity
        return None if claimed is None or exact is None else claimed - exact

    @property
    def standing(self) -> float | None:
        """The share of unrelated pairs below it, of the search's similarity; None where nothing was calibrated."""
        known = self.peek()
        if self.calibration is None or (known is not None and known.fingerprint != self.calibration.fingerprint):
            return None
        searched, similarity = self.stages[0] if self.stages else self, self.similarity
        if similarity is None and (metric := Metric.find(searched.metric)) is not None:
            similarity = metric.similarity(searched.score)
        return None if similarity is None else self.calibration.standing(similarity)

    def what_if(self, *, without: Any = None, replace: Any = None) -> WhatIf:
        """What score and rank would be without a part of either text, or with others in its place, computed again.

        Without arguments the parts that matter: every word of the query, and what carries most in the document. The
        page of a hit shows them once they were computed.
        """
        if without is None and replace is None:
            part = self._part("what_if")
            found: WhatIf | None = part.get()
            if found is None:
                raise InvalidInput(f"this hit cannot be asked what if: {part.reason}")
            return found
        if self.parts is None or self.parts.ask is None:
            raise InvalidInput("this hit has no retriever any more that could be asked: use Explainer(model).what_if")
        asked: WhatIf = self.parts.ask(without=without, replace=replace)
        return asked

    def peek_what_if(self) -> WhatIf | None:
        """What `what_if()` found, if it was asked; never computes."""
        found: WhatIf | None = self._part("what_if").peek()
        return found

    __str__ = object.__str__  # printing computes nothing

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON. Never computes: a pending explanation is written as None."""
        explanation = self.peek()
        names = (
            "id",
            "text",
            "metadata",
            "rank",
            "score",
            "metric",
            "similarity",
            "gap",
            "status",
            "reason",
            "chunk",
            "standing",
        )
        plain: dict[str, Any] = to_plain({name: getattr(self, name) for name in names})
        plain["stages"] = [self._stage_to_dict(stage) for stage in expanded(self.stages)]
        return plain | {"explanation": None if explanation is None else explanation.to_dict()}

    def _stage_to_dict(self, stage: Stage) -> dict[str, Any]:
        """With its own explanation, where that is computed and is not the hit's."""
        known = None if stage.handle is self.handle else stage.handle.peek()
        return stage.to_dict() | {"explanation": None if known is None else known.to_dict()}


class Hits(tuple[Hit, ...], Displayable):
    """What a search returns: a tuple of hits that shows why in a notebook, a terminal and a page.

    Looking at the hits computes the explanations that are pending; `repr` never does.
    """

    __slots__ = ()

    def load(self, part: Part = "explanation") -> Hits:
        """Compute this part of all hits in one batch, where it is pending; the hits themselves."""
        if part not in get_args(Part):
            raise InvalidInput(f"a hit has no part {part!r} to load: use one of {', '.join(get_args(Part))}")
        if part == "explanation":
            load(hit.handle for hit in self)
        elif part == "sentences":
            load(hit.brief_handle for hit in self)
        else:
            load(hit._part(part) for hit in self)
        return self

    def overview(self) -> Overview:
        """What the words of the query found in each hit, and why the first one came first; computed in one batch."""
        self.load()
        explained = next((hit for hit in self if hit.explanation is not None), None)
        return Overview.of(self, None if explained is None else explained._part("itself").get())

    def by_document(self) -> Documents:
        """The chunks of each document together, in its order, with their places in it as far as metadata tell."""
        return Documents.of(self)

    def __str__(self) -> str:
        """One line per hit, and whether it is explained: printing computes nothing."""
        return "\n".join(map(_line, self)) or "no hits"

    __repr__ = __str__

    @overload
    def __getitem__(self, index: SupportsIndex) -> Hit: ...
    @overload
    def __getitem__(self, index: slice) -> Hits: ...
    def __getitem__(self, index: SupportsIndex | slice) -> Hit | Hits:
        return Hits(super().__getitem__(index)) if isinstance(index, slice) else super().__getitem__(index)


def _line(hit: Hit) -> str:
    score = "no score" if hit.score is None else f"{hit.score:.4f} {hit.metric}"
    return f"{hit.rank:>2}  {hit.id}  {score}  explanation {hit.status}"
