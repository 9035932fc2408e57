"""The measurements of Tandem RL (arXiv 2606.28166), and the report that compares runs.

Four questions about a trained senior and the frozen junior it was trained beside:
    solo        how many problems does the senior solve alone?                               unbiased pass@k
    handoff     how many do the two solve in turns, changing at every blank line (`handoff-step`) or by the paper's word schedule
                (`handoff-word`)?                                                            pass@k of the joint text
    drift       how far is the senior from the junior, on the senior's own answers?          exact KL(senior || junior), nats a token
    legibility  how surprising are the senior's answers to the junior?                       cross-entropy, nats a token

Each measurement writes one JSON file that holds the settings, the versions, every text and every problem's result. It is written when it is
whole; what an interrupted one had is kept beside it and used when the same command is run again. A finished one is not computed twice.

Where the paper leaves a choice
    1. Drift has no formula in the paper or its scripts. Here: the KL over the whole vocabulary at each token of the senior's solo answers, both
       models at temperature 1; its mean over all tokens, and its sum over an answer, averaged over answers (short answers dilute a mean).
    2. Legibility is the mean over an answer's tokens, then over answers, then over benchmarks; the ids are those that were sampled.
    3. The paper averages over AIME24-26 and AMC23-25; the default here is what a run was evaluated on in training, or AIME24 and AMC23. Others can be
       named (AIME25, AIME26) or given as files. Hand-off as a share of solo is the ratio of the two averages.
    4. Intervals are 95 % percentile bootstraps over problems, and over seeds where an arm has several. Differences between two arms are taken on
       the same problems: a difference of single means on 30 problems is noise.

Run it
    python eval.py all --model runs/toy --preset toy                      # all four, of a run that `python tandem.py` makes;
    python eval.py all --model runs/toy-vanilla --preset toy              # likewise of the other
    python eval.py report runs/toy runs/toy-vanilla                       # table, differences, figure
    python eval.py all --model runs/gsm8k --data gsm8k-test,aime24        # a real run; the junior is the one it was trained with, and so is the
                                                                          # data, if none is named
    python eval.py solo --model Qwen/Qwen3-0.6B --data math-test --problems 100
"""
import functools, glob, hashlib, itertools, json, math, os, platform, random, sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file
from tqdm import tqdm

import tandem
from rlt import divergence
from tandem import (HUB, NEUTRAL, Problem, Schedule, UserError, completion_logprobs, completion_texts, encode_prompt, load_model,
                    load_problems, load_rows, load_tokenizer, micro_batches, parse_config, pick_device, rollout, run_main, stop_ids, stream, verify)


# ------------------------------------- 1. Config: the paper's values are the defaults -------------------------------------
MEASUREMENTS = ("solo", "handoff-step", "handoff-word", "drift", "legibility")
COMMANDS = {"solo": ["solo"], "handoff": ["handoff-step", "handoff-word"], "drift": ["drift"], "legibility": ["legibility"], "all": list(MEASUREMENTS)}
OF_RUN = "of the run"

@dataclass
class Config:
    """What is measured, and how the senior and the junior are sampled."""
    model: str = ""  # a run's folder, a checkpoint or any other model folder, or a hub name
    junior: str = OF_RUN  # the frozen partner; of the run: the one it was trained with
    data: str = OF_RUN  # benchmarks, separated by commas: names or local files; of the run: its --eval-data, or aime24,amc23
    problems: int = 0  # at most so many problems of each benchmark; 0: all
    n: int = 8  # answers to each problem
    k: str = ""  # the k of pass@k, separated by commas; empty: those of 1, 2, 4, 8 that n allows
    temperature: float = 0.7  # sampling
    top_p: float = 0.8  # likewise
    top_k: int = 20  # likewise; 0: all
    max_new_tokens: int = 3000  # answers are cut here; in hand-off the two share this budget
    max_turns: int = 150  # hand-off by steps: answers are cut where another turn would begin
    max_gap: int = 32  # hand-off by words: the author is redrawn after so many tokens without a word's beginning
    prompt_suffix: str = OF_RUN  # follows each question; of the run: as in training, or the paper's
    system_prompt: str = OF_RUN  # system prompt; of the run: as in training, or none
    seed: int = 0  # of the sampling
    batch_problems: int = 32  # problems that are answered together, and kept when the measurement is interrupted
    max_rows: int = 0  # sequences decoded at a time; 0: all of a batch (the result is the same)
    micro_tokens: int = 16384  # tokens, padding included, of one scoring pass
    device: str = "auto"  # auto: cuda, then mps, then cpu
    dtype: str = "auto"  # bfloat16, float32, or auto: bfloat16 where the GPU computes in it
    out: str = ""  # the folder of the JSON files; empty: eval/ in the run's folder, or runs/eval-NAME

    def check(self):
        tandem.check_ranges(self, n=(1, 10**7), temperature=(0, 100), top_p=(1e-6, 1), max_turns=(1, 10**7), batch_problems=(1, 10**7))
        if not self.model:
            raise UserError("--model is needed: a run's folder, a model folder or a hub name")
        for k in self.ks():
            if not 1 <= k <= self.n:
                raise UserError(f"--k {k}: pass@{k} needs at least {k} answers to a problem, and --n is {self.n}")

    def ks(self):
        try:
            return [int(k) for k in self.k.split(",")] if self.k else [k for k in (1, 2, 4, 8) if k <= self.n]
        except ValueError:
            raise UserError(f"--k must be numbers separated by commas, not {self.k!r}") from None

