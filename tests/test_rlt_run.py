"""The commands of rlt.py on the built-in models: what they leave behind, resume, data in every form, and users' mistakes."""
import json
import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import transformers

import rlt
import tandem
from conftest import ROOT, TOY
from rlt import Format, load_lessons
from test_run import rows, same_run, weights

SHORT = {
    "train": ["--preset", "toy", "--prompts-per-step", "4", "--prompts-per-update", "4", "--group-size", "4", "--steps", "5", "--save-every", "2", "--eval-every", "5",
              "--eval-problems", "4", "--sync-every", "2", "--show", "0", "--lr", "1e-3"],
    "explain": ["--preset", "toy", "--problems", "10", "--batch-problems", "4", "--samples", "2"],
    "distill": ["--preset", "toy", "--data", str(TOY / "rlt_gold.jsonl"), "--epochs", "0.5", "--batch-size", "32", "--save-every", "2", "--eval-problems", "8", "--eval-samples", "2"],
    "warmup": ["--preset", "toy", "--epochs", "0.1", "--batch-size", "24", "--save-every", "2"],
}


def call(*argv):
    """The script's exit status, in this process."""
    with pytest.raises(SystemExit) as stopped:
        tandem.run_main(lambda: rlt.main(list(map(str, argv))))
    return stopped.value.code or 0


def jsonl(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rlt") / "teacher"
    assert call("train", *SHORT["train"], "--out", folder) == 0
    return folder


@pytest.fixture(scope="module")
def traces(tmp_path_factory, taught):
    folder = tmp_path_factory.mktemp("rlt") / "traces"
    assert call("explain", *SHORT["explain"], "--model", taught / "final", "--out", folder) == 0
    return folder / "traces.jsonl"


def test_train_logs_the_parts_of_the_reward_and_moves_the_teacher(taught):
    log = rows(taught)
    assert [m["step"] for m in log] == list(range(6)) and "held_out/reward" in log[0] and "held_out/style/steps" in log[5]
    assert all({"reward", "r_ss", "r_kl", "length", "closed", "floor", "style/steps", "style/leak", "style/padded", "kl", "ratio", "no_signal", "grad_norm"} <= m.keys() for m in log[1:])
    assert all(m["ratio"] == 1 for m in log[1:]) and log[1]["kl"] == 0 < log[2]["kl"]  # one update a batch; the reference is the start at first
    start, end = weights(TOY / "teacher"), weights(taught / "final")
    assert any(not torch.equal(start[k], end[k]) for k in start)
    for sample in rows(taught, "samples.jsonl"):
        assert sample["reward"] == pytest.approx(max(rlt.EMPTY_REWARD, sample["r_ss"] - 3 * sample["r_kl"] - (not sample["closed"])), abs=1e-4)


def test_the_reference_moves_nine_tenths_of_the_way(taught):
    """By hand: after step 2 it is .1 of the start and .9 of checkpoint 2; after step 4, .1 of that and .9 of checkpoint 4."""
    start, two, four = (weights(folder) for folder in (TOY / "teacher", taught / "checkpoint-2", taught / "checkpoint-4"))
    after_4 = weights(taught / "reference-4")
    for name in start:
        after_2 = 0.1 * start[name] + 0.9 * two[name]
        assert torch.allclose(after_4[name], 0.1 * after_2 + 0.9 * four[name], atol=1e-6)
    assert any(not torch.allclose(after_4[n], four[n], atol=1e-6) for n in start)


@pytest.mark.parametrize("stop", [1, 2, 3, 4])  # before the reference first moves, with a move due, after one, with the second due
def test_a_resumed_teacher_is_the_uninterrupted_one(taught, tmp_path, stop):
    """Also where the reference has moved: at every place of the step in the reference's round."""
    assert call("train", *SHORT["train"], "--save-every", 1, "--steps", stop, "--out", tmp_path / "r", "--eval-every", 0) == 0
    config = json.loads((tmp_path / "r" / "config.json").read_text())
    (tmp_path / "r" / "config.json").write_text(json.dumps({**config, "eval_every": 5}))
    assert call("train", "--out", tmp_path / "r", "--resume", "--steps", 5) == 0
    log, whole = rows(tmp_path / "r"), rows(taught)
    assert log == whole[1:] and rows(tmp_path / "r", "samples.jsonl") == rows(taught, "samples.jsonl")
    ours, theirs = weights(tmp_path / "r" / "final"), weights(taught / "final")
    assert all(torch.equal(ours[k], theirs[k]) for k in ours)


def test_a_reference_that_cannot_be_saved_ends_the_run_where_it_can_be_resumed(taught, tmp_path, capsys, monkeypatch):
    save = tandem.Run.save
    monkeypatch.setattr(tandem.Run, "save", lambda run, name, *rest: False if name == "reference-2" else save(run, name, *rest))
    assert call("train", *SHORT["train"], "--out", tmp_path / "r") == 1 and "reference-2 was not saved" in capsys.readouterr().err
    monkeypatch.undo()
    assert call("train", "--out", tmp_path / "r", "--resume") == 0
    same_run(taught, tmp_path / "r")


def test_a_missing_reference_is_named(taught, tmp_path, capsys):
    assert call("train", *SHORT["train"], "--steps", 4, "--out", tmp_path / "r") == 0
    tandem.shutil.rmtree(tmp_path / "r" / "reference-2")
    assert call("train", "--out", tmp_path / "r", "--resume", "--steps", 5) == 2
    assert "reference-2 is missing" in capsys.readouterr().err


def test_explain_writes_chats_parts_and_rewards(traces, taught, toy):
    lines = rows(traces.parent, "traces.jsonl")
    assert len(lines) == 20 and all({"messages", "question", "solution", "explanation", "length", "closed", "reward", "r_ss", "r_kl"} <= line.keys() for line in lines)
    fmt = Format(toy.tokenizer, teacher_system="", system_prompt="")
    teacher, student = (tandem.load_model(str(p), torch.device("cpu"), torch.float32) for p in (taught / "final", TOY / "student"))
    ids = [fmt.encode(line["explanation"]) for line in lines]
    again = rlt.rlt_reward(teacher, student, fmt, *[[line[k] for line in lines] for k in ("question", "solution")], ids, [line["closed"] for line in lines])
    same = [i for i, line in enumerate(lines) if len(ids[i]) == line["length"]]  # (another split of the same text has another reward)
    assert len(same) > 10 and [again.reward[i].item() for i in same] == pytest.approx([lines[i]["reward"] for i in same], abs=1e-3)
    for line in lines:
        assert line["messages"][-1]["content"] == f"<|begin_of_thought|>\n\n{line['explanation']}\n\n<|end_of_thought|>\n\n<|begin_of_solution|>\n\n{line['solution']}\n\n<|end_of_solution|>"
        assert "<|end_of" not in line["explanation"]


def test_explain_keeps_the_best_of_each_question(traces, taught, tmp_path):
    assert call("explain", *SHORT["explain"], "--model", taught / "final", "--keep", "best", "--out", tmp_path / "b") == 0
    every, best = rows(traces.parent, "traces.jsonl"), rows(tmp_path / "b", "traces.jsonl")
    assert best == [max(every[i:i + 2], key=lambda line: line["reward"]) for i in range(0, 20, 2)]


@pytest.mark.parametrize("lines", [0, 3, 8, 9, 17])
def test_explain_goes_on_where_it_was_stopped(traces, taught, tmp_path, lines):
    """Also in the middle of a batch, and of a line."""
    text = traces.read_text().splitlines(True)
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "traces.jsonl").write_text("".join(text[:lines]) + text[lines][:40])
    config = {**json.loads((traces.parent / "config.json").read_text()), "out": str(tmp_path / "r")}
    (tmp_path / "r" / "config.json").write_text(json.dumps(config))
    assert call("explain", "--out", tmp_path / "r", "--resume") == 0
    assert (tmp_path / "r" / "traces.jsonl").read_text() == traces.read_text()


