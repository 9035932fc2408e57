"""Tandem Reinforcement Learning (arXiv 2606.28166), and GRPO from scratch, in one file.

The idea. Reinforcement learning with a verifier makes a model strong and strange: it drifts to habits that nobody else can take over from.
So let two models write every rollout together. A trainable *senior* and a frozen *junior* take turns at random, a word or so each; the
verifier scores what the pair wrote; and the ordinary GRPO loss falls on the senior's own tokens only. Whatever the junior cannot continue
earns less, so the senior keeps its strength and stays easy to take over from, close to the junior, and legible to it.

Reading order is the order of the algorithm:
    1 config     2 problems and verifier     3 models     4 rollout (paper 3.1, 3.2)     5 rewards and advantages (3.3)
    6 log-probs and loss (3.3, 3.4)          7 training loop                             8 command line
Letters: P prompts, G completions of each, N = P * G sequences, T completion positions (right-padded), V vocabulary, D hidden size.

With `--prob-senior 1` the junior never writes, none is run, and this file *is* vanilla GRPO.

Departures from the paper and its released code
    1. One GPU and plain PyTorch instead of two GPUs and patched vLLM. Both models read every token; only the author's next-token
       distribution is sampled. The released code samples both and throws one proposal away: the emitted text has the same distribution.
    2. A token is drawn by inverting its cumulative distribution with a random number that belongs to (sequence, position). So a rollout
       depends on the seed alone, not on how many rows run at a time or on which rows have finished.
    3. Old log-probs come from the training forward pass before the first update, not from the sampler, so that the two agree in bf16.
    4. The paper names `lambda_jun` (3.4), an auxiliary KL on the tokens that the junior wrote, and sets it to 0. Those tokens are samples
       of the junior, so here it is the unbiased k3 estimate of KL(junior || senior) on them.
    5. Group advantages use the unbiased standard deviation plus 1e-6, as in verl; equal rewards give exactly 0.
    6. The paper trains for 2 epochs and reports its best checkpoints at steps 120-200: `steps` is 200 here. Warm-up, betas and weight
       decay are not given in the paper; the defaults are those of the released trainer (no warm-up, 0.9 and 0.999, 0.01).

Run it
    python tandem.py                                        # the built-in toy world, tandem against vanilla GRPO, minutes on a laptop's CPU
    python tandem.py --preset gsm8k                         # Qwen3-0.6B on GSM8K, one GPU
    python tandem.py --preset gsm8k --prob-senior 1 --out runs/vanilla                            # the vanilla GRPO control
    python tandem.py --preset gsm8k --prob-senior 1 --kl-coef 0.001 --out runs/kl-reg             # the KL-Reg control
    python tandem.py --out runs/gsm8k --resume              # go on after a stop, bit for bit
"""
import argparse
import ast
import contextlib
import copy
import inspect
import json
import logging
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, field, fields, replace
from fractions import Fraction
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
import torch
import torch.nn.functional as F
import transformers
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

HERE = Path(__file__).resolve().parent


class UserError(Exception):
    """A mistake of the user's: shown as one line, exit status 2, no traceback."""


# ---------------------------------------------------------------------------------------------------------------------------------------
# 1. Config: the paper's values are the defaults; the comment beside a field is its --help
# ---------------------------------------------------------------------------------------------------------------------------------------

@dataclass
class GRPOConfig:
    """What any GRPO run needs, whoever writes the rollout and whatever the reward (shared with rlt.py)."""
    # the rollout batch
    prompts_per_step: int = 16  # prompts of a rollout batch
    group_size: int = 8  # completions of each prompt
    max_prompt_tokens: int = 1024  # longer prompts are skipped and counted
    max_new_tokens: int = 3000  # completions are cut here
    temperature: float = 0.6  # of sampling, and of every log-prob
    max_rows: int = 0  # sequences decoded at a time; 0: all (fewer need less cache memory, the result is the same)
    # the loss
    prompts_per_update: int = 8  # prompts of one optimiser step; a divisor of prompts_per_step
    clip_eps: float = 0.2  # the ratio is clipped to [1 - eps, 1 + eps]
    kl_coef: float = 0.0  # k3 KL to the frozen partner; 0: none (the KL-Reg control has 0.001)
    loss_mean: str = "token"  # token: mean over all tokens of an update; sequence: mean of each sequence, then of sequences
    lr: float = 1e-6  # AdamW's learning rate, constant after the warm-up
    warmup_steps: int = 0  # steps of linear warm-up
    beta2: float = 0.999  # AdamW's second beta (the first is 0.9)
    weight_decay: float = 0.01  # AdamW's weight decay
    max_grad_norm: float = 1.0  # gradients are clipped to this norm
    # the machine
    seed: int = 0  # of everything that is drawn
    steps: int = 200  # rollout batches to train on
    device: str = "auto"  # auto: cuda, then mps, then cpu
    dtype: str = "auto"  # bfloat16, float32, or auto: bfloat16 where the hardware has it
    micro_tokens: int = 16384  # tokens, padding included, of one forward and backward pass
    gradient_checkpointing: bool = True  # recompute activations in the backward pass
    # what is kept and shown
    out: str = "runs/tandem"  # the run's folder
    resume: bool = False  # go on from the newest checkpoint in --out, with the settings stored there
    save_every: int = 20  # steps between checkpoints
    eval_every: int = 20  # steps between held-out evaluations; 0: none
    show: int = 0  # samples shown in the terminal at each evaluation

    def check(self):
        """Raises UserError that names the settings which contradict each other."""
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise UserError(f"--{f.name} must be a finite number, not {value}".replace("_", "-"))
        at_least = {"prompts_per_step": 1, "group_size": 2, "max_prompt_tokens": 1, "max_new_tokens": 1, "max_rows": 0, "micro_tokens": 1,
                    "prompts_per_update": 1, "kl_coef": 0, "warmup_steps": 0, "weight_decay": 0, "lr": 0, "steps": 1, "save_every": 1,
                    "eval_every": 0, "show": 0, "seed": 0}
        for name, least in at_least.items():
            if getattr(self, name) < least:
                why = " (a group of one has no advantage)" if name == "group_size" else ""
                raise UserError(f"--{name.replace('_', '-')} must be at least {least}, not {getattr(self, name)}{why}")
        for name in ("temperature", "clip_eps", "max_grad_norm"):
            if getattr(self, name) <= 0:
                raise UserError(f"--{name.replace('_', '-')} must be above 0, not {getattr(self, name)}")
        if self.prompts_per_step % self.prompts_per_update:
            raise UserError(f"--prompts-per-update {self.prompts_per_update} does not divide --prompts-per-step {self.prompts_per_step}")
        if not 0 <= self.beta2 < 1:
            raise UserError(f"--beta2 must lie in [0, 1), not {self.beta2}")
        one_of("loss_mean", self.loss_mean, ("token", "sequence"))
        one_of("device", self.device.split(":")[0], ("auto", "cuda", "mps", "cpu"))
        one_of("dtype", self.dtype, ("auto", "bfloat16", "float32"))


@dataclass
class Config(GRPOConfig):
    """Tandem RL; the settings of the paper's Qwen3-4B run."""
    # the models and the problems
    model: str = "Qwen/Qwen3-4B-Instruct-2507"  # the senior's start: a folder or a hub name
    junior: str = "self"  # the frozen partner: self (a copy of the senior's start) or a checkpoint with the same vocabulary
    data: str = "deepscaler"  # gsm8k, math, deepscaler, countdown (each also NAME-test where there is one), or a .jsonl/.json/.parquet file
    eval_data: str = ""  # held-out problems, named likewise; empty: taken out of --data before training
    eval_problems: int = 1000  # how many held-out problems are evaluated
    prompt_suffix: str = "\nThink step by step, and put the final answer in \\boxed{}."  # follows each question
    # the tandem rollout
    prob_senior: float = 0.5  # chance that a turn is the senior's; 1: vanilla GRPO, no junior is run
    schedule: str = "word"  # hand over after a word's first token (word), every token (token), or a blank line (step)
    max_gap: int = 32  # word schedule: tokens without a word's beginning after which the author is redrawn all the same
    lambda_jun: float = 0.0  # paper 3.4: weight of the auxiliary KL on the tokens that the junior wrote
    # the held-out evaluation: the senior alone
    eval_samples: int = 4  # completions of each held-out problem: pass@1 and pass@(this many)
    eval_temperature: float = 0.7  # sampling in evaluation
    eval_top_p: float = 0.8  # likewise
    eval_top_k: int = 20  # likewise; 0: all
    handoff_eval: bool = False  # at the start and at the end, also evaluate word and step hand-overs with the junior
    habit: str = ""  # a regular expression: the share of the lines of reasoning it matches is logged (a jargon rate, such as '<<.*?>>' for GSM8K's marks)
    compare_vanilla: bool = False  # first train the vanilla GRPO control (same settings, --prob-senior 1) in OUT-vanilla, then compare

    def check(self):
        super().check()
        if not 0 < self.prob_senior <= 1:
            raise UserError(f"--prob-senior must lie in (0, 1], not {self.prob_senior}")
        if self.lambda_jun < 0 or (self.lambda_jun > 0 and self.prob_senior == 1):
            raise UserError("--lambda-jun must be 0 or more, and needs tokens that a junior wrote: --prob-senior below 1")
        if self.compare_vanilla and self.prob_senior == 1:
            raise UserError("--compare-vanilla compares a tandem run with vanilla GRPO: it needs --prob-senior below 1")
        if min(self.max_gap, self.eval_problems, self.eval_samples) < 1 or self.eval_top_k < 0 or self.eval_temperature < 0:
            raise UserError("--max-gap, --eval-problems and --eval-samples must be at least 1, --eval-top-k and --eval-temperature at least 0")
        if not 0 < self.eval_top_p <= 1:
            raise UserError(f"--eval-top-p must lie in (0, 1], not {self.eval_top_p}")
        one_of("schedule", self.schedule, SCHEDULES)
        try:
            re.compile(self.habit)
        except re.error as error:
            raise UserError(f"--habit is not a regular expression: {error}") from None