PRESETS = {"paper": {}, "toy": dict(data=str(tandem.TOY / "eval.jsonl"), n=4, temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=44, prompt_suffix="",
                                 device="cpu")}


# ------------------------------------- 2. Benchmarks -------------------------------------
HUB.update({  # beside those of tandem.py; all with question and answer columns, but for GPQA
    "aime24": ("HuggingFaceH4/aime_2024", "default", "train"), "aime25": ("math-ai/aime25", "default", "test"),
    "aime26": ("MathArena/aime_2026", "default", "train"), "amc23": ("math-ai/amc23", "default", "test"), "minerva": ("math-ai/minervamath", "default", "test"),
    "olympiad": ("math-ai/olympiadbench", "default", "test"), "gpqa": ("Idavidrein/gpqa", "gpqa_diamond", "train"),
})
GPQA = ["Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3"]

def load_benchmarks(names, limit):
    """{label: problems} of benchmarks separated by commas, the first `limit` of each (0: all). A file's label is its name without the folders,
    so that nothing depends on where it lies. Raises UserError."""
    benchmarks = {}
    for name in names.split(","):
        label = Path(name).name
        if label in benchmarks:
            raise UserError(f"--data names {label} twice")
        problems, skipped = gpqa_problems(name) if label.startswith("gpqa") else load_problems(name)
        if skipped:
            print(f"note: {label}: {skipped} of {skipped + len(problems)} rows are left out, for want of a question or an answer")
        benchmarks[label] = problems[:limit or None]
    return benchmarks

def gpqa_problems(name):
    """(GPQA as multiple choice, number of rows skipped): the four answers in an order that depends on the question alone; the letter is the answer."""
    rows, problems = load_rows(name), []
    if not {"Question", *GPQA} <= set(rows.column_names):
        raise UserError(f"{name}: GPQA needs the columns Question, {', '.join(GPQA)}; it has {', '.join(rows.column_names)}")
    for row in rows:
        if not all(isinstance(row[c], str) for c in ("Question", *GPQA)):
            continue
        order = random.Random(row["Question"]).sample(range(4), 4)
        options = "\n".join(f"{letter}. {row[GPQA[i]].strip()}" for letter, i in zip("ABCD", order))
        problems.append(Problem(f"{row['Question'].strip()}\n\n{options}\n\nAnswer with the letter of the right option.", "ABCD"[order.index(0)]))
    if not problems:
        raise UserError(f"{name}: none of its {len(rows)} rows has a question and four answers")
    return problems, len(rows) - len(problems)

def read_json(path, *keys):
    """The JSON object in a file. Raises UserError for a broken file, or one that lacks the keys."""
    with tandem.blame(f"{path} is not such a file as this script writes"):
        content = json.loads(path.read_text())
        return {**content, **{key: content[key] for key in keys}}  # (KeyError, TypeError)

def resolve(config):
    """(the senior's model folder or hub name, config with the run's junior, data, prompts and output folder filled in). Raises UserError."""
    given = Path(config.model)
    run = next((folder for folder in (given, given.parent) if (folder / "config.json").is_file() and (folder / "metrics.jsonl").is_file()), None)
    stored = read_json(run / "config.json", "model") if run else {}
    model = config.model
    if run == given:
        found = [given / "final"] * (given / "final").is_dir() or sorted((p for p in given.glob("checkpoint-*") if p.name[11:].isdecimal()), key=lambda p: int(p.name[11:]))
        if not found:
            raise UserError(f"{given}: a run without a model: it has neither final/ nor a checkpoint yet")
        model = str(found[-1])
    elif given.is_dir() and not (given / "config.json").is_file():
        raise UserError(f"{given}: neither a run nor a model (no config.json)")
    junior, data, suffix, system, out = config.junior, config.data, config.prompt_suffix, config.system_prompt, config.out
    if junior == OF_RUN:
        junior = stored.get("model" if stored.get("junior") == "self" else "junior", "")
    if data == OF_RUN:
        data = stored.get("eval_data") or "aime24,amc23"
    if suffix == OF_RUN:
        suffix = stored.get("prompt_suffix", tandem.Config.prompt_suffix)
    if system == OF_RUN:
        system = stored.get("system_prompt", "")
    tail = "eval" if run == given else f"eval-{given.name}"
    out = out or str(run / tail if run else Path("runs") / tail)
    return model, replace(config, junior=junior, data=data, prompt_suffix=suffix, system_prompt=system, out=out)


