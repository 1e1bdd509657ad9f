"""What a step of GRPO teaches: honed, in fp32 and with int8 rollouts, against TRL, on the support agent.

All start from the same model (taught by demonstrations from before the tools changed and by a few from after, so that
attempts at one task differ), see the same tasks in the same order, take the same number of attempts and updates at the
same rate, and are judged by the same engine on 64 held-out requests after every fourth step: by the mean reward, which
is what practice raises, and by the share of right calls. Sampling draws its own dice on each side, so each is run with
several seeds; `difference_low` and `difference_high` bound the mean of honed's gain in reward minus TRL's, paired by
seed, with 95 % (Student's t), and the `_half` ones that after half of the steps. Hours on two cores: what each seed
gave is kept in .bench/learning, and a run that was stopped goes on where it was; `--fresh` begins again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import arena

from honed.model.load import prepare
from honed.model.merge import merge
from honed.text import load_renderer

EXAMPLES = Path(__file__).parent.parent / "examples"
SOURCES = f"{Path(__file__).parent.parent / 'src'}:{EXAMPLES}"
TRL = ("torch==2.13.0", "trl==1.16.0 peft", "datasets", "msgspec numpy")
STEPS, PER_STEP, SIZE, NEW, EVERY, RATE = 8, 4, 8, 48, 4, 2e-4
ATTEMPTS = 2
"""At each held-out request, at the temperature that is practised at."""
T_95 = {2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 1: 12.706}
"""Student's t, two-sided 95 %, by degrees of freedom."""


Judgement = tuple[float, float]
"""Mean reward and share of right calls."""


def first_calls(
    renderer: Any, seeds: range, era: str, changed: bool, count: int
) -> list[tuple[list[int], int, list[int]]]:
    """Of the first cases of a range: the prompt's ids, the case's seed, and the ids of the right first reply."""
    from support import world

    found = []
    for seed in seeds:
        case = world.case(seed, era)
        if changed and case.kind not in world.CHANGED:
            continue
        ids = renderer.start(world.prompt(case), world.tools(era))
        found.append((ids, seed, renderer.encode_reply(world.gold(case)[0])))
        if len(found) == count:
            break
    return found


def starting_model(base: Path, threads: int) -> Path:
    """The model that all begin with, by demonstrations of the first call: it knows the tools as they were, and half
    knows what they are now. Without the second part all attempts at a task end alike, and no step has a signal."""
    folder = arena.ENVIRONMENTS / "learning-half-taught"
    if (folder / "manifest.json").is_file():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    renderer = load_renderer(base, None)
    before = first_calls(renderer, range(7_000_000, 7_100_000), "before", False, 64)
    after = first_calls(renderer, range(8_000_000, 8_100_000), "after", True, 32)
    options = {"model": str(base), "threads": threads, "method": "lora"}
    teacher = arena.Contender("teacher", "honed_learner.py", options=options, env={"PYTHONPATH": SOURCES})
    try:
        teacher.start()
        for lessons, steps, rate in ((before, 24, 5e-4), (after, 4, 2e-4)):
            for step in range(steps):
                rows = [[ids + reply, len(ids)] for ids, _, reply in lessons[step % 8 * 8 : step % 8 * 8 + 8]]
                print(teacher.ask({"rows": rows, "loss": "cross_entropy", "rate": rate}), file=sys.stderr, flush=True)
        saved = teacher.ask({"save": "start"})
        if saved is None:
            raise SystemExit(f"the starting model could not be made: {teacher.unavailable}")
        merge(prepare(base), Path(saved["folder"]), saved["digest"], folder)
    finally:
        teacher.close()
    return folder


def lessons_of(renderer: Any, seed: int) -> list[tuple[list[int], int, list[int]]]:
    """The tasks of a seed, in the order of its steps."""
    first = 1_000_000 + 10_000 * seed
    return first_calls(renderer, range(first, first + 10_000), "after", True, STEPS * PER_STEP)


def honed_run(contender: arena.Contender, tasks: list[Any], seed: int) -> list[str]:
    """Adapters after every EVERY steps."""
    folders = []
    for step in range(STEPS):
        chosen = tasks[step * PER_STEP : (step + 1) * PER_STEP]
        job = {
            "prompts": [ids for ids, _, _ in chosen], "cases": [case for _, case, _ in chosen],
            "size": SIZE, "new": NEW, "seed": seed, "rate": RATE, "stop": [2],
        }  # fmt: skip
        print(contender.name, seed, step, contender.ask(job), file=sys.stderr, flush=True)
        if (step + 1) % EVERY == 0 and (saved := contender.ask({"save": f"{contender.name}/{seed}/{step + 1}"})):
            folders.append(saved["folder"])
    return folders