def test_distill_and_warmup_resume_to_the_same_weights(tmp_path):
    for name in ("distill", "warmup"):
        assert call(name, *SHORT[name], "--out", tmp_path / name) == 0
        out = tmp_path / f"{name}-r"
        argv = [sys.executable, ROOT / "rlt.py", name, *SHORT[name], "--out", out]
        child = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        while not (out / "checkpoint-2" / "trainer_state.pt").exists() and child.poll() is None:
            pass
        child.kill()
        child.wait()
        assert call(name, "--out", out, "--resume") == 0
        same_run(tmp_path / name, out)
        assert call(name, "--out", out, "--resume") == 0  # finished: nothing happens
        same_run(tmp_path / name, out)


def test_a_student_is_trained_on_the_prompts_it_is_measured_with(tmp_path, capsys, monkeypatch):
    """Whatever the corpus: a question that asks for a box is taken as it is, any other gets the suffix, in training and evaluation alike."""
    for name in ("lessons", "problems"):
        lines = [{"question": q, "solution": "\\boxed{2}", "answer": "2"} for q in ("1+a1=?", "1+a1=? Put it in \\boxed{}.")] + [{"question": "1+a1=?", "answer": None}]
        jsonl(tmp_path / f"{name}.jsonl", *lines)
    seen = {}

    def finetune(run, config, tokenizer, examples, evaluate, best):
        seen.update(trained=[prompt for prompt, _ in examples], tokenizer=tokenizer)
        return evaluate(None, 0)
    monkeypatch.setattr(rlt, "finetune", finetune)
    monkeypatch.setattr(rlt, "Tandem", lambda *args: SimpleNamespace(evaluate=lambda step: seen.update(measured=[ids for _, ids in args[-1]])))
    call("distill", *SHORT["distill"], "--data", tmp_path / "lessons.jsonl", "--eval-data", tmp_path / "problems.jsonl", "--prompt-suffix", " Box it.", "--out", tmp_path / "r")
    assert seen["trained"] == seen["measured"] == [
        tandem.encode_prompt(seen["tokenizer"], text) for text in ("1+a1=? Box it.", "1+a1=? Put it in \\boxed{}.")]
    assert "problems.jsonl: 1 of 3 rows are left out" in capsys.readouterr().out