# ------------------------------------- 3. Measuring -------------------------------------
def fingerprint(name):
    """What tells two models of the same name apart: a hash over the sizes, heads and tails of the folder's safetensors; a hub name as it is."""
    digest = hashlib.sha256(name.encode() if not Path(name).is_dir() else b"")
    for path in sorted(Path(name).glob("*.safetensors")):
        with open(path, "rb") as file:
            digest.update(f"{path.name} {path.stat().st_size}".encode() + file.read(1 << 20))
            file.seek(max(0, path.stat().st_size - (1 << 20)))
            digest.update(file.read())
    return digest.hexdigest()[:16]

def write_aside(path, text):
    """A file that is either the old one or the whole new one."""
    aside = path.with_name(f".{path.name}.new")
    aside.write_text(text)
    os.replace(aside, path)

class Measurement:
    """One JSON file in the making: benchmark by benchmark, batch by batch. `settings` is what a repetition needs, and must not change."""

    def __init__(self, folder, name, settings):
        self.path, self.partial, self.settings = folder / f"{name}.json", folder / f".{name}.partial.jsonl", settings
        stored = read_json(self.path, "settings", "summary", "benchmarks")["settings"] if self.path.is_file() else None
        lines = tandem.read_jsonl(self.partial)
        self.finished = stored is not None
        stored = stored or (lines[0] if lines else settings)
        keys = (settings.keys() | stored.keys()) - {"model", "junior"}  # (their hashes tell; folders may move)
        for key in sorted(keys, key=lambda key: ("hash" in key, key == "k", key)):  # the cause before what it brings about
            if stored.get(key) != settings.get(key):
                if key.endswith("_hash") and key != "data_hash":
                    raise UserError(f"{self.path} was made with other weights of the {key[:-5].replace('model', 'senior')} (trained further since?): "
                                    "choose another --out, or remove it")
                raise UserError(f"{self.path} was made with {key} {stored.get(key)!r}, not {settings.get(key)!r}: choose another --out")
        self.done = {(line["benchmark"], line["start"]): line["results"] for line in lines[1:]}
        if not self.finished:
            folder.mkdir(parents=True, exist_ok=True)
            with open(self.partial, "w") as file:  # without a line that was cut in half
                file.writelines(json.dumps(line) + "\n" for line in lines or [settings])

    def results(self, benchmark, start, compute):
        """The results of the batch of problems that begins at `start`: those kept from an interrupted measurement, or computed and kept."""
        if (benchmark, start) not in self.done:
            self.done[benchmark, start] = compute()
            with open(self.partial, "a") as file:
                file.write(json.dumps({"benchmark": benchmark, "start": start, "results": self.done[benchmark, start]}) + "\n")
        return self.done[benchmark, start]

    def finish(self, benchmarks, summary):
        versions = {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}
        write_aside(self.path, json.dumps({"settings": self.settings, "versions": versions, "summary": summary, "benchmarks": benchmarks}))
        self.partial.unlink()

def pass_at_k(n, c, k):
    """Unbiased pass@k: the chance that k of n samples, c of them right, hold a right one: 1 - C(n-c, k) / C(n, k). Raises ValueError."""
    if not (1 <= k <= n and 0 <= c <= n):
        raise ValueError(f"pass@{k} of {n} samples, {c} of them right: needs 1 <= k <= n and 0 <= c <= n")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)

def adapter_base(folder):
    """What the adapter of a model's folder sits on, a folder or a hub name; None if it has no adapter (see tandem.save_model)."""
    path = Path(folder) / "adapter" / "adapter_config.json"
    with tandem.blame(f"{path} is not an adapter's config"):
        return str(json.loads(path.read_text())["base_model_name_or_path"]) if path.is_file() else None

def load_adapted(folder, base, device, dtype):
    """The senior of `tandem.py --lora-rank`: its base in `dtype`, with the stored adapter in fp32. Raises UserError."""
    with tandem.blame(f"{folder}/adapter could not be loaded"):
        stored = load_file(Path(folder) / "adapter" / "adapter_model.safetensors")
        rank = next(len(tensor) for name, tensor in stored.items() if ".lora_A." in name)
        model = tandem.adapted(load_model(base, device, dtype), rank, seed=0).requires_grad_(False)
        own = {f"base_model.model.{name}.weight": p for name, p in model.named_parameters() if ".lora_" in name}
        if own.keys() != stored.keys():
            raise UserError(f"{folder}/adapter is not for {base}: other layers")
        for name, p in own.items():
            p.copy_(stored[name])
    return model

