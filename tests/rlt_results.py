"""The README's figures for rlt.py in the toy world: every arm, several seeds, one table. What is already there is not run again.

    python tests/rlt_results.py [--seeds 3] [--out runs/rlt-results]     # about seven minutes a seed on two cores
"""
import argparse
import json
import re
import statistics
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import rlt  # noqa: E402
import tandem  # noqa: E402

TOY = HERE / "toy"


def part(entry, folder, *argv):
    """Runs a command of rlt.py or of tandem.py into `folder`, or goes on with it; returns the rows of its log."""
    resume = ["--resume"] * (folder / "config.json").is_file()
    entry([*map(str, argv), "--out", str(folder), *resume])
    return tandem.read_jsonl(folder / ("traces.jsonl" if (folder / "traces.jsonl").is_file() else "metrics.jsonl"))


def right(row):
    """Whether an explanation's own claims are true: each total of its steps, or the answer that it leaks."""
    answer = int(re.search(r"\d+", row["solution"])[0])
    if "=" in row["explanation"] and "because" not in row["explanation"]:
        totals = [int(n) for n in re.findall(r"(?:^|=)(\d\d)(?=[+-])", row["explanation"])]
        start, *terms = re.findall(r"\d+|[+-]\w\d", row["question"])
        true = [int(start) + sum(int(t[0] + t[2]) for t in terms[:i]) for i in range(len(terms))]
        return totals == true and row["explanation"].endswith(terms[-1])
    return all(int(n) == answer for n in re.findall(r"=(\d+)", row["explanation"]))


def style_mix(rows):
    """{style: share}, with steps and leaks split into right and wrong."""
    patterns = rlt.ExplainConfig(**rlt.PRESETS["explain"]["toy"]).patterns()
    mix = {"steps, right": 0, "steps, wrong": 0, "leak": 0, "padded": 0, "other": 0}
    for row in rows:
        style = next((name for name, regex in patterns.items() if regex.search(row["explanation"])), "other")
        mix[f"steps, {'right' if right(row) else 'wrong'}" if style == "style/steps" else style.removeprefix("style/")] += 1 / len(rows)
    return mix


def one_seed(seed, out):
    """{name of a figure: value} of one seed."""
    common, figures = ["--preset", "toy", "--seed", seed, "--show", 0], {}
    command = lambda name: lambda argv: rlt.command(name, argv)  # noqa: E731
    distil = lambda name, data, *argv: part(command("distill"), out / f"student-{name}", *common, "--data", data, *argv)[-1]["solo/pass@1"]  # noqa: E731
    teachers = {"before RL": TOY / "teacher", "RLT": out / "RLT/final", "RLT, exact KL": out / "exact/final", "without r_KL": out / "no-kl/final"}
    part(command("train"), out / "RLT", *common)
    part(command("train"), out / "exact", *common, "--kl", "exact")
    part(command("train"), out / "no-kl", *common, "--lambda-kl", 0)
    for i, (name, model) in enumerate(teachers.items()):
        settings = [*common[:4], "--model", model]
        rows = part(command("explain"), out / f"traces-{i}", *settings)
        figures.update({f"{name}: {key}": value for key, value in (rlt.summary(rows, {}) | style_mix(rows)).items()})
        figures[f"{name}: student"] = distil(i, out / f"traces-{i}/traces.jsonl")
        part(command("explain"), out / f"traces-{i}-minus", *settings, "--data", TOY / "rlt_minus_train.jsonl", "--problems", 512)
        figures[f"{name}: student, on -"] = distil(f"{i}-minus", out / f"traces-{i}-minus/traces.jsonl", "--eval-data", TOY / "rlt_minus_eval.jsonl")
    (out / "answers.jsonl").write_text("".join((TOY / "rlt_train.jsonl").read_text().splitlines(True)[:256]))
    figures["answers only: student"] = distil("answers", out / "answers.jsonl")
    figures["gold steps: student"] = distil("gold", TOY / "rlt_gold.jsonl")
    base = [tandem.read_jsonl(out / f"student-{name}/metrics.jsonl")[0]["solo/pass@1"] for name in ("0", "0-minus")]
    figures["base, not distilled: student"], figures["base, not distilled: student, on -"] = base

    rows = part(command("explain"), out / "traces-pool", *common[:4], "--problems", 512)  # by the teacher before RL
    ranked = sorted(rows, key=lambda row: row["reward"])
    for quarter in range(4):
        some, path = ranked[128 * quarter:128 * (quarter + 1)], out / f"quarter-{quarter + 1}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in some))
        figures[f"quarter {quarter + 1}: reward"] = statistics.mean(row["reward"] for row in some)
        figures[f"quarter {quarter + 1}: student"] = distil(f"quarter-{quarter + 1}", path, "--epochs", 25)

    for name, start in (("RLT's student", out / "student-1/final"), ("base", TOY / "base")):
        log = part(tandem.main, out / f"cold-{name[:4]}", "--preset", "toy", "--no-handoff-eval", "--prob-senior", 1, "--habit", "", "--show", 0,
                   "--model", start, "--junior", "self", "--data", TOY / "rlt_train.jsonl", "--eval-data", TOY / "rlt_eval.jsonl", "--eval-problems", 200,
                   "--prompts-per-step", 16, "--prompts-per-update", 16, "--group-size", 8, "--max-new-tokens", 64, "--temperature", 0.7, "--eval-temperature", 0.7,
                   "--lr", 1e-4, "--steps", 60, "--eval-every", 60, "--seed", seed)
        figures[f"RL from {name}: before"], figures[f"RL from {name}: after"] = log[0]["solo/pass@1"], log[-1]["solo/pass@1"]
    return figures


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/rlt-results"))
    options = parser.parse_args()
    seeds = [one_seed(seed, options.out / f"seed{seed}") for seed in range(options.seeds)]
    lines = [f"{name:<40} {statistics.mean(values):7.3f}  [{min(values):.3f}, {max(values):.3f}]" for name in seeds[0] if (values := [s[name] for s in seeds])]
    (options.out / "figures.json").write_text(json.dumps(seeds, indent=1))
    print(f"\nmean [lowest, highest] of {options.seeds} seeds\n" + "\n".join(lines))


if __name__ == "__main__":
    main()