def test_a_distilled_student_measures_itself_and_starts_cold_rl(tmp_path, capsys):
    assert call("distill", *SHORT["distill"], "--epochs", 8, "--eval-temperature", 0, "--out", tmp_path / "s") == 0
    log = rows(tmp_path / "s")
    assert log[-1]["solo/pass@1"] > log[0]["solo/pass@1"] and log[0]["step"] == 0
    argv = ["--prob-senior", 1, "--model", tmp_path / "s" / "final", "--data", TOY / "rlt_train.jsonl", "--eval-data", TOY / "rlt_eval.jsonl", "--prompt-suffix", "",
            "--steps", 1, "--prompts-per-step", 2, "--prompts-per-update", 2, "--group-size", 4, "--max-new-tokens", 64, "--eval-problems", 8, "--eval-samples", 2,
            "--eval-temperature", 0, "--eval-top-p", 1, "--eval-top-k", 0, "--device", "cpu", "--out", tmp_path / "cold"]
    with pytest.raises(SystemExit) as stopped:
        tandem.run_main(lambda: tandem.main(list(map(str, argv))))
    assert not stopped.value.code
    assert rows(tmp_path / "cold")[0]["solo/pass@1"] == log[-1]["solo/pass@1"]  # the same prompts and problems, greedy


def test_sft_update_is_the_mean_over_all_response_tokens_however_it_is_split(toy):
    fmt = Format(toy.tokenizer, teacher_system="", system_prompt="")
    batch = [(fmt.student_prompt(q), fmt.encode(r)) for q, r in (("1+a1=?", "because the answer is 2"), ("10+a3+b2=?", "no"), ("7", "10+a3=13+b2"))]
    model = transformers.AutoModelForCausalLM.from_pretrained(TOY / "base")
    gradients = []
    for budget in (10**6, 1):
        config = type("C", (), dict(micro_tokens=budget, max_grad_norm=math.inf))
        kept = {}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer.register_step_pre_hook(lambda *_: kept.update({n: p.grad.clone() for n, p in model.named_parameters()}))
        metrics = rlt.sft_update(model, optimizer, batch, config, 0.0, None, torch.float32)
        gradients.append(kept)
    losses = [torch.nn.functional.cross_entropy(model(torch.tensor([p + r])).logits[0, len(p) - 1:-1], torch.tensor(r), reduction="sum") for p, r in batch]
    mean = sum(losses) / sum(len(r) for _, r in batch)
    assert metrics["loss"] == pytest.approx(mean.item(), abs=1e-5) and metrics["tokens"] == sum(len(r) for _, r in batch)
    mean.backward()
    for name, parameter in model.named_parameters():
        for kept in gradients:
            assert torch.allclose(kept[name], parameter.grad, atol=1e-5), name


def test_teacher_stops_at_its_closing_tag(toy):
    """As soon as the tag is whole, also where it begins inside another token's neighbourhood; not at half a tag."""
    fmt = Format(toy.tokenizer, teacher_system="", system_prompt="")
    texts = ["Take a1\n\n<|end_of_explanation|>", "Take <|end_of_explanation|", "<|end_of_explanation|>", "a |> <|end_of_thought|>", "x<|end_of_explanation|>"]
    ids, lengths = rlt.as_tensors([fmt.encode(text) for text in texts])
    assert fmt.closes(ids, lengths).tolist() == [True, False, True, False, True]
    teacher = tandem.load_model(str(TOY / "teacher"), torch.device("cpu"), torch.float32)
    prompts = [fmt.teacher_prompt(f"{n}+a1+b2+c3+d4=?", f"\\boxed{{{n + 10}}}") for n in range(20, 40)]
    settings = dict(max_new_tokens=40, temperature=0.7, vocab_size=len(toy.tokenizer), stops=tandem.stop_ids(teacher), seed=3)
    a, b = tandem.rollout(teacher, None, prompts, **settings), tandem.rollout(teacher, None, prompts, also_stop=fmt.closes, **settings)
    for row in range(20):
        n, text = int(b.lengths[row]), fmt.tokenizer.decode(a.ids[row, :a.lengths[row]])
        assert b.ids[row, :n].tolist() == a.ids[row, :n].tolist()  # the same text, up to the tag
        before, tag, _ = text.partition("<|end_of_explanation|>")
        assert fmt.tokenizer.decode(b.ids[row, :n]) == before + tag if tag else n == a.lengths[row]


