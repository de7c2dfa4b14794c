"""`longleaf prefixes`: the stored prefixes of this machine's data folder, without a server or a model.

Only `warm` speaks to the API: it is a job, and with the others of `cli.jobs`.

Exit status: 0 ok, 1 something stored is bad, 2 refused or misused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from cache_store import (
    BadBlock,
    BlockKey,
    CacheStoreError,
    Keyring,
    NoKey,
    SnapshotStore,
    StoredPrefix,
    Tier,
    chain_of,
    export_prefixes,
    import_prefixes,
    remove_prefix,
    stored_prefixes,
    usage_by_model,
    verify,
)
from cache_store.index import disk_bytes
from cli.figures import ago, size
from cli.settings import Settings
from cli.words import cell, console, refuse, say, settings_or_refuse
from jobs.printable import json_text, printable

EXIT_BAD = 1
ID_DIGITS = 12
"""Of an id's 32 digits, as many are printed; any beginning that fits one block alone is accepted."""
NO_BUDGET = 1 << 62
"""To look at a store is to evict nothing of it."""

app = typer.Typer(
    help="Look after the stored prefixes in this machine's data folder.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Id = Annotated[str, typer.Argument(help="An id, or its beginning, as `longleaf prefixes list` prints it.")]
Data = Annotated[Path | None, typer.Option(help="Data folder (LONGLEAF_DATA).")]
Tenant = Annotated[str | None, typer.Option(help="Only what belongs to this tenant.")]


@app.command("list")
def list_(data: Data = None, tenant: Tenant = None, as_json: AsJson = False) -> None:
    """List the stored prefixes, the last used first, and what each model takes."""
    with _store(data) as store:
        found = [p for p in stored_prefixes(store) if tenant is None or p.tenant == tenant]
        usage, total_bytes = usage_by_model(store), store.total_bytes
    if as_json:
        models = {model: asdict(use) for model, use in usage.items()}
        _print_json({"prefixes": [_json(p) for p in found], "models": models, "total_bytes": total_bytes})
        return
    table = Table("id", "tokens", "size", "own", "saves", "used", "model", "", box=None, pad_edge=False)
    for p in found:
        table.add_row(
            _short(p.key),
            f"{p.num_tokens:,}",
            size(p.disk_bytes),
            size(p.own_bytes),
            f"{p.prefill_s:,.1f} s",
            ago(p.used_ns / 1e9),
            cell(p.model or "?"),
            cell(_notes(p)),
        )
    console().print(table)
    for model, use in sorted(usage.items()):
        console().print(
            f"{cell(model or '?')}: {_blocks(use.num_blocks)}, {size(use.disk_bytes)}", highlight=False
        )
    console().print(f"{size(total_bytes)} in all", highlight=False)


@app.command()
def show(id: Id, data: Data = None, as_json: AsJson = False) -> None:
    """Show one prefix and its blocks."""
    with _store(data) as store:
        key = _key(store, id)
        entries = {entry.key: entry for entry in store.entries()}
        chain = chain_of(entries, key)
        attached = {e.attached: e.disk_bytes for e in entries.values() if e.attached and e.parent == key}
        pinned = key in store.pins()
        info = store.header_of(key)
    if as_json:
        blocks = [
            {"id": e.key.hex, "num_tokens": e.num_tokens, "disk_bytes": e.disk_bytes, "exact": e.exact}
            for e in chain
        ]
        sections = [asdict(section) for section in info.sections]
        _print_json(
            {
                "id": key.hex,
                "pinned": pinned,
                "meta": info.meta,
                "blocks": blocks,
                "sections": sections,
                "attached": attached,
            }
        )
        return
    rows: dict[str, str] = {
        "id": key.hex,
        "tokens": f"{sum(e.num_tokens for e in chain):,} in {_blocks(len(chain))}",
        "size": size(sum(e.disk_bytes for e in chain)),
        "exact": "yes" if all(e.exact for e in chain) else "continued from decoded blocks",
        "used": ago(chain[-1].used_ns / 1e9),
        "pinned": "yes" if pinned else "no",
        "last block": ", ".join(f"{name} {value}" for name, value in info.meta.items()),
        "sections": f"{len(info.sections)}: {_sections([s.name for s in info.sections])}",
        "attached": ", ".join(f"{name} {size(num_bytes)}" for name, num_bytes in attached.items())
        or "nothing",
    }
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in rows.items():
        table.add_row(name, cell(value))
    console().print(table)


@app.command()
def pin(id: Id, data: Data = None) -> None:
    """Keep a prefix from eviction until `unpin`."""
    with _store(data) as store:
        key = _key(store, id)
        store.pin(key)
    print(f"{_short(key)} is pinned")


@app.command()
def unpin(id: Id, data: Data = None) -> None:
    """Let a prefix be evicted again."""
    with _store(data) as store:
        pins = store.pins()
        matches = [key for key in pins if key.hex.startswith(id.lower())]
        if len(matches) != 1:
            pinned = ", ".join(sorted(map(_short, pins))) or "nothing"
            refuse(f"{id!r} begins {len(matches)} pinned ids, not one; pinned: {pinned}")
        store.unpin(matches[0])
    print(f"{_short(matches[0])} is not pinned any more")


@app.command()
def rm(
    ids: Annotated[list[str] | None, typer.Argument(help="Ids, or their beginnings.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Everything that belongs to this tenant.")] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Everything that is not encrypted.")] = False,
    data: Data = None,
) -> None:
    """Delete prefixes, from the shared tier too; blocks that other prefixes share stay.

    With --tenant and LONGLEAF_SNAPSHOT_KEYS the key goes first that its prefixes are encrypted with.
    """
    if bool(ids) + (tenant is not None) + plain != 1:
        refuse("name ids, --tenant or --plain, one of them")
    if plain and settings_or_refuse().snapshot_keys is None:
        refuse("every prefix is plain, since LONGLEAF_SNAPSHOT_KEYS is not set: name ids or --tenant")
    with _store(data, shared=True) as store:
        if plain:
            print(f"{_blocks(store.remove_plain())} deleted")
            return
        if tenant is not None:
            print(f"{_blocks(store.remove_tenant(tenant))} deleted")
            return
        for key in [_key(store, id) for id in ids or []]:
            num_removed = remove_prefix(store, key)
            kept = "" if num_removed else ": every block is shared with another prefix"
            print(f"{_short(key)}: {_blocks(num_removed)} deleted{kept}")


@app.command()
def export(
    file: Annotated[Path, typer.Argument(help="The file to write; it must not exist.")],
    ids: Annotated[list[str], typer.Argument(help="Ids, or their beginnings.")],
    data: Data = None,
) -> None:
    """Write prefixes to one file, every byte checked."""
    with _store(data) as store:
        if file.exists():
            refuse(f"{file} is there already; name another file")
        num_blocks = export_prefixes(store, [_key(store, id) for id in ids], file)
    print(f"{_blocks(num_blocks)}, {size(file.stat().st_size)} in {file}")


@app.command("import")
def import_(file: Path, data: Data = None) -> None:
    """Store the prefixes of an exported file. Import what you trust."""
    settings = settings_or_refuse()
    folder = data / "snapshots" if data else settings.snapshots
    with _errors():
        store = SnapshotStore(folder, settings.snapshots_bytes, keyring=_keyring(settings))
        if store.read_only:
            refuse(f"{folder} cannot be written")
        num_stored = num_refused = 0
        for _, stored in import_prefixes(store, file):
            num_stored += stored
            num_refused += not stored
    print(f"{_blocks(num_stored)} stored")
    if num_refused:
        say(f"{_blocks(num_refused)} found no room in {size(settings.snapshots_bytes)}")
        raise typer.Exit(EXIT_BAD)


@app.command("verify")
def verify_(
    ids: Annotated[
        list[str] | None, typer.Argument(help="Ids, or their beginnings; all where absent.")
    ] = None,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Read every byte again and put bad blocks into quarantine."""
    with _store(data) as store:
        keys = None
        if ids:
            entries = {entry.key: entry for entry in store.entries()}
            keys = list({e.key: None for id in ids for e in chain_of(entries, _key(store, id))})
        num_checked = num_closed = 0
        bad: dict[BlockKey, BadBlock] = {}
        for key, error in verify(store, keys):
            if isinstance(error, NoKey):
                num_closed += 1
                continue
            num_checked += 1
            if error is not None:
                bad[key] = error
    if as_json:
        told = {key.hex: str(error) for key, error in bad.items()}
        _print_json({"checked": num_checked, "without_key": num_closed, "bad": told})
    else:
        for error in bad.values():
            print(printable(str(error)))
        closed = f", {_blocks(num_closed)} not read: no key" if num_closed else ""
        print(f"{_blocks(num_checked)} read, {len(bad):,} bad{closed}")
    if bad:
        raise typer.Exit(EXIT_BAD)


@app.command()
def gc(data: Data = None) -> None:
    """Apply the budget, and remove expired checkpoints and what dead writers left."""
    settings = settings_or_refuse()
    folder = _folder(data)
    before = _disk_bytes(folder)
    with _errors():
        store = SnapshotStore(folder, settings.snapshots_bytes, keyring=_keyring(settings))
        if store.read_only:
            refuse(f"{folder} cannot be written")
    after = _disk_bytes(folder)
    print(f"{size(before - after)} freed, {size(after)} left of {size(settings.snapshots_bytes)}")


def _disk_bytes(folder: Path) -> int:
    """As the store counts: whole pages."""
    return sum(disk_bytes(path.stat().st_size) for path in folder.rglob("*") if path.is_file())


@contextmanager
def _store(data: Path | None, shared: bool = False) -> Iterator[SnapshotStore]:
    """The store of the data folder; what goes wrong with it becomes a message and an exit status.

    shared: whether what is done to it is done to the shared tier of the settings too.
    """
    folder = _folder(data)
    settings = settings_or_refuse()
    url = settings.shared_tier if shared else None
    with _errors():
        tier = Tier(url, push=False) if url else None
        yield SnapshotStore(folder, NO_BUDGET, 0, tier=tier, keyring=_keyring(settings))


def _keyring(settings: Settings) -> Keyring | None:
    """Raises KeyringError."""
    return Keyring(settings.snapshot_keys) if settings.snapshot_keys else None


def _folder(data: Path | None) -> Path:
    folder = data / "snapshots" if data else settings_or_refuse().snapshots
    with _errors():
        is_there = folder.is_dir()
    if not is_there:
        refuse(f"{folder} is not there: a worker makes it; --data or LONGLEAF_DATA names another data folder")
    return folder


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:  # of what is printed
        raise
    except (CacheStoreError, OSError) as error:
        refuse(str(error))


def _key(store: SnapshotStore, id: str) -> BlockKey:
    """The block of tokens whose id begins so."""
    keys = [entry.key for entry in store.entries() if not entry.attached]
    matches = [key for key in keys if key.hex.startswith(id.lower())]
    if len(matches) != 1:
        refuse(f"{id!r} begins {len(matches)} stored ids, not one; `longleaf prefixes list` prints them")
    return matches[0]


def _print_json(value: Mapping[str, Any]) -> None:
    print(json_text(value))


def _json(prefix: StoredPrefix) -> dict[str, Any]:
    return {"id": prefix.key.hex} | {k: v for k, v in asdict(prefix).items() if k != "key"}


def _short(key: BlockKey) -> str:
    return key.hex[:ID_DIGITS]


def _notes(prefix: StoredPrefix) -> str:
    notes = [] if prefix.whole else ["a block before it is missing"]
    notes += [] if prefix.readable else ["no key"]
    notes += ["pinned"] * prefix.pinned + ["continued"] * (not prefix.exact)
    return ", ".join(notes + [f"tenant {prefix.tenant}"] * bool(prefix.tenant))


def _sections(names: list[str]) -> str:
    return ", ".join(names if len(names) <= 4 else [*names[:2], "...", names[-1]])


def _blocks(num_blocks: int) -> str:
    return f"{num_blocks:,} block{'s' if num_blocks != 1 else ''}"
