"""How the processes write their logs: lines for people, or with LOG_FORMAT=json one object a line.

It knows no process. A request's id comes from `request_id`, which is set where requests come in; job ids are
found in the messages, so a line about a job has it whoever wrote it.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal

from jobs.printable import escaped_line, printable

LogFormat = Literal["text", "json"]

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
_JOB = re.compile(r"\bjob_[0-9a-z]{20}\b")


class JsonFormatter(logging.Formatter):
    """time, level, logger, message; request_id, job_id and exception where there are any; extra fields."""

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": message,
        }
        if (current := request_id.get()) is not None:
            line["request_id"] = current
        if (job := _JOB.search(message)) is not None:
            line["job_id"] = job[0]
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """A message is one line of printable text: what a caller wrote in it cannot look like another line."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return escaped_line(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return printable(super().formatException(ei))


def configure(log_format: LogFormat, text: str) -> None:
    """Write everything from INFO on to stderr; `text` is the format of lines for people."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter(text))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
