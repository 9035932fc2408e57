"""Whole runs on the built-in model: what they leave behind, resume bit for bit, stops of every kind, and users' mistakes."""
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import transformers

import tandem
from conftest import ROOT, TOY, tiny_model

SHORT = ["--preset", "toy", "--no-handoff-eval", "--prompts-per-step", "4", "--prompts-per-update", "2", "--group-size", "4",
         "--max-new-tokens", "44", "--eval-problems", "4", "--eval-every", "2", "--save-every", "2", "--steps", "4", "--show", "0"]
CLOCK = ("rollout_s", "update_s", "tokens_per_s", "memory_gb")


def call(*argv):
    """The script's exit status, in this process."""
    with pytest.raises(SystemExit) as stopped:
        tandem.run_main(lambda: tandem.main(list(map(str, argv))))
    return stopped.value.code or 0


def rows(folder, name="metrics.jsonl"):
    return [{k: v for k, v in json.loads(line).items() if k not in CLOCK} for line in (folder / name).read_text().splitlines()]


def weights(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()


def same_run(a, b):
    assert rows(a) == rows(b) and rows(a, "samples.jsonl") == rows(b, "samples.jsonl")
    ours, theirs = weights(a / "final"), weights(b / "final")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "whole"
    assert call(*SHORT, "--out", folder) == 0
    return folder


def test_what_a_run_leaves_behind(finished, toy):
    assert {p.name for p in finished.iterdir()} == {"config.json", "metrics.jsonl", "samples.jsonl", "checkpoint-2", "checkpoint-4", "final"}
    metrics = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in metrics] == [0, 1, 2, 3, 4]
    logged = {"reward", "senior_share", "handovers", "length", "cut", "no_signal", "loss", "entropy", "ratio", "clipped", "grad_norm", "lr", "rollout_s", "update_s",
              "tokens_per_s", "memory_gb", "habit"}
    assert all(logged <= m.keys() for m in metrics[1:]) and [bool("solo/pass@1" in m and "solo/pass@4" in m) for m in metrics] == [True, False, True, False, True]
    assert [m["lr"] for m in metrics[1:]] == pytest.approx([6e-5, 1.2e-4, 1.8e-4, 2.4e-4])  # linear warm-up over 5 steps
    assert all(0.3 < m["senior_share"] < 0.7 for m in metrics[1:]) and metrics[2]["ratio"] != 1
    for sample in rows(finished, "samples.jsonl"):
        assert len(sample["ids"]) == len(sample["author"]) <= 44 and set(sample["author"]) <= set("sj") and sample["reward"] in (0, 1)
        assert toy.tokenizer.decode(sample["ids"], skip_special_tokens=True) == sample["text"]
    config = json.loads((finished / "config.json").read_text())
    assert config["group_size"] == 4 and config["resume"] is False
    start, end = weights(TOY / "senior"), weights(finished / "final")
    assert any(not torch.equal(start[k], end[k]) for k in start)


def test_final_loads_anywhere_with_equal_logits(finished):
    """Tied embeddings and both stop ids survive; the checkpoint of the last step is the final model."""
    a, b = (transformers.AutoModelForCausalLM.from_pretrained(finished / name) for name in ("final", "checkpoint-4"))
    ids = torch.arange(5, 25)[None]
    assert torch.equal(a(ids).logits, b(ids).logits) and a.config.tie_word_embeddings
    assert a.generation_config.eos_token_id == [2, 0] and transformers.AutoTokenizer.from_pretrained(finished / "final").chat_template
    assert {p.suffix for p in (finished / "final").iterdir()} <= {".json", ".jinja", ".safetensors"}


def test_a_resumed_run_is_the_uninterrupted_run(finished, tmp_path):
    assert call(*SHORT, "--steps", 2, "--out", tmp_path / "r") == 0
    assert call("--out", tmp_path / "r", "--resume", "--steps", 4) == 0
    # the short run ended at step 2 with a final/ of its own; evaluation and everything else are as if it had not
    same_run(finished, tmp_path / "r")
    assert call("--out", tmp_path / "r", "--resume", "--steps", 4) == 0  # finished: nothing happens
    same_run(finished, tmp_path / "r")