def trl_run(contender: arena.Contender, tasks: list[Any], seed: int) -> list[str]:
    """The same of TRL."""
    folder = arena.ENVIRONMENTS / "learning-trl" / str(seed)
    points = list(range(EVERY, STEPS + 1, EVERY))
    done = contender.ask({
        "prompts": [ids for ids, _, _ in tasks], "cases": [case for _, case, _ in tasks], "count": PER_STEP,
        "size": SIZE, "new": NEW, "steps": STEPS, "seed": seed, "rate": RATE, "save_at": points, "folder": str(folder),
    })  # fmt: skip
    print(contender.name, seed, done, file=sys.stderr, flush=True)
    return [str(folder / str(point)) for point in points] if done else []


def kept_curve(
    result: Path, contender: arena.Contender, tasks: list[Any], seed: int, judged: Callable[[str], Judgement]
) -> list[Judgement] | None:
    """After every EVERY steps, from the file that an earlier run left or by running it; None where it can't."""
    if not result.is_file():
        began = time.monotonic()
        try:
            contender.start()
            folders = (trl_run if contender.name == "trl" else honed_run)(contender, tasks, seed)
        finally:
            contender.close()
        if contender.unavailable:
            return None
        found = {
            "curve": [judged(folder) for folder in folders],
            "seconds": round(time.monotonic() - began),
            "hello": contender.hello,
        }
        partial = result.with_suffix(".partial")
        partial.write_text(json.dumps(found))
        partial.replace(result)
    return [(reward, success) for reward, success in json.loads(result.read_text())["curve"]]


def interval(differences: list[float]) -> tuple[float, float] | tuple[None, None]:
    """95 % of the mean's."""
    if len(differences) < 2:
        return None, None
    half = T_95[len(differences) - 1] * statistics.stdev(differences) / len(differences) ** 0.5
    middle = statistics.mean(differences)
    return round(middle - half, 4), round(middle + half, 4)


def compared(curves: dict[str, dict[int, list[Judgement]]]) -> dict[str, Any]:
    """Mean gains in reward, and the bounds of honed's less TRL's at each budget, over the seeds that both have."""
    last = STEPS // EVERY
    result: dict[str, Any] = {}
    for name, found in curves.items():
        for column, what in enumerate(("gain", "gain_success")):
            if found:
                gains = [curve[last][column] - curve[0][column] for curve in found.values()]
                result[f"{what}_{name}"] = round(statistics.mean(gains), 4)
    for name in ("honed", "honed_int8"):
        both = sorted(curves[name].keys() & curves["trl"].keys())
        for point, when in ((last, ""), (last // 2, "_half")):
            low, high = interval([curves[name][seed][point][0] - curves["trl"][seed][point][0] for seed in both])
            suffix = name.removeprefix("honed") + when
            result |= {f"difference_low{suffix}": low, f"difference_high{suffix}": high}
    return result | {"seeds": len(curves["trl"])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--fresh", action="store_true", help="forget what seeds gave before")
    given = parser.parse_args()
    sys.path.insert(0, str(EXAMPLES))
    base = prepare("smollm2").directory
    start = starting_model(base, given.threads)
    renderer = load_renderer(base, None)
    held_out = first_calls(renderer, range(5_000_000, 5_100_000), "after", True, 64)
    options: dict[str, Any] = {"model": str(start), "threads": given.threads, "method": "lora"}
    env = {"PYTHONPATH": SOURCES}
    kept = arena.ENVIRONMENTS / "learning" / "-".join(map(str, (STEPS, PER_STEP, SIZE, NEW, EVERY, RATE)))
    if given.fresh:
        shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir(parents=True, exist_ok=True)
    curves: dict[str, dict[int, list[Judgement]]] = {"honed": {}, "honed_int8": {}, "trl": {}}
    missing: dict[str, str] = {}
    judge = arena.Contender("judge", "honed_judge.py", options=options, env=env)
    try:
        judge.start()
        asked = {
            "prompts": [ids for ids, _, _ in held_out],
            "cases": [case for _, case, _ in held_out],
            "new": NEW,
            "stop": [2],
            "attempts": ATTEMPTS,
        }

        def judged(adapter: str) -> Judgement:
            found = judge.ask({**asked, "adapter": adapter})
            if found is None:
                raise SystemExit(f"the judge failed: {judge.unavailable}")
            return round(found["reward"], 4), round(found["success"], 4)

        before = judged("")
        for seed in range(given.seeds):
            tasks = lessons_of(renderer, seed)
            contenders = [
                arena.Contender("honed", "honed_learner.py", options=options, env=env),
                arena.Contender("honed_int8", "honed_learner.py", options={**options, "precision": "int8"}, env=env),
                arena.Contender("trl", "trl_grpo.py", TRL, options=options, env=env),
            ]
            for contender in contenders:
                curve = kept_curve(kept / f"{contender.name}-{seed}.json", contender, tasks, seed, judged)
                if curve is None:
                    missing[contender.name] = contender.unavailable
                    continue
                curves[contender.name][seed] = [before, *curve]
                print(contender.name, seed, curves[contender.name][seed], file=sys.stderr, flush=True)
    finally:
        judge.close()
    arena.finish({**compared(curves), "curves": curves, "every": EVERY, "unavailable": missing})


if __name__ == "__main__":
    main()
