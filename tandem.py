"""Tandem Reinforcement Learning (arXiv 2606.28166), and GRPO from scratch, in one file.

The idea. Reinforcement learning with a verifier makes a model strong and strange: it drifts to habits that nobody else can take over from. So
let two models write every rollout together: a trainable *senior* and a frozen *junior* take turns at random, a word or so each. The pair is
rewarded, and the plain GRPO loss falls on the senior's tokens only. What the junior cannot continue earns less, so the senior keeps its strength
and stays easy to take over from, close to the junior, and legible. With `--prob-senior 1` the senior writes alone: this *is* vanilla GRPO.
Shapes: P prompts, G completions of each, N = P * G; T completion positions, L with the prompt, Q new ones, M tokens; R rows decoded; V words, D wide.

Departures from the paper and its released code
    1. One GPU and plain PyTorch, not two and patched vLLM. Only the author's distribution is sampled (there both are, and one is thrown away).
    2. A token is drawn by inverting its cumulative distribution with a random number that belongs to (sequence, position): a rollout depends
       on the seed, not on how many rows run at a time or have finished. (On a CPU to the bit; on a GPU rounding depends on the batch.)
    3. Old log-probs come from the training forward pass before the first update, not from the sampler: the two then agree in bf16.
    4. `lambda_jun` (3.4, 0 in the paper) weighs a KL on the tokens that the junior wrote: here the unbiased k3 estimate of KL(junior || senior).
    5. `steps` is 200, and final/ is the last step (the paper: 2 epochs, best at steps 120-200 by held-out pass@4, which is logged here).

Run it
    python tandem.py                                    # the built-in toy world, vanilla GRPO and then tandem; minutes on a laptop's CPU
    python tandem.py --preset gsm8k                     # Qwen3-0.6B on GSM8K, one GPU
    python tandem.py --preset gsm8k --prob-senior 1 --out runs/vanilla    # vanilla GRPO; --kl-coef 0.001: KL-Reg; --group-size 16: G16
"""
import argparse, contextlib, copy, functools, glob, inspect, itertools, json, logging, math, operator, os, random, re, shutil, signal, subprocess
import sys, threading, time
from collections import Counter, namedtuple
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

torch.backends.cuda.enable_cudnn_sdp(False)  # (it plans for half a second at every new shape, and here each step has another)
TOY = Path(__file__).resolve().parent / "tests" / "toy"

class UserError(Exception):
    """A mistake of the user's: shown as one line, exit status 2, no traceback."""

@contextlib.contextmanager
def blame(what):
    """Whatever goes wrong inside is due to `what`, a file or a setting of the user's: broken files raise something else in every library."""
    try:
        yield
    except Exception as error:
        said = ' '.join(str(error.__cause__ or error).split())[:200] or type(error).__name__
        raise error if isinstance(error, UserError) else UserError(f"{what}: {said}") from None
# ------------------------------------- 1. Config: the paper's values are the defaults -------------------------------------
@dataclass
class GRPOConfig:
    """What any GRPO run needs, whatever the reward (shared with rlt.py). The comment beside a field is its --help."""
    prompts_per_step: int = 16  # prompts of a rollout batch
    group_size: int = 8  # completions of each prompt
    max_prompt_tokens: int = 1024  # longer prompts are skipped and counted
    max_new_tokens: int = 3000  # completions are cut here
    temperature: float = 0.6  # of sampling, and of every log-prob
    max_rows: int = 0  # sequences decoded at a time; 0: as many as a GPU's free memory can hold (the result is the same)
    prompts_per_update: int = 8  # prompts of one optimiser step; a divisor of prompts_per_step
    clip_eps: float = 0.2  # the ratio is clipped to [1 - eps, 1 + eps]
    kl_coef: float = 0.0  # weight of the k3 KL to the frozen partner; 0: none (the KL-Reg control: 0.001)
    loss_mean: str = "token"  # token: mean over all tokens of an update; sequence: mean of each sequence, then of sequences
    lr: float = 1e-6  # AdamW's learning rate, constant after the warm-up
    warmup_steps: int = 0  # steps of linear warm-up
    beta2: float = 0.999  # AdamW's second beta (the first is 0.9)
    weight_decay: float = 0.01  # AdamW's weight decay
    max_grad_norm: float = 1.0  # gradients are clipped to this norm
    seed: int = 0  # of everything that is drawn
    steps: int = 200  # rollout batches to train on
    device: str = "auto"  # auto: cuda, then mps, then cpu
    dtype: str = "auto"  # bfloat16, float32, or auto: bfloat16 where the GPU computes in it
    micro_tokens: int = 16384  # tokens, padding included, of one forward and backward pass
    gradient_checkpointing: bool = True  # recompute activations in the backward pass
    out: str = "runs/tandem"  # the run's folder
    resume: bool = False  # go on from the newest checkpoint in --out, with the settings stored there
    save_every: int = 20  # steps between checkpoints
    eval_every: int = 20  # steps between held-out evaluations; 0: none
    show: int = 0  # samples shown in the terminal at each evaluation
    def check(self):
        check_ranges(self)
        if self.prompts_per_step % self.prompts_per_update:
            raise UserError(f"--prompts-per-update {self.prompts_per_update} does not divide --prompts-per-step {self.prompts_per_step}")

@dataclass
class Config(GRPOConfig):
    """Tandem RL; the settings of the paper's Qwen3-4B run."""
    model: str = "Qwen/Qwen3-4B-Instruct-2507"  # the senior's start: a folder or a hub name
    junior: str = "self"  # the frozen partner: self (a copy of the senior's start) or a checkpoint with the same vocabulary
    data: str = "deepscaler"  # gsm8k, math, deepscaler, countdown (and NAME-test), or a .jsonl, .json or .parquet file
    eval_data: str = ""  # held-out problems, named likewise; empty: taken out of --data before training
    eval_problems: int = 1000  # how many held-out problems are evaluated
    system_prompt: str = ""  # system prompt; empty: none (or the chat template's own)
    prompt_suffix: str = "\nThink step by step, and put the final answer in \\boxed{}."  # follows each question
    lora_rank: int = 0  # train an adapter of this rank (lr: about ten times as high); a junior `self` is then the same weights; 0: train all
    prob_senior: float = 0.5  # chance that a turn is the senior's; 1: vanilla GRPO, the senior alone
    schedule: str = "word"  # hand over after a word's first token (word), every token (token), or a blank line (step)
    max_gap: int = 32  # word schedule: the author is redrawn after so many tokens without a word's beginning
    lambda_jun: float = 0.0  # paper 3.4: weight of the auxiliary KL on the tokens that the junior wrote
    eval_samples: int = 4  # completions of each held-out problem, by the senior alone: pass@1 and pass@(this many)
    eval_temperature: float = 0.7  # sampling in evaluation
    eval_top_p: float = 0.8  # likewise
    eval_top_k: int = 20  # likewise; 0: all
    handoff_eval: bool = False  # also evaluate senior and junior in turns
    habit: str = ""  # a regular expression; the share of the lines of reasoning it matches is logged (GSM8K's marks: '<<.*?>>')
    def check(self):
        super().check()
        if self.prob_senior == 1 and self.lambda_jun:
            raise UserError("--lambda-jun needs a junior that writes: --prob-senior below 1")
        with blame("--habit is not a regular expression"):
            re.compile(self.habit)

def check_ranges(config, **ranges):
    """Raises UserError that names a number out of its range (RANGES, or one given here), or a word that is none of its choices."""
    for f in fields(config):
        value, (low, high) = getattr(config, f.name), {**RANGES, **ranges}.get(f.name, (0, 10**7))
        if type(value) is not f.type and (f.type, type(value)) != (float, int):  # (in a config.json that was edited)
            raise UserError(f"{flag(f.name)} must be {f.type.__name__}, not {value!r}")
        if f.type in (int, float) and not low <= value <= high:  # (never so for NaN)
            raise UserError(f"{flag(f.name)} must be a number from {low} to {high}, not {value}")
        if f.name in CHOICES and (re.sub(r":\d+$", "", value) if f.name == "device" else value) not in CHOICES[f.name]:
            raise UserError(f"{flag(f.name)} must be one of {', '.join(CHOICES[f.name])}, not {value!r}")

RANGES = {  # every other number may be anything from 0 to ten million
    "group_size": (2, 10**5), "lora_rank": (0, 4096), "seed": (0, 2**63), "prob_senior": (1e-6, 1), "temperature": (1e-6, 100), "lr": (0, 1),
    "eval_top_p": (1e-6, 1), "beta2": (0, 1 - 1e-6), "max_grad_norm": (1e-6, 10**7), "clip_eps": (1e-6, 10**7), **dict.fromkeys((
        "prompts_per_step", "prompts_per_update", "max_prompt_tokens", "max_new_tokens", "micro_tokens", "steps", "save_every", "max_gap",
        "eval_problems", "eval_samples"), (1, 10**7))}
CHOICES = {"loss_mean": ("token", "sequence"), "device": ("auto", "cuda", "mps", "cpu"), "dtype": ("auto", "bfloat16", "float32"),
           "schedule": ("word", "token", "step")}
NEUTRAL = {"show", "resume", "out", "device", "save_every", "eval_every", "max_rows", "micro_tokens", "gradient_checkpointing"}  # change no result
PRESETS = {"paper": {},  # 2 x A100 80 GB in the paper
    "gsm8k": dict(model="Qwen/Qwen3-0.6B", data="gsm8k", eval_data="gsm8k-test", eval_problems=200, max_new_tokens=512, out="runs/gsm8k"),
    "toy": dict(model=str(TOY / "senior"), junior=str(TOY / "junior"), data=str(TOY / "train.jsonl"), eval_data=str(TOY / "eval.jsonl"),
                prompts_per_step=9, prompts_per_update=9, group_size=16, max_new_tokens=44, temperature=1.0, lr=3e-4, warmup_steps=5, beta2=0.99,
                weight_decay=0.0, steps=60, eval_problems=100, eval_temperature=1.0, eval_top_p=1.0, eval_top_k=0, handoff_eval=True,
                habit="^Zorb", prompt_suffix="", gradient_checkpointing=False, device="cpu", show=1, out="runs/toy")}