def one_of(name, value, allowed):
    if value not in allowed:
        raise UserError(f"--{name.replace('_', '-')} must be one of {', '.join(allowed)}, not {value!r}")


SCHEDULES = ("word", "token", "step")
PRESETS = {
    "paper": dict(),  # arXiv 2606.28166, appendix: 2 x A100 80 GB there
    "toy": dict(  # a Qwen3 of 0.3 M parameters whose habit is a jargon (the setting of arXiv 2510.13551); two CPU cores, about two minutes
        model=str(HERE / "tests/toy/senior"), junior=str(HERE / "tests/toy/junior"), data=str(HERE / "tests/toy/train.jsonl"),
        eval_data=str(HERE / "tests/toy/eval.jsonl"), prompt_suffix="", prompts_per_step=9, prompts_per_update=9, group_size=16,
        max_new_tokens=44, temperature=1.0, lr=3e-4, warmup_steps=5, beta2=0.99, weight_decay=0.0, steps=60, save_every=20, eval_every=20,
        eval_problems=100, eval_samples=4, eval_temperature=1.0, eval_top_p=1.0, eval_top_k=0, handoff_eval=True, habit="^Zorb",
        compare_vanilla=True, gradient_checkpointing=False, device="cpu", show=1, out="runs/toy"),
    "gsm8k": dict(  # one GPU with 24 GB
        model="Qwen/Qwen3-0.6B", data="gsm8k", eval_data="gsm8k-test", eval_problems=200, max_prompt_tokens=512, max_new_tokens=512,
        out="runs/gsm8k"),
}


def parse_config(config_class, presets, argv, description):
    """Turns a config dataclass into a command line: (--preset's values, then explicit flags) over the defaults.

    No argument at all means `--preset toy`. With --resume, the settings stored in --out come first, and a flag that contradicts
    them is refused, but for those that only say how far or how visibly to go on. Raises UserError; argparse's own errors exit with 2.
    """
    parser = argparse.ArgumentParser(description=description, argument_default=argparse.SUPPRESS, allow_abbrev=False)
    parser.error = lambda message: fail(message)
    parser.add_argument("--preset", help=f"a named set of values: {', '.join(presets)}")
    docs = dict(re.findall(r"^    (\w+): .*?  # (.*)$", "\n".join(inspect.getsource(c) for c in config_class.__mro__[-2::-1]), re.M))
    for f in fields(config_class):
        kind = dict(action=argparse.BooleanOptionalAction) if isinstance(f.default, bool) else dict(type=type(f.default))
        parser.add_argument("--" + f.name.replace("_", "-"), **kind, help=f"{docs[f.name]} (default: {f.default!r})".replace("%", "%%"))
    given = vars(parser.parse_args(argv))
    preset = given.pop("preset", None if argv else "toy")
    if preset is not None:
        one_of("preset", preset, presets)
    config = config_class(**{**presets.get(preset, {}), **given})
    if config.resume:
        config = stored_config(config, {**presets.get(preset, {}), **given})
    config.check()
    return config


def stored_config(config, given):
    """The config stored in the run's folder, with those of the `given` settings that a resumed run may change."""
    path = Path(config.out) / "config.json"
    if not path.is_file():
        raise UserError(f"--resume: there is no run in {config.out} (no config.json)")
    try:
        stored = replace(config, **json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise UserError(f"--resume: {path} is not the config of such a run: {error}") from None
    free = {"steps", "show", "resume", "out", "device", "save_every"}
    for name, value in given.items():
        if name not in free and value != getattr(stored, name):
            raise UserError(f"--resume: the run in {config.out} has --{name.replace('_', '-')} {getattr(stored, name)!r}, not {value!r}")
    return replace(stored, **{k: v for k, v in given.items() if k in free})


def fail(message, status=2):
    """One line, and out."""
    sys.stderr.write(f"{Path(sys.argv[0]).name}: error: {' '.join(str(message).split())}\n")
    sys.exit(status)


def stream(*path):
    """A seed of its own for every purpose: the same path gives the same 63 bits on every machine.

    >>> stream(0, "rollout", 3) == stream(0, "rollout", 3), stream(0, "rollout", 3) == stream(0, "rollout", 4)
    (True, False)
    """
    return random.Random("/".join(map(str, path))).getrandbits(63)


# ---------------------------------------------------------------------------------------------------------------------------------------
# 2. Problems and verifier
# ---------------------------------------------------------------------------------------------------------------------------------------

@dataclass
class Problem:
    question: str
    answer: str  # the final answer only
    solution: str = ""  # the worked solution, where the data has one
    numbers: tuple = ()  # Countdown: the numbers that may be used; the answer is the target


HUB = {  # name -> (hub path, configuration, split)
    "gsm8k": ("openai/gsm8k", "main", "train"),
    "gsm8k-test": ("openai/gsm8k", "main", "test"),
    "math": ("DigitalLearningGmbH/MATH-lighteval", "default", "train"),
    "math-test": ("HuggingFaceH4/MATH-500", "default", "test"),
    "deepscaler": ("agentica-org/DeepScaleR-Preview-Dataset", "default", "train"),
}
FILE_KINDS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
QUESTION_COLUMNS = ("question", "problem", "prompt", "input")
ANSWER_COLUMNS = ("answer", "target", "solution")


def load_problems(name):
    """The problems of a named set or a local file: (list of Problem, number of rows skipped for want of a question or an answer).

    Raises UserError for a missing file, an unknown name, missing columns, an empty set, or no usable row.
    """
    if name in ("countdown", "countdown-test"):
        return countdown_problems(name == "countdown-test"), 0
    rows = load_rows(name)
    if len(rows) == 0:
        raise UserError(f"{name}: no rows")
    columns = {c.lower(): c for c in rows.column_names}
    question = next((columns[c] for c in QUESTION_COLUMNS if c in columns), None)
    answers = [columns[c] for c in ANSWER_COLUMNS if c in columns]
    is_countdown = question is None and {"nums", "target"} <= set(columns)
    if not is_countdown and (question is None or not answers):
        raise UserError(f"{name}: needs a question column ({'/'.join(QUESTION_COLUMNS)}) and an answer column "
                        f"({'/'.join(ANSWER_COLUMNS)}); it has {', '.join(rows.column_names)}")
    problems = []
    for row in rows:
        if is_countdown:
            problems.append(countdown_problem(row[columns["nums"]], row[columns["target"]]))
            continue
        text = row[question]
        answer = next(filter(None, (final_answer(row[c]) for c in answers)), None)
        if not isinstance(text, str) or not text.strip() or answer is None:
            continue
        if "body" in columns:  # SVAMP: the story stands in a column of its own
            text = f"{row[columns['body']]} {text}"
        worked = row[columns["solution"]] if "solution" in columns else row[answers[0]]
        problems.append(Problem(text.strip(), answer, str(worked)))
    if not problems:
        raise UserError(f"{name}: none of its {len(rows)} rows has both a question and an answer")
    return problems, len(rows) - len(problems)


def load_rows(name):
    import datasets  # imported late: it takes a second

    datasets.disable_progress_bars()
    datasets.utils.logging.set_verbosity_error()
    path = Path(name)
    if name in HUB:
        hub_path, configuration, split = HUB[name]
        arguments = dict(path=hub_path, name=configuration, split=split)
    elif path.suffix in FILE_KINDS and path.is_file():
        if path.stat().st_size == 0:
            raise UserError(f"{name}: the file is empty")
        arguments = dict(path=FILE_KINDS[path.suffix], data_files=str(path), split="train")
    elif path.suffix in FILE_KINDS:
        raise UserError(f"{name}: no such file")
    else:
        raise UserError(f"unknown data {name!r}: use {', '.join(HUB)}, countdown, countdown-test, or a {'/'.join(FILE_KINDS)} file")
    try:
        with quiet():
            return datasets.load_dataset(**arguments)
    except Exception as error:  # datasets raises a different class for every way in which a file can be broken
        cause = error.__cause__ or error
        raise UserError(f"{name}: could not be read ({type(cause).__name__}: {str(cause)[:200]}); "
                        f"a local .jsonl file with question and answer columns works offline") from None


def final_answer(value):
    r"""The final answer in a column's value, or None: after GSM8K's `####`, in the last box, or the value itself if it is short.

    >>> final_answer("48/2 = 24\n#### 1,024"), final_answer(r"so \boxed{\frac12}."), final_answer(27.0), final_answer(None)
    ('1,024', '\\frac12', '27', None)
    """
    if isinstance(value, bool) or not isinstance(value, (str, int, float)) or (isinstance(value, float) and not math.isfinite(value)):
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = str(value).strip()
    if "####" in text:
        text = text.rpartition("####")[2].strip()
    elif extract_boxed(text) is not None:
        text = extract_boxed(text).strip()
    return text if text and "\n" not in text and len(text) <= 200 else None


BOX = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.S)


def extract_boxed(text):
    r"""The content of the last balanced `\boxed{}`, or None. One pass with a stack, so linear in hostile text.

    >>> extract_boxed(r"first \boxed{1}, then \boxed{\frac{1}{2}} and \boxed{open")
    '\\frac{1}{2}'
    """
    stack, best = [], None  # the stack holds, for every open brace, where a box's content starts, or None for an ordinary brace
    for match in BOX.finditer(text):
        if match[0] == "{":
            stack.append(None)
        elif match[0] == "}":
            start = stack.pop() if stack else None
            if start is not None and (best is None or start > best[0]):
                best = (start, match.start())
        elif match[0].endswith("{") and match[0].startswith("\\boxed"):
            stack.append(match.end())
    return text[best[0]:best[1]] if best else None


