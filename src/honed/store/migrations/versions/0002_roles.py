"""What a trace was to the version that learned from it: a demonstration, a replayed success, an attempt at a task."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Adds the role; in what is there it follows from the trace's origin, for only replay took production's own."""
    op.add_column("version_data", sa.Column("role", sa.Text(), nullable=False, server_default="practice"))
    op.execute(
        "UPDATE version_data SET role = (SELECT CASE origin WHEN 'demonstration' THEN 'demonstration' "
        "WHEN 'production' THEN 'replay' ELSE 'practice' END FROM traces WHERE traces.id = version_data.trace) "
        "WHERE trace IN (SELECT id FROM traces)"
    )