# ------------------------------------- data -------------------------------------
def test_every_form_of_data_gives_the_same_lessons(tmp_path, toy):
    fmt = Format(toy.tokenizer)
    begin = "<|begin_of_thought|>\n\nFirst, two.\n\n<|end_of_thought|>\n\n<|begin_of_solution|>\n\nIt is \\boxed{2}\n\n<|end_of_solution|>"
    forms = [
        {"question": "Q?", "solution": "It is \\boxed{2}", "reasoning": "First, two."},
        {"Problem": "Q?", "Solution": "It is \\boxed{2}", "reasoning_trace": "<|begin_of_thought|> First, two. <|end_of_thought|>"},
        {"prompt": "Q?", "answer": "It is \\boxed{2}", "Explanation": "<think>\nFirst, two.\n</think>"},
        {"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "Q?"}, {"role": "assistant", "content": begin}]},
        {"system": "S", "conversations": [{"from": "user", "value": "Q?"}, {"from": "assistant", "value": begin}]},
        {"messages": [{"role": "user", "content": "Q?"}, {"role": "assistant", "content": "<think>First, two.</think>It is \\boxed{2}"}]},
        {"question": "Q?", "solution": "It is \\boxed{2}", "trace": "<think>First, two.</think>\nThe answer is 2"},  # a whole response as the trace
        {"question": "Q?", "solution": "It is #### 2", "trace": "First, two."},  # GSM8K's form
        {"messages": [{"role": role, "content": text} for role, text in (("user", "What?"), ("assistant", "That."), ("user", "Q?"), ("assistant", begin))]},
    ]
    for i, row in enumerate(forms):
        (lesson,), skipped = load_lessons(str(jsonl(tmp_path / f"{i}.jsonl", row)), fmt)
        assert (lesson.question, lesson.solution, lesson.explanation, lesson.answer, skipped) == ("Q?", "It is \\boxed{2}", "First, two.", "2", 0), row


def test_rows_without_a_part_are_skipped_and_counted(tmp_path, toy):
    path = jsonl(tmp_path / "d.jsonl", {"question": "Q?", "solution": "1", "reasoning": "r"}, {"question": "", "solution": "1", "reasoning": "r"},
                 {"question": "Q?", "solution": None, "reasoning": "r"}, {"question": "Q?", "solution": "1", "reasoning": " "},
                 {"question": "Q?", "solution": "1", "reasoning": "a teacher's <|end_of_thought|> stray"})
    lessons, skipped = load_lessons(str(path), Format(toy.tokenizer))
    assert len(lessons) == 1 and skipped == 4
    path = jsonl(tmp_path / "c.jsonl", {"messages": BEGIN}, {"messages": None}, {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "cut <|begin_of_thought|>"}]})
    lessons, skipped = load_lessons(str(path), Format(toy.tokenizer))
    assert len(lessons) == 1 and skipped == 2


def test_numbers_are_written_as_numbers(tmp_path, toy):
    for value, want in ((145.0, "145"), (2.5, "2.5"), (7, "7"), ("x", "x")):
        assert load_lessons(str(jsonl(tmp_path / f"{want}.jsonl", {"question": "Q?", "answer": value})), Format(toy.tokenizer))[0][0].solution == want


def test_a_file_may_be_called_countdown(tmp_path, toy):
    path = jsonl(tmp_path / "countdown_traces.jsonl", {"question": "Q?", "solution": "1", "explanation": "r", "reward": -0.5}, {"question": "Q?", "solution": "1", "explanation": "r", "reward": None})
    lessons, _ = load_lessons(str(path), Format(toy.tokenizer))
    assert [(x.explanation, x.reward) for x in lessons] == [("r", -0.5), ("r", -math.inf)]  # without a reward: the last in rank


def test_countdown_has_solutions_that_its_verifier_accepts(toy):
    lessons, skipped = load_lessons("countdown-test", Format(toy.tokenizer))
    assert len(lessons) == 1000 and not skipped and all(tandem.verify(x.solution, p.answer, p.numbers) == 1 for x, p in zip(lessons, tandem.load_problems("countdown-test")[0]))


