"""Alembic's entry: runs the migrations on the connection that `honed.store.migrate` hands over."""

from alembic import context

from honed.store.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