@pytest.mark.parametrize("steps", [4, 6])
def test_a_finished_run_without_its_checkpoints_is_left_alone(finished, tmp_path, steps, capsys):
    shutil.copytree(finished, tmp_path / "r")
    for checkpoint in (tmp_path / "r").glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    before = {p: p.read_bytes() for p in (tmp_path / "r").rglob("*") if p.is_file()}
    assert call("--out", tmp_path / "r", "--resume", "--steps", steps) == 0 and "is finished" in capsys.readouterr().out
    assert {p: p.read_bytes() for p in (tmp_path / "r").rglob("*") if p.is_file()} == before


def test_a_last_checkpoint_that_was_not_saved_does_not_cost_the_finished_run(tmp_path, monkeypatch):
    save = torch.save
    monkeypatch.setattr(torch, "save", lambda state, path: save(state, path) if "checkpoint-4" not in str(path) else 1 / 0)
    assert call(*SHORT, "--out", tmp_path / "r") == 0 and not (tmp_path / "r" / "checkpoint-4").exists()
    before = {p: p.read_bytes() for p in (tmp_path / "r").rglob("*") if p.is_file()}
    assert call("--out", tmp_path / "r", "--resume") == 0 and {p: p.read_bytes() for p in (tmp_path / "r").rglob("*") if p.is_file()} == before


