"""The tables, as SQLAlchemy Core metadata: what the queries are written against.

Databases are made by migrations/, never by `metadata.create_all`; a test holds the two equal. Columns exist for what is
filtered or joined on; the rest of a noun is msgpack in `body`. Everything here is portable to PostgreSQL.
"""

from __future__ import annotations

import sqlalchemy as sa

HEAD = "0002"
"""The newest migration's revision: what this code reads and writes."""

metadata = sa.MetaData(
    naming_convention={
        "ix": "ix_%(column_0_N_label)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)


def _text(name: str, *, key: bool = False, null: bool = False, unique: bool = False) -> sa.Column[str]:
    return sa.Column(name, sa.Text, primary_key=key, nullable=null, unique=unique)


def _number(name: str, *, null: bool = False) -> sa.Column[float]:
    return sa.Column(name, sa.Double, nullable=null)


def _integer(name: str, *, key: bool = False, null: bool = False) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger, primary_key=key, nullable=null, autoincrement=False)


def _bytes(name: str, *, null: bool = False) -> sa.Column[bytes]:
    return sa.Column(name, sa.LargeBinary, nullable=null)


def _sequence() -> sa.Column[int]:
    """The order of insertion, for nouns whose order matters more than their clock."""
    return sa.Column("seq", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True)


traces = sa.Table(
    "traces",
    metadata,
    _text("id", key=True),
    _text("origin"),
    _text("line"),
    _text("tenant"),
    _text("task", null=True),
    _text("tools"),
    _number("score", null=True),
    _bytes("body"),
    _number("at"),
    sa.Index(None, "at"),
    sa.Index(None, "origin", "at"),
    sa.Index(None, "line", "at"),
    sa.Index(None, "tenant", "at"),
    sa.Index(None, "task"),
)

signals = sa.Table(
    "signals",
    metadata,
    sa.Column("trace", sa.Text, sa.ForeignKey("traces.id"), primary_key=True),
    _text("name", key=True),
    _integer("position"),
    sa.Index(None, "name", "trace"),
)

turns = sa.Table(
    "turns",
    metadata,
    _text("id", key=True),
    sa.Column("trace", sa.Text, sa.ForeignKey("traces.id"), nullable=False),
    _integer("position"),
    _text("parent", null=True),
    _text("tenant"),
    _text("line"),
    _text("model"),
    _text("version"),
    _text("finish"),
    _text("fidelity"),
    _bytes("body"),
    _bytes("context"),
    _bytes("output"),
    _bytes("logprobs"),
    _bytes("raw_logprobs"),
    _bytes("experts", null=True),
    _number("at"),
    sa.UniqueConstraint("trace", "position"),
    sa.Index(None, "parent"),
    sa.Index(None, "version"),
)

toolsets = sa.Table("toolsets", metadata, _text("digest", key=True), _bytes("body"))

offsets = sa.Table("offsets", metadata, _text("log", key=True), _integer("offset"))

feedback = sa.Table(
    "feedback",
    metadata,
    _text("id", key=True),
    _text("target"),
    _text("name"),
    _text("kind"),
    _text("source"),
    _text("tenant"),
    _text("key", null=True),
    _number("number", null=True),
    _bytes("value"),
    _number("at"),
    sa.UniqueConstraint("tenant", "key"),
    sa.Index(None, "target", "name"),
    sa.Index(None, "at"),
)

tasks = sa.Table(
    "tasks",
    metadata,
    _sequence(),
    _text("id", unique=True),
    _text("kind"),
    _text("suite"),
    _text("split"),
    _text("source"),
    _text("state"),
    _text("reason"),
    _bytes("body"),
    _number("at"),
    sa.Index(None, "state"),
    sa.Index(None, "split", "suite"),
    sa.Index(None, "source"),
)

groups = sa.Table(
    "groups",
    metadata,
    _text("run", key=True),
    _integer("step", key=True),
    _integer("slot", key=True),
    _text("id"),
    _text("task"),
    _number("at"),
    sa.Index(None, "id"),
)

group_traces = sa.Table(
    "group_traces",
    metadata,
    _text("run", key=True),
    _integer("step", key=True),
    _integer("slot", key=True),
    _integer("position", key=True),
    sa.Column("trace", sa.Text, sa.ForeignKey("traces.id"), nullable=False),
    sa.Index(None, "trace"),
)

versions = sa.Table(
    "versions",
    metadata,
    _text("line", key=True),
    _integer("number", key=True),
    _text("id", unique=True),
    _integer("parent", null=True),
    _bytes("body"),
    _number("at"),
)

version_data = sa.Table(
    "version_data",
    metadata,
    _text("version", key=True),
    _text("trace", key=True),
    sa.Column("role", sa.Text, nullable=False, server_default="practice"),
    sa.Index(None, "trace"),
)

verdicts = sa.Table(
    "verdicts",
    metadata,
    _text("id", key=True),
    _text("version"),
    _text("baseline"),
    _text("decision"),
    _bytes("body"),
    _number("at"),
    sa.Index(None, "version"),
)

releases = sa.Table(
    "releases",
    metadata,
    _sequence(),
    _text("id", unique=True),
    _text("line"),
    _text("version"),
    _text("kind"),
    _bytes("body"),
    _number("at"),
    sa.Index(None, "line", "seq"),
)

replicas = sa.Table(
    "replicas",
    metadata,
    _text("release", key=True),
    _text("replica", key=True),
    _text("version"),
    _number("at"),
)

entries = sa.Table(
    "entries",
    metadata,
    _text("id", key=True),
    _text("activity"),
    _text("device"),
    _number("seconds"),
    _integer("tokens"),
    _number("dollars", null=True),
    _text("subject"),
    _text("line"),
    _text("stage"),
    _text("outcome"),
    _number("at"),
    sa.Index(None, "line", "stage", "at"),
    sa.Index(None, "subject"),
    sa.Index(None, "at"),
)

jobs = sa.Table("jobs", metadata, _text("line", key=True), _text("key", key=True), _bytes("value"), _number("at"))

holders = sa.Table(
    "holders",
    metadata,
    _text("line", key=True),
    _text("owner"),
    _text("host"),
    _integer("pid"),
    _number("at"),
)
