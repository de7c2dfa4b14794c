"""Runs revisions on the connection that api/migrate.py hands over, inside its transaction."""

from alembic import context

from api.models import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    render_as_batch=True,
    compare_type=True,
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
