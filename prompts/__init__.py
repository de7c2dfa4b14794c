"""From documents and an instruction to token ids, by a model folder's own template and tokenizer.

The API counts with it and the worker builds with it, so both mean the same tokens. It needs neither MLX nor
transformers.
"""

from prompts.builder import Document, Prompt, PromptBuilder
from prompts.errors import PromptError
from prompts.frame import SYSTEM, Frame, find_frame
from prompts.instructions import instructions
from prompts.template import ChatTemplate, read_template
from prompts.thinking import Stage, ThinkingTags

__all__ = [
    "SYSTEM",
    "ChatTemplate",
    "Document",
    "Frame",
    "Prompt",
    "PromptBuilder",
    "PromptError",
    "Stage",
    "ThinkingTags",
    "find_frame",
    "instructions",
    "read_template",
]