def test_explains_another_task(tmp_path):
    assert call("explain", *SHORT["explain"], "--data", "countdown-test", "--problems", 3, "--max-new-tokens", 8, "--out", tmp_path / "c") == 0
    assert len(rows(tmp_path / "c", "traces.jsonl")) == 6
    assert call("distill", *SHORT["distill"], "--data", tmp_path / "c" / "traces.jsonl", "--eval-data", "countdown-test", "--epochs", 1, "--batch-size", 4, "--max-new-tokens", 8, "--out", tmp_path / "s") == 0


def test_answers_alone_and_the_best_traces(traces, tmp_path, toy, capsys):
    assert call("distill", *SHORT["distill"], "--data", TOY / "rlt_train.jsonl", "--epochs", 0.1, "--eval-every", 0, "--out", tmp_path / "a") == 0
    assert "512 solutions without explanations" in capsys.readouterr().out
    fmt = Format(toy.tokenizer)
    assert toy.tokenizer.decode(fmt.response("", "\\boxed{2}")) == "<|begin_of_solution|>\n\n\\boxed{2}\n\n<|end_of_solution|><|im_end|>"
    assert toy.tokenizer.decode(fmt.response("Why.", "2")) == "<|begin_of_thought|>\n\nWhy.\n\n<|end_of_thought|>\n\n<|begin_of_solution|>\n\n2\n\n<|end_of_solution|><|im_end|>"
    caught = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rlt, "finetune", lambda run, config, tokenizer, examples, evaluate, best: caught.update(examples=examples, best=best) or [])
        assert call("distill", *SHORT["distill"], "--data", traces, "--best", 4, "--out", tmp_path / "b") == 0
    best = sorted(rows(traces.parent, "traces.jsonl"), key=lambda line: -line["reward"])[:4]
    fmt = Format(toy.tokenizer, teacher_system="", system_prompt="")
    assert caught["best"] == 4 and [r for _, r in caught["examples"]][:4] == [fmt.response(line["explanation"], line["solution"]) for line in best]


def test_marked_tokens_are_the_costliest(toy):
    tok = toy.tokenizer
    ids = tok.encode("73+a3=76")
    costs = [0.0, 0.01, 0.3, 0.0, 0.0, 2.5, 0.04]
    assert len(ids) == 7 and rlt.marked(tok, ids, costs) == "73«+a 0.30»3=«7 2.50»6" and rlt.marked(tok, [], []) == ""
    assert rlt.marked(tok, tok.encode("a\x1b[31mb"), [1.0] * 9, worst=0) == "a\\x1b[31mb"  # a terminal's escape codes are shown, not obeyed


def test_show_prints_explanation_and_solution_with_marks(tmp_path, capsys):
    assert call("explain", *SHORT["explain"], "--problems", 2, "--show", 2, "--out", tmp_path / "e") == 0
    printed = capsys.readouterr().out
    assert printed.count("marked where the solution shows through") == 2 and "«" in printed and ": r_SS" in printed


def test_resume_refuses_data_that_changed_and_lines_of_two_processes(traces, taught, tmp_path, capsys):
    data = tmp_path / "d.jsonl"
    lines = (TOY / "rlt_train.jsonl").read_text().splitlines(True)
    data.write_text("".join(lines[:4]))
    argv = ["explain", "--preset", "toy", "--data", data, "--batch-problems", 2, "--out", tmp_path / "r"]
    assert call(*argv) == 0
    kept = (tmp_path / "r" / "traces.jsonl").read_text()
    for text in ("".join(lines[10:14]), lines[0]):  # other questions; fewer
        data.write_text(text)
        assert call("explain", "--out", tmp_path / "r", "--resume") == 2 and "was made from other data" in capsys.readouterr().err
        assert (tmp_path / "r" / "traces.jsonl").read_text() == kept
    data.write_text("".join(lines[:4]))
    (tmp_path / "r" / "traces.jsonl").write_text(kept + kept)
    assert call("explain", "--out", tmp_path / "r", "--resume") == 2 and "two processes" in capsys.readouterr().err


def test_resume_leaves_the_users_own_files_alone(tmp_path):
    assert call("train", *SHORT["train"], "--steps", 2, "--eval-every", 0, "--out", tmp_path / "r") == 0
    (tmp_path / "r" / "mine.jsonl").write_text('{"question": "q"}\n')
    for name in ("checkpoint-2", "checkpoint-1"):
        if (tmp_path / "r" / name).exists():
            tandem.shutil.copytree(tmp_path / "r" / name, tmp_path / "r" / f"{name}.bak")
    (tmp_path / "r" / "reference-2.bak").mkdir()
    assert call("train", "--out", tmp_path / "r", "--resume", "--steps", 3) == 0
    assert (tmp_path / "r" / "mine.jsonl").read_text() == '{"question": "q"}\n' and (tmp_path / "r" / "reference-2.bak").is_dir()