class Pair:
    """A senior, its junior and the tokenizer; loaded when the first measurement needs them."""

    def __init__(self, model, config):
        self.config, self.names = config, {"senior": model, "junior": config.junior}
        self.tokenizer, self.loaded = load_tokenizer(model), {}
        if config.junior:
            tandem.check_same_vocabulary(self.tokenizer, load_tokenizer(config.junior), config.junior)

    def __getattr__(self, role):
        if role not in ("senior", "junior"):
            raise AttributeError(role)
        if role not in self.loaded:
            device, dtype = pick_device(self.config.device, self.config.dtype)
            base = adapter_base(self.names["senior"])
            if base and role == "senior":  # as it was trained: the merged weights in bf16 would have lost most of a small adapter
                self.loaded[role] = load_adapted(self.names["senior"], base, device, dtype)
            elif base and self.names["junior"] == base:
                self.loaded[role] = self.senior.base[0]  # the same weights with the adapter off
            else:
                self.loaded[role] = load_model(self.names[role], device, dtype).requires_grad_(False)
        return self.loaded[role]

    @functools.lru_cache
    def schedule(self, name):  # (looking at every token of a large vocabulary takes seconds)
        step = name == "handoff-step"
        return Schedule.of(self.tokenizer, len(self.tokenizer), "step" if step else "word", max_gap=self.config.max_gap, alternate=step)

def answer(pair, name, problems, seed):
    """n answers to each problem, by the senior alone (solo) or by the two in turns: a list of dicts, one a problem."""
    c, size = pair.config, len(pair.tokenizer)
    prompts = [encode_prompt(pair.tokenizer, p.question + ("" if p.numbers else c.prompt_suffix), c.system_prompt) for p in problems]
    schedule, junior = (None, None) if name == "solo" else (pair.schedule(name), pair.junior)
    rolled = rollout(pair.senior, junior, prompts, group_size=c.n, max_new_tokens=c.max_new_tokens, schedule=schedule, temperature=c.temperature,
                     top_k=c.top_k, top_p=c.top_p, stops=stop_ids(pair.senior, junior, tokenizer=pair.tokenizer), vocab_size=size,
                     max_rows=c.max_rows, max_turns=c.max_turns if name == "handoff-step" else sys.maxsize, seed=seed)
    texts, turns = completion_texts(pair.tokenizer, rolled), rolled.turns.tolist()
    out = [{"question": p.question, "answer": p.answer, "prompt_ids": ids, "samples": []} for p, ids in zip(problems, prompts)]
    for i, (text, length) in enumerate(zip(texts, rolled.lengths.tolist())):
        finished, problem = bool(rolled.finished[i]), i // c.n
        author = {} if schedule is None else {"author": "".join("js"[s] for s in rolled.senior_mask[i, :length].tolist()), "turns": turns[i],
                                              "cut_by_turns": not finished and length < c.max_new_tokens}
        out[problem]["samples"].append({"text": text, "ids": rolled.ids[i, :length].tolist(), "correct": int(verify(text, problems[problem].answer, problems[problem].numbers)),
                                        "finished": finished, **author})
    return out

def score(pair, name, problems):
    """Drift or legibility of the senior's solo answers: for every problem, of every answer, the sum over its tokens in nats, and its length."""
    rows = [(p["prompt_ids"], s["ids"]) for p in problems for s in p["samples"]]
    sums = [0.0] * len(rows)
    for batch in micro_batches(range(len(rows)), [len(prompt) + len(ids) for prompt, ids in rows], pair.config.micro_tokens):
        prompts, completions = [rows[i][0] for i in batch], [rows[i][1] for i in batch]
        lengths = torch.tensor([len(ids) for ids in completions])
        ids = tandem.padded(completions, int(lengths.max()), "cpu")
        with torch.no_grad():
            values = (divergence(pair.senior, pair.junior, prompts, prompts, ids, lengths, vocab_size=len(pair.tokenizer)) if name == "drift" else
                      -completion_logprobs(pair.junior, prompts, ids, lengths, 1.0, vocab_size=len(pair.tokenizer)))
        for i, total in zip(batch, values.cpu().double().sum(1).tolist()):
            sums[i] = total
    results, i = [], 0
    for p in problems:
        results.append({"question": p["question"], "samples": [{"nats": sums[i + j], "tokens": len(s["ids"])} for j, s in enumerate(p["samples"])]})
        i += len(p["samples"])
    return results