def test_the_examples_in_docstrings_are_true():
    import doctest
    import rlt
    for module in (tandem, rlt):
        failed, tried = doctest.testmod(module)
        assert tried and not failed, module


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resume_after_kill_9(tmp_path, dtype):
    argv = [*SHORT, "--steps", "5", "--dtype", dtype]
    assert call(*argv, "--out", tmp_path / "whole") == 0
    out = tmp_path / "killed"
    child = subprocess.Popen([sys.executable, ROOT / "tandem.py", *argv, "--out", out], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while child.poll() is None and not (out / "metrics.jsonl").exists() or (len((out / "metrics.jsonl").read_text().splitlines()) < 4 and child.poll() is None):
        time.sleep(0.005)  # step 3 is logged: one step after a checkpoint
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert not (out / "final").exists()
    with open(out / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "reward": 0.')  # a half-written line
    shutil.copytree(out / "checkpoint-2", out / ".tmp-checkpoint-4")  # and a half-written checkpoint
    (out / ".tmp-checkpoint-4" / "model.safetensors").write_bytes(b"half")
    assert call("--out", out, "--resume") == 0
    same_run(tmp_path / "whole", out)
    assert not list(out.glob(".tmp*"))


@pytest.mark.parametrize("stderr", ["pipe", "/dev/full"])  # (a terminal that is gone, or a log on a full disk, must not cost the checkpoint)
def test_ctrl_c_finishes_the_step_and_leaves_a_checkpoint(tmp_path, stderr):
    out, argv = tmp_path / "stopped", [*SHORT, "--steps", "60", "--save-every", "50", "--eval-every", "0"]
    errors = subprocess.PIPE if stderr == "pipe" else open(stderr, "w") if Path(stderr).exists() else pytest.skip("no such file here")
    child = subprocess.Popen([sys.executable, ROOT / "tandem.py", *argv, "--out", out], stdout=subprocess.PIPE, stderr=errors, text=True)
    while not (out / "metrics.jsonl").exists() or not (out / "metrics.jsonl").read_text():
        time.sleep(0.01)
    child.send_signal(signal.SIGINT)
    printed, complaints = child.communicate(timeout=60)
    assert child.returncode == 130 and "Traceback" not in (complaints or "") and "--resume" in printed
    step = rows(out)[-1]["step"]
    assert (out / f"checkpoint-{step}" / "trainer_state.pt").is_file() and step < 60
    assert call("--out", out, "--resume", "--steps", step + 1) == 0 and [r["step"] for r in rows(out)] == list(range(1, step + 2))


def test_vanilla_control_and_closing_table(tmp_path, capsys):
    more = [*SHORT[2:], "--steps", "2", "--handoff-eval"]
    assert tandem.demo(str(tmp_path / "t"), more) is None
    printed = capsys.readouterr().out
    for words in ("senior at the start", "senior after vanilla GRPO", "senior after tandem", "junior", "word hand-off", "step hand-off", "habit", f"{tmp_path}/t-vanilla/"):
        assert words in printed
    vanilla = [json.loads(line) for line in (tmp_path / "t-vanilla" / "metrics.jsonl").read_text().splitlines()]
    assert all(m["senior_share"] == 1 and m["handovers"] == 0 for m in vanilla[1:])
    assert rows(tmp_path / "t-vanilla")[0] == rows(tmp_path / "t")[0]  # the same start, measured alike
    before = [(p, p.stat().st_mtime_ns) for p in sorted(tmp_path.rglob("*.safetensors"))]
    assert tandem.demo(str(tmp_path / "t"), more) is None and before == [(p, p.stat().st_mtime_ns) for p in sorted(tmp_path.rglob("*.safetensors"))]
    assert "senior after tandem" in capsys.readouterr().out  # again: nothing is trained, and the table is there


def test_only_the_last_two_checkpoints_keep_their_trainer_state(tmp_path):
    assert call(*SHORT, "--save-every", 1, "--eval-every", 0, "--out", tmp_path / "r") == 0
    assert sorted(p.parent.name for p in (tmp_path / "r").glob("*/trainer_state.pt")) == ["checkpoint-3", "checkpoint-4"]
    assert len(list((tmp_path / "r").glob("checkpoint-*/model.safetensors"))) == 4


@pytest.mark.parametrize("prob_senior", [0.5, 0.9])  # (of 0.9, the lost mask's 1 is not far away)
def test_the_alarm_when_the_authorship_mask_is_lost(tmp_path, capsys, monkeypatch, prob_senior):
    real = tandem.rollout

    def lost(*args, **settings):
        rolled = real(*args, **settings)
        rolled.senior_mask = tandem.real_tokens(rolled.ids, rolled.lengths)
        return rolled
    monkeypatch.setattr(tandem, "rollout", lost)
    assert call(*SHORT, "--steps", 1, "--eval-every", 0, "--prob-senior", prob_senior, "--out", tmp_path / "r") == 0
    assert "WARNING: the senior wrote 100% of the tokens" in capsys.readouterr().out


def test_samples_show_both_authors_and_obey_no_escape_codes(tmp_path, capsys, toy):
    assert call(*SHORT, "--steps", 1, "--eval-every", 1, "--show", 1, "--handoff-eval", "--out", tmp_path / "r") == 0
    printed = capsys.readouterr().out
    assert "«" in printed and "--- word | Add" in printed and "\x1b" not in printed
    shower = object.__new__(tandem.Tandem)
    shower.tokenizer = toy.tokenizer
    ids = toy.tokenizer.encode("a \x1b[31m b\x07\x9b")
    shown = shower.coloured({"ids": ids, "author": "s" * 2 + "j" * (len(ids) - 2), "prompt": "\x1b]0;title\x07", "reward": 1.0, "answer": "7"})
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown) and "\\x1b[31m" in shown


@pytest.mark.skipif(sys.platform == "win32", reason="needs RLIMIT_FSIZE")
def test_a_full_disk_costs_the_checkpoint_and_nothing_else(tmp_path):
    """A limit on the size of files stands in for the full disk: the weights no longer fit, the logs do."""
    out = tmp_path / "r"
    assert call(*SHORT, "--steps", 2, "--out", out) == 0
    code = ("import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000)); sys.argv[0] = 'tandem.py'; import tandem; "
            f"tandem.run_main(lambda: tandem.main({['--out', str(out), '--resume', '--steps', '4']!r}))")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith("tandem.py: error:") and "Traceback" not in done.stderr
    assert "checkpoint-4 was not saved" in done.stdout and rows(out)[-1]["step"] == 4
    assert not list(out.glob(".tmp*")) and not (out / "checkpoint-4").exists()
    assert call("--out", out, "--resume", "--steps", 4) == 0  # with room again
    assert call(*SHORT, "--out", tmp_path / "whole") == 0
    same_run(tmp_path / "whole", out)


# --- mistakes: one line, exit status 2, before any model is loaded --------------------------------------------------------------------

def other_vocabulary(folder):
    tokenizer = tandem.load_tokenizer(str(TOY / "senior"))
    tokenizer.add_tokens(["extra"])
    tiny_model(0, vocab_size=600).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


MISTAKES = [
    (["--data", "missing.jsonl"], "no data 'missing.jsonl' (no such file)"), (["--data", "{tmp}/table.csv"], "table.csv' (another kind of file)"),
    (["--data", "{tmp}/columns.jsonl"], "question column"),
    (["--data", "{tmp}/empty.jsonl"], "empty.jsonl' (an empty file)"), (["--data", "{tmp}"], "(no such file)"),
    (["--data", "{tmp}/unanswerable.jsonl"], "none of its 3 rows"),
    (["--data", "{tmp}/few.jsonl"], "too few problems"),
    (["--max-prompt-tokens", "3"], "too few problems are left: 0"),
    (["--group-size", "1"], "--group-size must be a number from 2"),
    (["--prompts-per-update", "3"], "--prompts-per-update 3 does not divide --prompts-per-step 4"),
    (["--preset", "huge"], "huge"),
    (["--no-such-flag"], "--no-such-flag"),
    (["--steps", "many"], "--steps"),
    (["--steps", "0"], "--steps"),
    (["--lr", "nan"], "--lr"),
    (["--lr", "-1"], "--lr"),
    (["--temperature", "0"], "--temperature"),
    (["--prob-senior", "0"], "--prob-senior"),
    (["--prob-senior", "1.5"], "--prob-senior"),
    (["--prob-senior", "1", "--lambda-jun", "0.1"], "--lambda-jun"),
    (["--schedule", "sentence"], "--schedule must be one of word, token, step"),
    (["--loss-mean", "batch"], "--loss-mean"),
    (["--device", "tpu"], "--device"),
    (["--dtype", "int8"], "--dtype"),
    (["--habit", "("], "--habit"), (["--lora-rank", "10000000"], "--lora-rank"),
    (["--junior", "{tmp}/other"], "another vocabulary than its partner's (481 entries against 480"),
    (["--junior", "{tmp}"], "no config.json"), (["--model", "{tmp}/mute"], "mute: no tokenizer there"), (["--junior", "{tmp}/mute"], "mute: no tokenizer there"),
    (["--model", "./no-such-model"], "no such model folder"),
    (["--model", "no-such-model"], "OWNER/NAME"),
    (["--model", "nobody/no-such-model-anywhere"], "could not be loaded from the hub (there is no such folder)"),
    (["--device", "cpu:"], "--device"), (["--device", "cpu:-1"], "--device"), (["--lr", "1e300"], "--lr"), (["--max-gap", "9" * 30], "--max-gap"), (["--max-new-tokens", "9" * 11], "--max-new"),
    (["--model", "{tmp}/badconfig"], "no model there"), (["--junior", "{tmp}/badconfig"], "no model there"),
    (["--out", "{tmp}/taken/"], "is there already"),
    (["--out", "{tmp}/taken"], "is there already"),
    (["--out", "{tmp}/few.jsonl"], "is there already"),
    (["--out", "{tmp}/nothing", "--resume"], "no run in"),
]


@pytest.fixture(scope="module")
def mistakes(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("mistakes")
    (tmp / "columns.jsonl").write_text('{"text": "a", "label": "b"}\n')
    (tmp / "empty.jsonl").write_text("")
    (tmp / "unanswerable.jsonl").write_text('{"question": "a", "answer": null}\n' * 3)
    (tmp / "few.jsonl").write_text('{"question": "a", "answer": "1"}\n' * 2)
    (tmp / "taken").mkdir()
    (tmp / "taken" / "config.json").write_text("{}")
    (tmp / "badconfig").mkdir()
    (tmp / "badconfig" / "config.json").write_text("[]")
    (tmp / "table.csv").write_text("question,answer\na,1\n")
    tiny_model(0).save_pretrained(tmp / "mute")
    other_vocabulary(tmp / "other")
    return tmp


@pytest.mark.parametrize("argv, message", MISTAKES, ids=lambda x: " ".join(x) if isinstance(x, list) else "")
def test_mistakes(argv, message, mistakes, tmp_path, capsys, monkeypatch):
    def never(*_, **__):
        raise AssertionError("a model was loaded")
    monkeypatch.setattr(tandem, "load_model", never)
    argv = [a.replace("{tmp}", str(mistakes)) for a in argv]
    assert call(*SHORT, "--out", tmp_path / "r", *argv) == 2
    complaint = capsys.readouterr().err
    assert complaint.count("\n") == 1 and "error: " in complaint and message in complaint and not (tmp_path / "r").exists()


@pytest.mark.parametrize("file, content, message", [
    ("config.json", b"{bad", "config.json"), ("config.json", b"[1]", "config.json"), ("config.json", b'{"lr": "abc"}', "config.json"), ("config.json", b'{"unknown": 1}', "config.json"),
    ("config.json", b"\xff\xfe", "config.json"), ("metrics.jsonl", b"{garbage\n", "metrics.jsonl"), ("metrics.jsonl", b"[]\n", "metrics.jsonl"), ("metrics.jsonl", b"7\n", "metrics.jsonl"), ("samples.jsonl", b"\xff\xfe\n", "samples.jsonl"),
    ("checkpoint-4/trainer_state.pt", b"", "trainer_state.pt"), ("checkpoint-4/trainer_state.pt", b"half", "trainer_state.pt"),
    ("checkpoint-4/model.safetensors", b"half", "checkpoint-4"), ("checkpoint-4/config.json", b"[]", "checkpoint-4"),
])
def test_broken_runs_are_refused_and_lose_nothing(finished, tmp_path, capsys, file, content, message):
    shutil.copytree(finished, tmp_path / "r")
    (tmp_path / "r" / "checkpoint-old").mkdir()  # another name is none of ours
    (tmp_path / "r" / file).write_bytes(content)
    before = {p: p.stat().st_size for p in (tmp_path / "r").rglob("*")}
    assert call("--out", tmp_path / "r", "--resume", "--steps", 5) == 2
    complaint = capsys.readouterr().err
    assert complaint.count("\n") == 1 and message in complaint and {p: p.stat().st_size for p in (tmp_path / "r").rglob("*")} == before


def test_a_model_that_cannot_be_loaded_leaves_no_run_behind(tmp_path, capsys):
    shutil.copytree(TOY / "senior", tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").write_bytes(b"half")
    assert call(*SHORT, "--model", tmp_path / "m", "--out", tmp_path / "r") == 2 and not (tmp_path / "r").exists()
    assert "could not be loaded" in (complaint := capsys.readouterr().err) and complaint.count("\n") == 1


def test_resume_refuses_settings_that_contradict_the_run(finished, capsys):
    assert call("--out", finished, "--resume", "--lr", "1e-3") == 2
    assert "has --lr 0.0003, not 0.001" in capsys.readouterr().err


def test_a_run_that_ran_out_of_memory_goes_on_with_less(finished, tmp_path):
    """What changes no result may change: rows at a time, tokens of a pass, recomputing."""
    assert call(*SHORT, "--steps", 2, "--out", tmp_path / "r") == 0
    assert call("--out", tmp_path / "r", "--resume", "--steps", 4, "--max-rows", 3, "--micro-tokens", 150, "--gradient-checkpointing") == 0
    ours, theirs = weights(tmp_path / "r" / "final"), weights(finished / "final")
    assert max((ours[k] - theirs[k]).abs().max() for k in ours) < 1e-5
    assert [r["reward"] for r in rows(tmp_path / "r")[1:]] == [r["reward"] for r in rows(finished)[1:]]


def test_an_error_in_a_step_gives_ctrl_c_back(tmp_path, monkeypatch):
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(tandem, "grpo_update", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        tandem.main([*SHORT, "--out", str(tmp_path / "r")])
    assert signal.getsignal(signal.SIGINT) is before


def test_a_model_with_dropout_is_trained_without_it(tmp_path):
    """Whatever a family calls it: two scorings of the same ids in training mode are identical, and what is sampled is what is trained."""
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=64))
    for name, model in (("qwen", tiny_model(0, attention_dropout=0.3)), ("gpt2", gpt2)):
        model.save_pretrained(tmp_path / name)
        for dropped, loaded in ((True, model), (False, tandem.load_model(str(tmp_path / name), torch.device("cpu"), torch.float32))):
            loaded.train()
            a, b = (tandem.completion_logprobs(loaded, [[5, 6, 7]], torch.arange(10, 30)[None], torch.tensor([20]), 1.0) for _ in range(2))
            assert torch.equal(a, b) != dropped


def test_another_reward_trains_and_leaves_pass_at_k_alone(tmp_path, monkeypatch):
    """A shaped reward, with halves and negatives, is what is learnt from and logged; the shares of problems solved stay shares of problems solved."""
    monkeypatch.setattr(tandem, "reward", lambda text, problem: tandem.verify(text, problem.answer) - 0.5 - 0.01 * len(text))
    assert call(*SHORT, "--steps", 2, "--out", tmp_path / "r") == 0
    assert all(m["reward"] < 0 for m in rows(tmp_path / "r")[1:]) and all(m["no_signal"] < 1 for m in rows(tmp_path / "r")[1:])
    samples = rows(tmp_path / "r", "samples.jsonl")
    assert all(s["reward"] == s["correct"] - 0.5 - 0.01 * len(s["text"]) and s["correct"] == tandem.verify(s["text"], s["answer"]) for s in samples)
    shares = [m[key] * 16 for m in rows(tmp_path / "r") for key in ("solo/pass@1", "solo/pass@4") if key in m]
    assert len(shares) == 4 and all(x == int(x) >= 0 for x in shares) and any(shares)


def test_the_presets_steps_do_not_win_over_the_runs_own(tmp_path, capsys):
    assert call(*SHORT, "--steps", 2, "--out", tmp_path / "r") == 0
    assert call("--preset", "toy", *SHORT[2:-4], "--resume", "--out", tmp_path / "r") == 0  # (the preset has 60 of them)
    assert f"{tmp_path}/r is finished; to run it anew, remove it" in capsys.readouterr().out and len(rows(tmp_path / "r")) == 3
    (tmp_path / "r").rename(tmp_path / "moved")
    assert call("--resume", "--out", tmp_path / "moved", "--steps", 3, "--eval-every", 1) == 0 and not (tmp_path / "r").exists()
    assert rows(tmp_path / "moved")[-1]["step"] == 3


def test_long_prompts_are_skipped_and_counted(tmp_path, capsys):
    lines = [json.dumps({"question": "Add 1 2 3 " + "4 " * n, "answer": "7"}) for n in [1] * 6 + [200] * 3]
    (tmp_path / "d.jsonl").write_text("\n".join(lines) + "\n")
    assert call(*SHORT, "--data", tmp_path / "d.jsonl", "--max-prompt-tokens", 50, "--steps", 1, "--out", tmp_path / "r") == 0
    assert "6 problems to train on" in (printed := capsys.readouterr().out) and "3 with a prompt of more than 50 tokens" in printed


def test_every_setting_has_a_line_of_help(capsys):
    assert call("--help") == 0
    printed = " ".join(capsys.readouterr().out.split())
    from dataclasses import fields
    for f in fields(tandem.Config):
        assert tandem.flag(f.name) in printed
    assert "the ratio is clipped to [1 - eps, 1 + eps]" in printed and "nan" not in printed.lower().split()


@pytest.mark.parametrize("key, value", [("prompts_per_step", 2.0), ("group_size", 2.5), ("model", None), ("seed", 1.5), ("data", 5), ("resume", "no"), ("steps", True),
                                        ("gradient_checkpointing", "no"), ("habit", None), ("more", 1)])
def test_a_config_that_was_edited_is_one_line(finished, tmp_path, capsys, key, value):
    shutil.copytree(finished, tmp_path / "r")
    config = json.loads((finished / "config.json").read_text())
    (tmp_path / "r" / "config.json").write_text(json.dumps({**config, key: value}))
    assert call("--out", tmp_path / "r", "--resume") == 2
    assert capsys.readouterr().err.count("\n") == 1 and weights(tmp_path / "r" / "final")
    config.pop(key, None)
    (tmp_path / "r" / "config.json").write_text(json.dumps(config))
    assert key == "more" or call("--out", tmp_path / "r", "--resume") == 2


def test_no_argument_means_the_toy_and_flags_win_over_presets():
    toy = tandem.parse_config(tandem.Config, tandem.PRESETS, [], "")
    assert toy.out == "runs/toy" and toy.model == str(TOY / "senior")
    assert tandem.parse_config(tandem.Config, tandem.PRESETS, ["--preset", "toy", "--lr", "0.5"], "").lr == 0.5
    paper = tandem.parse_config(tandem.Config, tandem.PRESETS, ["--seed", "3"], "")
    assert (paper.model, paper.prompts_per_step, paper.group_size, paper.lr, paper.temperature, paper.max_gap, paper.seed) == (
        "Qwen/Qwen3-4B-Instruct-2507", 16, 8, 1e-6, 0.6, 32, 3)


def test_epochs_visit_every_problem_once_in_an_order_of_their_own():
    items = list(range(10))
    seen = [i for step in range(1, 6) for i in tandem.batch_of(items, step, 4, 0)]
    assert sorted(seen[:10]) == sorted(seen[10:]) == items and seen[:10] != seen[10:]
    assert seen != [i for step in range(1, 6) for i in tandem.batch_of(items, step, 4, 1)]
    assert sorted(tandem.batch_of(items, 1, 30, 0)) == sorted(items * 3)  # a step of several epochs


def test_the_bf16_actor_is_the_fp32_master_rounded(tmp_path, monkeypatch):
    """Its weights are bf16, its rotary frequencies are not: in bf16 they would be a radian off at position 1,000."""
    caught = {}
    monkeypatch.setattr(tandem, "train_loop", lambda run, model, actor, *_, **__: caught.update(model=model, actor=actor))
    assert call(*SHORT, "--dtype", "bfloat16", "--out", tmp_path / "r") == 130
    model, actor = caught["model"], caught["actor"]
    assert model.dtype == torch.float32 and actor.dtype == torch.bfloat16
    assert all(torch.equal(a, m.bfloat16()) for a, m in zip(actor.parameters(), model.parameters()))
    buffers = dict(model.named_buffers())
    assert buffers and all(torch.equal(b, buffers[name]) and b.dtype == buffers[name].dtype for name, b in actor.named_buffers())


def test_models_that_would_be_got_wrong_are_refused(tmp_path):
    from transformers import MistralConfig, MistralForCausalLM
    MistralForCausalLM(MistralConfig(vocab_size=40, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
                                     sliding_window=16)).save_pretrained(tmp_path / "mistral")
    with pytest.raises(tandem.UserError, match="sliding-window"):
        tandem.load_model(str(tmp_path / "mistral"), torch.device("cpu"), torch.float32)
    tiny_model(0, use_sliding_window=True, sliding_window=4, max_window_layers=0).save_pretrained(tmp_path / "sliding")
    with pytest.raises(tandem.UserError, match="sliding-window"):
        tandem.load_model(str(tmp_path / "sliding"), torch.device("cpu"), torch.float32)
    (tmp_path / "pickled").mkdir()
    tiny_model(0).config.save_pretrained(tmp_path / "pickled")
    torch.save(tiny_model(0).state_dict(), tmp_path / "pickled" / "pytorch_model.bin")
    with pytest.raises(tandem.UserError, match="could not be loaded"):
        tandem.load_model(str(tmp_path / "pickled"), torch.device("cpu"), torch.float32)
