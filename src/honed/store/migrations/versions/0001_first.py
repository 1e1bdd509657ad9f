"""The first schema: traces, feedback, tasks, groups, versions, releases, the ledger and jobs."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Creates every table."""
    op.create_table(
        "entries",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("activity", sa.Text(), nullable=False),
        sa.Column("device", sa.Text(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("tokens", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("dollars", sa.Double(), nullable=True),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("line", sa.Text(), nullable=False),
        sa.Column("stage", sa.Text(), nullable=False),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_entries")),
    )
    op.create_index(op.f("ix_entries_at"), "entries", ["at"], unique=False)
    op.create_index(op.f("ix_entries_line_entries_stage_entries_at"), "entries", ["line", "stage", "at"], unique=False)
    op.create_index(op.f("ix_entries_subject"), "entries", ["subject"], unique=False)
    op.create_table(
        "feedback",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=True),
        sa.Column("number", sa.Double(), nullable=True),
        sa.Column("value", sa.LargeBinary(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_feedback")),
        sa.UniqueConstraint("tenant", "key", name=op.f("uq_feedback_tenant_key")),
    )
    op.create_index(op.f("ix_feedback_at"), "feedback", ["at"], unique=False)
    op.create_index(op.f("ix_feedback_target_feedback_name"), "feedback", ["target", "name"], unique=False)
    op.create_table(
        "groups",
        sa.Column("run", sa.Text(), nullable=False),
        sa.Column("step", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("slot", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("task", sa.Text(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("run", "step", "slot", name=op.f("pk_groups")),
    )
    op.create_index(op.f("ix_groups_id"), "groups", ["id"], unique=False)
    op.create_table(
        "holders",
        sa.Column("line", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("pid", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("line", name=op.f("pk_holders")),
    )
    op.create_table(
        "jobs",
        sa.Column("line", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("value", sa.LargeBinary(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("line", "key", name=op.f("pk_jobs")),
    )
    op.create_table(
        "offsets",
        sa.Column("log", sa.Text(), nullable=False),
        sa.Column("offset", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.PrimaryKeyConstraint("log", name=op.f("pk_offsets")),
    )
    op.create_table(
        "releases",
        sa.Column("seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("line", sa.Text(), nullable=False),
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_releases")),
        sa.UniqueConstraint("id", name=op.f("uq_releases_id")),
    )
    op.create_index(op.f("ix_releases_line_releases_seq"), "releases", ["line", "seq"], unique=False)
    op.create_table(
        "replicas",
        sa.Column("release", sa.Text(), nullable=False),
        sa.Column("replica", sa.Text(), nullable=False),
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("release", "replica", name=op.f("pk_replicas")),
    )
    op.create_table(
        "tasks",
        sa.Column("seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("suite", sa.Text(), nullable=False),
        sa.Column("split", sa.Text(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_tasks")),
        sa.UniqueConstraint("id", name=op.f("uq_tasks_id")),
    )
    op.create_index(op.f("ix_tasks_source"), "tasks", ["source"], unique=False)
    op.create_index(op.f("ix_tasks_split_tasks_suite"), "tasks", ["split", "suite"], unique=False)
    op.create_index(op.f("ix_tasks_state"), "tasks", ["state"], unique=False)
    op.create_table(
        "toolsets",
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_toolsets")),
    )
    op.create_table(
        "traces",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("origin", sa.Text(), nullable=False),
        sa.Column("line", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("task", sa.Text(), nullable=True),
        sa.Column("tools", sa.Text(), nullable=False),
        sa.Column("score", sa.Double(), nullable=True),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_traces")),
    )
    op.create_index(op.f("ix_traces_at"), "traces", ["at"], unique=False)
    op.create_index(op.f("ix_traces_line_traces_at"), "traces", ["line", "at"], unique=False)
    op.create_index(op.f("ix_traces_origin_traces_at"), "traces", ["origin", "at"], unique=False)
    op.create_index(op.f("ix_traces_task"), "traces", ["task"], unique=False)
    op.create_index(op.f("ix_traces_tenant_traces_at"), "traces", ["tenant", "at"], unique=False)
    op.create_table(
        "verdicts",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("baseline", sa.Text(), nullable=False),
        sa.Column("decision", sa.Text(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_verdicts")),
    )
    op.create_index(op.f("ix_verdicts_version"), "verdicts", ["version"], unique=False)
    op.create_table(
        "version_data",
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("trace", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("version", "trace", name=op.f("pk_version_data")),
    )
    op.create_index(op.f("ix_version_data_trace"), "version_data", ["trace"], unique=False)
    op.create_table(
        "versions",
        sa.Column("line", sa.Text(), nullable=False),
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("parent", sa.BigInteger(), autoincrement=False, nullable=True),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("line", "number", name=op.f("pk_versions")),
        sa.UniqueConstraint("id", name=op.f("uq_versions_id")),
    )
    op.create_table(
        "group_traces",
        sa.Column("run", sa.Text(), nullable=False),
        sa.Column("step", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("slot", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("position", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("trace", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["trace"], ["traces.id"], name=op.f("fk_group_traces_trace_traces")),
        sa.PrimaryKeyConstraint("run", "step", "slot", "position", name=op.f("pk_group_traces")),
    )
    op.create_index(op.f("ix_group_traces_trace"), "group_traces", ["trace"], unique=False)
    op.create_table(
        "signals",
        sa.Column("trace", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("position", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.ForeignKeyConstraint(["trace"], ["traces.id"], name=op.f("fk_signals_trace_traces")),
        sa.PrimaryKeyConstraint("trace", "name", name=op.f("pk_signals")),
    )
    op.create_index(op.f("ix_signals_name_signals_trace"), "signals", ["name", "trace"], unique=False)
    op.create_table(
        "turns",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("trace", sa.Text(), nullable=False),
        sa.Column("position", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("parent", sa.Text(), nullable=True),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("line", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("finish", sa.Text(), nullable=False),
        sa.Column("fidelity", sa.Text(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("context", sa.LargeBinary(), nullable=False),
        sa.Column("output", sa.LargeBinary(), nullable=False),
        sa.Column("logprobs", sa.LargeBinary(), nullable=False),
        sa.Column("raw_logprobs", sa.LargeBinary(), nullable=False),
        sa.Column("experts", sa.LargeBinary(), nullable=True),
        sa.Column("at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["trace"], ["traces.id"], name=op.f("fk_turns_trace_traces")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_turns")),
        sa.UniqueConstraint("trace", "position", name=op.f("uq_turns_trace_position")),
    )
    op.create_index(op.f("ix_turns_parent"), "turns", ["parent"], unique=False)
    op.create_index(op.f("ix_turns_version"), "turns", ["version"], unique=False)