def measure(pair, name, folder, config, benchmarks):
    """Makes NAME.json, or finds it made; returns what is in it. Drift and legibility are taken on the answers of solo.json."""
    text = json.dumps({label: [(p.question, p.answer) for p in problems] for label, problems in benchmarks.items()})
    settings = {"measurement": name, "model": pair.names["senior"], "model_hash": fingerprint(pair.names["senior"]), "data": ",".join(benchmarks),
                "data_hash": hashlib.sha256(text.encode()).hexdigest()[:16], **{key: getattr(config, key) for key in (
                    "n", "temperature", "top_p", "top_k", "max_new_tokens", "prompt_suffix", "system_prompt", "seed", "problems", "batch_problems")},
                "k": config.ks(), "dtype": str(pick_device(config.device, config.dtype)[1])[6:]}
    if name != "solo":
        settings.update(junior=pair.names["junior"], junior_hash=fingerprint(pair.names["junior"]), max_turns=config.max_turns, max_gap=config.max_gap)
    record = Measurement(folder, name, settings)
    if record.finished:
        return json.loads(record.path.read_text())
    solo = measure(pair, "solo", folder, config, benchmarks)["benchmarks"] if name in ("drift", "legibility") else None
    results = {}
    for label, problems in (solo or benchmarks).items():
        results[label] = []
        for start in tqdm(range(0, len(problems), config.batch_problems), desc=f"{name} {label}", unit="batch", disable=None):
            some = problems[start:start + config.batch_problems]
            compute = (lambda: score(pair, name, some)) if solo else (lambda: answer(pair, name, some, stream(config.seed, name, label, start)))
            results[label] += record.results(label, start, compute)
    tables = {metric: table_of(metric, [results]) for metric in metrics_of(name, config.ks())}
    summary = {metric: {**{b: float(num.sum() / den.sum()) for b, (num, den) in table.items()}, "macro": float(macro(table))} for metric, table in tables.items()}
    record.finish(results, summary)
    return json.loads(record.path.read_text())


# ------------------------------------- 4. Numbers with intervals -------------------------------------
# A metric's table is, for each benchmark, two arrays [seeds, problems]: its value is sum(numerator) / sum(denominator), averaged over benchmarks.
# A pair of tables stands for the ratio of their values (hand-off as a share of solo).
def metrics_of(name, ks):
    if name in ("solo", "handoff-step", "handoff-word"):
        more = {"solo": ["length", "cut"], "handoff-word": ["cut"], "handoff-step": ["cut", "cut by turns"]}[name]
        return [f"{name} {metric}" for metric in [f"pass@{k}" for k in ks] + more]
    return ["drift a token", "drift an answer"] if name == "drift" else ["legibility"]

def table_of(metric, seeds):
    """{benchmark: (numerator, denominator)}, each [S, P], of a metric; `seeds` are the "benchmarks" of the arm's files, one a seed."""
    value = metric.rpartition(" ")[2]

    def cell(problem):
        samples = problem["samples"]
        if value.startswith("pass@"):
            return pass_at_k(len(samples), sum(s["correct"] for s in samples), int(value[5:])), 1
        total = {"length": lambda s: len(s["ids"]), "cut": lambda s: not s["finished"], "turns": lambda s: s["cut_by_turns"], "token": lambda s: s["nats"],
                 "answer": lambda s: s["nats"], "legibility": lambda s: s["nats"] / s["tokens"]}[value]
        return sum(map(total, samples)), sum(s["tokens"] for s in samples) if value == "token" else len(samples)
    cells = {b: np.array([[cell(p) for p in seed[b]] for seed in seeds], dtype=float) for b in seeds[0]}  # [S, P, 2]
    return {b: (array[..., 0], array[..., 1]) for b, array in cells.items()}

def macro(table):
    if isinstance(table, tuple):
        return macro(table[0]) / macro(table[1]) if macro(table[1]) else math.nan
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.mean([num.sum() / den.sum() for num, den in table.values()])

def bootstrap(table, seed=0, draws=2000, arm=0):
    """[draws] values of a metric with problems, and seeds where there are several, drawn with replacement. Two arms' tables of the same problems
    have the same problems in the same draw (and seeds of their own, by `arm`), so the difference of their draws is paired."""
    if isinstance(table, tuple):
        with np.errstate(invalid="ignore", divide="ignore"):
            return bootstrap(table[0], seed, draws, arm) / bootstrap(table[1], seed, draws, arm)
    values = []
    for b, (num, den) in table.items():
        s, p = num.shape
        problems = np.random.default_rng([seed, 0, *b.encode()]).multinomial(p, np.full(p, 1 / p), draws)  # [draws, P]: how often each is drawn
        seeds = np.random.default_rng([seed, 1 + arm]).multinomial(s, np.full(s, 1 / s), draws)  # [draws, S]
        with np.errstate(invalid="ignore", divide="ignore"):
            values.append(np.einsum("ds,sp,dp->d", seeds, num, problems) / np.einsum("ds,sp,dp->d", seeds, den, problems))
    return np.mean(values, 0)

