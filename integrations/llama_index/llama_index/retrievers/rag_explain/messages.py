"""The text of LlamaIndex's messages and responses: what they ask, or answer."""

from __future__ import annotations

from typing import Any

from llama_index.core.agent.workflow.workflow_events import AgentWorkflowStartEvent
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, MessageRole
from llama_index.core.base.response.schema import PydanticResponse, Response
from llama_index.core.schema import QueryBundle


def asked(value: Any) -> str | None:
    """The question that a value is: a string, a message, or the last one of a user among messages."""
    if isinstance(value, str):
        return value
    if isinstance(value, QueryBundle):
        return value.query_str
    if isinstance(value, ChatMessage):
        return value.content
    if isinstance(value, AgentWorkflowStartEvent):
        return asked(value.get("user_msg") or value.get("chat_history"))
    return next((one.content for one in _latest(value) if one.role is MessageRole.USER), None)


def answered(value: Any) -> str | None:
    """The answer that a value is: a string, a message, a response that is complete, or an assistant's last message."""
    if isinstance(value, str):
        return value
    if isinstance(value, ChatResponse):
        value = value.message
    if isinstance(value, ChatMessage):
        return value.content
    if isinstance(value, CompletionResponse):
        return value.text
    if isinstance(value, Response):
        return value.response
    if isinstance(value, PydanticResponse):
        return None if value.response is None else value.response.model_dump_json()
    last = next(iter(_latest(value)), None)
    return last.content if last is not None and last.role is MessageRole.ASSISTANT else None


def _latest(value: Any) -> list[ChatMessage]:
    """The messages of a list, the last one first."""
    return [one for one in reversed(value if isinstance(value, list) else []) if isinstance(one, ChatMessage)]