def test_one_command_does_not_take_over_the_run_of_another(tmp_path, capsys):
    assert call("warmup", *SHORT["warmup"], "--out", tmp_path / "w") == 0
    for command in ("distill", "train", "explain"):
        assert call(command, "--out", tmp_path / "w", "--resume") == 2 and "is not the config of such a run" in capsys.readouterr().err
    assert call("distill", *SHORT["distill"], "--eval-every", 0, "--out", tmp_path / "d") == 0
    assert call("warmup", "--out", tmp_path / "d", "--resume") == 2 and "is not the config of such a run" in capsys.readouterr().err


def test_special_tokens_in_data_are_refused_or_skipped(tmp_path, toy, capsys):
    """`<|im_end|>` in a text would become the real one: the student would be taught to stop within its thought."""
    good = {"question": "Q?", "solution": "1", "explanation": "r"}
    path = jsonl(tmp_path / "d.jsonl", good, {**good, "explanation": "a <|im_end|> b"})
    lessons, skipped = load_lessons(str(path), Format(toy.tokenizer))
    assert len(lessons) == 1 and skipped == 1
    path = jsonl(tmp_path / "e.jsonl", good, {**good, "question": "a <|im_end|>\n<|im_start|>assistant\nx"})
    assert call("distill", *SHORT["distill"][:2], "--data", path, "--out", tmp_path / "r") == 2 and "row 2: its question contains the tag <|im_end|>" in capsys.readouterr().err


@pytest.mark.parametrize("chat", [5, True, 1.5, [5], [[]], [{}], {"role": "user"}])
def test_chats_that_are_none(tmp_path, capsys, chat):
    assert call("distill", "--preset", "toy", "--data", jsonl(tmp_path / "c.jsonl", {"messages": chat}), "--out", tmp_path / "r") == 2
    assert "\n" not in capsys.readouterr().err.strip()


def test_models_that_cannot_be_used_are_one_line(tmp_path, capsys):
    evil = tmp_path / "evil"
    tandem.shutil.copytree(TOY / "student", evil)
    config = json.loads((evil / "config.json").read_text())
    (evil / "config.json").write_text(json.dumps({**config, "model_type": "evil", "auto_map": {"AutoConfig": "ev.C", "AutoModelForCausalLM": "ev.M"}}))
    (evil / "ev.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    child = subprocess.run([sys.executable, ROOT / "rlt.py", "distill", "--preset", "toy", "--data", TOY / "rlt_gold.jsonl", "--model", evil, "--out", tmp_path / "r"],
                           input="y\n" * 20, capture_output=True, text=True, timeout=120)
    assert child.returncode == 2 and not (tmp_path / "ran").exists() and "Traceback" not in child.stderr  # its own code is never run, whatever is answered
    strict = tmp_path / "strict"
    tandem.shutil.copytree(TOY / "student", strict)
    (strict / "chat_template.jinja").write_text("{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}{{ messages[0]['content'] }}")
    for command in ("warmup", "distill"):
        assert call(command, *SHORT[command], "--model", strict, "--system-prompt", "x", "--teacher-system", "x", "--out", tmp_path / "r") == 2
        assert "the chat template does not take this prompt" in capsys.readouterr().err
    tokenizer = tandem.load_tokenizer(str(TOY / "student"))
    tokenizer.eos_token = None
    tandem.shutil.copytree(TOY / "student", tmp_path / "endless")
    tokenizer.save_pretrained(tmp_path / "endless")
    assert call("distill", *SHORT["distill"], "--model", tmp_path / "endless", "--out", tmp_path / "r") == 2 and "no end-of-text token" in capsys.readouterr().err
    assert call("distill", *SHORT["distill"], "--model", TOY, "--out", tmp_path / "r") == 2 and "no model there" in capsys.readouterr().err


@pytest.mark.parametrize("spoilt", ["grad_norm", "loss"])
def test_what_is_not_finite_ends_the_run_before_it_is_kept(spoilt, tmp_path, capsys, monkeypatch):
    update = tandem.grpo_update
    spoil = lambda model, *rest: (lambda metrics: {**metrics, spoilt: math.nan} if (tmp_path / "r" / "checkpoint-1").exists() else metrics)(update(model, *rest))  # noqa: E731
    monkeypatch.setattr(tandem, "grpo_update", spoil)  # the second step's
    assert call("train", *SHORT["train"], "--steps", 3, "--save-every", 1, "--eval-every", 0, "--out", tmp_path / "r") == 2
    assert "step 2: the loss or its gradient is not finite" in capsys.readouterr().err
    assert {p.name for p in (tmp_path / "r").glob("*")} == {"config.json", "metrics.jsonl", "samples.jsonl", "checkpoint-1"} and rows(tmp_path / "r")[-1]["step"] == 1