def as_number(text):
    r"""The exact number that an answer spells, or None: commas, currency, sign, percent sign, decimals, fractions.

    >>> as_number("$1,234.50"), as_number(r"-\frac{6}{4}"), as_number("50\\%"), as_number("1 1/2"), as_number("1e9")
    (Fraction(2469, 2), Fraction(-3, 2), Fraction(50, 1), None, None)
    """
    text = text.strip().replace("−", "-").replace("\\!", "").replace("{,}", ",").replace("\\$", "").replace("$", "").strip()
    text = re.sub(r"\s*\\?%$", "", text).removesuffix(".")
    if len(text) > 100 or not text.isascii():  # nobody's answer; and int() is quadratic
        return None
    if match := re.fullmatch(r"([+-]?)\\[dt]?frac\{(\d+)\}\{(\d+)\}", text):
        top, bottom = match[1] + match[2], match[3]
    elif match := re.fullmatch(r"([+-]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?)(?:/(\d+))?", text):
        top, bottom = match[1].replace(",", ""), match[2] or "1"
    else:
        return None
    if top in ("", "+", "-") or int(bottom) == 0:
        return None
    return Fraction(top) / int(bottom)


def verify(text, answer):
    r"""1.0 if the last box of `text` holds `answer`, else 0.0: equal strings, equal numbers, then what math-verify calls equal.

    >>> verify(r"So it is \boxed{0.50}", r"\frac{1}{2}"), verify("no box: 7", "7")
    (1.0, 0.0)
    """
    box = extract_boxed(text)
    if box is None or not box.strip():
        return 0.0
    box, answer = box.strip(), answer.strip()
    if box == answer:
        return 1.0
    ours, theirs = as_number(box), as_number(answer)
    if ours is not None and theirs is not None:
        return float(ours == theirs)
    return float(len(box) <= 500 and symbolic_grader.equal(answer, box))


class SymbolicGrader:
    """math-verify in a child process of its own, under a deadline.

    The deadline must hold for a tower of powers, which no signal interrupts, and outside the main thread: so a timer kills the child,
    the answer counts as wrong, and the next question starts a new child. The child may use 4 GiB. Only the LaTeX parser is used:
    math-verify's other one hands text to `eval`.
    """
    CHILD = """
import json, logging, sys
try:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
except (ImportError, ValueError, OSError):
    pass
logging.disable(logging.CRITICAL)
from math_verify import LatexExtractionConfig, parse, verify
read = lambda text: parse("$" + text.replace("$", "") + "$", [LatexExtractionConfig()], parsing_timeout=None)
print("ready", flush=True)
for line in sys.stdin:
    try:
        gold, box = map(read, json.loads(line))
        print(int(bool(gold and box and verify(gold, box, timeout_seconds=None))), flush=True)
    except Exception:
        print(0, flush=True)
"""

    def __init__(self, deadline=5.0):
        self.deadline, self.child, self.lock = deadline, None, threading.Lock()

    def equal(self, answer, box):
        with self.lock:
            if self.child is None or self.child.poll() is not None:
                self.start()
            timer = threading.Timer(self.deadline, self.child.kill)
            timer.start()
            try:
                self.child.stdin.write(json.dumps([answer, box]) + "\n")
                self.child.stdin.flush()
                return self.child.stdout.readline().strip() == "1"  # "" when the timer has killed it
            except OSError:
                return False
            finally:
                timer.cancel()

    def start(self):
        self.child = subprocess.Popen([sys.executable, "-c", self.CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                      stderr=subprocess.DEVNULL, text=True, encoding="utf-8", errors="replace")
        if self.child.stdout.readline().strip() != "ready":
            raise UserError("math-verify does not import: pip install 'math-verify[antlr4_13_2]'")


symbolic_grader = SymbolicGrader()


def countdown_problem(numbers, target, solution=""):
    listed = ", ".join(map(str, numbers))
    question = (f"Using the numbers {listed}, write an expression that equals {target}. Use only +, -, * and /, and each number at most "
                f"as often as it is given. Put the expression, without an equals sign, in \\boxed{{}}.")
    return Problem(question, str(target), solution, tuple(int(n) for n in numbers))


def countdown_problems(test, n_test=1000, n_train=10000):
    """Generated, all different, the same on every machine: the first `n_test` are the test set, the others for training."""
    draw, seen, problems = random.Random("countdown"), set(), []
    while len(problems) < n_test + n_train:
        numbers = [draw.randint(1, 99) for _ in range(draw.choice((3, 4)))]
        terms = [(Fraction(n), str(n)) for n in numbers]
        while len(terms) > 1:
            (a, left), (b, right) = terms.pop(draw.randrange(len(terms))), terms.pop(draw.randrange(len(terms)))
            op = draw.choice("+-*/" if b else "+-*")
            terms.append(({"+": a + b, "-": a - b, "*": a * b}.get(op) if op != "/" else a / b, f"({left} {op} {right})"))
        value, expression = terms[0]
        key = (tuple(sorted(numbers)), value)
        if value.denominator == 1 and 10 <= value <= 99 and key not in seen:
            seen.add(key)
            problems.append(countdown_problem(numbers, int(value), expression[1:-1]))
    return problems[:n_test] if test else problems[n_test:]


def verify_countdown(text, numbers, target):
    r"""1.0 if the last box holds an expression worth `target` (exact fractions) that uses each number at most as often as given.

    The expression is parsed, never evaluated as code: + - * / and parentheses over integers, no powers.

    >>> verify_countdown(r"\boxed{(7 - 3) \times 6 = 24}", (3, 6, 7), 24), verify_countdown(r"\boxed{2 ** 3}", (2, 3), 8)
    (1.0, 0.0)
    """
    box = extract_boxed(text) or ""
    for latex, plain in (("\\times", "*"), ("\\cdot", "*"), ("×", "*"), ("\\div", "/"), ("÷", "/"), ("\\left", ""), ("\\right", "")):
        box = box.replace(latex, plain)
    box = box.partition("=")[0].strip()
    if len(box) > 200 or not re.fullmatch(r"[\d\s+\-*/()]+", box, re.A):
        return 0.0
    left = list(numbers)
    try:
        return float(arithmetic(ast.parse(" ".join(box.split()), mode="eval").body, left) == Fraction(str(target)))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return 0.0


def arithmetic(node, left):
    """The exact value of a parsed expression; each number it uses is taken out of `left`. Raises ValueError for anything else."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        left.remove(node.value)  # ValueError if it is not there
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -arithmetic(node.operand, left)
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub, ast.Mult, ast.Div)):
        a, b = arithmetic(node.left, left), arithmetic(node.right, left)
        return {ast.Add: a.__add__, ast.Sub: a.__sub__, ast.Mult: a.__mul__, ast.Div: a.__truediv__}[type(node.op)](b)
    raise ValueError("not arithmetic")


def grade(problem, text):
    """The verifier's 0/1 reward for the text up to the stop id."""
    return verify_countdown(text, problem.numbers, problem.answer) if problem.numbers else verify(text, problem.answer)


def encode_prompt(tokenizer, text):
    """Token ids of a user's turn, ready for the answer. Without a chat template: `Question: ...`, a new line, `Answer:`."""
    if tokenizer.chat_template is None:
        return tokenizer(f"Question: {text}\nAnswer:").input_ids
    chat = tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True,
                                         enable_thinking=False)  # (Qwen3's switch; other templates ignore it)
    return tokenizer(chat, add_special_tokens=False).input_ids  # the template has already written them


def encode_problems(tokenizer, problems, suffix, max_tokens):
    """[(problem, prompt ids)] of the problems whose prompt fits, and how many did not. Raises UserError if none does."""
    encoded = [(p, encode_prompt(tokenizer, p.question + ("" if p.numbers else suffix))) for p in problems]
    fitting = [(p, ids) for p, ids in encoded if len(ids) <= max_tokens]
    if not fitting:
        raise UserError(f"all {len(encoded)} prompts are longer than --max-prompt-tokens {max_tokens}")
    return fitting, len(encoded) - len(fitting)


# ---------------------------------------------------------------------------------------------------------------------------------------
# 3. Models
# ---------------------------------------------------------------------------------------------------------------------------------------

@contextlib.contextmanager
def quiet():
    """No progress bars and warnings of the libraries while something loads."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        transformers.logging.set_verbosity(level)


def pick_device(name):
    """A torch.device; `auto` is cuda, then mps, then cpu. Raises UserError if the one asked for is not there."""
    have = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(kind for kind in have if have[kind])
    if not have[name.split(":")[0]]:
        raise UserError(f"--device {name}: there is none on this machine")
    return torch.device(name)


def pick_dtype(name, device):
    """A torch.dtype; `auto` is bfloat16 on a GPU that computes in it, else float32."""
    if name != "auto":
        return getattr(torch, name)
    return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32


def check_model_name(name):
    """Raises UserError for a path that holds no model; cheap, so done for every model before the first is loaded."""
    path = Path(name)
    if path.is_dir() and not (path / "config.json").is_file():
        raise UserError(f"{name}: no model there (no config.json); a run's model is in its final/ or checkpoint-N/ folder")
    if not path.is_dir() and (name.startswith((".", "/", "~")) or name.count("/") != 1 or path.exists()):
        raise UserError(f"{name}: no such model folder (and not a hub name of the form OWNER/NAME)")


def load_tokenizer(name):
    check_model_name(name)
    try:
        with quiet():
            return transformers.AutoTokenizer.from_pretrained(name, clean_up_tokenization_spaces=False)
    except (OSError, ValueError) as error:
        raise UserError(f"{name}: no tokenizer could be loaded ({str(error).splitlines()[0][:200]})") from None


def load_model(name, device, dtype):
    """A causal language model from a folder or the hub: safetensors only, no remote code, eval mode. Raises UserError.

    The rollout's cache knows full attention only, and log-probs are taken from hidden states by the plain output head.
    """
    check_model_name(name)
    try:
        with quiet():
            model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=dtype, attn_implementation="sdpa", use_safetensors=True)
    except (OSError, ValueError) as error:
        raise UserError(f"{name}: no model could be loaded ({str(error).splitlines()[0][:200]})") from None
    config = model.config
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or []):
        raise UserError(f"{name}: only models with full attention in every layer are supported (Qwen2.5, Qwen3, Llama, SmolLM2, ...)")
    if any(getattr(config, name, None) not in (None, 1.0) for name in ("final_logit_softcapping", "logit_scale", "logits_scaling")):
        raise UserError(f"{name}: models that rescale their logits are not supported")
    return model.to(device).eval()


def check_same_vocabulary(tokenizer, other, name):
    """The junior continues the senior's token ids, so every id must mean the same to both. Raises UserError that names a difference."""
    ours, theirs = tokenizer.get_vocab(), other.get_vocab()
    if ours == theirs:
        return
    token = min(ours.items() ^ theirs.items(), key=lambda item: (item[1], item[0]))[0]
    raise UserError(f"{name}: another vocabulary than the senior's ({len(theirs)} entries against {len(ours)}; for instance token "
                    f"{token!r} is {theirs.get(token, 'missing')} there and {ours.get(token, 'missing')} here)")


