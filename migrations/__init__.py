"""Alembic's revisions of the API's database; api/migrate.py runs them."""