# ------------------------------------- mistakes -------------------------------------
GOOD = {"question": "1+a1=?", "solution": "\\boxed{2}", "reasoning": "1+a1=2"}
BEGIN = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "<|begin_of_thought|>a<|end_of_thought|>b"}]
THINK = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "<think>a</think>b"}]


@pytest.mark.parametrize("command, rows_of, says", [
    ("explain", [{"question": "1+a1=?"}], "a solution column"),
    ("train", [{"solution": "1+a1=?"}], "needs a question column"),
    ("explain", [{"question": "1+a1=?", "solution": ""}], "none of its 1 rows"),
    ("warmup", [{"question": "1+a1=?", "solution": "2"}], "needs reasoning traces"),
    ("explain", [{**GOOD, "solution": "a <|end_of_explanation|> b"}], "row 1: its solution contains the tag <|end_of_explanation|>"),
    ("distill", [GOOD, {**GOOD, "question": "so <|begin_of_solution|> 2"}], "row 2: its question contains the tag <|begin_of_solution|>"),
    ("distill", [{"messages": BEGIN}, {"messages": THINK}], "mixed formats: row 1 has tags of the style begin, row 2 has tags of the style think"),
    ("distill", [{"messages": None}, {"messages": BEGIN}, {"messages": THINK}], "mixed formats"),
    ("distill", [{"messages": BEGIN}, GOOD], "mixed formats"),
    ("distill", [GOOD, {"messages": BEGIN}], "mixed formats"),
    ("distill", [{"messages": [{"role": "assistant", "content": "x"}]}], "none of its 1 rows has all parts"),
    ("distill", [{"messages": "a text"}], "none of its 1 rows has all parts"),
    ("explain", [{**GOOD, "solution": "7" * 600}], "--max-prompt-tokens 200 is too low for all 1"),
])
def test_bad_data_is_one_line(tmp_path, capsys, command, rows_of, says):
    path = jsonl(tmp_path / "bad.jsonl", *rows_of)
    argv = ["--max-prompt-tokens", 200] if command in ("explain", "train") else []
    assert call(command, "--preset", "toy", "--data", path, *argv, "--out", tmp_path / "r") == 2
    error = capsys.readouterr().err.strip()
    assert "\n" not in error and says in error and not (tmp_path / "r").exists()


def test_a_solution_longer_than_the_budget_is_skipped_and_counted(tmp_path, capsys):
    path = jsonl(tmp_path / "d.jsonl", GOOD, {**GOOD, "solution": "7" * 600})
    assert call("explain", *SHORT["explain"], "--data", path, "--max-prompt-tokens", 200, "--out", tmp_path / "r") == 0
    assert "1 questions that could be explained" in (printed := capsys.readouterr().out) and "1 with more than 200 tokens" in printed


@pytest.mark.parametrize("argv, says", [
    (["train", "--alpha", "much"], "--alpha"), (["train", "--lambda-kl", "nan"], "--lambda-kl must be a number"), (["explain", "--alpha", "-1"], "--alpha must be"),
    (["train", "--lambda-kl", "inf"], "--lambda-kl"), (["train", "--kl", "both"], "--kl must be one of sampled, exact"), (["explain", "--tags", "xml"], "--tags must be one of"),
    (["explain", "--keep", "some"], "--keep must be one of"), (["train", "--styles", "steps"], "--styles must be"), (["train", "--styles", "a=("], "--styles"),
    (["explain", "--tags", "begin:3"], "--tags must be one of"), (["train", "--kl", "exact:1"], "--kl must be one of"), (["train", "--alpha", "1e300"], "--alpha must be"),
    (["train", "--group-size", str(10**30)], "--group-size must be"), (["train", "--styles", "step"], "--styles must be"), (["train", "--system-prompt", "\udcff"], "--system-prompt"),
    (["distill", "--data", str(TOY / "rlt_gold.jsonl"), "--batch-size", "3000"], "do not fill --batch-size 3000"), (["teach"], "warmup, train, explain, distill"), (["train", "now"], "not 'now'"), (["train", "--sync-every", "0"], "--sync-every"),
    (["distill", "--epochs", "0"], "--epochs"), (["train", "--student", "nowhere/to/be"], "no such model folder"), (["train", "--group-size", "1"], "--group-size"),
    (["distill", "--data", "gone.jsonl"], "no data 'gone.jsonl'"), (["distill", "--data", str(TOY / "rlt_gold.jsonl"), "--best", "3"], "--best 3 needs rewards"), (["explain", "--resume"], "there is no run"), (["warmup", "--max-tokens", "3"], "--max-tokens 3 is too low"),
])
def test_mistakes_are_one_line(tmp_path, capsys, argv, says):
    preset = ["--preset", "toy", "--out", tmp_path / "r"] if argv[-1:] != ["now"] and argv != ["teach"] else []
    assert call(*argv[:1], *preset, *argv[1:]) == 2
    error = capsys.readouterr().err.strip()
    assert "\n" not in error and says in error and not (tmp_path / "r").exists()


