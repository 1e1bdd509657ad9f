"""The demo's config files: what each stage of the story changes, everything else said once."""

from __future__ import annotations

from pathlib import Path

from support.world import MAX_TOKENS

COMMON = """\
[model]
source = "smollm2"
line = "support"
[store]
root = "store"
[serve]
port = 0
[watch]
tolerance = 0.05
[engine]
slots = 64
threads = {threads}
context = 1024
[train]
threads = {threads}
micro_tokens = 2048
seed = {seed}
[rollout]
max_tokens = {max_tokens}
concurrency = 64
"""

TEACH = """\
[tasks]
suites = ["support.lessons:holdout_before"]
[sft]
learning_rate = 5e-4
passes = 4
decay = 0.3
batch_size = 8
seed = {seed}
[learn]
steps = 0
warmup_steps = 6
snapshot_every = 8
seed = {seed}
[gate]
target_suites = ["support-changed-before", "support-unchanged-before"]
attempts = 1
hoped_gain = 0.5
temperature = 0.3
alpha_policy = "single"
concurrency = 64
"""

REPAIR = """\
[tasks]
suites = ["support.lessons:holdout_after", "support.lessons:dev_after"]
[curate]
maker = "support.env:task_from_trace"
max_tasks = 18
max_demonstrations = 24
replay = 64
holdout_share = 0.0
dev_share = 0.0
[sft]
learning_rate = 5e-4
passes = 5
decay = 0.4
batch_size = 10
rehearsal_candidates = 24
seed = {seed}
[grpo]
learning_rate = 5e-5
[learn]
steps = 3
warmup_steps = 6
snapshot_every = 8
groups_per_step = 6
group_size = 8
dev_suites = ["support-changed"]
seed = {seed}
[gate]
target_suites = ["support-changed"]
guard_suites = ["support-unchanged"]
attempts = 2
hoped_gain = 0.3
margin = 0.15
temperature = 0.3
concurrency = 64
"""

BROKEN = (
    REPAIR.replace("learning_rate = 5e-4\npasses = 5\ndecay = 0.4", "learning_rate = 0.05\npasses = 2")
    .replace("steps = 3", "steps = 0")
    .replace("replay = 64", "replay = 8")
    .replace('dev_suites = ["support-changed"]\n', "")
)
"""A learning rate a hundred times too high."""


def write(folder: Path, seed: int, threads: int) -> dict[str, Path]:
    """Writes the configs into the demo's folder and returns their paths by stage."""
    paths = {}
    values = {"seed": seed, "threads": threads, "max_tokens": MAX_TOKENS}
    for name, text in {"teach": TEACH, "repair": REPAIR, "broken": BROKEN}.items():
        paths[name] = folder / f"{name}.toml"
        paths[name].write_text((COMMON + text).format(**values), encoding="utf-8")
    return paths
