"""Model folders as far as the API reads them: context length and tokenizer, nothing of the weights."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from jobs.settings import folder_name

log = logging.getLogger(__name__)

_PIECE_CHARS = 2_000_000


@dataclass(frozen=True, slots=True)
class ModelFolder:
    id: str
    context_tokens: int | None
    tokenizer_sha256: str
    tokenizer_path: Path


class ModelFolders:
    """The folders under LONGLEAF_MODELS. A folder that appears or changes is seen at the next call."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._folders: dict[str, tuple[tuple[int, ...], ModelFolder]] = {}
        self._tokenizers: dict[str, Tokenizer] = {}

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
            stamps = tuple(
                value
                for stat in (config.stat(), tokenizer.stat())
                for value in (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            )
            with self._lock:
                known = self._folders.get(model)
                if known is None or known[0] != stamps:
                    settings = json.loads(config.read_bytes())
                    digest = hashlib.sha256(tokenizer.read_bytes()).hexdigest()
                    folder = ModelFolder(model, _context_tokens(settings), digest, tokenizer)
                    known = self._folders[model] = (stamps, folder)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            log.warning("model folder %s is not readable: %s", path, error)
            return None
        return known[1]

    def count(self, folder: ModelFolder, text: str) -> int:
        """Tokens of `text` by the model's tokenizer, without any special tokens.

        Very long texts are counted in pieces cut at line ends, which bounds the memory and may
        differ from one count of the whole by a token per two million characters.
        """
        tokenizer = self._tokenizer(folder)
        num_tokens, start = 0, 0
        while start < len(text):
            end = start + _PIECE_CHARS
            if end < len(text):
                end = text.rfind("\n", start, end) + 1 or end
            batch = tokenizer.encode_batch_fast([text[start:end]], add_special_tokens=False)
            num_tokens += len(batch[0].ids)
            start = end
        return num_tokens

    def _tokenizer(self, folder: ModelFolder) -> Tokenizer:
        with self._lock:
            tokenizer = self._tokenizers.get(folder.tokenizer_sha256)
            if tokenizer is None:
                tokenizer = Tokenizer.from_file(str(folder.tokenizer_path))
                tokenizer.no_truncation()
                tokenizer.no_padding()
                self._tokenizers[folder.tokenizer_sha256] = tokenizer
            return tokenizer


def _context_tokens(config: object) -> int | None:
    if not isinstance(config, dict):
        raise ValueError("config.json is not an object")
    nested = config.get("text_config")
    found = config.get("max_position_embeddings") or (
        nested.get("max_position_embeddings") if isinstance(nested, dict) else None
    )
    return found if isinstance(found, int) and found > 0 else None