def stop_ids(model, tokenizer):
    """Every id that ends an answer: all of the generation config's, and the tokenizer's."""
    listed = model.generation_config.eos_token_id
    listed = listed if isinstance(listed, (list, tuple)) else [listed]
    return sorted({int(i) for i in (*listed, tokenizer.eos_token_id) if i is not None})


def freeze(model):
    return model.requires_grad_(False).eval()


@contextlib.contextmanager
def inference(*models):
    """Eval mode and no gradients; afterwards each model's previous mode is back."""
    before = [model.training for model in models]
    for model in models:
        model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for model, training in zip(models, before):
            model.train(training)


# ---------------------------------------------------------------------------------------------------------------------------------------
# 4. Rollout (paper 3.1 and 3.2): who writes the next token, and writing it
# ---------------------------------------------------------------------------------------------------------------------------------------

def token_texts(tokenizer, vocab_size):
    """What each id adds to a text, [V] strings; decoded behind an anchor, since some tokenizers strip a first space."""
    anchor = tokenizer.encode("a", add_special_tokens=False)[-1]
    n = min(vocab_size, len(tokenizer))
    before = tokenizer.decode([anchor], clean_up_tokenization_spaces=False)
    texts = tokenizer.batch_decode([[anchor, i] for i in range(n)], clean_up_tokenization_spaces=False)
    return [text.removeprefix(before) for text in texts] + [""] * (vocab_size - n)


def word_boundaries(tokenizer, vocab_size):
    """True for ids after which the author is redrawn: tokens whose bytes begin with a space (paper 3.2), bool [V].

    The hand-over so falls after a word's first piece; newlines, digits and punctuation do not hand over. Raises UserError if there is
    no such id.
    """
    boundary = torch.tensor([text.startswith(" ") for text in token_texts(tokenizer, vocab_size)])
    if not boundary.any():
        raise UserError("no token of this tokenizer begins with a space: the word schedule cannot hand over; use --schedule token")
    return boundary


@dataclass
class Schedule:
    """When the author changes, and to whom.

    The author is redrawn after a token of `always`, after a token of `opens` that follows one of `closes` (a blank line in two halves),
    and after `max_gap` tokens without a redraw. Tables are bool [V].
    """
    name: str
    always: torch.Tensor
    opens: torch.Tensor
    closes: torch.Tensor
    max_gap: int
    prob_senior: float = 0.5
    alternate: bool = False  # evaluation: the other one's turn at every hand-over, the senior first; no coins

    @classmethod
    def of(cls, tokenizer, vocab_size, name="word", prob_senior=0.5, max_gap=32, alternate=False):
        none = torch.zeros(vocab_size, dtype=torch.bool)
        if name == "word":
            tables = (word_boundaries(tokenizer, vocab_size), none, none)
        elif name == "token":
            tables = (~none, none, none)
        elif name == "step":
            texts = token_texts(tokenizer, vocab_size)
            tables = tuple(torch.tensor([test(text) for text in texts]) for test in (
                lambda text: "\n\n" in text, lambda text: text.startswith("\n"), lambda text: text.endswith("\n")))
        else:
            raise ValueError(f"schedule {name!r} is none of {SCHEDULES}")
        return cls(name, *tables, max_gap if name == "word" else sys.maxsize, prob_senior, alternate)

    def after(self, token, author, gap, half, coin):
        """The author of the token after `token`, for every row [R]: (author, gap, half, redrawn).

        author, coin: True for the senior; gap: tokens since the last redraw; half: the row ends in half a blank line.
        Example, words ending in '_', max_gap 3:    token   a_  b   c   d   e_
                                                    gap     0   1   2   0   0      (d is the third token since a_: the cap redraws)
        """
        redraw = self.always[token] | (half & self.opens[token]) | (gap + 1 >= self.max_gap)
        author = torch.where(redraw, ~author if self.alternate else coin, author)
        return author, torch.where(redraw, 0, gap + 1), self.closes[token] & ~redraw, redraw

    def to(self, device):
        return replace(self, always=self.always.to(device), opens=self.opens.to(device), closes=self.closes.to(device))


class Reader:
    """A model and what it has read of each row. Token p of a row lies in slot p of the cache: no left padding, no shifted positions.

    Right-padded reads write rubbish into the slots behind a row's end; the row's own tokens overwrite it before any mask lets it be seen.
    The model's layers call `update`, as they call it of a transformers cache.
    """
    BLOCK = 256  # the cache grows by so many slots at a time

    def __init__(self, model, vocab_size):
        self.decoder, self.head, self.vocab_size = model.get_decoder(), model.get_output_embeddings(), vocab_size
        self.cache_name = "cache" if "cache" in inspect.signature(self.decoder.forward).parameters else "past_key_values"
        self.keys, self.values, self.seen = {}, {}, None  # per layer [R, heads, slots, head size]; tokens read of each row [R]

    def read(self, tokens, upto, rows=None):
        """Reads each row's tokens from where it stopped up to `upto`, and returns the next-token logits [R, V].

        tokens [R, L] by position, upto [R]; rows: the rows meant (indices into the cache), None: all of them.
        """
        if self.seen is None:
            self.seen = torch.zeros_like(upto)
        count = upto - (self.seen if rows is None else self.seen[rows])
        positions = (upto - count)[:, None] + torch.arange(int(count.max()), device=upto.device)  # [R, Q]
        positions = positions.clamp(max=tokens.size(1) - 1)  # (of padding only)
        self.rows, self.positions, self.span = rows, positions, int(positions.max()) + 1
        mask = torch.arange(self.span, device=upto.device) <= positions[:, :, None]  # [R, Q, span]: a query sees its own slot and those before
        hidden = self.decoder(input_ids=tokens.gather(1, positions), position_ids=positions, attention_mask=mask[:, None], use_cache=True,
                              **{self.cache_name: self}).last_hidden_state  # [R, Q, D]
        if rows is None:
            self.seen = upto.clone()
        else:
            self.seen[rows] = upto
        last = hidden[torch.arange(len(count), device=count.device), count - 1]  # [R, D]: the padding is behind each row's last token
        return self.head(last)[:, :self.vocab_size].float()

    def update(self, key, value, layer, *_, **__):
        """Writes a layer's new keys and values [R, heads, Q, size] into their slots; returns all that the queries may see."""
        if layer not in self.keys:
            self.keys[layer], self.values[layer] = (x.new_zeros(x.size(0), x.size(1), 0, x.size(3)) for x in (key, value))
        rows = torch.arange(key.size(0), device=key.device) if self.rows is None else self.rows
        out = []
        for store, new in ((self.keys, key), (self.values, value)):
            short = self.span - store[layer].size(2)
            if short > 0:  # zeros, not empty memory: a masked NaN is still a NaN
                store[layer] = F.pad(store[layer], (0, 0, 0, max(short, self.BLOCK)))
            store[layer][rows[:, None], :, self.positions] = new.transpose(1, 2)
            out.append(store[layer][:, :, :self.span] if self.rows is None else store[layer][self.rows, :, :self.span])
        return out

    def get_seq_length(self, *_):  # (asked by older transformers, which then ignore it: positions and masks are given)
        return int(self.positions.min())

    def select(self, index):
        """Keeps the rows of `index` [R'], in that order: drops finished rows, or repeats each prompt for its group."""
        self.seen = self.seen[index]
        for store in (self.keys, self.values):
            for layer in store:
                store[layer] = store[layer][index]


def truncate(logits, temperature, top_k=0, top_p=1.0):
    """Probabilities [R, V] after temperature, then top-k, then top-p (the most probable tokens that together reach p)."""
    if top_k:
        kth = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -math.inf)
    probs = torch.softmax(logits / temperature, -1)
    if top_p < 1:
        ordered, order = probs.sort(dim=-1, descending=True, stable=True)
        ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= top_p, 0)  # what stands before it already reaches p
        probs = torch.zeros_like(probs).scatter(-1, order, ordered)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


def sample(logits, uniform, temperature, top_k=0, top_p=1.0):
    """Draws an id for every row: (ids [R], their log-probs [R]) from logits [R, V] and uniform [R] in [0, 1). Temperature 0 is greedy."""
    if temperature == 0:
        return logits.argmax(-1), torch.zeros_like(uniform)
    probs = truncate(logits, temperature, top_k, top_p)
    cdf = probs.cumsum(-1)
    ids = torch.searchsorted(cdf, uniform[:, None] * cdf[:, -1:], right=True)  # the first id whose cdf lies above: never one of probability 0
    ids = torch.minimum(ids, torch.searchsorted(cdf, cdf[:, -1:]))  # (nor past the last, if the product was rounded up)
    return ids[:, 0], probs.gather(-1, ids)[:, 0].log()


