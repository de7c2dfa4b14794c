"""The schema: made by migrations, equal to the models, upgraded by one process at a time."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from alembic import command
from sqlalchemy import create_engine, inspect

import migrations
from api import migrate
from api.db import Database
from api.models import Base


def test_the_migrations_make_what_the_models_say(tmp_path: Path) -> None:
    migrate.upgrade(tmp_path / "a.db")
    engine = create_engine(f"sqlite:///{tmp_path / 'a.db'}")
    with engine.connect() as connection:
        config = migrate.config()
        config.attributes["connection"] = connection
        command.check(config)
        assert set(inspect(connection).get_table_names()) == {*Base.metadata.tables, "alembic_version"}
    engine.dispose()
    assert migrate.current(tmp_path / "a.db") == migrate.head()


def test_an_upgrade_of_a_current_database_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    assert migrate.upgrade(path) is None
    before = path.read_bytes()
    assert migrate.upgrade(path) is None
    assert path.read_bytes() == before
    assert list(tmp_path.glob("*.bak")) == []


def test_concurrent_starts_migrate_once(tmp_path: Path) -> None:
    path = tmp_path / "data" / "longleaf.db"
    code = "import sys; from pathlib import Path; from api.migrate import upgrade; upgrade(Path(sys.argv[1]))"
    started = [
        subprocess.Popen([sys.executable, "-c", code, str(path)], stderr=subprocess.PIPE) for _ in range(3)
    ]
    errors = [process.communicate(timeout=60)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0, 0], errors
    assert migrate.current(path) == migrate.head()


@pytest.fixture
def next_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script folder with this code's revisions and one more; its file may be rewritten."""
    folder = tmp_path / "migrations"
    shutil.copytree(Path(migrations.__file__).parent, folder, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(migrations, "__file__", str(folder / "__init__.py"))
    script = folder / "versions" / "next.py"
    head = migrate.head()
    script.write_text(
        f"from alembic import op\nrevision = 'next'\ndown_revision = {head!r}\n"
        "branch_labels = None\ndepends_on = None\n"
        "def upgrade():\n    with op.batch_alter_table('documents', recreate='always') as batch:\n"
        "        batch.alter_column('name', new_column_name='title')\n"
        "def downgrade():\n    pass\n"
    )
    return script


def old_database(path: Path) -> None:
    """A database at this code's schema, with a document and its text."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA foreign_keys=ON")
        connection.execute(
            "INSERT INTO documents VALUES "
            "('doc_1', 'a.txt', 'text/plain', 4, 4, NULL, 'sha', 'sha', 0.0, 'default', 0.0, NULL)"
        )
        connection.execute("INSERT INTO document_texts VALUES ('doc_1', 'text', '[]')")
        connection.commit()


def test_an_upgrade_keeps_rows_that_refer_to_a_rebuilt_table(tmp_path: Path, next_revision: Path) -> None:
    path = tmp_path / "a.db"
    hidden = next_revision.read_text()
    next_revision.unlink()
    migrate.upgrade(path)
    old_database(path)
    next_revision.write_text(hidden)
    backup = migrate.upgrade(path)
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT title FROM documents").fetchall() == [("a.txt",)]
        assert connection.execute("SELECT text FROM document_texts").fetchall() == [("text",)]
    assert backup is not None
    with closing(sqlite3.connect(backup)) as connection:
        assert connection.execute("SELECT name FROM documents").fetchall() == [("a.txt",)]


def test_what_was_there_before_tenants_belongs_to_the_default_one(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    engine = create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        config = migrate.config()
        config.attributes["connection"] = connection
        command.upgrade(config, "0003")
        connection.exec_driver_sql(
            "INSERT INTO documents VALUES ('doc_1', 'a.txt', 'text/plain', 4, 4, NULL, 'sha', 'sha', 0.0)"
        )
        connection.exec_driver_sql("INSERT INTO document_texts VALUES ('doc_1', 'text', '[]')")
    engine.dispose()
    migrate.upgrade(path)
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT tenant_id FROM documents").fetchall() == [("default",)]
        assert connection.execute("SELECT text FROM document_texts").fetchall() == [("text",)]
        (secret,) = connection.execute("SELECT secret FROM tenants WHERE id = 'default'").fetchone()
        assert len(bytes.fromhex(secret)) == 32


def test_a_failed_upgrade_leaves_the_database_as_it_was(tmp_path: Path, next_revision: Path) -> None:
    path = tmp_path / "a.db"
    hidden = next_revision.read_text()
    next_revision.unlink()
    migrate.upgrade(path)
    old_database(path)
    next_revision.write_text(
        hidden.replace("def downgrade", "    op.execute('SELECT broken')\ndef downgrade")
    )
    old = migrate.current(path)
    with pytest.raises(Exception, match="broken"):
        migrate.upgrade(path)
    assert migrate.current(path) == old
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT name FROM documents").fetchall() == [("a.txt",)]
        tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master")}
        assert not any(name.startswith("_alembic_tmp") for name in tables)


@pytest.mark.parametrize(
    ("statements", "message"),
    [
        (
            ["CREATE TABLE alembic_version (version_num)", "INSERT INTO alembic_version VALUES ('9999')"],
            "newer",
        ),
        (["CREATE TABLE something_else (a)"], "something else"),
    ],
)
def test_a_strange_database_is_left_alone(tmp_path: Path, statements: list[str], message: str) -> None:
    path = tmp_path / "a.db"
    with closing(sqlite3.connect(path)) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()
    before = path.read_bytes()
    with pytest.raises(migrate.MigrationError, match=message):
        migrate.upgrade(path)
    assert path.read_bytes() == before


def test_a_file_that_is_no_database_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "a.db").write_bytes(b"not a database at all" * 100)
    with pytest.raises(migrate.MigrationError, match="cannot be read"):
        migrate.upgrade(tmp_path / "a.db")


def test_a_connection_is_what_the_store_relies_on(tmp_path: Path) -> None:
    migrate.upgrade(tmp_path / "a.db")
    database = Database(tmp_path / "a.db")
    with database.read() as session:
        connection = session.connection()
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar() == 1
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2
        assert connection.exec_driver_sql("PRAGMA busy_timeout").scalar() == 5000
    database.close()