def test_a_student_with_another_vocabulary_is_refused_before_a_model_is_loaded(tmp_path, capsys, monkeypatch):
    tokenizer = tandem.load_tokenizer(str(TOY / "student"))
    tandem.shutil.copytree(TOY / "student", tmp_path / "other")
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(tmp_path / "other")
    monkeypatch.setattr(rlt, "load_model", lambda *_: pytest.fail("a model was loaded"))
    for command in ("train", "explain"):
        assert call(command, "--preset", "toy", "--student", tmp_path / "other", "--out", tmp_path / command) == 2
        assert "another vocabulary" in capsys.readouterr().err


def test_the_demo_shows_teacher_and_student_and_does_nothing_twice(tmp_path, monkeypatch, capsys):
    """The whole pipeline with tiny settings; called again, also where a part is missing."""
    small = {"train": dict(steps=2, prompts_per_step=2, prompts_per_update=2, group_size=2, eval_problems=2, show=0), "explain": dict(problems=32),
             "distill": dict(epochs=1.0, eval_problems=4, eval_samples=2)}
    for command, settings in small.items():
        monkeypatch.setitem(rlt.PRESETS[command], "toy", {**rlt.PRESETS[command]["toy"], **settings})
    out = tmp_path / "demo"
    stamps = lambda: {p: p.stat().st_mtime_ns for p in out.rglob("*.safetensors")}  # noqa: E731
    assert rlt.demo(str(out)) is None
    table, made = capsys.readouterr().out.split("\n\n")[-2], stamps()
    assert [line.split()[0] for line in table.splitlines()] == ["teacher", "before", "after"] and table.splitlines()[0].split()[1:] == [
        "reward", "r_ss", "r_kl", "steps", "leak", "padded", "student"]
    log = rows(out / "student-after")
    assert f"{log[0]['solo/pass@1']:.3f} -> {log[-1]['solo/pass@1']:.3f}" in table.splitlines()[2]
    assert rlt.demo(str(out)) is None and capsys.readouterr().out.split("\n\n")[-2] == table and stamps() == made
    tandem.shutil.rmtree(out / "student-after")
    assert rlt.demo(str(out)) is None and capsys.readouterr().out.split("\n\n")[-2] == table  # made again, to the digit


@pytest.mark.parametrize("line, message", [("5", "no JSON object"), ("[]", "no JSON object"), ("{}", "is none of explain's"),
                                           ('{"step": "a", "question": "q", "solution": "s"}', "is none of explain's")])
def test_lines_that_are_none_of_explains(tmp_path, capsys, line, message):
    argv = ["explain", *SHORT["explain"], "--problems", 2, "--out", tmp_path / "r"]
    assert call(*argv) == 0
    with open(tmp_path / "r" / "traces.jsonl", "a") as file:
        file.write(line + "\n")
    assert call("explain", "--out", tmp_path / "r", "--resume") == 2 and message in capsys.readouterr().err


def test_no_argument_means_the_toy_and_the_defaults_are_the_papers(monkeypatch):
    ran = []
    monkeypatch.setattr(rlt, "demo", lambda: ran.append("demo"))
    assert rlt.main([]) is None and ran == ["demo"]
    paper = tandem.parse_config(rlt.TrainConfig, rlt.PRESETS["train"], ["--seed", "1"], "")
    assert (paper.steps, paper.prompts_per_step, paper.group_size, paper.temperature, paper.lr, paper.kl_coef, paper.sync_every, paper.sync_share, paper.max_grad_norm,
            paper.loss_mean, paper.alpha, paper.lambda_kl, paper.prompts_per_update) == (125, 16, 64, 0.7, 1e-6, 0.04, 32, 0.9, 1.0, "sequence", 0.01, 3.0, 16)
    sft = tandem.parse_config(rlt.WarmupConfig, rlt.PRESETS["warmup"], ["--seed", "1"], "")
    assert (sft.lr, sft.epochs, sft.batch_size, sft.weight_decay, sft.beta2, sft.warmup_share, sft.max_tokens) == (1e-5, 10, 16, 1e-4, 0.95, 0.05, 16384)
