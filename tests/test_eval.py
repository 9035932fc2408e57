"""The four measurements against slow plain versions, the bootstrap against known values, and whole commands on the built-in model."""
import json
import math
import shutil
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import eval as measures
import tandem
from conftest import ROOT, TOY, Scripted, tiny_model
from tandem import Schedule, rollout

PROMPTS = [[5, 6, 7, 8, 9], [10], [11, 12, 13], [5, 6, 7, 8, 9, 10, 11, 12]]


def call(*argv):
    with pytest.raises(SystemExit) as stopped:
        tandem.run_main(lambda: measures.main(list(map(str, argv))))
    return stopped.value.code or 0


def step_schedule(**settings):
    """Ids 20..22 hold a blank line, 23..29 end in half a one, 25..32 begin with half a one."""
    ids = torch.arange(40)
    return Schedule((ids >= 20) & (ids <= 22), (ids >= 25) & (ids <= 32), (ids >= 23) & (ids <= 29), max_gap=10**9, alternate=True, **settings)


# --- hand-off -------------------------------------------------------------------------------------------------------------------------

def plain_handoff(senior, junior, prompt, max_new_tokens, temperature, uniform, max_turns, stops=(1, 2)):
    """One row, without a cache; the rule in words: a turn ends with a blank line, in one token or in two halves."""
    ids, authors, turn, half, who = list(prompt), [], 1, False, True
    for t in range(max_new_tokens):
        with torch.no_grad():
            logits = (senior if who else junior)(torch.tensor([ids])).logits[0, -1].double()
        if temperature == 0:
            token = int(logits.argmax())
        else:
            probs = torch.softmax(logits / temperature, -1).tolist()
            token, total = 0, probs[0]
            while total <= uniform[t].item() and token < len(probs) - 1:
                token += 1
                total += probs[token]
        ids.append(token)
        authors.append(who)
        if token in stops:
            return ids[len(prompt):], authors, True
        if 20 <= token <= 22 or (half and 25 <= token <= 32):
            who, half, turn = not who, False, turn + 1
            if turn > max_turns:
                return ids[len(prompt):], authors, False
        else:
            half = 23 <= token <= 29
    return ids[len(prompt):], authors, False