def interval(draws):
    """The 95 % percentile interval of bootstrap draws."""
    finite = draws[np.isfinite(draws)]
    return tuple(np.percentile(finite, (2.5, 97.5))) if len(finite) else (math.nan, math.nan)


# ------------------------------------- 5. Report -------------------------------------
@dataclass
class Arm:
    name: str
    folders: list  # of the JSON files, one a seed
    files: dict  # measurement -> [the JSON of each seed]
    runs: list  # for each seed: the rows of the run's metrics.jsonl, or None

def arm_name(config):
    return "tandem" if config["prob_senior"] < 1 else "KL-Reg" if config["kl_coef"] else "vanilla GRPO"

def load_arms(words):
    """The arms of `RUN...` or `NAME=GLOB[,GLOB]...`; runs that differ in nothing but the seed are one arm. Raises UserError."""
    folders, configs = {}, {}
    for word in words:
        name, _, patterns = ("", "", word) if "=" not in word or glob.glob(word) else word.partition("=")
        matches = sorted(path for pattern in patterns.split(",") for path in glob.glob(pattern))
        if not matches:
            raise UserError(f"report: no folder {patterns}")
        for path in map(Path, matches):
            configs[path] = read_json(path / "config.json", "model") if (path / "metrics.jsonl").is_file() else {}
            label = name or (arm_name(configs[path]) if "prob_senior" in configs[path] else path.name)
            if path in folders.setdefault(label, []):
                raise UserError(f"report: {path} is named twice, and would count as two seeds of {label}")
            folders[label].append(path)
            if not name:
                check_one_arm(label, folders[label], configs)
    arms = []
    for name, paths in folders.items():
        evals = [path / "eval" if (path / "eval").is_dir() else path for path in paths]
        files = {}
        for measurement in MEASUREMENTS:
            there = [folder / f"{measurement}.json" for folder in evals if (folder / f"{measurement}.json").is_file()]
            if there and len(there) < len(evals):
                lacking = next(path for path, folder in zip(paths, evals) if not (folder / f"{measurement}.json").is_file())
                raise UserError(f"report: {measurement} is missing in {lacking}; make it with: {remedy(lacking, configs[lacking], measurement.split('-')[0])}")
            files[measurement] = [read_json(path, "settings", "summary", "benchmarks") for path in there]
            for path, file in zip(paths, files[measurement]):
                check_current(path, measurement, file)
        if not any(files.values()):
            raise UserError(f"report: no measurements in {paths[0]}; make them with: "
                            f"{remedy(paths[0], configs[paths[0]], 'all' if 'prob_senior' in configs[paths[0]] else 'solo')}")
        logs = [tandem.read_jsonl(folder / "metrics.jsonl") or tandem.read_jsonl(folder.parent / "metrics.jsonl") for folder in paths]
        arms.append(Arm(name, evals, {m: f for m, f in files.items() if f}, logs))
    for arm in arms:
        for measurement, files in arm.files.items():
            check_same_problems(next(a for a in arms if measurement in a.files), arm, measurement, files)
    return arms

def check_one_arm(label, paths, configs):
    """The last run of an arm must differ from the first in nothing but the seed, and from all in that. Raises UserError that names what differs."""
    first, other = paths[0], paths[-1]
    names = f"name the arms: A={first} B={other}, or NAME={first},{other} for one"

    def bare(path, key):  # (of folders and files the name: clones lie elsewhere)
        value = configs[path].get(key)
        return Path(value).name if key in ("model", "junior", "student", "data", "eval_data") and isinstance(value, str) else value
    for key in sorted((configs[first].keys() | configs[other].keys()) - NEUTRAL - {"seed"}):
        if bare(first, key) != bare(other, key):
            raise UserError(f"report: {first} and {other} would both be {label}, but differ in {tandem.flag(key)} ({configs[first].get(key)!r}, "
                            f"{configs[other].get(key)!r}); {names}")
    if configs[other].get("seed") in [configs[path].get("seed") for path in paths[:-1]]:
        raise UserError(f"report: {other} would be one more seed of {label}, but tells none, or that of one before; {names}")

def check_current(run, measurement, file):
    """Raises UserError if a run has other weights now than those that were measured."""
    final = run / "final"
    if final.is_dir() and (run / "eval").is_dir() and file["settings"].get("model_hash") != fingerprint(final):
        raise UserError(f"report: {run}/eval/{measurement}.json is of other weights than {final} (trained further since?); remove {run}/eval and measure again")

def remedy(path, config, command):
    """The command that makes a run's measurements."""
    return f"python eval.py {command} --model {path}" + " --preset toy" * str(config.get("model", "")).startswith(str(tandem.TOY))