@dataclass
class Rollout:
    """N completions, right-padded with 0; what lies behind a row's length does not exist."""
    ids: torch.Tensor  # [N, T] long
    lengths: torch.Tensor  # [N] long, the first stop id included
    senior_mask: torch.Tensor  # [N, T] bool: the senior wrote it (paper 3.3: where the loss falls)
    finished: torch.Tensor  # [N] bool: stopped by itself, not cut
    logprobs: torch.Tensor  # [N, T] of each id under its author, as sampled
    turns: torch.Tensor  # [N] long: changes of author, plus 1

    @property
    def mask(self):
        """[N, T] bool: real tokens."""
        return torch.arange(self.ids.size(1), device=self.ids.device) < self.lengths[:, None]


def rollout(senior, junior, prompts, *, group_size=1, max_new_tokens=128, schedule=None, temperature=1.0, top_k=0, top_p=1.0, stops=None,
            vocab_size=None, max_rows=0, seed=0):
    """Writes `group_size` completions of each prompt, senior and junior in turns. Paper 3.1 and 3.2.

    prompts: P lists of ids; schedule: who writes when (None, or prob_senior 1: the senior alone, and `junior` is not run);
    temperature 0 is greedy; stops: ids that end a completion (default: all of the senior's generation config); vocab_size: ids from
    there on are never sampled (default: none is masked); max_rows: sequences decoded at a time, 0 for all: the result does not depend
    on it. Sampling settings are these and no others: a generation config changes nothing.
    Returns a Rollout of N = P * group_size rows, those of a prompt side by side, as long as the longest of them.
    """
    device = senior.device
    solo = schedule is None or (schedule.prob_senior == 1 and not schedule.alternate)
    if stops is None:
        stops = senior.generation_config.eos_token_id
    stops = torch.tensor([i for i in (stops if isinstance(stops, (list, tuple)) else [stops]) if i is not None], device=device)
    vocab_size = vocab_size or senior.config.vocab_size
    generator = torch.Generator().manual_seed(seed)
    n = len(prompts) * group_size
    uniform = torch.rand(n, max_new_tokens, generator=generator)  # a row's own numbers, whatever else is in the batch
    coins = torch.rand(n, max_new_tokens + 1, generator=generator) < (1.0 if solo else schedule.prob_senior)
    at_a_time = max(1, max_rows // group_size) if max_rows else len(prompts)
    with inference(senior, *([] if solo else [junior])):
        parts = []
        for start in range(0, len(prompts), at_a_time):
            some = slice(start * group_size, (start + at_a_time) * group_size)
            readers = [Reader(model, vocab_size) for model in ((senior,) if solo else (senior, junior))]
            parts.append(write(readers, prompts[start:start + at_a_time], group_size, max_new_tokens, None if solo else schedule.to(device),
                               (temperature, top_k, top_p), stops, uniform[some].to(device), coins[some].to(device)))
    longest = max(part.ids.size(1) for part in parts)
    grown = [[F.pad(x, (0, longest - x.size(1))) if x.dim() == 2 else x for x in vars(part).values()] for part in parts]
    return Rollout(*(torch.cat(x) for x in zip(*grown)))


def write(readers, prompts, group_size, max_new_tokens, schedule, sampling, stops, uniform, coins):
    """The decoding loop, for the rows of one batch; see rollout."""
    device, n = uniform.device, len(uniform)
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    tokens = torch.zeros(len(prompts), int(lengths.max()) + max_new_tokens, dtype=torch.long, device=device)
    for i, prompt in enumerate(prompts):
        tokens[i, :len(prompt)] = torch.tensor(prompt, device=device)
    logits = [reader.read(tokens, lengths) for reader in readers]  # each prompt is read once ...
    group = torch.arange(len(prompts), device=device).repeat_interleave(group_size)
    for reader in readers:
        reader.select(group)  # ... and its cache repeated for the group
    tokens, upto, logits = tokens[group], lengths[group], [z[group] for z in logits]
    out = Rollout(torch.zeros(n, max_new_tokens, dtype=torch.long, device=device), torch.zeros(n, dtype=torch.long, device=device),
                  torch.zeros(n, max_new_tokens, dtype=torch.bool, device=device), torch.zeros(n, dtype=torch.bool, device=device),
                  torch.zeros(n, max_new_tokens, device=device), torch.ones(n, dtype=torch.long, device=device))
    # the state of every row that is still being written; `row` says which one it is, so nothing depends on its place in the batch
    row = torch.arange(n, device=device)
    author = torch.ones_like(row, dtype=torch.bool) if schedule is None or schedule.alternate else coins[:, 0]
    gap, half = torch.zeros_like(row), torch.zeros_like(author)
    for t in range(max_new_tokens):
        proposal = logits[0] if len(readers) == 1 else torch.where(author[:, None], *logits)  # [R, V]: the author's
        token, logprob = sample(proposal, uniform[row, t], *sampling)
        out.ids[row, t], out.senior_mask[row, t], out.logprobs[row, t], out.lengths[row] = token, author, logprob, t + 1
        done = torch.isin(token, stops)
        out.finished[row] = done
        tokens.scatter_(1, upto[:, None], token[:, None])
        upto = upto + 1
        if schedule is not None:
            before = author
            author, gap, half, _ = schedule.after(token, author, gap, half, coins[row, t + 1])
            out.turns[row] += (author != before) & ~done
        if done.any():  # finished rows leave the batch, and their state with them
            keep = (~done).nonzero()[:, 0]
            row, author, gap, half, tokens, upto = (x[keep] for x in (row, author, gap, half, tokens, upto))
            for reader in readers:
                reader.select(keep)
        if len(row) == 0 or t + 1 == max_new_tokens:
            break
        logits = [reader.read(tokens, upto) for reader in readers]  # both models read the shared history (paper 3.1)
    longest = int(out.lengths.max())
    return replace(out, ids=out.ids[:, :longest], senior_mask=out.senior_mask[:, :longest], logprobs=out.logprobs[:, :longest])


# ---------------------------------------------------------------------------------------------------------------------------------------
# 5. Rewards and advantages (paper 3.3)
# ---------------------------------------------------------------------------------------------------------------------------------------

def completion_texts(tokenizer, rolled):
    """The text of each completion up to its stop id, N strings."""
    ids = [row[:length - done] for row, length, done in zip(rolled.ids.tolist(), rolled.lengths.tolist(), rolled.finished.tolist())]
    return tokenizer.batch_decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def group_advantages(rewards, group_size, eps=1e-6):
    """(reward - its group's mean) / (its group's standard deviation + eps), [N]; equal rewards give exactly 0. Raises ValueError.

    >>> group_advantages(torch.tensor([1., 0., 0., 1., 5., 5., 5., 5.]), 4).round(decimals=4).tolist()
    [0.866, -0.866, -0.866, 0.866, 0.0, 0.0, 0.0, 0.0]
    """
    if group_size < 2 or rewards.numel() % group_size:
        raise ValueError(f"{rewards.numel()} rewards do not make groups of {group_size} (at least 2)")
    groups = rewards.view(-1, group_size)  # [P, G]
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + eps)
    equal = (groups == groups[:, :1]).all(1, keepdim=True)  # else rounding residue is divided by almost nothing
    return torch.where(equal, 0.0, advantages).view(-1)


# ---------------------------------------------------------------------------------------------------------------------------------------
# 6. Log-probs and loss (paper 3.3 and 3.4)
# ---------------------------------------------------------------------------------------------------------------------------------------

def completion_logprobs(model, prompts, ids, lengths, temperature, *, vocab_size=None, entropy=False, slice_tokens=1024):
    """Log-probs of the completion ids at the sampling temperature, [N, T], 0 on padding; differentiable.

    prompts: N lists of ids (or P of them, each for N / P rows in order); ids [N, T]; lengths [N]. `vocab_size` as in rollout.
    The output head runs on completion positions only, in slices that are recomputed in the backward pass, so the logits of the whole
    batch never exist at once. With `entropy`, returns also the distributions' entropies in nats [N, T], without gradient.
    """
    each = ids.size(0) // len(prompts)
    prompts = [prompt for prompt in prompts for _ in range(each)]
    device, lengths = model.device, lengths.to(model.device)
    ids = ids.to(device)
    starts = torch.tensor([len(p) for p in prompts], device=device)
    whole = torch.zeros(len(prompts), int((starts + lengths).max()), dtype=torch.long, device=device)  # [N, prompt + completion], padded right
    row, col = (torch.arange(ids.size(1), device=device) < lengths[:, None]).nonzero(as_tuple=True)  # the M completion tokens, by row
    for i, prompt in enumerate(prompts):
        whole[i, :len(prompt)] = torch.tensor(prompt, device=device)
    whole[row, starts[row] + col] = ids[row, col]
    hidden = model.get_decoder()(input_ids=whole, use_cache=False).last_hidden_state  # [N, L, D]; causal, so padding on the right is never seen
    hidden = hidden[row, starts[row] + col - 1]  # [M, D]: the shift by one: a token is predicted from the position before it
    head, targets = model.get_output_embeddings(), ids[row, col]
    parts = [checkpoint(slice_logprobs, head, hidden[i:i + slice_tokens], targets[i:i + slice_tokens], temperature, vocab_size, entropy,
                        use_reentrant=False) for i in range(0, len(row), slice_tokens)]
    scattered = [torch.zeros(ids.shape, device=device).index_put((row, col), torch.cat(part)) for part in zip(*parts)]
    return tuple(scattered) if entropy else scattered[0]


def slice_logprobs(head, hidden, targets, temperature, vocab_size, entropy):
    """([M] log-probs of the targets,) and, if asked for, their distributions' entropies [M]."""
    logits = head(hidden)[:, :vocab_size].float() / temperature  # [M, V]
    normaliser = logits.logsumexp(-1)
    logp = logits.gather(-1, targets[:, None])[:, 0] - normaliser
    if not entropy:
        return (logp,)
    with torch.no_grad():  # H = log Z - sum p z
        return logp, normaliser - (torch.exp(logits - normaliser[:, None]) * logits).sum(-1)