flag = lambda name: "--" + name.replace("_", "-")
readable = lambda metrics: " | ".join(f"{name} {value}" if isinstance(value, int) else f"{name} {value:.3g}" for name, value in metrics.items())

def parse_config(config_class, presets, argv, description):
    """A config dataclass from the command line: explicit flags over --preset's values over the defaults; no argument at all is `--preset toy`.
    With --resume the settings are those stored in --out, and a flag that contradicts them is refused. Raises UserError."""
    parser = argparse.ArgumentParser(description=description, argument_default=argparse.SUPPRESS, allow_abbrev=False)
    parser.error = fail
    parser.add_argument("--preset", help="a named set of values; where a flag is given without it, `paper`", choices=list(presets))
    docs = dict(re.findall(r"^    (\w+): .*?  # (.*)$", "".join(map(inspect.getsource, config_class.__mro__[-2::-1])), re.M))
    for f in fields(config_class):
        kind = {"type": (lambda s: s.encode().decode()) if f.type is str else f.type} if f.type is not bool else {"action": argparse.BooleanOptionalAction}
        parser.add_argument(flag(f.name), **kind, help=f"{docs[f.name]} (default: {f.default!r})".replace("%", "%%"))
    flags = vars(parser.parse_args(argv))
    given = {**presets[flags.pop("preset", "paper" if argv else "toy")], **flags}
    config = config_class(**given)
    if getattr(config, "resume", False):
        stored, free = Path(config.out) / "config.json", NEUTRAL | {"steps"}
        if not stored.is_file():
            raise UserError(f"--resume: there is no run in {config.out} (no config.json)")
        with blame(f"--resume: {stored} is not the config of such a run"):
            content = json.loads(stored.read_text())  # all of the settings, and no others
            config = replace(config, **{f.name: content.pop(f.name) for f in fields(config)}, **content)
            config.check()
        for name in [name for name in sorted(given.keys() - free) if given[name] != getattr(config, name)]:
            raise UserError(f"--resume: the run in {config.out} has {flag(name)} {getattr(config, name)!r}, not {given[name]!r}")
        config = replace(config, **{**{name: flags[name] for name in flags.keys() & free}, "out": str(stored.parent)})
    config.check()
    return config

def fail(message, status=2):
    sys.stderr.write(f"{Path(sys.argv[0]).name}: error: {printable(' '.join(str(message).split()))}\n")
    sys.exit(status)

def stream(*path):
    """A seed of its own for every purpose: the same path gives the same 63 bits on every machine."""
    return random.Random("/".join(map(str, path))).getrandbits(63)
# ------------------------------------- 2. Problems and verifier -------------------------------------
@dataclass
class Problem:
    question: str
    answer: str  # the final answer only
    solution: str = ""  # the worked solution, where the data has one
    numbers: tuple = ()  # Countdown: the numbers that may be used; the answer is the target

HUB = {"gsm8k": ("openai/gsm8k", "main", "train"), "gsm8k-test": ("openai/gsm8k", "main", "test"),  # name -> (hub path, configuration, split)
       "math": ("DigitalLearningGmbH/MATH-lighteval", "default", "train"), "math-test": ("HuggingFaceH4/MATH-500", "default", "test"),
       "deepscaler": ("agentica-org/DeepScaleR-Preview-Dataset", "default", "train")}
BUILT_IN = {name: str(TOY / f"{name}.parquet") for name in ("countdown", "countdown-test")}  # made by tests/make_toy.py
FILES = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
QUESTIONS, ANSWERS = ("question", "problem", "prompt", "input"), ("answer", "final_answer", "target", "solution")  # column names, in any case
NEEDED = f"a question column ({'/'.join(QUESTIONS)}) and an answer column ({'/'.join(ANSWERS)})"

def load_rows(name):
    """The rows of a named set or of a local file. Raises UserError for what is not there or not readable."""
    import datasets  # (here, since it takes a second)
    name = BUILT_IN.get(name, name)
    state = "no such file" if not Path(name).is_file() else "an empty file" if not Path(name).stat().st_size else "another kind of file"
    if name not in HUB and (Path(name).suffix not in FILES or state != "another kind of file"):
        raise UserError(f"no data {name!r} ({state}): name {', '.join([*HUB, *BUILT_IN])}, or a {', '.join(FILES)} file that holds {NEEDED}")
    datasets.disable_progress_bars()
    datasets.utils.logging.set_verbosity(logging.CRITICAL)
    path, configuration, split = HUB.get(name, (FILES.get(Path(name).suffix), None, "train"))
    with blame(f"{name} could not be " + ("fetched from the hub" if name in HUB else f"read; accepted is a {'/'.join(FILES)} file with {NEEDED}")):
        rows = datasets.load_dataset(path, configuration, split=split, data_files=None if name in HUB else glob.escape(name))
        rows[:]  # (every row is decoded, so that what cannot be read is found here)
        return rows

def load_problems(name):
    """(list of Problem, number of rows skipped for want of a question or an answer) of a named set or a local file. Raises UserError."""
    rows = load_rows(name)
    columns = {c.lower(): c for c in rows.column_names}
    questions, answers, body, worked = ([columns[c] for c in names if c in columns] for names in (QUESTIONS, ANSWERS, ["body"], ["solution"]))
    if not (questions and answers):
        raise UserError(f"{name}: needs {NEEDED}; it has {', '.join(rows.column_names) or 'no rows'}")
    problems = []
    for row in rows:
        parts = [row[c] for c in body + questions[:1]]  # (SVAMP keeps the story in a column of its own, `Body`)
        answer = next(filter(None, (final_answer(row[c]) for c in answers)), None)
        numbers = row.get("countdown_numbers") or []
        whole = isinstance(numbers, list) and all(type(n) is int and n >= 0 for n in numbers)
        if answer and whole and all(isinstance(part, str) and part.strip() for part in parts):
            problems.append(Problem(" ".join(parts).strip(), answer, str(row[(worked or answers)[0]]), tuple(numbers)))
    if not problems:
        raise UserError(f"{name}: none of its {len(rows)} rows has both a question and an answer")
    return problems, len(rows) - len(problems)

def final_answer(value):
    """The final answer in a column's value, or None: after GSM8K's `####`, in the last box, or the value itself if it is short."""
    value = value[0] if isinstance(value, list) and len(value) == 1 else value
    if not isinstance(value, (str, int, float)) or value != value: return None  # (NaN)
    text = str(int(value) if isinstance(value, float) and value.is_integer() else value).rpartition("####")[2]  # (all of it, where there is none)
    text = extract_boxed(text) or text
    return text.strip() if text.strip() and len(text) <= 200 and "\n" not in text.strip() else None

def extract_boxed(text):
    r"""The content of the last balanced `\boxed{}`, or None. One pass with a stack, so linear in hostile text."""
    stack, best = [], (-1, -1)  # of every open brace: where a box's content starts, or -1 for another brace; escaped ones don't count
    for brace in re.finditer(r"\\boxed\s*\{|\\.|[{}]", text, re.S):
        if brace[0] == "}" and stack:
            best = max(best, (stack.pop(), brace.start()))
        elif brace[0] == "{" or brace[0].startswith("\\boxed"):
            stack.append(brace.end() if brace[0] != "{" else -1)
    return text[slice(*best)] if best[0] >= 0 else None

class SymbolicGrader:
    """math-verify (its LaTeX parser: the other one calls `eval`) in a child process that a timer kills: no signal interrupts a tower of powers."""
    CHILD = """if True:
        import contextlib, json, sys
        from math_verify import LatexExtractionConfig, parse, verify
        print("ready", flush=True)
        for line in sys.stdin:
            equal = False
            with contextlib.suppress(Exception):
                answer, box = (parse(f"${text}$", [LatexExtractionConfig()], parsing_timeout=None) for text in json.loads(line))
                equal = bool(answer and box) and verify(answer, box, timeout_seconds=None)
            print(equal, flush=True)"""
    child, lock = None, threading.Lock()
    @functools.lru_cache(maxsize=10000)
    def equal(self, answer, box, deadline=5.0):
        with self.lock:
            if self.child is None or self.child.poll() is not None:
                self.child = subprocess.Popen([sys.executable, "-c", self.CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                              stderr=subprocess.DEVNULL, text=True, start_new_session=True)  # (Ctrl-C is not for it)
                if self.child.stdout.readline() != "ready\n":
                    raise UserError("math-verify does not import; install it with: pip install 'math-verify[antlr4_13_2]'")
            (timer := threading.Timer(deadline, self.child.kill)).start()
            with contextlib.suppress(OSError):  # (a child that died before it was asked)
                print(json.dumps([re.sub(r"\\?\$|\\[,!]", "", text) for text in (answer, box)]), file=self.child.stdin, flush=True)
            verdict = self.child.stdout.readline()  # "" once the timer has killed it
            timer.cancel()
            self.child = self.child if verdict else None
            return verdict == "True\n"
grader = SymbolicGrader()

def verify(text, answer, numbers=()):
    """1.0 if the last box of `text` holds `answer`, or, with `numbers` (Countdown), an expression of these that is worth it, exactly; else 0.0."""
    box, answer = (side.strip().removesuffix(".") for side in (extract_boxed(text) or "", answer))
    if numbers:
        box = box.partition("=")[0].replace("×", "*").replace("÷", "/")
        spare = Counter(re.findall("[0-9]+", box)) - Counter(map(str, numbers))
        legal = len(box) <= 200 and re.fullmatch(r"([0-9 +\-*/(){}]|\\(times|cdot|div|left|right)|\\frac *(?={))+", box) and not spare
        legal = legal and not re.search(r"[0-9)}]\s*(\(|\\left|\\frac)|[)}]\s*[0-9]", box)  # 3(4) is a product to some, and 3 + 4 to math-verify
        return float(bool(legal) and grader.equal(answer, box))  # (math-verify parses it, and computes with exact fractions)
    box = box if "=" in answer else re.sub(r"^[A-Za-z]\w*\s*=\s*", "", box)  # `x = 7` is 7, but `8 = 7` is nothing
    words = [re.sub(r"\\text\w*\{([^{}]*)\}", r"\1", side).strip() for side in (box, answer)]
    words = [side if len(side) == 1 else side.casefold() for side in words]
    if box == answer or words[1].replace(" ", "").isalpha() or box.count("=") != answer.count("="):  # as text: `no` is not `on`
        return float(box != "" and words[0] == words[1])
    return float(box != "" and len(box) <= 500 and grader.equal(answer, box))

def encode_prompt(tokenizer, text, system=""):
    """Token ids of a user's turn, ready for the answer. Without a chat template: `Question: ...`, a new line, `Answer:`."""
    if tokenizer.chat_template is None:
        return tokenizer(f"{system}\n\nQuestion: {text}\nAnswer:".lstrip("\n")).input_ids
    messages = [{"role": "system", "content": system}] * bool(system) + [{"role": "user", "content": text}]
    with blame("the chat template does not take this prompt (one with a system prompt, perhaps)"):
        chat = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, enable_thinking=False)  # (Qwen3's switch)
    return tokenizer(chat, add_special_tokens=False).input_ids  # the template has written them already
