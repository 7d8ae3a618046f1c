"""The text of LangChain's messages: what the last of them asks, or answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, convert_to_messages


def asked(value: Any) -> str | None:
    """The question that a value is: a string, a message, or the last human one among messages."""
    if isinstance(value, str):
        return value
    if isinstance(value, BaseMessage):
        return str(value.text)
    return next((str(one.text) for one in _latest(value) if isinstance(one, HumanMessage)), None)


def answered(value: Any) -> str | None:
    """The answer that a value is: a string, a message, or an AI's that is the last of messages and calls no tool."""
    if isinstance(value, str):
        return value
    is_alone = isinstance(value, BaseMessage)
    last = value if is_alone else next(_latest(value), None)
    if last is None or (isinstance(last, AIMessage) and last.tool_calls):  # it says nothing to the asker yet
        return None
    return str(last.text) if is_alone or isinstance(last, AIMessage) else None


def _latest(value: Any) -> Iterator[BaseMessage]:
    """The messages of a list, in any form that LangChain takes, the last one first; a list of strings is none."""
    with suppress(Exception):  # something else is in the list
        for one in reversed(value if isinstance(value, list) else []):
            yield from () if isinstance(one, str) else convert_to_messages([one])
