"""`python -m api.key_command create|list|revoke`: API keys, in the database itself.

It works while the API runs and before it ever did, since the first key cannot be made over HTTP.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from api.db import Database
from api.keys import SCOPES, WORKER, KeyStore
from api.limits import NO_LIMITS, Limits
from api.migrate import MigrationError, upgrade
from api.routes.paging import iso
from api.settings import SettingsError, load_settings
from api.tenants import DEFAULT_TENANT
from jobs import streams
from jobs.printable import one_line
from jobs.private_files import only_for_user


def main(words: Sequence[str] | None = None) -> int:
    streams.prepare()
    streams.end_with_reader()
    only_for_user()
    given = _parser().parse_args(words)
    try:
        path = load_settings().database
        upgrade(path)
    except (SettingsError, MigrationError, OSError) as error:
        print(f"longleaf keys: {error}", file=sys.stderr)
        return 1
    database = Database(path)
    try:
        return _run(KeyStore(database), given)
    finally:
        database.close()


def _run(keys: KeyStore, given: argparse.Namespace) -> int:
    if given.command == "create":
        limits = Limits(given.requests_per_minute, given.max_queued_jobs, given.max_document_bytes)
        scopes = given.scope or ["submit", "read"]
        is_worker = WORKER in scopes
        if is_worker and (set(scopes) != {WORKER} or given.tenant != DEFAULT_TENANT or limits != NO_LIMITS):
            print(
                "a worker's key has the scope worker alone, no tenant and no limits: it is for a machine "
                "that works for all of them; make another key for people and programs",
                file=sys.stderr,
            )
            return 2
        row, plain = keys.create(given.tenant, scopes, given.name, limits)
        print(plain)
        whose = "a machine that runs `longleaf worker`" if is_worker else f"the tenant {given.tenant}"
        print(
            f"{row.id}: {', '.join(row.scopes)} for {whose}; "
            "the key is shown this once, and only its hash is kept",
            file=sys.stderr,
        )
    elif given.command == "list":
        for row, tenant in keys.rows():
            ended = f"revoked {iso(row.revoked_at)}" if row.revoked_at else "valid"
            whose, name = one_line(tenant), one_line(row.name)
            print(f"{row.id}  {whose}  {','.join(row.scopes)}  {iso(row.created_at)}  {ended}  {name}")
    else:
        try:
            keys.revoke(given.key_id)
        except LookupError:
            print(f"there is no key {given.key_id}; `longleaf keys list` shows them", file=sys.stderr)
            return 2
        print(f"{given.key_id}: revoked")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="longleaf keys")
    commands = parser.add_subparsers(dest="command", required=True)
    create = commands.add_parser("create", help="make a key and print it, once")
    create.add_argument(
        "--tenant", default=DEFAULT_TENANT, help="whom it belongs to; made where it is not there"
    )
    create.add_argument(
        "--scope",
        action="append",
        choices=(*SCOPES, WORKER),
        help="may be repeated; submit and read where absent; worker by itself, for a machine that joins",
    )
    create.add_argument("--name", default="", help="what you call it")
    for limit in ("--requests-per-minute", "--max-queued-jobs", "--max-document-bytes"):
        create.add_argument(limit, type=int, default=None, help="a limit; none where it is absent")
    commands.add_parser("list", help="show all keys, without what they are")
    commands.add_parser("revoke", help="end a key").add_argument("key_id")
    return parser


if __name__ == "__main__":
    sys.exit(main())
