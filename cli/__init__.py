"""The `longleaf` command and the Python client. They know HTTP and `jobs` alone."""

from cli.client import ApiError, Client, Document, Job, Refused, Unreachable

__all__ = ["ApiError", "Client", "Document", "Job", "Refused", "Unreachable"]