def check_same_problems(first, arm, measurement, files):
    """Every arm and seed must have answered the same problems under the same settings. Raises UserError that names what differs."""
    reference = first.files[measurement][0]
    for folder, file in zip(arm.folders, files):
        ours, theirs = ({b: [p["question"] for p in problems] for b, problems in f["benchmarks"].items()} for f in (file, reference))
        if ours != theirs:
            raise UserError(f"report: {folder}/{measurement}.json was measured on other problems ({file['settings']['data']}) than {first.folders[0]} "
                            f"({reference['settings']['data']}); only the same problems compare")
        for key in file["settings"].keys() - {"model", "model_hash", "junior", "seed", "problems", "batch_problems", "dtype"}:
            if file["settings"][key] != reference["settings"].get(key):
                raise UserError(f"report: {folder}/{measurement}.json was measured with {key} {file['settings'][key]!r}, {first.folders[0]} with "
                                f"{reference['settings'].get(key)!r}")

def metric_tables(arm):
    """{metric: table} of everything an arm has measured; hand-off also as a share of solo."""
    tables = {}
    for measurement, files in arm.files.items():
        for metric in metrics_of(measurement, files[0]["settings"]["k"]):
            tables[metric] = table_of(metric, [f["benchmarks"] for f in files])
    for metric in [m for m in tables if m.startswith("handoff") and m.endswith(("pass@1", "pass@4"))]:  # (the paper's table has pass@4)
        solo = "solo " + metric.rpartition(" ")[2]
        if solo in tables:  # hand-off as a share of solo
            tables[f"{metric} / solo"] = (tables[metric], tables[solo])
    return tables

def report(words, out):
    """Table, paired differences and figure of the arms; report.md, report.json and report.png in `out`."""
    arms = load_arms(words)
    tables = [metric_tables(arm) for arm in arms]
    draws = [{metric: bootstrap(table, arm=i) for metric, table in t.items()} for i, t in enumerate(tables)]
    metrics = [m for m in dict.fromkeys(m for t in tables for m in t) if any(np.isfinite(macro(t[m])) for t in tables if m in t)]
    numbers = {arm.name: {m: dict(zip(("value", "low", "high"), (float(macro(t[m])), *map(float, interval(d[m]))))) for m in metrics if m in t}
               for arm, t, d in zip(arms, tables, draws)}
    differences = {f"{arms[i].name} - {arms[0].name}": {m: dict(zip(("value", "low", "high"), (float(macro(tables[i][m]) - macro(tables[0][m])), *map(
        float, interval(draws[i][m] - draws[0][m]))))) for m in metrics if m in tables[i] and m in tables[0]} for i in range(1, len(arms))}
    seeds = ", ".join(f"{arm.name}: {len(arm.folders)} seed{'s' * (len(arm.folders) > 1)}" for arm in arms)
    text = (markdown(numbers, metrics) + (f"\nDifferences on the same problems\n\n{markdown(differences, metrics)}" if differences else "") +
            f"\nIn brackets: 95 % bootstrap intervals over problems, and over seeds where there are several ({seeds}). Drift and legibility are in nats.\n")
    Path(out).mkdir(parents=True, exist_ok=True)
    for name, content in (("report.md", text), ("report.json", json.dumps({"arms": numbers, "differences": differences}, indent=1))):
        write_aside(Path(out) / name, content)
    drawn = figure(arms, numbers, Path(out) / "report.png")
    print(f"{text}\nfiles: {out}/report.md, {out}/report.json" + f", {out}/report.png" * drawn)

def markdown(columns, metrics):
    """A table of {column: {metric: value, low, high}}, a line a metric."""
    def cell(x):
        return "" if x is None else f"{x['value']:.3f} [{x['low']:.3f}, {x['high']:.3f}]"
    rows = [["", *columns]] + [[m, *(cell(column.get(m)) for column in columns.values())] for m in metrics]
    width = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["| " + " | ".join(text.ljust(w) for text, w in zip(row, width)) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in width) + "|", *lines[1:]]) + "\n"

COLOURS, MARKERS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"), "osD^vP"  # Okabe and Ito's: told apart by the colour-blind
CURVES = {"reward": "reward in training", "habit": "lines with the habit", "length": "tokens a response", "solo/pass@1": "solo pass@1",
          "step/pass@1": "step hand-off pass@1"}
BARS = (("pass@1 (share of problems)", {"solo": "solo pass@1", "word\nhand-off": "handoff-word pass@1", "step\nhand-off": "handoff-step pass@1"}),
        ("drift (nats a token)", {"KL(senior || junior)": "drift a token"}), ("legibility (nats a token)", {"junior's cross-entropy": "legibility"}))