# ------------------------------------- 3. Models -------------------------------------
def pick_device(device, dtype):
    """(torch.device, torch.dtype) for --device and --dtype. Raises UserError for a device that this machine lacks."""
    have = ["cuda"] * torch.cuda.is_available() + ["mps"] * torch.backends.mps.is_available() + ["cpu"]
    device = have[0] if device == "auto" else device
    if device.split(":")[0] not in have:
        raise UserError(f"--device {device}: this machine has {', '.join(have)}")
    bf16 = dtype == "bfloat16" or (dtype == "auto" and device[:4] == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False))
    return torch.device(device), torch.bfloat16 if bf16 else torch.float32

def from_pretrained(kind, name, **settings):
    """kind.from_pretrained(name); what the user got wrong becomes a UserError. No remote code is ever run."""
    if Path(name).exists() and not ((file := Path(name) / "config.json").is_file() and '"model_type"' in file.read_text("utf-8", "replace")):
        raise UserError(f"{name}: no model there (no config.json with a model_type); a run keeps its models in final/ and checkpoint-N/")
    if not Path(name).exists() and (name[0] in "./~" or name.startswith("runs/") or name.count("/") != 1):
        raise UserError(f"{name}: no such model folder, and not a hub name of the form OWNER/NAME")
    if kind is transformers.AutoTokenizer and Path(name).is_dir() and not [*Path(name).glob("tokenizer*")]:
        raise UserError(f"{name}: no tokenizer there; save the model's tokenizer beside it")
    with blame(f"{name} could not be loaded" + " from the hub (there is no such folder)" * (not Path(name).exists())):
        return kind.from_pretrained(name, trust_remote_code=False, **settings)
load_tokenizer = functools.partial(from_pretrained, transformers.AutoTokenizer)

def load_model(name, device, dtype):
    """A causal language model, safetensors only, in eval mode. Raises UserError for one that the cache or the plain output head would get wrong."""
    config = from_pretrained(transformers.AutoConfig, name)  # without dropout: two scorings of the same tokens are the same
    config.update({key: 0.0 for key, value in vars(config).items() if "drop" in key and isinstance(value, float)})
    model = from_pretrained(transformers.AutoModelForCausalLM, name, config=config, dtype=dtype, attn_implementation="sdpa", use_safetensors=True)
    layers = getattr(config, "layer_types", None) or ["sliding" if getattr(config, "sliding_window", None) else "full_attention"]
    if set(layers) != {"full_attention"} or any(getattr(config, scale, None) not in (None, 1.0) for scale in (
            "final_logit_softcapping", "logit_scale", "logits_scaling")):
        raise UserError(f"{name}: models with sliding-window attention or scaled logits are not supported; Qwen2.5, Qwen3, Llama, SmolLM2 are")
    model.set_attn_implementation("grouped")
    return model.to(device).eval()

def load_trained(start, device, dtype):
    """(the model that is trained, whose weights are fp32 masters; the actor that computes in `dtype`: the same model, or a copy that is loaded)."""
    model = load_model(start, device, torch.float32)
    return model, model if dtype == torch.float32 else load_model(start, device, dtype)  # (a cast would put the rotary frequencies in bf16)

class LoRA(torch.nn.Linear):
    """A frozen linear layer and a trainable detour of low rank (arXiv 2106.09685): y = W x + (32 / rank) B A x. W is the base model's own tensor;
    A and B are fp32, since a bf16 weight would not move. B begins at 0: the model begins as its base."""
    half = False  # whether only the first half of a batch takes the detour: the senior's rows, before the same rows for the junior
    def __init__(self, linear, rank, generator):
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight, self.bias, self.scale = linear.weight, linear.bias, 32 / rank
        start = (2 * torch.rand(rank, linear.in_features, generator=generator) - 1) / linear.in_features ** 0.5
        self.lora_A = torch.nn.Parameter(start.to(linear.weight.device))
        self.lora_B = torch.nn.Parameter(torch.zeros(linear.out_features, rank, device=linear.weight.device))
    def forward(self, x):
        y, n = super().forward(x), len(x) // 2 if LoRA.half else len(x)
        y[:n] += (x[:n] @ self.lora_A.T.to(x.dtype)) @ self.lora_B.T.to(x.dtype) * self.scale
        return y

def adapted(base, rank, seed):
    """A second model on the weights of `base`, which are frozen and not copied, with an adapter on every linear layer of its blocks."""
    weights, generator = [*base.requires_grad_(False).parameters(), *base.buffers()], torch.Generator().manual_seed(seed)
    model = copy.deepcopy(base, {id(tensor): tensor for tensor in weights})
    model.base = (base,)  # (in a tuple, or it would be a part of the model)
    for name, layer in list(model.get_decoder().named_modules()):
        if type(layer) is torch.nn.Linear:
            model.get_decoder().set_submodule(name, LoRA(layer, rank, generator))
    if not any(p.requires_grad for p in model.parameters()):
        raise UserError("--lora-rank: this model has no linear layers for an adapter")
    return model

def save_model(model, folder, base):
    """A Hugging Face folder; of a model with an adapter, the merged weights in fp32 (bf16 would round most of it away) and adapter/, for PEFT."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, LoRA)}
    if not layers: return model.save_pretrained(folder)
    merged = copy.deepcopy(model.base[0], {id(p): torch.nn.Parameter(p.to("cpu", torch.float32, copy=True)) for p in model.base[0].parameters()})
    for name, layer in layers.items():
        merged.get_submodule(name).weight.data += (layer.scale * layer.lora_B @ layer.lora_A).detach().cpu()
    merged.save_pretrained(folder)
    (folder / "adapter").mkdir()
    save_file({f"base_model.model.{name}.weight": p for name, p in model.state_dict().items() if ".lora_" in name},
              folder / "adapter" / "adapter_model.safetensors")
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps({
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": len(layer.lora_A), "lora_alpha": 32,
        "target_modules": sorted({name.rpartition(".")[2] for name in layers}), "inference_mode": True}, indent=1))

def check_same_vocabulary(tokenizer, other, name):
    """The junior continues the senior's ids, so every id must mean the same to both. Raises UserError that names a difference."""
    ours, theirs = tokenizer.get_vocab(), other.get_vocab()
    if ours != theirs:
        token, i = min(ours.items() ^ theirs.items(), key=lambda item: (item[1], item[0]))
        raise UserError(f"{name}: another vocabulary than its partner's ({len(theirs)} entries against {len(ours)}; for instance token "
                        f"{token!r} is {theirs.get(token, 'missing')} there and {ours.get(token, 'missing')} here)")

def stop_ids(*models, tokenizer=None):
    """Every id that ends an answer: all of the models' generation configs, and the tokenizer's."""
    ids = [model.generation_config.eos_token_id for model in models if model] + [tokenizer and tokenizer.eos_token_id]
    return sorted({i for some in ids for i in (some if isinstance(some, (list, tuple)) else [some])} - {None})
# ------------------------------------- 4. Rollout (the paper's tandem rollout) -------------------------------------
def token_texts(tokenizer, vocab_size):
    """What each id adds to a text, V strings; decoded behind an anchor, since some tokenizers strip a text's first space."""
    anchor, n = tokenizer.encode("a", add_special_tokens=False)[-1], min(vocab_size, len(tokenizer))
    texts = tokenizer.batch_decode([[anchor]] + [[anchor, i] for i in range(n)], clean_up_tokenization_spaces=False)
    return [text.removeprefix(texts[0]) for text in texts[1:]] + [""] * (vocab_size - n)

def word_boundaries(tokenizer, vocab_size):
    """True for ids after which the author is redrawn: tokens whose bytes begin with a space (word schedule), bool [V]. So the hand-over falls
    after a word's first piece; without a space before them newlines, digits and signs do not. Raises UserError if no id does."""
    boundary = torch.tensor([text.startswith(" ") for text in token_texts(tokenizer, vocab_size)])
    if not boundary.any():
        raise UserError("no token of this tokenizer begins with a space, so the word schedule never hands over: use --schedule token")
    return boundary