def k3(logp, other):
    """Unbiased, never negative estimate of KL(p || other) from samples of p, token by token: r - 1 - log r with r = other / p.

    Beyond e**20 the ratio is held there: the exponential would overflow and turn the gradient into NaN.
    """
    log_ratio = (other - logp).clamp(-20, 20)
    return torch.exp(log_ratio) - 1 - log_ratio


def grpo_loss(logp, old_logp, advantages, mask, clip_eps, ref_logp=None, kl_coef=0.0, denominator=None):
    """The clipped surrogate over `mask`, with an optional k3 KL, divided by `denominator` (default: the mask's sum). Paper 3.3.

    logp, old_logp, ref_logp [N, T]; advantages [N]; mask [N, T] bool: in tandem the *senior's* tokens, in numerator and denominator alike.
    The denominator is a number, or [N, 1] for a number a row; with micro-batches, pass that of the whole optimiser step.
    An empty mask gives 0. What is masked out is selected away before any arithmetic, so NaNs there do no harm.
    """
    mask = mask.bool()
    if denominator is None:
        denominator = mask.sum().clamp(min=1)
    logp, old_logp = torch.where(mask, logp, 0.0), torch.where(mask, old_logp, 0.0)
    ratio = torch.exp((logp - old_logp).clamp(-20, 20))  # pi / pi_old
    advantages = advantages[:, None]
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_eps, 1 + clip_eps) * advantages)  # [N, T]
    if kl_coef:
        loss = loss + kl_coef * k3(logp, torch.where(mask, ref_logp, 0.0))
    return (torch.where(mask, loss, 0.0) / denominator).sum()


def junior_kl(logp, junior_logp, junior_mask, denominator=None):
    """The auxiliary term of paper 3.4 (departure 4): mean over the tokens that the junior wrote of k3 for KL(junior || senior)."""
    if denominator is None:
        denominator = junior_mask.sum().clamp(min=1)
    logp, junior_logp = torch.where(junior_mask, logp, 0.0), torch.where(junior_mask, junior_logp, 0.0)
    return (torch.where(junior_mask, k3(junior_logp, logp), 0.0) / denominator).sum()


def micro_batches(totals, budget):
    """Splits rows by length into batches of at most `budget` tokens, padding included; a longer row gets a batch of its own.

    >>> micro_batches([5, 9, 4, 30], budget=20)
    [[3], [1, 0], [2]]
    """
    batches = []
    for i in sorted(range(len(totals)), key=lambda i: -totals[i]):
        if batches and totals[batches[-1][0]] * (len(batches[-1]) + 1) <= budget:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


class MasterAdamW:
    """AdamW on fp32 master weights: at lr 1e-6 an update of a bf16 weight rounds away, so bf16 models keep an fp32 copy here.

    Gradients of bf16 weights are added up in fp32 as they arrive, and freed at once. For fp32 models the masters are the weights.
    """

    def __init__(self, model, beta2=0.999, weight_decay=0.0):
        self.weights = [p for p in model.parameters() if p.requires_grad]
        self.masters = [p if p.dtype == torch.float32 else p.detach().float().requires_grad_() for p in self.weights]
        for weight, master in zip(self.weights, self.masters):
            if master is not weight:
                weight.register_post_accumulate_grad_hook(lambda w, m=master: self.collect(w, m))
        self.adam = torch.optim.AdamW(self.masters, lr=0.0, betas=(0.9, beta2), weight_decay=weight_decay,
                                      fused=self.masters[0].device.type == "cuda")

    @staticmethod
    def collect(weight, master):
        master.grad = weight.grad.float() if master.grad is None else master.grad.add_(weight.grad)
        weight.grad = None

    def step(self, lr, max_grad_norm):
        """One update; returns the gradient's norm before clipping."""
        norm = torch.nn.utils.clip_grad_norm_(self.masters, max_grad_norm)
        self.adam.param_groups[0]["lr"] = lr
        self.adam.step()
        self.adam.zero_grad()
        self.push()
        return float(norm)

    @torch.no_grad()
    def push(self):
        for weight, master in zip(self.weights, self.masters):
            if master is not weight:
                weight.copy_(master)

    def state_dict(self):
        own = [None if m is w else m.detach() for w, m in zip(self.weights, self.masters)]
        return {"masters": own, "adam": self.adam.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state):
        for master, stored in zip(self.masters, state["masters"]):
            if stored is not None:
                master.copy_(stored)
        self.adam.load_state_dict(state["adam"])
        self.push()


@dataclass
class Batch:
    """A scored rollout, ready for GRPO."""
    prompts: list  # N lists of ids
    ids: torch.Tensor  # [N, T]
    lengths: torch.Tensor  # [N]
    mask: torch.Tensor  # [N, T] bool: where the loss falls
    rewards: torch.Tensor  # [N]
    metrics: dict = field(default_factory=dict)
    samples: list = field(default_factory=list)  # dicts, one a sequence, for samples.jsonl


def score(model, batch, rows, config, vocab_size, entropy=False):
    """completion_logprobs of some rows of a batch, cut to the longest of them."""
    longest = int(batch.lengths[rows].max())
    return completion_logprobs(model, [batch.prompts[i] for i in rows], batch.ids[rows, :longest], batch.lengths[rows], config.temperature,
                               vocab_size=vocab_size, entropy=entropy)


def score_all(model, batch, config, vocab_size):
    """Log-probs of the whole batch [N, T], without gradient, micro-batch by micro-batch."""
    out = torch.zeros(batch.ids.shape, device=model.device)
    totals = [len(p) + n for p, n in zip(batch.prompts, batch.lengths.tolist())]
    with inference(model):
        for rows in micro_batches(totals, config.micro_tokens):
            logp = score(model, batch, rows, config, vocab_size)
            out[rows, :logp.size(1)] = logp
    return out


def grpo_update(model, optimizer, batch, config, lr, vocab_size, reference=None, advantage_eps=1e-6):
    """All optimiser steps over one rollout batch; returns their metrics. Paper 3.3.

    Several steps over a batch (the paper takes two) need the old log-probs frozen before the first; with one, old and new are equal.
    """
    group, per_update = config.group_size, config.prompts_per_update * config.group_size
    advantages = group_advantages(batch.rewards, group, advantage_eps).to(model.device)
    lambda_jun = getattr(config, "lambda_jun", 0.0)
    n = len(batch.prompts)
    totals = [len(p) + k for p, k in zip(batch.prompts, batch.lengths.tolist())]
    real = torch.arange(batch.ids.size(1), device=model.device) < batch.lengths[:, None]
    old_logp = score_all(model, batch, config, vocab_size) if per_update < n else None
    ref_logp = score_all(reference, batch, config, vocab_size) if config.kl_coef or lambda_jun else None
    sums, norms, loss_sum, updates = {}, [], 0.0, range(0, n, per_update)
    model.train()
    for start in updates:
        update = list(range(start, min(start + per_update, n)))
        mask, others = batch.mask[update], (real & ~batch.mask)[update]
        # one denominator for the whole optimiser step, however it is split
        denominator = torch.full((n, 1), max(int(mask.sum()), 1), device=model.device, dtype=torch.float32)
        if config.loss_mean == "sequence":
            denominator[update] = (mask.sum(1, keepdim=True) * (mask.any(1).sum())).clamp(min=1).float()
        for micro in micro_batches([totals[i] for i in update], config.micro_tokens):
            rows = [update[i] for i in micro]
            logp, entropy = score(model, batch, rows, config, vocab_size, entropy=True)
            width = logp.size(1)
            old = logp.detach() if old_logp is None else old_logp[rows, :width]
            ref = None if ref_logp is None else ref_logp[rows, :width]
            mask = batch.mask[rows, :width]
            loss = grpo_loss(logp, old, advantages[rows], mask, config.clip_eps, ref, config.kl_coef, denominator[rows])
            if lambda_jun:
                loss = loss + lambda_jun * junior_kl(logp, ref, real[rows, :width] & ~mask, others.sum().clamp(min=1))
            loss.backward()
            loss_sum += loss.item()
            for name, value in token_stats(logp.detach(), old, advantages[rows], mask, config.clip_eps, entropy, ref).items():
                sums[name] = sums.get(name, 0.0) + value
        norms.append(optimizer.step(lr, config.max_grad_norm))
    model.eval()
    tokens = max(sums.pop("tokens"), 1)
    groups = batch.rewards.view(-1, group)
    return {"reward": batch.rewards.mean().item(), "no_signal": (groups == groups[:, :1]).all(1).float().mean().item(),
            "loss": loss_sum / len(updates), **{name: value / tokens for name, value in sums.items()},
            "grad_norm": sum(norms) / len(norms), "lr": lr}


@torch.no_grad()
def token_stats(logp, old, advantages, mask, clip_eps, entropy, ref):
    """Sums over the loss's tokens: ratio, share whose gradient the clip removed, entropy, and KL to the reference where there is one."""
    ratio, advantages = torch.exp((logp - old)[mask].clamp(-20, 20)), advantages[:, None].expand_as(mask)[mask]
    clipped = ((ratio > 1 + clip_eps) & (advantages > 0)) | ((ratio < 1 - clip_eps) & (advantages < 0))
    stats = {"tokens": mask.sum(), "ratio": ratio.sum(), "clipped": clipped.sum(), "entropy": entropy[mask].sum()}
    if ref is not None:
        stats["kl"] = k3(logp[mask], ref[mask]).sum()
    return {name: float(value) for name, value in stats.items()}


# ---------------------------------------------------------------------------------------------------------------------------------------
# 7. Training loop
# ---------------------------------------------------------------------------------------------------------------------------------------