def figure(arms, numbers, path):
    """Training curves (mean over seeds, band from the lowest to the highest) above, the measurements with their intervals below. Returns whether
    there is anything to draw: of pass@k it shows pass@1."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    curves = [key for key in CURVES if any(key in row for arm in arms for log in arm.runs for row in log)]
    curves = [key for key in curves if not (key == "length" and "habit" in curves)][:4]
    bars = [(label, keys) for label, keys in BARS if any(m in numbers[arm.name] for arm in arms for m in keys.values())]
    if not bars:
        return False
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3, "axes.axisbelow": True})
    fig = plt.figure(figsize=(11, 6.2 if curves else 3.4), layout="constrained")
    parts = fig.subfigures(2 if curves else 1, 1, squeeze=False)[:, 0]
    if curves:
        for axis, key in zip(np.atleast_1d(parts[0].subplots(1, len(curves))), curves):
            for arm, colour, marker in zip(arms, itertools.cycle(COLOURS), itertools.cycle(MARKERS)):
                draw_curve(axis, [{row["step"]: row[key] for row in log if key in row} for log in arm.runs], arm.name, colour, marker)
            axis.set_xlabel("training step")
            axis.set_title(CURVES[key], fontsize=10)
            axis.set_ylim(bottom=0)
    axes = np.atleast_1d(parts[-1].subplots(1, len(bars), width_ratios=[len(keys) for _, keys in bars]))
    for axis, (label, keys) in zip(axes, bars):
        for i, (arm, colour) in enumerate(zip(arms, itertools.cycle(COLOURS))):
            for x, metric in enumerate(keys.values()):
                if metric in numbers[arm.name]:
                    v = numbers[arm.name][metric]
                    place, width = x + (i - (len(arms) - 1) / 2) * 0.8 / len(arms), 0.72 / len(arms)
                    axis.bar(place, v["value"], width, color=colour, label=arm.name if x == 0 else None)
                    axis.errorbar(place, v["value"], [[max(0, v["value"] - v["low"])], [max(0, v["high"] - v["value"])]], color="black", capsize=3, lw=1)
        axis.set(ylabel=label, xticks=range(len(keys)), xticklabels=list(keys))
        axis.grid(axis="x", visible=False)
    handles, labels = axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside upper center", ncols=len(arms), frameon=False)
    fig.savefig(path, dpi=120)
    plt.close(fig)
    return True

def draw_curve(axis, logs, name, colour, marker):
    """Mean over seeds, and the band from the lowest to the highest, of the steps that every seed has."""
    steps = sorted(set.intersection(*(set(log) for log in logs))) if logs else []
    if not steps:
        return
    values = np.array([[log[step] for step in steps] for log in logs])  # [S, steps]
    few = len(steps) <= 12
    axis.plot(steps, values.mean(0), color=colour, label=name, marker=marker if few else None, markersize=5)
    axis.fill_between(steps, values.min(0), values.max(0), color=colour, alpha=0.2, lw=0)


# ------------------------------------- 6. Command line -------------------------------------
USAGE = f"the first word says what to do: {', '.join(COMMANDS)} (with --model ...), or report RUN... [--out FOLDER]; --help after it lists the settings"

def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    command = argv[0] if argv else ""
    if command in ("-h", "--help") or command == "report" and {"-h", "--help"} & set(argv):
        return print(f"{__doc__}\n{USAGE}")
    if command == "report":
        words, out = list(argv[1:]), "runs/report"
        if "--out" in words:
            at = words.index("--out")
            out, words = (words[at + 1:at + 2] or [""])[0], words[:at] + words[at + 2:]
        if not words or not out or any(word.startswith("-") for word in words):
            raise UserError("report: python eval.py report RUN... [--out FOLDER], where RUN is a run's folder or NAME=FOLDER[,FOLDER]")
        return report(words, out)
    if command not in COMMANDS:
        raise UserError(USAGE)
    config = parse_config(Config, PRESETS, argv[1:] or ["--preset", "paper"], f"eval.py {command}: measurements of Tandem RL (arXiv 2606.28166)")
    model, config = resolve(config)
    pair = Pair(model, replace(config, junior="") if command == "solo" else config)  # (alone it needs none, not even one that is there)
    if not config.junior and command != "solo":
        raise UserError(f"--junior is needed: {config.model} is no run that names one")
    benchmarks = load_benchmarks(config.data, config.problems)  # refuses what cannot be read, before a model is loaded
    for name in COMMANDS[command]:
        result = measure(pair, name, Path(config.out), config, benchmarks)
        numbers = {metric.removeprefix(name + " "): values["macro"] for metric, values in result["summary"].items()}
        print(f"{name}: " + tandem.readable(numbers))
        if numbers.get("cut", 0) > 1 / 3:
            print(f"note: {numbers['cut']:.0%} of these answers were cut at --max-new-tokens {config.max_new_tokens}")
    print(f"files: {config.out}/")

if __name__ == "__main__":
    run_main(main)