@dataclass
class Schedule:
    """When the author is redrawn, and how: after a token of `always`; after one of `starts` behind one of `ends` (which start and end with half a
    blank line); after `max_gap` tokens without a redraw. The tables are bool [V]; the latter two are None where no pair of tokens counts."""
    always: torch.Tensor
    starts: torch.Tensor | None
    ends: torch.Tensor | None
    max_gap: int
    prob_senior: float = 0.5
    alternate: bool = False  # evaluation: no coins; the senior begins, and each redraw is the other one's turn
    @classmethod
    def of(cls, tokenizer, vocab_size, name="word", prob_senior=0.5, max_gap=32, alternate=False):
        if name == "step":
            tables = zip(*(("\n\n" in t, t.startswith("\n"), t.endswith("\n")) for t in token_texts(tokenizer, vocab_size)))
            return cls(*map(torch.tensor, tables), sys.maxsize, prob_senior, alternate)
        always = word_boundaries(tokenizer, vocab_size) if name == "word" else torch.ones(vocab_size, dtype=torch.bool)
        return cls(always, None, None, max_gap, prob_senior, alternate)
    def after(self, token, before, drawn, n, author, coin):
        """Who writes after `token`, which stands behind `before`, and where that was drawn; all [R]. The row has n tokens now, and had `drawn` at its
        last redraw; author and coin are True for the senior. At max_gap 3, _a x y z _b from drawn = 0 on give 1 1 1 4 5."""
        redraw = self.always[token] | (n - drawn >= self.max_gap)
        if self.starts is not None:  # (the halves of a blank line that a redraw parts are none)
            redraw |= self.starts[token] & self.ends[before] & (n - drawn > 1)
        return torch.where(redraw, ~author if self.alternate else coin, author), torch.where(redraw, n, drawn)

def grouped_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **more):
    """transformers' own; but under a mask (over a cache) the heads that share keys ask side by side, in place of a copy of the keys for each."""
    group, mask = query.size(1) // key.size(1), None if attention_mask is None else attention_mask[..., :key.size(2)]
    if mask is None or group == 1 or mask.size(1) > 1:
        return transformers.AttentionInterface()["sdpa"](module, query, key, value, mask, scaling=scaling, dropout=dropout, **more)
    mask = mask if mask.size(2) == 1 else mask.repeat(1, 1, group, 1)  # [R, 1, group * Q, slots]
    out = torch.nn.functional.scaled_dot_product_attention(query.unflatten(1, (-1, group)).flatten(2, 3), key, value, mask, dropout, scale=scaling)
    return out.unflatten(2, (group, -1)).flatten(1, 2).transpose(1, 2).contiguous(), None  # [R, Q, heads, size]
transformers.AttentionInterface.register("grouped", grouped_attention)
transformers.AttentionMaskInterface.register("grouped", transformers.AttentionMaskInterface()["sdpa"])