class Run:
    """A run's folder: config.json, metrics.jsonl, samples.jsonl, checkpoint-N/, final/. What is in it is whole, or is not there."""

    def __init__(self, config):
        self.config, self.folder = config, Path(config.out)
        if not config.resume and self.folder.is_dir() and any(self.folder.iterdir()):
            raise UserError(f"{self.folder} already holds a run: choose another --out, or add --resume to go on with it")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--out {self.folder}: {error.strerror}") from None

    def start(self):
        """Stores the config; on --resume finds the newest checkpoint (or None) and drops what was logged after it."""
        for aside in self.folder.glob(".tmp-*"):
            shutil.rmtree(aside)
        write_aside(self.folder / "config.json", json.dumps({**asdict(self.config), "resume": False}, indent=1) + "\n")
        found = [p for p in self.folder.glob("checkpoint-*") if (p / "trainer_state.pt").is_file()]
        self.newest = max(found, key=lambda p: int(p.name.split("-")[1]), default=None)
        self.step = int(self.newest.name.split("-")[1]) if self.newest else 0
        for name in ("metrics.jsonl", "samples.jsonl"):
            kept = [row for row in read_jsonl(self.folder / name) if self.newest and row["step"] <= self.step]
            write_aside(self.folder / name, "".join(json.dumps(row) + "\n" for row in kept))

    def log(self, name, rows):
        with open(self.folder / name, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)

    def save(self, name, model, tokenizer, state=None):
        """Writes a Hugging Face folder (and the trainer's state) aside, then renames it. On a full disk it warns, and nothing is lost."""
        aside, target = self.folder / f".tmp-{name}", self.folder / name
        try:
            shutil.rmtree(aside, ignore_errors=True)
            with quiet():
                model.save_pretrained(aside)
                tokenizer.save_pretrained(aside)
            if state is not None:
                torch.save(state, aside / "trainer_state.pt")
            shutil.rmtree(target, ignore_errors=True)
            os.replace(aside, target)
        except Exception as error:  # OSError, safetensors' own class, torch's RuntimeError: each writer reports a full disk differently
            shutil.rmtree(aside, ignore_errors=True)
            tqdm.write(f"warning: {target} was not saved ({' '.join(str(error).split())[:200]}); earlier checkpoints are intact")
            return False
        for old in sorted(self.folder.glob("checkpoint-*/trainer_state.pt"), key=lambda p: int(p.parent.name.split("-")[1]))[:-2]:
            old.unlink()  # only the last two can be resumed; all keep their weights
        return True


def write_aside(path, text):
    """A file that is either the old one or the whole new one."""
    aside = path.with_name(f".{path.name}.new")
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, path)


def read_jsonl(path):
    """The whole lines of a log; a half-written last line (after a kill) is left out."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]


class StopRequest:
    """Ctrl-C finishes the step and leaves a checkpoint; a second one stops at once."""

    def __enter__(self):
        self.asked = False
        self.before = signal.signal(signal.SIGINT, self.handle) if threading.current_thread() is threading.main_thread() else None
        return self

    def handle(self, *_):
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        tqdm.write("stopping after this step and a checkpoint; press Ctrl-C again to stop at once")

    def __exit__(self, *_):
        if self.before is not None:
            signal.signal(signal.SIGINT, self.before)


def train_loop(run, model, tokenizer, config, collect, evaluate, reference=None, advantage_eps=1e-6, describe=None):
    """The loop of any GRPO run: collect a batch, update, log, evaluate, save.

    collect(step) -> Batch; evaluate(step, last) -> dict of metrics. All that is drawn depends on (seed, step) only, so the state of a
    run is its weights and its optimiser: a resumed run is the uninterrupted one, bit for bit. `model` must hold the weights of
    `run.newest`. Returns True, or False if Ctrl-C ended it early.
    """
    step = run.step
    model.config.use_cache = False
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = MasterAdamW(model, config.beta2, config.weight_decay)
    if run.newest:
        optimizer.load_state_dict(torch.load(run.newest / "trainer_state.pt", map_location=model.device, weights_only=True))
    else:
        run.log("metrics.jsonl", [{"step": 0, **prefixed("eval", evaluate(0, False))}])
    vocab_size = len(tokenizer)
    with StopRequest() as stop, tqdm(total=config.steps, initial=step, desc=run.folder.name, unit="step", disable=None) as bar:
        while step < config.steps and not stop.asked:
            step += 1
            began = time.perf_counter()
            batch = collect(step)
            rolled = time.perf_counter()
            lr = config.lr * min(1.0, step / max(config.warmup_steps, 1))
            metrics = grpo_update(model, optimizer, batch, config, lr, vocab_size, reference, advantage_eps)
            ended = time.perf_counter()
            metrics = {"step": step, **batch.metrics, **metrics, "rollout_s": rolled - began, "update_s": ended - rolled,
                       "tokens_per_s": int(batch.lengths.sum()) / (ended - began), "memory_gb": peak_memory_gb(model.device)}
            last = step == config.steps
            if config.eval_every and (step % config.eval_every == 0 or last):
                metrics.update(prefixed("eval", evaluate(step, last)))
            run.log("samples.jsonl", [{"step": step, **sample} for sample in batch.samples])
            run.log("metrics.jsonl", [metrics])
            tqdm.write((describe or describe_step)(metrics, config))
            bar.update()
            if step % config.save_every == 0 or last or stop.asked:
                run.save(f"checkpoint-{step}", model, tokenizer, optimizer.state_dict())
    if step < config.steps:
        tqdm.write(f"stopped at step {step} of {config.steps}; go on with: python {Path(sys.argv[0]).name} --out {run.folder} --resume")
        return False
    return run.save("final", model, tokenizer)


def prefixed(prefix, metrics):
    return {f"{prefix}/{name}": value for name, value in metrics.items()}


def peak_memory_gb(device):
    """Peak memory in GB: the GPU's as PyTorch counts it, else that of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    try:
        import resource
    except ImportError:  # Windows
        return 0.0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9


def describe_step(m, config):
    """One readable line a step. The share of the senior's tokens is the alarm of paper 3.3: with its mask lost, tandem fails open to GRPO."""
    text = (f"step {m['step']}/{config.steps} | reward {m['reward']:.3f} | senior {m['senior_share']:.2f} | hand-overs {m['handovers']:.1f} | length "
            f"{m['length']:.0f}, {m['cut']:.0%} cut | no signal {m['no_signal']:.0%} | loss {m['loss']:+.4f} | "
            + (f"kl {m['kl']:.4f} | " if "kl" in m else "") + (f"habit {m['habit']:.0%} | " if "habit" in m else "") +
            f"entropy {m['entropy']:.3f} | clipped {m['clipped']:.1%} | grad {m['grad_norm']:.2f} | {m['rollout_s']:.1f}+{m['update_s']:.1f} s")
    if "eval/pass@1" in m:
        text += f"\n    held out, the senior alone: pass@1 {m['eval/pass@1']:.3f}  pass@{config.eval_samples} {m[f'eval/pass@{config.eval_samples}']:.3f}"
    if abs(m["senior_share"] - config.prob_senior) > (0.2 if config.prob_senior < 1 else 0):
        text += f"\nWARNING: the senior wrote {m['senior_share']:.0%} of the tokens, with --prob-senior {config.prob_senior}: is the authorship mask right?"
    return text


def pass_at_k(n, c, k):
    """Unbiased pass@k: the chance that k of n samples, c of them right, hold a right one: 1 - C(n-c, k) / C(n, k). Raises ValueError.

    >>> pass_at_k(4, 1, 2), pass_at_k(4, 0, 1), pass_at_k(4, 3, 2)
    (0.5, 0.0, 1.0)
    """
    if not (1 <= k <= n and 0 <= c <= n):
        raise ValueError(f"pass@{k} of {n} samples, {c} right: needs 1 <= k <= n and 0 <= c <= n")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def habit_share(texts, habit):
    """The share of the lines of reasoning (not blank, no box) in which the regular expression is found."""
    lines = [line for text in texts for line in text.splitlines() if line.strip() and "\\boxed" not in line]
    return sum(bool(re.search(habit, line)) for line in lines) / max(len(lines), 1)


