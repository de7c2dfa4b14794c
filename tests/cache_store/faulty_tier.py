"""A shared folder whose operations fail, hang or stop half-way: fsspec's local files with injected faults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.local import LocalFileSystem


class FaultyFiles(LocalFileSystem):  # type: ignore[misc]
    """`faulty:///folder`. meet: called with every operation's name and path; raises or waits at will."""

    protocol = "faulty"
    cachable = False
    meet: ClassVar[Callable[[str, str], None]] = staticmethod(lambda operation, path: None)
    cut_writes: ClassVar[bool] = False

    @classmethod
    def _strip_protocol(cls, path: str) -> Any:
        return super()._strip_protocol(path.removeprefix("faulty://"))

    def ls(self, path: str, detail: bool = False, **options: Any) -> Any:
        self.meet("ls", path)
        return super().ls(path, detail, **options)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> Any:
        self.meet("cat", path)
        return super().cat_file(path, start, end, **options)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> Any:
        self.meet("pipe", path)
        if self.cut_writes and value:
            super().pipe_file(path, value[: len(value) // 2], mode, **options)
            raise OSError("connection reset")
        return super().pipe_file(path, value, mode, **options)

    def mv(self, path1: str, path2: str, **options: Any) -> Any:
        self.meet("mv", path2)
        return super().mv(path1, path2, **options)

    def rm_file(self, path: str) -> Any:
        self.meet("rm", path)
        return super().rm_file(path)


fsspec.register_implementation("faulty", FaultyFiles, clobber=True)
