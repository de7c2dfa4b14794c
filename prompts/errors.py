"""Why no prompt can be made for a model."""

from __future__ import annotations


class PromptError(Exception):
    """`code` is `no_chat_template` or `model_unreadable`; the message names the cause and the next step."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