class Tandem:
    """The two things that make GRPO tandem RL: how a batch is collected, and what is measured on held-out problems."""

    def __init__(self, config, senior, junior, tokenizer, train, held_out):
        self.config, self.senior, self.junior, self.tokenizer, self.train, self.held_out = config, senior, junior, tokenizer, train, held_out
        self.vocab_size = len(tokenizer)
        self.stops = stop_ids(senior, tokenizer)
        self.schedule = None if config.prob_senior == 1 else self.schedule_of(config.schedule, prob_senior=config.prob_senior)

    def schedule_of(self, name, **settings):
        return Schedule.of(self.tokenizer, self.vocab_size, name, max_gap=self.config.max_gap, **settings)

    def problems_of(self, step):
        """The step's prompts: epoch after epoch in a shuffled order that depends on (seed, epoch) alone."""
        n, picked = len(self.train), []
        for i in range((step - 1) * self.config.prompts_per_step, step * self.config.prompts_per_step):
            order = random.Random(stream(self.config.seed, "epoch", i // n)).sample(range(n), n)
            picked.append(self.train[order[i % n]])
        return picked

    def collect(self, step):
        """A tandem rollout, rewarded as a team; the loss mask is the senior's tokens."""
        c = self.config
        problems = [item for item in self.problems_of(step) for _ in range(c.group_size)]
        rolled = rollout(self.senior, self.junior, [ids for _, ids in problems[::c.group_size]], group_size=c.group_size,
                         max_new_tokens=c.max_new_tokens, schedule=self.schedule, temperature=c.temperature, stops=self.stops,
                         vocab_size=self.vocab_size, max_rows=c.max_rows, seed=stream(c.seed, "rollout", step))
        texts = completion_texts(self.tokenizer, rolled)
        rewards = [grade(problem, text) for (problem, _), text in zip(problems, texts)]
        metrics = {"senior_share": rolled.senior_mask.sum().item() / rolled.lengths.sum().item(),
                   "handovers": (rolled.turns - 1).float().mean().item(), "length": rolled.lengths.float().mean().item(),
                   "cut": 1 - rolled.finished.float().mean().item()}
        if c.habit:
            metrics["habit"] = habit_share(texts, c.habit)
        samples = [self.sample(problems[i][0], texts[i], rewards[i], rolled, i) for i in range(0, len(texts), c.group_size)]
        return Batch([ids for _, ids in problems], rolled.ids, rolled.lengths, rolled.senior_mask, torch.tensor(rewards), metrics, samples)

    def sample(self, problem, text, reward, rolled, i):
        n = int(rolled.lengths[i])
        author = "".join("s" if senior else "j" for senior in rolled.senior_mask[i, :n].tolist())
        return {"prompt": problem.question, "answer": problem.answer, "text": text, "ids": rolled.ids[i, :n].tolist(), "author": author,
                "reward": reward, "finished": bool(rolled.finished[i])}

    def evaluate(self, step, last):
        """The senior alone on held-out problems; with --handoff-eval, at the start and at the end, also in turns with the junior."""
        c, out = self.config, {}
        names = ["solo"] + (["word", "step"] if c.handoff_eval and (step == 0 or last) else [])
        for name in names:
            schedule = {"solo": None, "word": lambda: self.schedule_of("word"), "step": lambda: self.schedule_of("step", alternate=True)}[name]
            result, shown = self.measure(self.senior, self.junior, schedule and schedule(), stream(c.seed, "eval", step))
            out.update(result if name == "solo" else {f"{name}_{key}": value for key, value in result.items()})
            if name == names[-1] and c.show and step:
                tqdm.write("\n".join(self.show(s) for s in shown[:c.show]))
        if c.handoff_eval and step == 0:
            out.update({f"junior_{k}": v for k, v in self.measure(self.junior, None, None, stream(c.seed, "eval", step))[0].items()})
        return out

    def measure(self, senior, junior, schedule, seed):
        c, n = self.config, self.config.eval_samples
        rolled = rollout(senior, junior, [ids for _, ids in self.held_out], group_size=n, max_new_tokens=c.max_new_tokens, schedule=schedule,
                         temperature=c.eval_temperature, top_k=c.eval_top_k, top_p=c.eval_top_p, stops=self.stops,
                         vocab_size=self.vocab_size, max_rows=c.max_rows or 512, seed=seed)
        texts = completion_texts(self.tokenizer, rolled)
        right = [grade(self.held_out[i // n][0], text) for i, text in enumerate(texts)]
        correct = [int(sum(right[i:i + n])) for i in range(0, len(right), n)]
        out = {f"pass@{k}": sum(pass_at_k(n, c, k) for c in correct) / len(correct) for k in sorted({1, n})}
        out.update(length=rolled.lengths.float().mean().item(), cut=1 - rolled.finished.float().mean().item())
        if c.habit:
            out["habit"] = habit_share(texts, c.habit)
        return out, [self.sample(self.held_out[i // n][0], texts[i], right[i], rolled, i) for i in range(0, min(len(texts), n * c.show), n)]

    def show(self, sample):
        """A sample with its authors: two colours in a terminal, else the junior's tokens in «»."""
        colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        senior, junior, end = ("\033[96m", "\033[93m", "\033[0m") if colour else ("", "«", "»")
        text, i, ids, author = "", 0, sample["ids"], sample["author"]
        while i < len(ids):
            j = next((j for j in range(i, len(ids)) if author[j] != author[i]), len(ids))
            piece = printable(self.tokenizer.decode(ids[i:j], clean_up_tokenization_spaces=False))
            text += (senior + piece + (end if colour else "")) if author[i] == "s" else junior + piece + end
            i = j
        names = f"{senior}senior{end if colour else ''} {junior}junior{end}"
        return f"--- {names} | {printable(sample['prompt'])[:300]}\n{text}\n--- reward {sample['reward']:.0f}, answer {printable(sample['answer'])}"


def printable(text):
    """Model text is data: control characters (a terminal's escape codes) are shown, not obeyed.

    >>> printable("a\\x1b[31mb\\n")
    'a␛[31mb\\n'
    """
    return re.sub(r"[\x00-\x08\x0b-\x1f]", lambda m: chr(0x2400 + ord(m[0])), re.sub(r"[\x7f-\x9f]", "\N{REPLACEMENT CHARACTER}", text))


# ---------------------------------------------------------------------------------------------------------------------------------------
# 8. Command line
# ---------------------------------------------------------------------------------------------------------------------------------------

def prepare(config, tokenizer):
    """(train, held out), each a list of (problem, prompt ids). What is skipped is counted aloud. Raises UserError."""
    problems, skipped = load_problems(config.data)
    held_out, skipped_eval = load_problems(config.eval_data) if config.eval_data else ([], 0)
    if not config.eval_data:
        random.Random("held out").shuffle(problems)
        take = min(config.eval_problems, len(problems) // 5)
        held_out, problems = problems[:take], problems[take:]
        if not held_out:
            raise UserError(f"{config.data}: too few problems to hold some out; name a file with --eval-data")
    held_out = held_out[:config.eval_problems]
    train, too_long = encode_problems(tokenizer, problems, config.prompt_suffix, config.max_prompt_tokens)
    held_out, too_long_eval = encode_problems(tokenizer, held_out, config.prompt_suffix, config.max_prompt_tokens)
    print(f"{len(train)} problems to train on ({skipped} without question or answer and {too_long} too long were skipped), "
          f"{len(held_out)} held out ({skipped_eval} and {too_long_eval} skipped)")
    if len(train) < config.prompts_per_step:
        raise UserError(f"{config.data}: {len(train)} problems are fewer than --prompts-per-step {config.prompts_per_step}")
    return train, held_out


def train(config):
    """One run from start (or checkpoint) to final/. Returns its metrics rows, or None if Ctrl-C ended it."""
    junior_name = config.model if config.junior == "self" else config.junior
    check_model_name(config.model)
    check_model_name(junior_name)
    device = pick_device(config.device)
    dtype = pick_dtype(config.dtype, device)
    run = Run(config)
    if config.resume and (run.folder / "final").is_dir() and len(read_jsonl(run.folder / "metrics.jsonl")) > config.steps:
        print(f"{run.folder} is finished: nothing to do")
        return read_jsonl(run.folder / "metrics.jsonl")
    tokenizer = load_tokenizer(config.model)
    if config.junior != "self":
        check_same_vocabulary(tokenizer, load_tokenizer(junior_name), junior_name)
    problems, held_out = prepare(config, tokenizer)
    run.start()
    senior = load_model(str(run.newest or config.model), device, dtype)
    needs_junior = config.prob_senior < 1 or config.kl_coef or config.lambda_jun or config.handoff_eval
    junior = freeze(load_model(junior_name, device, dtype)) if needs_junior else None
    for model, name in ((senior, config.model), (junior, junior_name)):
        if model is not None and model.config.vocab_size < len(tokenizer):
            raise UserError(f"{name}: the model knows {model.config.vocab_size} ids, its tokenizer {len(tokenizer)}")
    print(f"{run.folder}: {config.model}, {sum(p.numel() for p in senior.parameters()) / 1e6:.1f} M parameters, {str(dtype)[6:]} on {device}; "
          + (f"junior {junior_name}, schedule {config.schedule}, senior {config.prob_senior:.0%}" if config.prob_senior < 1 else "vanilla GRPO, no junior"))
    tandem = Tandem(config, senior, junior, tokenizer, problems, held_out)
    done = train_loop(run, senior, tokenizer, config, tandem.collect, tandem.evaluate, reference=junior)
    return read_jsonl(run.folder / "metrics.jsonl") if done else None


def table(runs, config):
    """The closing table: {name: metrics rows} -> text."""
    head = ["", "solo", "word hand-off", "step hand-off", "habit"]
    keys = ["eval/pass@1", "eval/word_pass@1", "eval/step_pass@1", "eval/habit"]
    first = next(iter(runs.values()))[0]
    lines = {"junior alone": [first.get("eval/junior_" + k[5:]) for k in keys], "senior at the start": [first.get(k) for k in keys]}
    lines.update({f"after {name}": [rows[-1].get(k) for k in keys] for name, rows in runs.items()})
    cells = [[name] + ["" if v is None else f"{v:.3f}" for v in row] for name, row in lines.items() if any(v is not None for v in row)]
    columns = [i for i in range(len(head)) if i == 0 or any(row[i] for row in cells)]
    width = [max(len(row[i]) for row in [head] + cells) for i in range(len(head))]
    body = "\n".join("  ".join(row[i].ljust(width[i]) if i == 0 else row[i].rjust(width[i]) for i in columns) for row in [head] + cells)
    return (f"\n{body}\n\npass@1 on held-out problems. solo: the senior alone; hand-off: the senior and the junior in turns, after a word or after a "
            f"step.\n" + (f"habit: share of the lines of reasoning that match {config.habit!r}.\n" if config.habit else ""))


def main(argv=None):
    config = parse_config(Config, PRESETS, sys.argv[1:] if argv is None else argv, "Tandem Reinforcement Learning (arXiv 2606.28166)")
    arms = {"tandem" if config.prob_senior < 1 else "GRPO": config}
    if config.compare_vanilla:
        control = replace(config, prob_senior=1.0, lambda_jun=0.0, compare_vanilla=False, show=0, out=config.out + "-vanilla")
        arms = {"vanilla GRPO": replace(control, resume=config.resume and (Path(control.out) / "config.json").is_file()), **arms}
    if config.compare_vanilla and not config.resume:
        for arm in arms.values():
            Run(arm)  # refuses a folder that is taken, before an hour is spent on the other arm
    runs = {}
    for name, arm in arms.items():
        rows = train(arm)
        if rows is None:
            return 130
        runs[name] = rows
    print(table(runs, config))
    print("files: " + "; ".join(f"{arm.out}/final (the model), {arm.out}/metrics.jsonl, {arm.out}/samples.jsonl" for arm in arms.values()))
    return 0


def run_main(entry):
    """A script's entry: users' mistakes and full disks are one line, not a traceback."""
    try:
        sys.exit(entry())
    except UserError as error:
        fail(error)
    except OSError as error:
        fail(error, status=1)
    except KeyboardInterrupt:
        fail("interrupted", status=130)


if __name__ == "__main__":
    run_main(main)
