"""Model folders as far as the API reads them: context length and tokenizer, nothing of the weights."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jobs.settings import folder_name
from prompts import PromptBuilder

log = logging.getLogger(__name__)

_COUNTED_AS = b"pieces of text without control tokens\n"
"""Part of a count's key: counts that were made in another way are not taken for these."""


@dataclass(frozen=True, slots=True)
class ModelFolder:
    id: str
    context_tokens: int | None
    tokenizer_sha256: str
    """Of the tokenizer and the way of counting with it."""
    path: Path


class ModelFolders:
    """The folders under LONGLEAF_MODELS. A folder that appears or changes is seen at the next call."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._folders: dict[str, tuple[tuple[int, ...], ModelFolder]] = {}
        self._builders: dict[str, tuple[tuple[int, ...], PromptBuilder]] = {}

    def all(self) -> list[ModelFolder]:
        if not self._root.is_dir():
            return []
        ids = sorted(path.name.replace("--", "/") for path in self._root.iterdir() if path.is_dir())
        return [folder for folder in map(self.get, ids) if folder is not None]

    def get(self, model: str) -> ModelFolder | None:
        """The folder of a model, or None where it is absent, unfinished or unreadable here."""
        path = self._root / folder_name(model)
        config, tokenizer = path / "config.json", path / "tokenizer.json"
        try:
            stamps = _stamps([config, tokenizer])
            with self._lock:
                known = self._folders.get(model)
                if known is None or known[0] != stamps:
                    settings = json.loads(config.read_bytes())
                    digest = hashlib.sha256(_COUNTED_AS + tokenizer.read_bytes()).hexdigest()
                    folder = ModelFolder(model, _context_tokens(settings), digest, path)
                    known = self._folders[model] = (stamps, folder)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            log.warning("model folder %s is not readable: %s", path, error)
            return None
        return known[1]

    def prompts(self, folder: ModelFolder) -> PromptBuilder:
        """What builds the model's prompts in its workers, and so counts as they do.

        Raises:
            PromptError: no prompt can be made for the model.
        """
        stamps = _stamps(sorted(folder.path.glob("*.json")) + sorted(folder.path.glob("*.jinja")))
        with self._lock:
            known = self._builders.get(folder.id)
            if known is None or known[0] != stamps:
                known = self._builders[folder.id] = (stamps, PromptBuilder(folder.path))
            return known[1]


def _stamps(paths: Sequence[Path]) -> tuple[int, ...]:
    """What changes when one of the files does. Raises OSError."""
    stats = [path.stat() for path in paths]
    return tuple(value for stat in stats for value in (stat.st_mtime_ns, stat.st_size, stat.st_ino))


def _context_tokens(config: object) -> int | None:
    if not isinstance(config, dict):
        raise ValueError("config.json is not an object")
    nested = config.get("text_config")
    found = config.get("max_position_embeddings") or (
        nested.get("max_position_embeddings") if isinstance(nested, dict) else None
    )
    return found if isinstance(found, int) and found > 0 else None