class Reader:
    """One model, or two that read together. Token p of a row lies in slot p of a cache: no left padding. What right-padding writes behind a row's
    end, the row's own tokens overwrite before any mask shows it. The models' layers call `update`, as of any transformers cache."""
    graphs = "cuda"  # the kind of device on which steps of one token a row are captured and replayed
    def __init__(self, models, vocab_size, rows, limit, pair=False):
        self.decoders, self.heads = zip(*((model.get_decoder(), model.get_output_embeddings()) for model in models))
        self.arguments = ["cache" if "cache" in inspect.signature(d.forward).parameters else "past_key_values" for d in self.decoders]
        self.vocab_size, self.limit, self.pair, self.slots, self.replay, self.cache = vocab_size, limit, pair, 0, None, {}  # cache by model and layer
        self.seen = torch.zeros(rows * (1 + pair), dtype=torch.long, device=models[0].device)  # tokens read of each row
    def read(self, tokens, upto, wanted=()):
        """Reads tokens [R, L] of each row from where it stopped up to `upto` [R]; returns next-token logits, of each model for its `wanted` rows."""
        tokens, upto = (tokens.repeat(2, 1), upto.repeat(2)) if self.pair else (tokens, upto)
        most, far = torch.stack([upto - self.seen, self.seen]).amax(1).tolist()  # new tokens, and tokens read, of the row with most
        positions = (self.seen[:, None] + torch.arange(max(most, 1), device=upto.device)).clamp(max=tokens.size(1) - 1)  # [R, Q]
        span, ids = min(far + max(most, 1), tokens.size(1)), tokens.gather(1, positions)
        if self.replay and ids.size(1) == 1 and span <= self.slots:
            hidden = self.replay(ids, positions)
        else:
            hidden = self.forward(ids, positions, span)
            self.replay = self.captured(ids, positions) if ids.size(1) == 1 and ids.device.type == Reader.graphs else self.replay
        last, self.seen = upto - self.seen - 1, upto.clone()  # padding stands behind each row's last token
        return [head(states[rows, last[rows]])[:, :self.vocab_size].float() for head, states, rows in zip(self.heads, hidden, wanted)]
    def forward(self, ids, positions, span):
        """Each model's hidden states [R, Q, D] of ids [R, Q] at `positions` [R, Q]; a token sees the slots up to its own (mask [R, 1, Q, span])."""
        self.where, self.span = (torch.arange(len(ids), device=ids.device)[:, None], positions), span
        mask = torch.where(torch.arange(span, device=ids.device) <= positions[:, None, :, None], 0.0, -torch.inf)
        LoRA.half, hidden = self.pair, []
        for self.model, (decoder, cache) in enumerate(zip(self.decoders, self.arguments)):
            inputs = dict(input_ids=ids, position_ids=positions, attention_mask=mask.to(decoder.dtype), use_cache=True)
            hidden.append(decoder(**inputs, **{cache: self}).last_hidden_state)
        LoRA.half = False
        return hidden
    def captured(self, *held):
        """`forward` of one token a row, over all slots, as a CUDA graph: a model's hundreds of kernels take longer to launch one by one than to run.
        It uses the very tensors it was captured with: new inputs are copied into `held`, and it is good until rows leave or the cache grows."""
        graph, pool, device = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle(), self.seen.device
        try:
            with torch.cuda.device(device), torch.cuda.graph(graph, pool):
                hidden = self.forward(*held, self.slots)
        except RuntimeError as error:  # (layers that ask the GPU for a number on the way, such as some experts' routers)
            torch.cuda.set_stream(torch.cuda.default_stream(device))  # a capture that failed leaves its stream and its memory pool open
            with contextlib.suppress(Exception):
                torch._C._cuda_endAllocateToPool(device.index, pool)
            Reader.graphs = None
            return tqdm.write(f"decoding without CUDA graphs, which is slower: {' '.join(str(error.__context__ or error).split())[:100]}")
        def replay(*new):
            [old.copy_(now) for old, now in zip(held, new)]
            graph.replay()
            return hidden
        return replay
    def update(self, key, value, layer, *_, **__):
        """Writes a layer's new keys and values [R, heads, Q, size] into their slots; returns those of the first `span` slots, likewise."""
        new = torch.cat([key, value], -1).transpose(1, 2)  # [R, Q, heads, both sizes]
        old = self.cache.get((self.model, layer), new[:, :0])  # [R, slots, heads, both sizes]
        if self.span > old.size(1):  # grown by half, and by zeros, not by empty memory: a masked NaN is still a NaN
            self.slots, self.replay = -(-min(max(self.span, 64, old.size(1) * 3 // 2), self.limit) // 8) * 8, None  # (kernels like eights)
            self.cache[self.model, layer] = old = torch.nn.functional.pad(old, (0, 0, 0, 0, 0, self.slots - old.size(1)))
        old[self.where] = new
        return old[:, :self.span].transpose(1, 2).split([key.size(-1), value.size(-1)], -1)
    get_seq_length, is_compileable = lambda self, *_: 0, False  # (older transformers ask; positions and masks are given)
    def select(self, rows):
        """Keeps `rows` [R'], in that order: repeats each prompt for its group, or drops finished rows."""
        rows, self.replay = torch.cat([rows, rows + len(self.seen) // 2]) if self.pair else rows, None
        self.seen = self.seen[rows]
        for key, cached in self.cache.items():  # (one by one: no second copy of the whole cache)
            self.cache[key] = cached.index_select(0, rows)

def sample(logits, uniform, temperature, top_k=0, top_p=1.0):
    """Draws an id a row, [R], from logits [R, V] and uniform [R] in [0, 1). Temperature 0 is greedy."""
    if temperature == 0: return logits.argmax(-1)
    logits = logits / temperature
    if top_k or top_p < 1:  # top-p sorts, which takes long for a whole vocabulary: among the k best
        best, where = logits.topk(min(top_k or logits.size(-1), logits.size(-1)))  # [R, k]
        logits = torch.full_like(logits, -torch.inf).scatter(-1, where, transformers.TopPLogitsWarper(top_p)(None, best))
    cdf = (probs := torch.softmax(logits, -1)).cumsum(-1)
    ids = torch.searchsorted(cdf, uniform[:, None] * cdf[:, -1:], right=True).clamp_(max=cdf.size(-1) - 1)  # [R, 1]: the id drawn is the first above
    if not (possible := probs.gather(-1, ids) > 0).all():  # (hardly ever: where the product was rounded up)
        ids = torch.where(possible, ids, probs.argmax(-1, keepdim=True))
    return ids[:, 0]

@dataclass
class Rollout:
    """N completions, right-padded with 0. Behind a row's length nothing exists."""
    ids: torch.Tensor  # [N, T] long
    lengths: torch.Tensor  # [N] long; the first stop id is included
    senior_mask: torch.Tensor  # [N, T] bool: the senior wrote it, so the loss falls on it
    finished: torch.Tensor  # [N] bool: stopped by itself, not cut
    turns: torch.Tensor  # [N] long: one more than its hand-overs

@torch.no_grad()
def rollout(senior, junior, prompts, *, group_size=1, max_new_tokens=128, schedule=None, temperature=1.0, top_k=0, top_p=1.0, stops=None,
            also_stop=None, vocab_size=None, max_rows=0, max_turns=sys.maxsize, seed=0):
    """Writes `group_size` completions of each of P prompts (lists of ids), senior and junior in turns: a Rollout of N = P * group_size rows, a
    prompt's side by side. schedule: when the author changes; None, or prob_senior 1: the senior alone, `junior` is not run. stops: ids that end a
    completion (default: all of the writers' generation configs, which have no other influence); also_stop(ids [R, T], lengths [R]) -> bool [R]: which
    end for another reason, such as their text. vocab_size: ids from there on are never sampled. max_rows: sequences decoded at a time at most, 0:
    all that fit; the result is the same. max_turns: a completion is cut where another turn would begin. Temperature 0 is greedy."""
    n, device = len(prompts) * group_size, senior.device
    in_turns = schedule is not None and schedule.alternate
    solo = not in_turns and (schedule is None or schedule.prob_senior == 1)
    generator = torch.Generator().manual_seed(seed)  # its own, and on the CPU: the same numbers on every device
    uniform = torch.rand(n, max_new_tokens, generator=generator).to(device)  # a row's own numbers, whatever else is in the batch
    coins = (torch.rand(n, max_new_tokens + 1, generator=generator) < (1.0 if solo else schedule.prob_senior)).to(device)
    zeros = torch.zeros(n, max_new_tokens, dtype=torch.long, device=device)
    out = Rollout(zeros, zeros[:, 0].clone(), zeros.bool(), zeros[:, 0].bool(), zeros[:, 0] + 1)
    models = (senior,) if solo else (senior, junior)
    stops = torch.tensor(stop_ids(*models) if stops is None else stops, device=device)
    pair = not solo and not in_turns and (junior,) == getattr(senior, "base", None)
    schedule = None if solo else replace(schedule, **{name: x.to(device) for name, x in vars(schedule).items() if torch.is_tensor(x)})
    modes = [model.training for model in models]
    max_rows = min(max_rows or n, rows_that_fit(models, max(map(len, prompts)) + max_new_tokens))
    for start in range(0, n, max_rows):
        row = torch.arange(start, min(start + max_rows, n), device=device)
        some = prompts[start // group_size:(start + len(row) - 1) // group_size + 1]
        tokens = padded(some, max(map(len, some)) + max_new_tokens, device)  # [P, L]
        readers = [Reader([model.eval() for model in together], vocab_size or senior.config.vocab_size, *tokens.shape, pair)
                   for together in ([models[:1]] if pair else [models[:1], models[1:]] if in_turns else [models])]
        lengths, group = torch.tensor([len(p) for p in some], device=device), row // group_size - start // group_size  # each row's prompt
        for reader in readers:  # each prompt is read once, up to its last token, and the cache repeated for the group
            reader.read(tokens, lengths - 1)
            reader.select(group)
        write(out, row, readers, tokens[group], lengths[group], schedule, (temperature, top_k, top_p), stops, also_stop, uniform, coins, max_turns)
    [model.train(mode) for model, mode in zip(models, modes)]
    return replace(out, ids=out.ids[:, :out.lengths.max()], senior_mask=out.senior_mask[:, :out.lengths.max()])

def write(out, row, readers, tokens, start, schedule, sampling, stops, also_stop, uniform, coins, max_turns):
    """Writes the rows `row` [R] of `out`, token by token, behind their prompts: tokens [R, L], of `start` [R] ids. A row's state moves with it."""
    open_rows, in_turns, active = torch.ones_like(row, dtype=torch.bool), len(readers) == 2, 0  # active: the reader that reads now
    author, upto, drawn, turn = open_rows.clone() if in_turns else coins[row, 0], start.clone(), torch.zeros_like(row), torch.ones_like(row)
    while len(row):
        authors = torch.stack([author, ~author]) & open_rows  # [2, R]: the rows that the senior writes now, and the junior
        if in_turns:  # long turns: the model with more rows to write goes on, and the other's rows wait
            authors[1 - (active := int(authors.sum(1).argmax()))] = False
        wanted = [rows.nonzero()[:, 0] for rows in (authors.view(1, -1) if readers[0].pair else authors)]
        now = torch.cat(wanted) % len(row)  # the senior's rows first, as in the logits
        r, at, t, writer, turns = row[now], upto[now], (upto - start)[now], author[now], turn[now]
        token, n = sample(torch.cat(readers[active].read(tokens, upto, wanted[active:])), uniform[r, t], *sampling), t + 1
        out.ids[r, t], out.senior_mask[r, t], out.lengths[r], out.turns[r] = token, writer, n, turns
        out.finished[r] = torch.isin(token, stops) | (also_stop(out.ids[r], n) if also_stop else False)
        tokens[now, at], upto[now] = token, at + 1
        if schedule is not None:
            then, drawn[now] = schedule.after(token, None if schedule.starts is None else tokens[now, at - 1], drawn[now], n, writer, coins[r, n])
            author[now], turn[now] = then, turns + (then != writer)
        open_rows = ~out.finished[row] & (upto - start < uniform.size(1)) & (turn <= max_turns)
        if (~open_rows).sum() > len(row) // (3 if row.is_cuda else 8):  # finished rows leave a few at a time: caches are copied, graphs captured anew
            keep = open_rows.nonzero()[:, 0]
            row, author, drawn, turn, tokens, start, upto, open_rows = (x[keep] for x in (row, author, drawn, turn, tokens, start, upto, open_rows))
            [reader.select(keep) for reader in readers]

head_size = lambda config: getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
kv_size = lambda config: (getattr(config, "num_key_value_heads", None) or config.num_attention_heads) * head_size(config)
cache_bytes = lambda model: 2 * model.config.num_hidden_layers * kv_size(model.config) * model.dtype.itemsize  # of one token of one row

def rows_that_fit(models, width, reserved=0):
    """How many rows of `width` tokens the caches can hold at a time: any number, but on a GPU in nine tenths of what this process leaves free."""
    if (device := models[0].device).type != "cuda": return sys.maxsize
    free = torch.cuda.get_device_properties(device).total_memory - torch.cuda.memory_allocated(device) - reserved
    return max(1, int(0.9 * free / width / sum(map(cache_bytes, models))))

def padded(lists, width, device):
    """Lists of ids as one tensor [len(lists), width], padded with 0 on the right."""
    return torch.tensor([list(ids) + [0] * (width - len(ids)) for ids in lists], dtype=torch.long, device=device)
# ------------------------------------- 5. Rewards and advantages (team reward) -------------------------------------
def reward(text, problem):
    """What the pair earns together for the text it wrote: 1 or 0. For another team reward change this; pass@k counts what `verify` says."""
    return verify(text, problem.answer, problem.numbers)

def completion_texts(tokenizer, rolled):
    """The text of each completion up to its stop id, N strings."""
    ids = [ids[:end] for ids, end in zip(rolled.ids.tolist(), (rolled.lengths - rolled.finished.long()).tolist())]
    return tokenizer.batch_decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

def group_advantages(rewards, group_size, eps=1e-6):
    """(reward - its group's mean) / (its group's standard deviation + eps), [N]; equal rewards give exactly 0. Raises ValueError.
    >>> group_advantages(torch.tensor([1., 0., 0., 1., 5., 5., 5., 5.]), 4)
    tensor([ 0.8660, -0.8660, -0.8660,  0.8660,  0.0000,  0.0000,  0.0000,  0.0000])"""
    if group_size < 2 or rewards.numel() % group_size:
        raise ValueError(f"{rewards.numel()} rewards do not make groups of {group_size} (at least 2)")
    groups = rewards.view(-1, group_size)  # [P, G]
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + eps)
    equal = (groups == groups[:, :1]).all(1, keepdim=True)  # (else rounding residue is divided by almost nothing)
    return torch.where(equal, 0.0, advantages).view(-1)
# ------------------------------------- 6. Log-probs and loss (GRPO on the senior's tokens) -------------------------------------
LOGITS = 2**27  # as many may exist at a time, half a gigabyte in fp32; a slice of 1,024 at Qwen's 151,936 words is a little more
def completion_hidden(model, prompts, ids, lengths):
    """(hidden states [M, D] that predict the M completion tokens, their row [M], their column [M]); arguments as in completion_logprobs."""
    ids, lengths = ids.to(model.device), lengths.to(model.device)
    prompts = [prompt for prompt in prompts for _ in range(len(ids) // len(prompts))]
    starts = torch.tensor([len(p) for p in prompts], device=model.device)
    whole = padded(prompts, int((starts + lengths).max()), model.device)  # [N, L]: prompt, completion, padding
    row, col = real_tokens(ids, lengths).nonzero(as_tuple=True)
    whole[row, starts[row] + col] = ids[row, col]
    LoRA.half = False  # (a rollout that was broken off may have left it)
    hidden = model.get_decoder()(input_ids=whole, use_cache=False).last_hidden_state  # [N, L, D]; causal: padding on the right is never seen
    return hidden[row, starts[row] + col - 1], row, col  # the shift by one: a token is predicted from the position before it

def completion_logprobs(model, prompts, ids, lengths, temperature, *, vocab_size=None, entropy=False, slice_tokens=1024, states=None):
    """Log-probs of completion ids [N, T] at the sampling temperature, 0 on padding, differentiable: [N, T]. prompts: N lists of ids, or P for N / P
    rows each; lengths [N]; vocab_size as in rollout. The head runs on completion positions only, in slices, which are recomputed in backward if all
    would hold more than LOGITS numbers. With `entropy`, also entropies in nats, without gradient. `states`: completion_hidden's result, if known."""
    hidden, row, col = states or completion_hidden(model, prompts, ids, lengths)
    head, targets = model.get_output_embeddings(), ids.to(model.device)[row, col]
    run = functools.partial(checkpoint, use_reentrant=False) if len(row) * model.config.vocab_size > LOGITS else lambda f, *rest: f(*rest)
    parts = [run(slice_logprobs, head, h, t, temperature, vocab_size, entropy) for h, t in zip(hidden.split(slice_tokens), targets.split(slice_tokens))]
    out = [torch.zeros(ids.shape, device=model.device).index_put((row, col), torch.cat(part)) for part in zip(*parts)]
    return tuple(out) if entropy else out[0]

def slice_logprobs(head, hidden, targets, temperature, vocab_size, entropy):
    """(log-probs of the targets [M],) and, if asked for, the distributions' entropies [M]; from hidden states [M, D]."""
    logp = torch.log_softmax(head(hidden)[:, :vocab_size].float() / temperature, -1)  # [M, V]
    return logp.gather(-1, targets[:, None])[:, 0], *([-(logp.detach().exp() * logp.detach()).sum(-1)] if entropy else [])

def real_tokens(ids, lengths):
    """[N, T] bool: the tokens within each row's length; never told from the ids, since a padding id may be a stop id."""
    return torch.arange(ids.size(1), device=ids.device) < lengths[:, None]

def k3(logp, other):
    """Unbiased, never negative estimate of KL(p || other) on samples of p: r - 1 - log r, r = other / p. (Its gradient is KL(other || p)'s.)"""
    log_ratio = (other - logp).clamp(max=20)  # held above: fp32 overflows at e**89, and turns the gradient into NaN
    return torch.exp(log_ratio) - 1 - log_ratio

def grpo_loss(logp, old_logp, advantages, mask, clip_eps, ref_logp=None, kl_coef=0.0, denominator=None):
    """1 / denominator * sum over `mask` of [-min(rho A, clip(rho, 1 - eps, 1 + eps) A) + kl_coef k3], where rho = pi / pi_old. The denominator is the
    mask's sum, if it is not given: a number, or [N, 1], of a whole optimiser step. logp, old_logp, ref_logp [N, T]; advantages [N]; mask [N, T] bool,
    in tandem the *senior's* tokens, above and below alike; an empty one gives 0. What it leaves out is selected away, so a NaN there does no harm."""
    mask, advantages = mask.bool(), advantages[:, None]  # [N, 1]
    denominator = mask.sum().clamp(min=1) if denominator is None else denominator
    logp = torch.where(mask, logp, 0.0)
    ratio = torch.exp((logp - torch.where(mask, old_logp, 0.0)).clamp(-20, 20))  # pi / pi_old
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_eps, 1 + clip_eps) * advantages)  # [N, T]
    if kl_coef:
        loss = loss + kl_coef * k3(logp, torch.where(mask, ref_logp, 0.0))
    return (torch.where(mask, loss, 0.0) / denominator).sum()

def micro_batches(rows, totals, budget):
    """`rows`, longest first, in batches of at most `budget` tokens, padding included; a longer row gets a batch of its own."""
    batches = []
    for i in sorted(rows, key=lambda i: -totals[i]):
        if not batches or totals[batches[-1][0]] * (len(batches[-1]) + 1) > budget: batches.append([])
        batches[-1].append(i)
    return batches

# A scored rollout: prompts (N lists of ids), ids [N, T], lengths [N], mask [N, T] bool (where the loss falls), rewards [N]; what is logged and kept
Batch = namedtuple("Batch", "prompts ids lengths mask rewards metrics samples")

def grpo_update(model, optimizer, batch, config, lr, vocab_size, reference=None, advantage_eps=1e-6, dtype=torch.float32):
    """All optimiser steps over one rollout batch; returns their metrics. The weights are fp32 whatever the `dtype` of the arithmetic:
    at lr 1e-6 the update of a bf16 weight would round away. With several steps (the paper takes two) old log-probs are frozen before the first."""
    n, per_update, lambda_jun = len(batch.prompts), config.prompts_per_update * config.group_size, getattr(config, "lambda_jun", 0.0)
    totals = [len(prompt) + length for prompt, length in zip(batch.prompts, batch.lengths.tolist())]
    advantages = group_advantages(batch.rewards, config.group_size, advantage_eps).to(model.device)
    others = real_tokens(batch.ids, batch.lengths) & ~batch.mask
    def logprobs(scorer, rows, **settings):  # [rows, length of the longest of them]
        prompts, lengths, settings = [batch.prompts[i] for i in rows], batch.lengths[rows], {"vocab_size": vocab_size, **settings}
        with torch.autocast(model.device.type, dtype, enabled=dtype != torch.float32):
            return completion_logprobs(scorer, prompts, batch.ids[rows, :int(lengths.max())], lengths, config.temperature, **settings)
    @torch.no_grad()
    def frozen(scorer):  # of the whole batch, [N, T]
        out = torch.zeros(batch.ids.shape, device=model.device)
        for rows in micro_batches(range(n), totals, config.micro_tokens):
            logp = logprobs(scorer, rows)
            out[rows, :logp.size(1)] = logp
        return out
    old_logp = frozen(model) if per_update < n else None  # (of a single update the ratio is 1)
    ref_logp = frozen(reference) if config.kl_coef or lambda_jun else None
    sums, norms = Counter(), []
    model.train()
    for update in (range(n)[start:start + per_update] for start in range(0, n, per_update)):  # the rows of an optimiser step
        tokens = batch.mask.sum(1, keepdim=True)  # [N, 1]; token mean: of all tokens of the step; sequence mean: of each row's, then of the rows
        denominator = tokens[update].sum().expand_as(tokens) if config.loss_mean == "token" else tokens * (tokens[update] > 0).sum()
        live = [i for i in update if advantages[i] != 0 or ref_logp is not None] or update  # rows with a gradient; if there are none, all: it is 0
        idle = sorted({*update} - {*live})  # rows whose gradient is exactly 0: they are measured, but get no backward pass
        for rows in micro_batches(live, totals, config.micro_tokens) + micro_batches(idle, totals, config.micro_tokens):
            with torch.set_grad_enabled(rows[0] in live):
                logp, entropy = logprobs(model, rows, entropy=True)
            now = (rows, slice(logp.size(1)))
            on, old, ref = batch.mask[now], logp.detach() if old_logp is None else old_logp[now], None if ref_logp is None else ref_logp[now]
            loss = grpo_loss(logp, old, advantages[rows], on, config.clip_eps, ref, config.kl_coef, denominator[rows].clamp(min=1))
            if lambda_jun:  # paper 3.4, departure 4: KL(junior || senior), estimated on the tokens that the junior wrote
                loss = loss + lambda_jun * torch.where(others[now], k3(ref, logp), 0.0).sum() / others[update].sum().clamp(min=1)
            if loss.requires_grad: loss.backward()
            ratio, kl = torch.exp(logp.detach() - old), {} if ref is None else {"kl": k3(logp.detach(), ref)}
            parts = {"tokens": on, "ratio": ratio, "clipped": (ratio - 1) * advantages[rows, None].sign() > config.clip_eps, "entropy": entropy, **kl}
            sums.update({name: part[on].sum().item() for name, part in parts.items()}, loss=loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm).item())
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    tokens = max(sums.pop("tokens"), 1)
    return {"reward": batch.rewards.mean().item(), "no_signal": (advantages.view(-1, config.group_size) == 0).all(1).float().mean().item(),
            "loss": sums.pop("loss") / len(norms), **{name: value / tokens for name, value in sums.items()},
            "grad_norm": sum(norms) / len(norms), "lr": lr}
# ------------------------------------- 7. Training loop -------------------------------------
class Run:
    """A run's folder: config.json, metrics.jsonl, samples.jsonl, checkpoint-N/, final/. What is in it is whole, or is not there."""
    def __init__(self, config):
        self.config, self.folder = config, Path(config.out)
        if not config.resume and self.folder.exists() and (not self.folder.is_dir() or any(p.name[:5] != ".tmp-" for p in self.folder.iterdir())):
            raise UserError(f"{self.folder} is there already: choose another --out, or add --resume to go on with the run in it")
        self.step, self.newest = ([(0, None)] + list(self.resumable().items()))[-1]
        self.logged = self.step if self.newest else -1  # of what was logged, the steps that count
    def resumable(self):  # {step: folder} of the checkpoints that hold a trainer's state, oldest first
        return dict(sorted((int(path.parent.name[11:]), path.parent) for path in self.folder.glob("checkpoint-*/trainer_state.pt")
                           if path.parent.name[11:].isdecimal()))
    def start(self):
        """Stores the config; drops what was logged after the newest checkpoint, and a shorter run's final/ (that checkpoint has its weights)."""
        files = {"config.json": json.dumps({**asdict(self.config), "resume": False}, indent=1), **{
            path.name: "".join(json.dumps(row) + "\n" for row in read_jsonl(path) if row.get("step", 0) <= self.logged)
            for path in (self.folder / f"{name}.jsonl" for name in ("metrics", "samples", "traces")) if path.is_file()}}
        self.folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.folder / "final", ignore_errors=True)
        for name, text in files.items():
            (self.folder / f".tmp-{name}").write_text(text, encoding="utf-8")
            os.replace(self.folder / f".tmp-{name}", self.folder / name)
    def log(self, name, rows):
        with open(self.folder / name, "a", encoding="utf-8") as file:  # closed, so flushed
            file.writelines(json.dumps(row) + "\n" for row in rows)
    def save(self, name, model, tokenizer, state=None):
        """Writes a Hugging Face folder (and the trainer's state) aside, then renames it. A full disk is a warning, and costs nothing else."""
        aside, target = self.folder / f".tmp-{name}", self.folder / name
        try:
            shutil.rmtree(aside, ignore_errors=True)
            save_model(model, aside, self.config.model)
            tokenizer.save_pretrained(aside)
            if state: torch.save(state, aside / "trainer_state.pt")
            shutil.rmtree(target, ignore_errors=True)
            os.replace(aside, target)
        except Exception as error:  # OSError, RuntimeError, safetensors' own: each writer reports a full disk in its own way
            shutil.rmtree(aside, ignore_errors=True)
            tqdm.write(f"warning: {target} was not saved ({' '.join(str(error).split())[:200]}); earlier checkpoints are intact")
            return False
        [(old / "trainer_state.pt").unlink() for old in list(self.resumable().values())[:-2]]  # the last two can be resumed; all keep their weights
        return True

def read_jsonl(path):
    """The rows of a log; a half-written last line (after a kill) is left out. Raises UserError for any other line that is none."""
    lines = [line for line in (path.read_text("utf-8", "replace").splitlines(True) if path.is_file() else []) if line.endswith("\n")]
    with blame(f"{path}: a line is no JSON object"):
        return [{**json.loads(line)} for line in lines]

def training(run, model, tokenizer, config, advance, evaluate):
    """The loop of any training: advance(step, optimizer) -> (metrics, samples), evaluate(step) -> metrics. Returns the rows of metrics.jsonl, or
    None after Ctrl-C. All that is drawn depends on (seed, step), so the state of a run is its weights (`model` holds those of `run.newest`) and
    its optimiser: a resumed run is the uninterrupted one (on a CPU bit for bit). Ctrl-C ends it after a step and a checkpoint, twice: at once."""
    rows = read_jsonl(run.folder / "metrics.jsonl")
    if (run.folder / "final").is_dir() and (not run.newest or rows and rows[-1].get("step", 0) >= config.steps):  # done, or nothing to go on from
        return print(f"{run.folder} is finished; to run it anew, remove it; to go on, give more --steps") or rows
    if config.gradient_checkpointing: getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()  # (the same, renamed)
    step, stopping, trained = run.step, threading.Event(), [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, betas=(0.9, config.beta2), weight_decay=config.weight_decay, fused=model.device.type == "cuda")
    if run.newest:
        with blame(f"{run.newest}: its trainer_state.pt is broken (without that folder, --resume takes the one before)"):
            state = torch.load(run.newest / "trainer_state.pt", map_location=model.device, weights_only=True)
            optimizer.load_state_dict(state["optimizer"])
            model.load_state_dict(state["adapter"], strict=False)
    run.start()
    if not run.newest and config.eval_every:
        run.log("metrics.jsonl", [{"step": 0, **evaluate(0)}])
    with contextlib.ExitStack() as after, tqdm(total=config.steps, initial=step, desc=f"{run.folder.name} (Ctrl-C ends it)", disable=None) as bar:
        stop = lambda *_: (stopping.set(), signal.signal(signal.SIGINT, signal.default_int_handler))
        after.callback(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, stop))
        while step < config.steps and not stopping.is_set():
            step += 1
            metrics, samples = advance(step, optimizer)
            if not math.isfinite(metrics["loss"] + metrics["grad_norm"]):
                raise UserError(f"step {step}: the loss or its gradient is not finite: start anew from {run.newest or config.model} at a lower --lr")
            metrics = {"step": step, **metrics, "memory_gb": peak_memory_gb(model.device)}
            tqdm.write(readable(metrics))
            if config.eval_every and (step % config.eval_every == 0 or step == config.steps):
                metrics.update(held_out := evaluate(step))
                tqdm.write("  held out: " + readable(held_out))
            run.log("samples.jsonl", [{"step": step, **sample} for sample in samples])
            run.log("metrics.jsonl", [metrics])
            bar.update()
            if step % config.save_every == 0 or step == config.steps or stopping.is_set():
                adapter = {name: p for name, p in model.state_dict().items() if ".lora_" in name}  # (of a model without one, nothing)
                run.save(f"checkpoint-{step}", model, tokenizer, {"optimizer": optimizer.state_dict(), "adapter": adapter})
    if step < config.steps: return print(f"stopped at step {step} of {config.steps}; to go on, the same command with --resume (the demo: without)")
    if not run.save("final", model, tokenizer):
        raise OSError(f"{run.folder}/final was not saved: make room, then add --resume")
    return read_jsonl(run.folder / "metrics.jsonl")

def train_loop(run, model, actor, tokenizer, config, collect, evaluate, reference=None, advantage_eps=1e-6):
    """GRPO with any reward: collect(step) -> Batch. `actor` writes the rollouts: the model itself, or a copy that is refreshed every step."""
    def advance(step, optimizer):
        began = time.perf_counter()
        batch = collect(step)
        rolled = time.perf_counter()
        lr = config.lr * min(1.0, step / max(config.warmup_steps, 1))
        update = grpo_update(model, optimizer, batch, config, lr, len(tokenizer), reference, advantage_eps, actor.dtype)
        refresh(actor, model)
        seconds = {"rollout_s": rolled - began, "update_s": time.perf_counter() - rolled}
        return {**batch.metrics, **update, **seconds, "tokens_per_s": int(batch.lengths.sum()) / sum(seconds.values())}, batch.samples
    return training(run, model, tokenizer, config, advance, evaluate)

@torch.no_grad()
def refresh(actor, model, share=1.0):
    """Moves the actor's weights towards the model's, all the way or by a share of it."""
    for ours, theirs in zip(actor.parameters(), model.parameters()):
        ours.copy_(theirs if share == 1 else ours.float().lerp(theirs.float(), share))

def memory_estimate(config, senior, actor, junior, prompt):
    """(GB at a rollout's peak, at an update's) for prompts of `prompt` tokens, by measured factors: what a layer keeps of a token, logits."""
    c, b, models = senior.config, actor.dtype.itemsize, [model for model in (actor, junior) if model is not None]
    n, width, deep = config.prompts_per_step * config.group_size, prompt + config.max_new_tokens, c.num_hidden_layers
    fixed = sum(p.nbytes for p in {id(p): p for model in [senior, *models] for p in model.parameters()}.values())
    trained = sum(p.numel() for p in senior.parameters() if p.requires_grad)  # 8 bytes each for Adam, 4 for the gradient; 2 for autocast's copy
    rows = min(config.max_rows or n, rows_that_fit(models, width, 8 * trained))
    tokens = min(config.micro_tokens, config.prompts_per_update * config.group_size * width)
    q, kv, inner = c.num_attention_heads * head_size(c), kv_size(c), getattr(c, "intermediate_size", None) or 4 * c.hidden_size
    layer, inputs = b * tokens * (8 * c.hidden_size + 5 * q + 6 * kv + 4 * inner), senior.dtype.itemsize * tokens * c.hidden_size * deep
    logits = c.vocab_size * (8 * min(tokens, 1024) + 4 * (tokens if tokens * c.vocab_size <= LOGITS else min(tokens, 1024)))
    kept = inputs + max(layer, logits) if config.gradient_checkpointing else layer * deep
    rollout = fixed + 8 * trained + rows * (width * sum(map(cache_bytes, models)) + 16 * c.vocab_size)
    return rollout / 1e9, (fixed + (12 if actor is senior else 14) * trained + kept) / 1e9

def peak_memory_gb(device):
    """The most memory that this process has held: a GPU's, or (on Linux) resident; 0 where that is not known."""
    if device.type == "cuda": return torch.cuda.max_memory_allocated(device) / 1e9
    status = Path("/proc/self/status")  # (getrusage's figure would take in the process that started this one)
    return sum(map(int, re.findall(r"VmHWM:\s*(\d+)", status.read_text() if status.exists() else ""))) * 1024 / 1e9

def batch_of(items, step, size, seed):
    """The `size` items of a step (from 1 on): epoch after epoch, in an order that depends on (seed, epoch) alone."""
    order = functools.cache(lambda epoch: random.Random(stream(seed, "epoch", epoch)).sample(items, len(items)))
    return [order(i // len(items))[i % len(items)] for i in range((step - 1) * size, step * size)]

class Tandem:
    """What makes GRPO tandem RL: how a batch is collected, and what is measured on held-out problems. Problems: [(Problem, prompt ids)]."""
    def __init__(self, config, senior, junior, tokenizer, train, held_out):
        self.config, self.senior, self.junior, self.tokenizer, self.train, self.held_out = config, senior, junior, tokenizer, train, held_out
        self.settings = dict(stops=stop_ids(senior, junior, tokenizer=tokenizer), vocab_size=len(tokenizer), max_new_tokens=config.max_new_tokens)
        self.schedule_of = functools.lru_cache(functools.partial(Schedule.of, tokenizer, len(tokenizer), max_gap=config.max_gap))
        self.schedule = self.schedule_of(config.schedule, config.prob_senior) if config.prob_senior < 1 else None
    def collect(self, step):
        """A tandem rollout, rewarded as a team; the loss falls on the senior's tokens."""
        c, problems = self.config, batch_of(self.train, step, self.config.prompts_per_step, self.config.seed)
        rolled = rollout(self.senior, self.junior, [ids for _, ids in problems], group_size=c.group_size, schedule=self.schedule,
                         temperature=c.temperature, max_rows=c.max_rows, seed=stream(c.seed, "rollout", step), **self.settings)
        metrics, samples = self.graded(rolled, problems, c.group_size)
        share = (rolled.senior_mask.sum() / rolled.lengths.sum()).item()
        if abs(share - c.prob_senior) > 0.2 or (share == 1) != (c.prob_senior == 1):  # with the authorship mask lost, tandem fails open to GRPO
            tqdm.write(f"WARNING: the senior wrote {share:.0%} of the tokens at --prob-senior {c.prob_senior}: a lost mask, or a model of few words")
        metrics = {"senior_share": share, "handovers": (rolled.turns - 1.0).mean().item(), **metrics}
        prompts, rewards = [ids for _, ids in problems for _ in range(c.group_size)], torch.tensor([sample["reward"] for sample in samples])
        return Batch(prompts, rolled.ids, rolled.lengths, rolled.senior_mask, rewards, metrics, samples[::c.group_size])
    def graded(self, rolled, problems, group_size):
        """(metrics, one sample a completion) of a rollout. The habit's share is that of the lines of reasoning: not blank, no box."""
        texts, samples = completion_texts(self.tokenizer, rolled), []
        for i, (text, n) in enumerate(zip(texts, rolled.lengths.tolist())):
            problem, author = problems[i // group_size][0], "".join("js"[s] for s in rolled.senior_mask[i, :n].tolist())  # a letter a token
            samples.append({"prompt": problem.question, "answer": problem.answer, "text": text, "ids": rolled.ids[i, :n].tolist(),
                            "author": author, "reward": reward(text, problem), "correct": verify(text, problem.answer, problem.numbers),
                            "finished": bool(rolled.finished[i])})
        metrics = {"length": rolled.lengths.float().mean().item(), "cut": 1 - rolled.finished.float().mean().item()}
        if self.config.habit:
            lines = [line for text in texts for line in text.splitlines() if line.strip() and "\\boxed" not in line]
            metrics["habit"] = sum(bool(re.search(self.config.habit, line)) for line in lines) / max(len(lines), 1)
        return metrics, samples
    def evaluate(self, step):
        """The senior alone on held-out problems; with --handoff-eval also senior and junior in turns, and at the start the junior."""
        c, out, k, arms = self.config, {}, self.config.eval_samples, {"solo": (self.senior, None)}
        if c.handoff_eval:
            arms.update(word=(self.senior, self.schedule_of("word")), step=(self.senior, self.schedule_of("step", alternate=True)),
                        **({} if step else {"junior": (self.junior, None)}))
        for name, (senior, schedule) in arms.items():
            rolled = rollout(senior, self.junior, [ids for _, ids in self.held_out], group_size=k, schedule=schedule, top_k=c.eval_top_k,
                             temperature=c.eval_temperature, top_p=c.eval_top_p, max_rows=c.max_rows or c.prompts_per_step * c.group_size,
                             max_turns=150 if name == "step" else sys.maxsize, seed=stream(c.seed, "eval", step), **self.settings)
            metrics, samples = self.graded(rolled, self.held_out, k)
            right = torch.tensor([sample["correct"] for sample in samples], dtype=torch.float64).view(-1, k)  # [problems, k]
            shares = {"pass@1": right.mean().item(), f"pass@{k}": right.max(1).values.mean().item()}
            out.update({f"{name}/{key}": value for key, value in {**shares, **metrics}.items()})
            for sample in samples[:c.show * k:k] if step else []:
                tqdm.write(f"--- {name} | {self.coloured(sample)}")
        return out
    def coloured(self, sample):
        """A sample with its authors: in a terminal the senior's tokens blue and the junior's yellow, elsewhere the junior's in «»."""
        terminal, text = sys.stdout.isatty() and "NO_COLOR" not in os.environ, ""
        marks = {"s": ("\033[96m", "\033[0m"), "j": ("\033[93m", "\033[0m")} if terminal else {"s": ("", ""), "j": ("«", "»")}
        for author, pairs in itertools.groupby(zip(sample["author"], sample["ids"]), key=operator.itemgetter(0)):
            text += printable(self.tokenizer.decode([i for _, i in pairs], clean_up_tokenization_spaces=False)).join(marks[author])
        return f"{printable(sample['prompt'])}\n{text}\n--- reward {sample['reward']:.3g}, answer {printable(sample['answer'])}"

def printable(text):
    """Model text is data: control characters (a terminal's escape codes) are shown as `\\x1b`, not obeyed."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda m: f"\\x{ord(m[0]):02x}", text)
# ------------------------------------- 8. Command line -------------------------------------
def prepare(config, tokenizer):
    """(train, held out): lists of (Problem, prompt ids). What is skipped is counted aloud. Raises UserError."""
    problems, skipped = load_problems(config.data)
    held_out, skipped_too = load_problems(config.eval_data) if config.eval_data else ([], 0)
    if not config.eval_data:
        random.Random("held out").shuffle(problems)
        take = min(config.eval_problems, len(problems) // 5)
        held_out, problems = problems[:take], problems[take:]
    encoded = [[(p, encode_prompt(tokenizer, p.question + ("" if p.numbers else config.prompt_suffix), config.system_prompt)) for p in some]
               for some in (problems, held_out[:config.eval_problems])]
    train, held_out = ([item for item in some if len(item[1]) <= config.max_prompt_tokens] for some in encoded)
    print(f"{len(train)} problems to train on, {len(held_out)} held out; skipped: {skipped + skipped_too} without a question or an answer, "
          f"{sum(map(len, encoded)) - len(train) - len(held_out)} with a prompt of more than {config.max_prompt_tokens} tokens")
    if len(train) < config.prompts_per_step or not held_out:
        raise UserError(f"too few problems are left: {len(train)} for --prompts-per-step {config.prompts_per_step}, {len(held_out)} held out")
    return train, held_out

def train(config):
    """One run, from its start or its newest checkpoint to final/. Returns the rows of metrics.jsonl, or None after Ctrl-C."""
    run, junior_name = Run(config), config.model if config.junior == "self" else config.junior
    device, dtype = pick_device(config.device, config.dtype)
    tokenizer = load_tokenizer(config.model)
    check_same_vocabulary(tokenizer, load_tokenizer(junior_name), junior_name)
    problems, held_out = prepare(config, tokenizer)
    unused = config.prob_senior == 1 and not config.kl_coef and not config.handoff_eval
    if config.lora_rank:  # (an adapter is resumed with the optimiser)
        senior = actor = adapted(load_model(config.model, device, dtype), config.lora_rank, config.seed)
    else:
        senior, actor = load_trained(str(run.newest or config.model), device, dtype)
    base = senior.base[0] if config.lora_rank and config.junior == "self" else None  # the junior is what the adapter sits on
    junior = None if unused else base or load_model(junior_name, device, dtype).requires_grad_(False)
    print(f"{run.folder}: {config.model}, {senior.num_parameters() / 1e6:.1f} M parameters, {str(dtype)[6:]} on {device}; " +
          ("GRPO, senior alone" if config.prob_senior == 1 else f"{config.schedule} schedule with {junior_name}, senior {config.prob_senior:.0%}"))
    need = memory_estimate(config, senior, actor, junior, max(len(ids) for _, ids in problems))
    have = torch.cuda.get_device_properties(device).total_memory / 1e9 if device.type == "cuda" else math.inf
    print(f"memory, estimated: {need[0]:.3g} GB at the peak of a rollout (less with --max-rows), {need[1]:.3g} GB at that of an update (less with "
          f"--micro-tokens, --lora-rank)" + (f": MORE than the {have:.3g} GB of this GPU" if max(need) > have else ""))
    tandem = Tandem(config, actor, junior, tokenizer, problems, held_out)
    return train_loop(run, senior, actor, tokenizer, config, tandem.collect, tandem.evaluate, reference=junior)

def demo(out="runs/toy", more=()):
    """The toy world: vanilla GRPO, then tandem RL from the same start, and a table. What is there already is not done again."""
    lines = {}
    for name, folder, arm in (("vanilla GRPO", f"{out}-vanilla", ["--prob-senior", "1", "--show", "0"]), ("tandem", out, [])):
        argv = ["--preset", "toy", *arm, *more, "--out", folder] + ["--resume"] * (Path(folder) / "config.json").is_file()
        if (rows := train(parse_config(Config, PRESETS, argv, ""))) is None: return 130
        lines.update({"senior at the start": rows[0], f"senior after {name}": rows[-1]})
    lines["junior"] = {"solo" + key[6:]: value for key, value in rows[0].items() if key.startswith("junior/")}
    columns = {"solo": "solo/pass@1", "word hand-off": "word/pass@1", "step hand-off": "step/pass@1", "habit": "solo/habit"}
    print("\n" + " " * 27 + "".join(f"{column:>15}" for column in columns))
    for name, row in lines.items():
        print(f"{name:<27}" + "".join(f"{row[key]:15.3f}" if key in row else " " * 15 for key in columns.values()))
    print(f"\nshares of the held-out problems, solved alone or by both in turns, and of the lines with the habit; the runs: {out}/, {out}-vanilla/")

def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if not argv: return demo()
    config = parse_config(Config, PRESETS, argv, "Tandem Reinforcement Learning (arXiv 2606.28166)")
    return 130 if train(config) is None else print(f"{config.out}/: final/ is the trained model, metrics.jsonl and samples.jsonl the log")

def run_main(entry):
    """A script's entry: a user's mistake or a full disk is one line, not a traceback."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if hasattr(sys.stdout, "reconfigure"): sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that lacks a sign must not cost a run
    try:
        sys.exit(entry())
    except (UserError, OSError, KeyboardInterrupt) as error:
        fail(error if str(error) else "interrupted; call it again (a run: --resume)", {UserError: 2, KeyboardInterrupt: 130}.get(type(error), 1))

if __name__ == "__main__":
    run_main(main)