@pytest.mark.parametrize("max_turns", [10**6, 3, 1])
@pytest.mark.parametrize("prompts", [PROMPTS, [[7], [9]]])
def test_handoff_in_long_turns_equals_the_plain_one_token_by_token(prompts, max_turns):
    senior, junior, n = tiny_model(0), tiny_model(1), 3 * len(prompts)
    rolled = rollout(senior, junior, prompts, group_size=3, max_new_tokens=30, schedule=step_schedule(), temperature=1.5, max_turns=max_turns, seed=9)
    uniform = torch.rand(n, 30, generator=torch.Generator().manual_seed(9))
    cut_by_turns = 0
    for i in range(n):
        ids, authors, finished = plain_handoff(senior, junior, prompts[i // 3], 30, 1.5, uniform[i], max_turns)
        assert rolled.ids[i, :rolled.lengths[i]].tolist() == ids and rolled.senior_mask[i, :rolled.lengths[i]].tolist() == authors
        assert rolled.finished[i].item() == finished and rolled.turns[i] <= max_turns
        cut_by_turns += not finished and len(ids) < 30
    assert (cut_by_turns > 0) == (max_turns < 10)
    assert max_turns < 10 or rolled.turns.max() > 4


def test_handoff_of_a_model_to_itself_is_its_solo_answer():
    model, twin = tiny_model(3), tiny_model(3)
    solo = rollout(model, None, PROMPTS, max_new_tokens=25, temperature=0)
    for schedule in (step_schedule(), Schedule(torch.arange(40) % 2 == 0, *[torch.zeros(40, dtype=torch.bool)] * 2, max_gap=4)):
        joint = rollout(model, twin, PROMPTS, max_new_tokens=25, temperature=0, schedule=schedule)
        assert torch.equal(joint.ids, solo.ids) and torch.equal(joint.lengths, solo.lengths) and joint.turns.max() > 1


def test_turns_of_scripted_models():
    """The senior says 4 5 20, the junior 6 20: turns of three and two, senior first, until the budget of 12."""
    def senior(seen):
        return {20: 4, 4: 5, 5: 20}.get(seen[-1], 4)

    def junior(seen):
        return {20: 6, 6: 20}.get(seen[-1], 6)
    rolled = rollout(Scripted(senior), Scripted(junior), [[7], [7, 8, 9]], max_new_tokens=12, schedule=step_schedule())
    assert rolled.ids.tolist() == [[4, 5, 20, 6, 20, 4, 5, 20, 6, 20, 4, 5]] * 2
    assert rolled.senior_mask[0].tolist() == [True] * 3 + [False] * 2 + [True] * 3 + [False] * 2 + [True] * 2
    assert rolled.turns.tolist() == [5, 5] and not rolled.finished.any()


def test_each_model_reads_only_when_it_writes():
    """In step hand-off a forward pass serves one model, and reads what the other wrote in one go: far fewer passes than two a token."""
    senior, junior = Scripted(lambda seen: 20 if len(seen) % 10 == 0 else 4), Scripted(lambda seen: 20 if len(seen) % 10 == 0 else 6)
    rollout(senior, junior, [[7] * 5] * 4, max_new_tokens=40, schedule=step_schedule())
    assert senior.calls + junior.calls <= 42  # one a token, and a prefill each


def exact_kl(senior, junior, prompts, ids, lengths, vocab_size=None, slice_tokens=1024):
    return measures.divergence(senior, junior, prompts, prompts, ids, lengths, 1.0, vocab_size, slice_tokens)


# --- drift and legibility -------------------------------------------------------------------------------------------------------------

@pytest.fixture()
def answers():
    rolled = rollout(tiny_model(0), None, PROMPTS, group_size=2, max_new_tokens=12, temperature=1.0, seed=3)
    return [p for p in PROMPTS for _ in range(2)], rolled.ids, rolled.lengths


@pytest.mark.parametrize("vocab_size", [None, 31])
def test_drift_equals_a_plain_double_loop(answers, vocab_size):
    senior, junior = tiny_model(0), tiny_model(1)
    prompts, ids, lengths = answers
    ids = ids.clamp(max=30)
    got = exact_kl(senior, junior, prompts, ids, lengths, vocab_size)
    for i, prompt in enumerate(prompts):
        for t in range(ids.size(1)):
            want = 0.0
            if t < lengths[i]:
                seen = torch.tensor([prompt + ids[i, :t].tolist()])
                p, q = (torch.softmax(m(seen).logits[0, -1, :vocab_size].double(), -1).tolist() for m in (senior, junior))
                want = sum(a * math.log(a / b) for a, b in zip(p, q))
            assert got[i, t].item() == pytest.approx(want, abs=1e-4)
    for slice_tokens in (1, 7):
        assert torch.allclose(exact_kl(senior, junior, prompts, ids, lengths, vocab_size, slice_tokens), got, atol=1e-5)
    alone = exact_kl(senior, junior, prompts[3:4], ids[3:4], lengths[3:4], vocab_size)
    assert torch.allclose(alone[0, :lengths[3]], got[3, :lengths[3]], atol=1e-4) and not got.requires_grad


def test_drift_of_identical_models_is_zero(answers):
    assert exact_kl(tiny_model(0), tiny_model(0), *answers).abs().max() < 1e-5


def pair_of(senior, junior, **settings):
    return SimpleNamespace(senior=senior, junior=junior, tokenizer=[0] * 40, config=SimpleNamespace(micro_tokens=settings.get("micro_tokens", 10**6)))


def as_problems(prompts, ids, lengths):
    return [{"question": str(i), "prompt_ids": prompts[i], "samples": [{"ids": ids[j, :lengths[j]].tolist()} for j in (i, i + 1)]} for i in range(0, len(prompts), 2)]


@pytest.mark.parametrize("micro_tokens", [1, 60, 10**6])
def test_legibility_equals_a_plain_double_loop(answers, micro_tokens):
    senior, junior = tiny_model(0), tiny_model(1)
    problems = as_problems(*answers)
    results = measures.score(pair_of(senior, junior, micro_tokens=micro_tokens), "legibility", problems)
    for problem, result in zip(problems, results):
        for sample, scored in zip(problem["samples"], result["samples"]):
            want = 0.0
            for t, token in enumerate(sample["ids"]):
                logits = junior(torch.tensor([problem["prompt_ids"] + sample["ids"][:t]])).logits[0, -1].double()
                want -= torch.log_softmax(logits, -1)[token].item()
            assert scored["nats"] == pytest.approx(want, abs=1e-3) and scored["tokens"] == len(sample["ids"])
    drift = measures.score(pair_of(senior, junior, micro_tokens=micro_tokens), "drift", problems)
    exact = exact_kl(senior, junior, *answers)
    assert [s["nats"] for r in drift for s in r["samples"]] == pytest.approx(exact.sum(1).tolist(), abs=1e-3)


def test_legibility_to_oneself_is_ones_entropy():
    """Cross-entropy of a model on its own samples is its entropy, within the error of sampling."""
    model = tiny_model(0)
    rolled = rollout(model, None, PROMPTS, group_size=400, max_new_tokens=8, temperature=1.0, seed=0)
    prompts = [p for p in PROMPTS for _ in range(400)]
    logp, entropy = tandem.completion_logprobs(model, prompts, rolled.ids, rolled.lengths, 1.0, entropy=True)
    difference = (-logp - entropy).sum(1).detach()
    assert abs(difference.mean()) < 4 * difference.std() / math.sqrt(len(prompts)) and entropy.sum() > 100


# --- numbers --------------------------------------------------------------------------------------------------------------------------

def table(values):
    values = np.atleast_2d(np.asarray(values, dtype=float))
    return {"b": (values, np.ones_like(values))}


def test_the_interval_covers_the_truth_about_95_percent_of_the_time():
    draw, hits, trials = np.random.default_rng(0), 0, 400
    for trial in range(trials):  # 60 problems of differing difficulty, 4 answers each; the truth is the mean difficulty, 2/3
        difficulty = draw.beta(2, 1, 60)
        low, high = measures.interval(measures.bootstrap(table(draw.binomial(4, difficulty) / 4), seed=trial, draws=400))
        hits += low <= 2 / 3 <= high
    assert 0.91 <= hits / trials <= 0.98


def test_seeds_widen_the_interval():
    """Twenty identical problems: without seeds nothing varies; with seeds their spread is the interval, as a bootstrap of the five means gives it."""
    assert measures.interval(measures.bootstrap(table([0.5] * 20))) == (0.5, 0.5)
    means = np.array([0.1, 0.3, 0.5, 0.7, 0.9])
    low, high = measures.interval(measures.bootstrap(table(np.repeat(means[:, None], 20, 1)), draws=20000))
    again = np.random.default_rng(1).choice(means, (20000, 5)).mean(1)
    assert (low, high) == pytest.approx(np.percentile(again, (2.5, 97.5)), abs=0.03)


def test_differences_are_paired_by_problem():
    """Hard and easy problems, and an arm that is better by .1 on each: singly the means are noisy, the difference is certain."""
    base = np.random.default_rng(0).uniform(0, 0.9, 30)
    a, b = (measures.bootstrap(table(values), arm=arm) for arm, values in enumerate((base, base + 0.1)))
    assert np.ptp(a) > 0.2 and measures.interval(b - a) == pytest.approx((0.1, 0.1))


def test_the_share_of_solo_is_the_ratio_of_the_averages():
    """As in the paper's table: 52.40 / 55.56, not a mean of ratios; a benchmark that nobody solves does no harm."""
    handoff, solo = ({"x": table(a)["b"], "y": table(b)["b"]} for a, b in (([0.2, 0.4], [0.0]), ([0.5, 0.7], [0.0])))
    assert measures.macro((handoff, solo)) == pytest.approx(0.15 / 0.3)
    draws = measures.bootstrap((handoff, solo))
    assert np.isfinite(draws).all() and 0.3 < np.median(draws) < 0.7


def test_k_is_what_is_reported(runs, tmp_path):
    assert call("solo", "--preset", "toy", "--model", runs / "t", "--problems", 2, "--n", 3, "--k", "1,3", "--out", tmp_path / "k") == 0
    summary = json.loads((tmp_path / "k" / "solo.json").read_text())["summary"]
    assert [m for m in summary if "pass@" in m] == ["solo pass@1", "solo pass@3"]


def test_metrics_by_hand():
    def answer(correct, length, finished=True, **more):
        return {"correct": correct, "ids": [0] * length, "finished": finished, **more}
    problems = {"x": [{"samples": [answer(1, 4), answer(0, 8, False)]}, {"samples": [answer(0, 2), answer(0, 2)]}], "y": [{"samples": [answer(1, 10), answer(1, 10)]}]}
    value = lambda metric: float(measures.macro(measures.table_of(metric, [problems])))  # noqa: E731
    assert value("solo pass@1") == pytest.approx((0.25 + 1) / 2) and value("solo pass@2") == pytest.approx((0.5 + 1) / 2)
    assert value("solo length") == pytest.approx((4 + 10) / 2) and value("solo cut") == pytest.approx((0.25 + 0) / 2)
    scored = {"x": [{"samples": [{"nats": 6.0, "tokens": 2}, {"nats": 1.0, "tokens": 10}]}, {"samples": [{"nats": 0.0, "tokens": 4}, {"nats": 9.0, "tokens": 4}]}]}
    value = lambda metric: float(measures.macro(measures.table_of(metric, [scored])))  # noqa: E731
    assert value("drift a token") == pytest.approx(16 / 20) and value("drift an answer") == pytest.approx(16 / 4)
    assert value("legibility") == pytest.approx((3 + 0.1 + 0 + 2.25) / 4)


# --- benchmarks -----------------------------------------------------------------------------------------------------------------------

def test_gpqa_becomes_multiple_choice(tmp_path):
    rows = [{"Question": f"Question {i}?", "Correct Answer": f"right {i}", **{f"Incorrect Answer {j}": f"wrong {i} {j}" for j in (1, 2, 3)}} for i in range(40)]
    (tmp_path / "gpqa_diamond.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (problems,) = measures.load_benchmarks(str(tmp_path / "gpqa_diamond.jsonl"), 0).values()
    for i, p in enumerate(problems):
        assert f"{p.answer}. right {i}\n" in p.question + "\n" and p.question.startswith(f"Question {i}?") and p.question.count("wrong") == 3
        assert tandem.verify(f"\\boxed{{{p.answer}}}", p.answer) == 1 and tandem.verify("\\boxed{E}", p.answer) == 0
    assert {p.answer for p in problems} == set("ABCD")
    assert measures.load_benchmarks(str(tmp_path / "gpqa_diamond.jsonl"), 3) == {"gpqa_diamond.jsonl": problems[:3]}


# --- commands -------------------------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A tandem run and its control, two steps each, and all measurements of both."""
    tmp = tmp_path_factory.mktemp("runs")
    assert tandem.demo(str(tmp / "t"), ["--steps", "2", "--prompts-per-step", "2", "--prompts-per-update", "2", "--group-size", "4", "--eval-problems", "3",
                                       "--eval-every", "1"]) is None
    for name in ("t", "t-vanilla"):
        assert call("all", "--preset", "toy", "--model", tmp / name, "--problems", 6, "--batch-problems", 4) == 0
    return tmp


def test_files_hold_what_a_repetition_needs(runs):
    assert sorted(p.name for p in (runs / "t" / "eval").iterdir()) == [f"{m}.json" for m in ("drift", "handoff-step", "handoff-word", "legibility", "solo")]
    for path in (runs / "t" / "eval").iterdir():
        content = json.loads(path.read_text())
        assert {"model", "model_hash", "data", "n", "temperature", "top_p", "top_k", "max_new_tokens", "seed", "prompt_suffix"} <= content["settings"].keys()
        assert content["settings"]["model"].endswith("final") and content["settings"]["prompt_suffix"] == "" and {"torch", "transformers"} <= content["versions"].keys()
        assert path.stem == "solo" or content["settings"]["junior"] == str(TOY / "junior")  # the run's own
        (problems,) = content["benchmarks"].values()
        assert len(problems) == 6 and all(len(p["samples"]) == 4 for p in problems)
    solo = json.loads((runs / "t" / "eval" / "solo.json").read_text())
    for p in list(solo["benchmarks"].values())[0]:
        assert all(s["correct"] == tandem.verify(s["text"], p["answer"]) for s in p["samples"])


def test_the_prompt_of_evaluation_is_that_of_training(runs, toy, tmp_path):
    """Of a run, of a checkpoint in a run, and of a bare model with the preset it was trained under."""
    want = tandem.encode_prompt(toy.tokenizer, json.loads((TOY / "eval.jsonl").read_text().splitlines()[0])["question"])
    for model in (runs / "t", runs / "t" / "checkpoint-2", TOY / "senior"):
        assert call("solo", "--preset", "toy", "--model", model, "--problems", 1, "--n", 1, "--out", tmp_path / model.name) == 0
        (problems,) = json.loads((tmp_path / model.name / "solo.json").read_text())["benchmarks"].values()
        assert problems[0]["prompt_ids"] == want
    assert measures.resolve(measures.Config(model=str(runs / "t")))[1].prompt_suffix == ""
    assert measures.resolve(measures.Config(model=str(TOY / "senior")))[1].prompt_suffix == tandem.Config.prompt_suffix


def test_nothing_depends_on_where_the_files_lie(runs, tmp_path):
    """The same data and model in other folders give the same answers, and count as the same measurement."""
    import shutil
    shutil.copytree(runs / "t", tmp_path / "moved")
    shutil.copy(TOY / "eval.jsonl", tmp_path / "eval.jsonl")
    argv = ["handoff", "--preset", "toy", "--problems", 6, "--batch-problems", 4]
    assert call(*argv, "--model", tmp_path / "moved", "--data", tmp_path / "eval.jsonl", "--out", tmp_path / "again") == 0
    for name in ("handoff-step", "handoff-word"):
        a, b = (json.loads((folder / f"{name}.json").read_text()) for folder in (tmp_path / "again", runs / "t" / "eval"))
        assert a["benchmarks"] == b["benchmarks"] and a["summary"] == b["summary"]
    assert call(*argv, "--model", tmp_path / "moved", "--data", tmp_path / "eval.jsonl") == 0  # finished already: the folder came along
    assert call("report", runs / "t", f"moved={tmp_path / 'moved'}", "--out", tmp_path / "r") == 0


def test_finished_measurements_are_not_computed_again(runs, monkeypatch, capsys):
    monkeypatch.setattr(measures, "load_model", lambda *_: pytest.fail("a model was loaded"))
    assert call("all", "--preset", "toy", "--model", runs / "t", "--problems", 6, "--batch-problems", 4) == 0
    assert "solo: pass@1" in capsys.readouterr().out


@pytest.mark.parametrize("changed", [["--n", "2"], ["--temperature", "0.5"], ["--seed", "1"], ["--problems", "5"], ["--dtype", "bfloat16"], ["--k", "1,3"]])
def test_other_settings_are_refused_in_the_same_folder(runs, changed, capsys):
    assert call("solo", "--preset", "toy", "--model", runs / "t", "--problems", 6, "--batch-problems", 4, *changed) == 2
    assert "was made with" in (complaint := capsys.readouterr().err) and complaint.count("\n") == 1
    assert f"was made with {changed[0][2:]} " in complaint  # (the setting by its name, not the hash that it changes too)


def test_an_interrupted_measurement_goes_on_where_it_stopped(runs, tmp_path, monkeypatch):
    argv = ["solo", "--preset", "toy", "--model", runs / "t", "--problems", 6, "--batch-problems", 2]
    assert call(*argv, "--out", tmp_path / "whole") == 0
    real, calls = measures.answer, []

    def interrupted(pair, name, problems, seed):
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(len(problems))
        return real(pair, name, problems, seed)
    monkeypatch.setattr(measures, "answer", interrupted)
    assert call(*argv, "--out", tmp_path / "parts") == 130 and not (tmp_path / "parts" / "solo.json").exists()
    with open(tmp_path / "parts" / ".solo.partial.jsonl", "a") as file:
        file.write('{"benchmark": "half a li')
    calls.clear()
    monkeypatch.setattr(measures, "answer", lambda *args: calls.append(1) or real(*args))
    assert call(*argv, "--out", tmp_path / "parts") == 0 and calls == [1]  # the third batch only
    a, b = (json.loads((tmp_path / name / "solo.json").read_text()) for name in ("whole", "parts"))
    assert a == b and not list((tmp_path / "parts").glob(".*"))


def test_resume_after_kill_9(runs, tmp_path):
    argv = ["handoff", "--preset", "toy", "--model", runs / "t", "--problems", 12, "--batch-problems", 1]
    child = subprocess.Popen([sys.executable, ROOT / "eval.py", *map(str, argv), "--out", tmp_path / "killed"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    partial = tmp_path / "killed" / ".handoff-step.partial.jsonl"
    while child.poll() is None and (not partial.exists() or len(partial.read_text().splitlines()) < 4):
        time.sleep(0.005)
    child.kill()
    child.wait()
    assert call(*argv, "--out", tmp_path / "killed") == 0 and call(*argv, "--out", tmp_path / "whole") == 0
    for name in ("handoff-step.json", "handoff-word.json"):
        assert json.loads((tmp_path / "killed" / name).read_text()) == json.loads((tmp_path / "whole" / name).read_text())


def test_the_report(runs, tmp_path, capsys):
    assert call("report", runs / "t", runs / "t-vanilla", "--out", tmp_path / "r") == 0
    printed, written = capsys.readouterr().out, (tmp_path / "r" / "report.md").read_text()
    assert written in printed and "| solo pass@1" in written and "vanilla GRPO - tandem" in written and "drift a token" in written and "handoff-step pass@1 / solo" in written
    numbers = json.loads((tmp_path / "r" / "report.json").read_text())
    solo = json.loads((runs / "t" / "eval" / "solo.json").read_text())
    problems = list(solo["benchmarks"].values())[0]
    mean = sum(s["correct"] for p in problems for s in p["samples"]) / 24
    assert numbers["arms"]["tandem"]["solo pass@1"]["value"] == pytest.approx(mean) == pytest.approx(solo["summary"]["solo pass@1"]["macro"])
    difference = numbers["differences"]["vanilla GRPO - tandem"]["solo pass@1"]
    assert difference["value"] == pytest.approx(numbers["arms"]["vanilla GRPO"]["solo pass@1"]["value"] - mean)
    assert (tmp_path / "r" / "report.png").read_bytes()[:4] == b"\x89PNG"


def test_arms_may_be_named_and_hold_several_seeds(runs, tmp_path, capsys):
    shutil.copytree(runs / "t", tmp_path / "again")
    assert call("report", f"ours={runs}/t,{tmp_path}/again", f"control={runs}/t-van*", "--out", tmp_path / "r") == 0
    assert "ours: 2 seeds, control: 1 seed" in capsys.readouterr().out


def test_a_folder_counts_once_and_may_have_an_equals_sign_in_its_name(runs, tmp_path, capsys):
    for words in ([f"ours={runs}/t,{runs}/t"], [f"ours={runs}/t", f"ours={runs}/./t"], [runs / "t", f"{runs}/t/"]):
        assert call("report", *words, "--out", tmp_path / "r") == 2
        assert "is named twice" in (complaint := capsys.readouterr().err) and complaint.count("\n") == 1
    shutil.copytree(runs / "t", tmp_path / "lr=1")
    assert call("report", f"{tmp_path}/lr=*", f"other={tmp_path}/lr=1", "--out", tmp_path / "r") == 0
    assert "tandem: 1 seed, other: 1 seed" in capsys.readouterr().out


def test_a_report_of_many_arms_and_one_without_pass_at_1(runs, tmp_path, capsys, monkeypatch):
    """Every arm is drawn; of what the figure does not show there is a table."""
    from matplotlib.axes import Axes
    drawn, bar = [], Axes.bar
    monkeypatch.setattr(Axes, "bar", lambda self, *a, **k: (drawn.append(k["label"]), bar(self, *a, **k))[1])
    assert call("report", *[f"a{i}={runs}/t" for i in range(8)], "--out", tmp_path / "r") == 0
    assert {f"a{i}" for i in range(8)} <= set(drawn)
    assert call("solo", "--preset", "toy", "--model", TOY / "senior", "--problems", 2, "--k", 4, "--out", tmp_path / "four") == 0
    capsys.readouterr()
    assert call("report", f"x={tmp_path}/four", "--out", tmp_path / "r4") == 0
    assert "solo pass@4" in (printed := capsys.readouterr().out) and "report.png" not in printed
    assert {p.name for p in (tmp_path / "r4").iterdir()} == {"report.md", "report.json"}


def test_solo_needs_no_junior_and_may_be_greedy(runs, tmp_path):
    gone = copy_of(runs / "t", tmp_path / "gone", junior=str(tmp_path / "nowhere"))
    shutil.rmtree(gone / "eval")
    for folder in ("a", "b"):
        assert call("solo", "--preset", "toy", "--model", gone, "--problems", 2, "--n", 2, "--temperature", 0, "--out", tmp_path / folder) == 0
    a, b = (json.loads((tmp_path / folder / "solo.json").read_text())["benchmarks"] for folder in "ab")
    assert a == b and all(len({s["text"] for s in p["samples"]}) == 1 for p in a["eval.jsonl"])


def test_the_default_benchmark_is_the_runs_own(runs, tmp_path):
    resolved = lambda path: measures.resolve(measures.Config(model=str(path)))[1].data  # noqa: E731
    assert resolved(runs / "t") == str(TOY / "eval.jsonl") and resolved(TOY / "senior") == "aime24,amc23"
    assert resolved(copy_of(runs / "t", tmp_path / "own", eval_data="")) == "aime24,amc23"


def test_runs_that_differ_in_what_changes_no_result_are_one_arm(runs, tmp_path, capsys):
    other = copy_of(runs / "t", tmp_path / "other", seed=1, eval_every=7, max_rows=5, save_every=3)
    assert call("report", runs / "t", other, "--out", tmp_path / "r") == 0 and "tandem: 2 seeds" in capsys.readouterr().out


def test_rows_that_are_left_out_are_counted(tmp_path, capsys):
    lines = [{"question": "Add 1 2", "answer": "3"}, {"question": "Add 1 2", "answer": None}, {"question": "", "answer": "3"}]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert call("solo", "--preset", "toy", "--model", TOY / "senior", "--data", tmp_path / "d.jsonl", "--out", tmp_path / "o") == 0
    assert "d.jsonl: 2 of 3 rows are left out" in capsys.readouterr().out


def copy_of(run, folder, **changes):
    shutil.copytree(run, folder)
    config = {**json.loads((folder / "config.json").read_text()), **changes}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("changes, words", [
    ({"seed": 1, "kl_coef": 0.1}, "differ in --kl-coef (0.0, 0.1)"), ({"seed": 1, "lora_rank": 8}, "--lora-rank"), ({"seed": 1, "model": "/else/where/junior"}, "--model"),
    ({"seed": 1, "schedule": "step"}, "--schedule"), ({"out": "other"}, "one more seed of tandem")])
def test_runs_are_seeds_of_one_arm_only_if_nothing_else_differs(runs, tmp_path, capsys, changes, words):
    other = copy_of(runs / "t", tmp_path / "other", **changes)
    assert call("report", runs / "t", other, "--out", tmp_path / "r") == 2
    complaint = capsys.readouterr().err
    assert complaint.count("\n") == 1 and words in complaint and f"A={runs}/t B={other}" in complaint
    assert call("report", f"A={runs}/t", f"B={other}", "--out", tmp_path / "r") == 0 and "A: 1 seed, B: 1 seed" in capsys.readouterr().out


def test_another_seed_device_or_place_is_one_more_seed(runs, tmp_path, capsys):
    model = json.loads((runs / "t" / "config.json").read_text())["model"]
    other = copy_of(runs / "t", tmp_path / "other", seed=1, out="elsewhere", device="auto", show=3, model=model.replace(str(ROOT), "/another/clone"))
    assert call("report", runs / "t", other, "--out", tmp_path / "r") == 0 and "tandem: 2 seeds" in capsys.readouterr().out


def test_measurements_of_other_weights_are_not_the_runs(runs, tmp_path, capsys):
    run = copy_of(runs / "t", tmp_path / "run")
    assert call("report", run, "--out", tmp_path / "r") == 0
    shutil.copy(runs / "t-vanilla" / "final" / "model.safetensors", run / "final" / "model.safetensors")  # as if it had gone on
    capsys.readouterr()
    assert call("report", run, "--out", tmp_path / "r") == 2 and "trained further since?" in capsys.readouterr().err
    assert call("solo", "--preset", "toy", "--model", run, "--problems", 6, "--batch-problems", 4) == 2
    assert "other weights of the senior (trained further since?)" in capsys.readouterr().err


def test_the_hint_of_the_report_works(runs, tmp_path, capsys):
    run = copy_of(runs / "t", tmp_path / "run")
    (run / "eval" / "drift.json").unlink()
    other = copy_of(runs / "t", tmp_path / "other", seed=1)
    assert call("report", run, other) == 2
    hint = capsys.readouterr().err.partition("make it with: python eval.py ")[2].split()
    assert hint == ["drift", "--model", str(run), "--preset", "toy"]
    assert call(*hint, "--problems", 6, "--batch-problems", 4) == 0 and call("report", run, other, "--out", tmp_path / "r") == 0


def test_many_answers_that_were_cut_are_remarked_upon(runs, tmp_path, capsys):
    argv = ["solo", "--preset", "toy", "--model", runs / "t", "--problems", 2]
    assert call(*argv, "--max-new-tokens", 3, "--out", tmp_path / "short") == 0 and "100% of these answers were cut at --max-new-tokens 3" in capsys.readouterr().out
    assert call(*argv, "--out", tmp_path / "whole") == 0 and "were cut" not in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"{bad", b"[]", b"{}", b"\xff\xfe"])
@pytest.mark.parametrize("file", ["eval/solo.json", "config.json"])
def test_broken_files_are_one_line(runs, tmp_path, capsys, file, content):
    shutil.copytree(runs / "t", tmp_path / "r")
    (tmp_path / "r" / file).write_bytes(content)
    for argv in (["solo", "--preset", "toy", "--model", tmp_path / "r", "--problems", 6, "--batch-problems", 4], ["report", tmp_path / "r", "--out", tmp_path / "report"]):
        assert call(*argv) == 2
        assert (complaint := capsys.readouterr().err).count("\n") == 1 and file.rpartition("/")[2] in complaint


def other_data(runs, folder):
    assert call("solo", "--preset", "toy", "--model", runs / "t-vanilla", "--data", TOY / "train.jsonl", "--problems", 6, "--batch-problems", 4, "--out", folder) == 0


@pytest.mark.parametrize("argv, words", [(["--help"], ("report RUN", "legibility")), (["-h"], ("report RUN",)), (["report", "--help"], ("report RUN",)), (["solo", "--help"], ("--top-p", "--n"))])
def test_help_is_no_mistake(argv, words, capsys):
    try:
        assert not measures.main(argv)
    except SystemExit as end:  # (argparse's)
        assert end.code == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in words)


@pytest.mark.parametrize("argv, message", [
    ([], "the first word says what to do"), (["measure"], "the first word"), (["solo"], "--model is needed"),
    (["solo", "--model", "{runs}/t", "--n", "1", "--k", "8"], "pass@8 needs at least 8 answers"), (["solo", "--model", "{runs}/t", "--k", "x"], "--k must be numbers"),
    (["solo", "--model", "{runs}/t", "--n", "0"], "--n must be"), (["solo", "--model", "{tmp}/empty-run"], "a run without a model"), (["solo", "--model", "{tmp}"], "neither a run nor a model"),
    (["solo", "--model", "./nowhere"], "no such model folder"), (["drift", "--model", "{toy}/senior", "--data", "{toy}/eval.jsonl", "--out", "{tmp}/x"], "--junior is needed"),
    (["solo", "--model", "{runs}/t", "--data", "no.jsonl"], "question column"), (["solo", "--model", "{runs}/t", "--data", "aime99"], "no data 'aime99'"),
    (["solo", "--model", "{runs}/t", "--data", "{toy}/eval.jsonl,{toy}/eval.jsonl"], "eval.jsonl twice"),
    (["solo", "--model", "{runs}/t", "--data", "aime24"], "aime24 could not be fetched from the hub: Couldn't reach 'HuggingFaceH4/aime_2024' on the Hub"),  # (no hub here)
    (["report"], "report RUN"), (["report", "{tmp}/nowhere"], "no folder"), (["report", "{tmp}/empty-run"], "no measurements"),
    (["report", "{runs}/t", "{tmp}/other"], "other problems"), (["report", "{runs}/t/eval", "--out"], "report RUN"), (["report", "a={runs}/t,{tmp}/lacking"], "is missing in"),
], ids=lambda x: " ".join(x) if isinstance(x, list) else "")
def test_mistakes(argv, message, runs, tmp_path, capsys):
    (tmp_path / "empty-run").mkdir()
    (tmp_path / "empty-run" / "config.json").write_text(json.dumps({"prob_senior": 0.5, "kl_coef": 0.0, "junior": "self", "model": "x", "prompt_suffix": ""}))
    (tmp_path / "empty-run" / "metrics.jsonl").write_text("")
    if "other" in str(argv):
        other_data(runs, tmp_path / "other")
    if "lacking" in str(argv):
        (tmp_path / "lacking").mkdir()
        (tmp_path / "lacking" / "solo.json").write_bytes((runs / "t" / "eval" / "solo.json").read_bytes())
    capsys.readouterr()
    assert call(*[a.replace("{runs}", str(runs)).replace("{tmp}", str(tmp_path)).replace("{toy}", str(TOY)) for a in argv]) == 2
    complaint = capsys.readouterr().err
    assert complaint.count("\n") == 1 and complaint.split(": ", 1)[1].startswith("error") and message in complaint


def test_pass_at_k_is_the_share_of_subsets_that_hold_a_right_one():
    from itertools import combinations
    for n in range(1, 7):
        for c in range(n + 1):
            right = [1] * c + [0] * (n - c)
            for k in range(1, n + 1):
                subsets = list(combinations(right, k))
                assert measures.pass_at_k(n, c, k) == pytest.approx(sum(any(s) for s in subsets) / len(subsets))
    for n, c, k in ((1, 1, 8), (4, 5, 2), (4, -1, 2), (4, 1, 0)):
        with pytest.raises(ValueError, match="pass@"):
            measures.pass_at_k(n, c, k)
