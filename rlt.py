"""Reinforcement-Learned Teachers (arXiv 2506.08388): train a model to explain known solutions, then learn from its explanations.

The idea. A teacher is given the question *and* its solution, and writes the explanation that connects them. It solves nothing; it is rewarded,
densely, by how well a frozen *student* understands: the solution should become likely to the student who has read the explanation
(usefulness, r_SS), and each step of the explanation should be one that the student could have come to without the solution (naturalness, r_KL).
GRPO then trains the teacher: the same GRPO as in tandem.py, which this file imports. What is the teacher good for? Its explanations distil students;
the students are a better start for RL with a verifier; and it explains tasks that it was not trained on.

Both contexts are built by concatenating token ids, so the ids that the teacher sampled are the ids that are scored, in either context, and
every span is known by construction. Only the closing tag is looked for, in the teacher's own text.

Letters: N explanations, T their positions (right-padded), S positions of the solution, V vocabulary.

Departures from the paper and its released code
    1. The naturalness is by default the released code's log-ratio on the sampled token (an unbiased estimate that can be negative); with
       `--kl exact` it is the paper's divergence over the whole vocabulary.
    2. A closing tag may begin inside a token (`.<` is one in Qwen's vocabulary). What stands before the tag in that token is encoded on its own.
    3. Rewards are held at EMPTY_REWARD from below, which is also what an empty explanation earns: never more than a real one. `floor` in the log
       is the share of explanations there: their differences are lost.
    4. The teacher stops at its closing tag; the loss falls on all that it wrote, the tag included.
    5. The distilled student's response begins with its opening tag, so that afterwards it needs nothing but the chat prompt (with its system prompt).
    6. The system prompts are in this project's own words. A student that was tuned with another one is best judged with that: --system-prompt.

Run it
    python rlt.py                                                    # the built-in toy world, all of it; minutes on a laptop's CPU
    python rlt.py distill --preset small --data bespoke --out runs/reward-student  # the student of the reward, tuned on the corpus
    python rlt.py warmup --preset small --out runs/warmup            # Qwen2.5-0.5B learns the teacher's format on Bespoke-Stratos-17k
    python rlt.py train --preset small --out runs/teacher            # GRPO with the reward above
    python rlt.py explain --preset small --out runs/traces           # the trained teacher explains
    python rlt.py distill --preset small --out runs/student          # a student learns from that, and is measured before and after
    python tandem.py --prob-senior 1 --model runs/student/final ...  # RL from that cold start (README)
"""
import functools, math, random, re, shutil, sys, time
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

import tandem
from tandem import (CHOICES, HUB, RANGES, TOY, Batch, GRPOConfig, Problem, Run, Tandem, UserError, batch_of, blame, check_same_vocabulary,
                    completion_hidden, completion_logprobs, encode_prompt, load_model, load_problems, load_rows, load_tokenizer,
                    load_trained, micro_batches, padded, parse_config, pick_device, printable, read_jsonl, real_tokens, refresh, rollout,
                    run_main, stop_ids, stream, train_loop, training)

# ------------------------------------- 1. Config: the paper's values are the defaults -------------------------------------
EMPTY_REWARD = -10.0  # of an explanation without a token
TAGS = {  # (open, close) of the thought, the solution and the explanation: plain text, not special tokens
    "begin": {name: (f"<|begin_of_{name}|>", f"<|end_of_{name}|>") for name in ("thought", "solution", "explanation")},
    "think": {"thought": ("<think>", "</think>"), "solution": ("<solution>", "</solution>"), "explanation": ("<explanation>", "</explanation>")},
}
TEACHER_SYSTEM = ("You are given a problem and its solution. Explain, step by step, the reasoning that leads from the problem to the solution, so "
                  "that a student who has not seen the solution could follow it and come to it.")
STUDENT_SYSTEM = "Think about the problem step by step, and then give the solution."

@dataclass
class FormatConfig:
    """How teacher and student are addressed (shared by all commands)."""
    tags: str = "begin"  # begin: <|begin_of_thought|> and the like; think: <think> and the like
    teacher_system: str = TEACHER_SYSTEM  # the teacher's system prompt; empty: none (or the chat template's own)
    system_prompt: str = STUDENT_SYSTEM  # the student's system prompt, which does not mention the solution; empty: likewise

@dataclass
class RewardConfig(FormatConfig):
    """The reward (shared by train and explain)."""
    student: str = "bespokelabs/Bespoke-Stratos-7B"  # the frozen student that judges; self: --model itself (train: as it was at the start)
    alpha: float = 0.01  # weight of the hardest solution token, and of the least natural explanation token
    lambda_kl: float = 3.0  # weight of the naturalness; 0: usefulness alone
    kl: str = "sampled"  # naturalness from the sampled token's log-ratio (sampled), or over the whole vocabulary (exact)
    styles: str = ""  # NAME=REGEX, separated by spaces: the share of explanations that each regular expression finds is logged (style/NAME)
    def check(self):
        tandem.check_ranges(self)
        self.patterns()
    def patterns(self):
        with blame("--styles must be NAME=REGEX, separated by spaces"):
            return {f"style/{name}": re.compile(regex) for name, regex in (word.split("=", 1) for word in self.styles.split())}

@dataclass
class TrainConfig(GRPOConfig, RewardConfig):
    """GRPO on the teacher; the settings of the paper's 7B run."""
    model: str = "runs/warmup/final"  # the teacher's start: a folder or a hub name
    data: str = "bespoke"  # questions and solutions: bespoke, gsm8k, math, countdown, or a .jsonl, .json or .parquet file
    eval_data: str = ""  # held-out questions, named likewise; empty: taken out of --data before training
    eval_problems: int = 64  # how many held-out questions are explained at an evaluation
    eval_samples: int = 2  # explanations of each
    group_size: int = 64  # explanations of each question
    max_prompt_tokens: int = 4096  # longer teacher prompts (question and solution) are skipped and counted
    max_new_tokens: int = 12288  # explanations are cut here
    temperature: float = 0.7  # of sampling, and of every log-prob
    prompts_per_update: int = 16  # questions of one optimiser step; a divisor of prompts_per_step
    kl_coef: float = 0.04  # weight of the k3 KL to the reference
    sync_every: int = 32  # steps after which the reference is moved towards the policy
    sync_share: float = 0.9  # how far it is moved: 1 is all the way
    loss_mean: str = "sequence"  # token: mean over all tokens of an update; sequence: mean of each sequence, then of sequences
    steps: int = 125  # rollout batches to train on
    out: str = "runs/teacher"  # the run's folder
    def check(self):
        GRPOConfig.check(self)
        RewardConfig.check(self)

@dataclass
class ExplainConfig(RewardConfig):
    """A teacher's explanations of any questions with solutions."""
    model: str = "runs/teacher/final"  # the teacher
    data: str = "bespoke"  # questions and solutions, as for train
    problems: int = 0  # explain only so many questions; 0: all
    samples: int = 1  # explanations of each question
    keep: str = "all"  # all of them, or the best by reward
    max_prompt_tokens: int = 4096  # longer teacher prompts are skipped and counted
    max_new_tokens: int = 12288  # explanations are cut here
    temperature: float = 0.7  # of sampling, and of the reward's log-probs
    batch_problems: int = 16  # questions that are explained together, and kept when it is interrupted
    max_rows: int = 0  # sequences decoded at a time; 0: all of a batch
    micro_tokens: int = 16384  # tokens, padding included, of one scoring pass
    seed: int = 0  # of the sampling
    device: str = "auto"  # auto: cuda, then mps, then cpu
    dtype: str = "auto"  # bfloat16, float32, or auto: bfloat16 where the GPU computes in it
    out: str = "runs/traces"  # the folder of traces.jsonl
    resume: bool = False  # go on with the traces in --out, with the settings stored there
    show: int = 0  # explanations shown marked: the tokens that cost most KL, and the solution's hardest for the student

@dataclass
class SFTConfig(FormatConfig):
    """Supervised fine-tuning; the settings of the paper's warm-up."""
    model: str = "Qwen/Qwen2.5-7B-Instruct"  # what is fine-tuned
    data: str = "bespoke"  # see the README for the forms of a file
    epochs: float = 10.0  # passes over the data
    batch_size: int = 16  # examples of a step
    max_tokens: int = 16384  # longer examples are skipped and counted
    lr: float = 1e-5  # AdamW's learning rate at its highest; a cosine to 0
    warmup_share: float = 0.05  # share of the steps in which it rises
    beta2: float = 0.95  # AdamW's second beta (the first is 0.9)
    weight_decay: float = 1e-4  # AdamW's weight decay
    max_grad_norm: float = 1.0  # gradients are clipped to this norm
    micro_tokens: int = 16384  # tokens, padding included, of one forward and backward pass
    gradient_checkpointing: bool = True  # recompute activations in the backward pass
    seed: int = 0  # of the order of the examples, and of the sampling
    device: str = "auto"  # auto: cuda, then mps, then cpu
    dtype: str = "auto"  # bfloat16, float32, or auto: bfloat16 where the GPU computes in it
    save_every: int = 500  # steps between checkpoints
    out: str = "runs/warmup"  # the run's folder
    resume: bool = False  # go on from the newest checkpoint in --out, with the settings stored there
    def check(self):
        tandem.check_ranges(self)

@dataclass
class WarmupConfig(SFTConfig):
    """SFT of a teacher in the teacher's format, from questions, solutions and reasoning traces."""
    eval_every = 0  # (nothing is evaluated, so it is no setting)

@dataclass
class DistillConfig(SFTConfig):
    """SFT of a student on a teacher's explanations, and what the student can do before and after."""
    data: str = "runs/traces/traces.jsonl"  # what explain wrote, or any such file; without explanations: the solutions alone
    best: int = 0  # only so many traces, those with the highest reward that are not too long; 0: all
    eval_data: str = "math-test"  # problems to solve, as for tandem.py
    eval_problems: int = 500  # at most so many of them
    eval_samples: int = 1  # answers to each
    eval_temperature: float = 0.7  # sampling in evaluation
    eval_top_p: float = 1.0  # likewise
    eval_top_k: int = 0  # likewise; 0: all
    eval_every: int = 100000  # steps between evaluations, beside those before and after; 0: none
    prompt_suffix: str = tandem.Config.prompt_suffix  # follows each question, in training and in evaluation, unless it asks for a box itself
    max_new_tokens: int = 4096  # answers are cut here
    max_rows: int = 64  # answers decoded at a time
    show: int = 0  # answers shown in the terminal at each evaluation
    out: str = "runs/student"  # the run's folder

RANGES.update(sync_share=(1e-6, 1), warmup_share=(0, 1), epochs=(1e-6, 1e6), **dict.fromkeys((
    "samples", "sync_every", "batch_size", "max_tokens", "batch_problems"), (1, 10**7)))
CHOICES.update(tags=tuple(TAGS), kl=("sampled", "exact"), keep=("all", "best"))

TEACHER_TOY = dict(teacher_system="", system_prompt="")
REWARD_TOY = dict(**TEACHER_TOY, student=str(TOY / "student"), data=str(TOY / "rlt_train.jsonl"), max_new_tokens=40, device="cpu",
                  styles=r"steps=^\d\d([+-]\w\d=\d\d)*[+-]\w\d$ leak=because padded=^Take")
SFT_TOY = dict(**TEACHER_TOY, batch_size=32, lr=2e-3, beta2=0.99, weight_decay=0.0, gradient_checkpointing=False, device="cpu")
SMALL = "Qwen/Qwen2.5-0.5B-Instruct"
PRESETS = {  # of each command
    "warmup": {"paper": {}, "small": dict(model=SMALL, epochs=1.0, max_tokens=4096),
               "toy": dict(SFT_TOY, model=str(TOY / "student"), data=str(TOY / "rlt_traces.jsonl"), batch_size=48, epochs=4.0,
                           out="runs/toy-warmup")},
    "train": {"paper": {}, "small": dict(student="runs/reward-student/final", group_size=16, max_prompt_tokens=1024, max_new_tokens=2048, steps=100),
              "toy": dict(**REWARD_TOY, model=str(TOY / "teacher"), eval_data=str(TOY / "rlt_eval.jsonl"), prompts_per_step=8, prompts_per_update=8,
                          group_size=8, lr=2e-4, warmup_steps=5, beta2=0.99, weight_decay=0.0, steps=40, eval_every=40, save_every=20,
                          gradient_checkpointing=False, show=1, out="runs/toy-teacher")},
    "explain": {"paper": {}, "small": dict(student="runs/reward-student/final", max_prompt_tokens=1024, max_new_tokens=2048),
                "toy": dict(**REWARD_TOY, model=str(TOY / "teacher"), problems=256, batch_problems=64, out="runs/toy-traces")},
    "distill": {"paper": {}, "small": dict(model=SMALL, epochs=2.0, max_tokens=4096),
                "toy": dict(SFT_TOY, model=str(TOY / "base"), data="runs/toy-traces/traces.jsonl", eval_data=str(TOY / "rlt_eval.jsonl"),
                            prompt_suffix="", eval_problems=200, eval_samples=4, epochs=12.5, max_new_tokens=64, max_rows=0, out="runs/toy-student")},
}

# ------------------------------------- 2. Data: questions, solutions, and perhaps explanations -------------------------------------
HUB["bespoke"] = ("bespokelabs/Bespoke-Stratos-17k", "default", "train")
EXPLANATIONS = ("explanation", "reasoning", "reasoning_trace", "trace", "thought")  # column names, in any case

@dataclass
class Lesson(Problem):
    explanation: str = ""
    reward: float = -math.inf  # of the explanation, where the file has one

def load_lessons(name, fmt):
    """(list of Lesson, number of rows skipped for want of a part) of a named set or a local file. Raises UserError.

    A row is a question, a solution and perhaps an explanation, each in a column, or a chat (`messages` or `conversations`) whose last turn has a
    thought and a solution between tags. If any row has an explanation, those without are skipped, and those with a tag inside it.
    """
    rows = load_rows(name)
    columns = {c.lower(): c for c in rows.column_names}
    pick = lambda names: [columns[c] for c in names if c in columns]  # noqa: E731
    questions, solutions, traces, chats = map(pick, (tandem.QUESTIONS, ("solution", *tandem.ANSWERS), EXPLANATIONS, ("messages", "conversations")))
    if questions and solutions:
        if chats and any((row[questions[0]] is None) != (rows[0][questions[0]] is None) for row in rows):
            raise UserError(f"{name}: mixed formats: some rows have columns for question and solution, others only {chats[0]}")
        parts = [(" ".join(row[c] for c in pick(["body"]) + questions[:1] if isinstance(row[c], str)), row[solutions[0]],
                  row[traces[0]] if traces else "") for row in rows]  # (SVAMP keeps the story in a column of its own, `Body`)
    elif chats:
        styles, parts = zip(*(chat_parts(row[chats[0]]) for row in rows))
        if len(found := [style for style in dict.fromkeys(styles) if style]) > 1:
            first, other = (f"row {styles.index(style) + 1} has tags of the style {style}" for style in found)
            raise UserError(f"{name}: mixed formats: {first}, {other}")
    else:
        raise UserError(f"{name}: needs a question column ({'/'.join(tandem.QUESTIONS)}) and a solution column (solution/"
                        f"{'/'.join(tandem.ANSWERS[:3])}), or chats (messages/conversations); it has {', '.join(rows.column_names)}")
    parts = [(bare(question), boxed(bare(solution)), response_parts(trace)[1] or bare(trace)) for question, solution, trace in parts]
    rewards = rows[columns["reward"]] if "reward" in columns else [None] * len(rows)
    explained, lessons = any(trace for *_, trace in parts), []
    for i, ((question, solution, trace), reward) in enumerate(zip(parts, rewards), 1):
        fmt.refuse_tags(f"{name}: row {i}", question=question, solution=solution)
        if question and solution and (trace or not explained) and not fmt.tag_in(trace):
            reward = reward if type(reward) in (int, float) and math.isfinite(reward) else -math.inf
            lessons.append(Lesson(question, tandem.final_answer(solution) or "", solution, explanation=trace, reward=reward))
    if not lessons:
        raise UserError(f"{name}: none of its {len(rows)} rows has all parts: a question, a solution, and an explanation if there are any")
    return lessons, len(rows) - len(lessons)

def bare(value):
    """A cell's text without the tags around it, in any style; "" for what is no text.

    >>> bare("<|begin_of_thought|> First, two. <|end_of_thought|>"), bare(145.0)
    ('First, two.', '145')
    """
    value = int(value) if isinstance(value, float) and value.is_integer() else value
    text = str(value).strip() if isinstance(value, (str, int, float)) and value == value else ""
    for start, end in (pair for style in TAGS.values() for pair in style.values()):
        text = text.removeprefix(start).removesuffix(end).strip()
    return text

def boxed(solution):
    r"""A solution with its final answer where the verifier looks for it: GSM8K's `#### 42` at the end becomes `\boxed{42}`."""
    worked, mark, answer = solution.rpartition("####")
    return f"{worked}\\boxed{{{answer.strip()}}}" if mark and "\n" not in answer.strip() else solution

def response_parts(text):
    """(style of the tags, thought, solution) of a whole response; ("", "", "") if it has no thought between tags."""
    for style, tags in TAGS.items():
        (open_t, close_t), (open_s, close_s) = tags["thought"], tags["solution"]
        if isinstance(text, str) and open_t in text and close_t in text:
            thought, _, solution = text.partition(open_t)[2].partition(close_t)
            return style, thought.strip(), solution.partition(open_s)[2].rpartition(close_s)[0] if open_s in solution else solution
    return "", "", ""

def chat_parts(chat):
    """(style of the tags, (question, solution, explanation)) of a chat's last user's turn and last turn; empty where there are none."""
    turns = [turn for turn in (chat if isinstance(chat, list) else []) if isinstance(turn, dict)]
    turns = [(turn.get("role") or turn.get("from"), turn.get("content") or turn.get("value")) for turn in turns]
    question = next((text for role, text in reversed(turns) if role in ("user", "human")), "")
    style, thought, solution = response_parts(turns[-1][1] if turns else "")
    return style, (question, solution, thought)

# ------------------------------------- 3. Formats: contexts of ids -------------------------------------
class Format:
    """How teacher and student see a question, an explanation and a solution.

    teacher:  system, user = question, assistant = OPEN_s | solution | CLOSE_s, OPEN_e | explanation | CLOSE_e
    student:  system, user = question, assistant = OPEN_t | explanation | CLOSE_t, OPEN_s | solution | CLOSE_s
    Each piece between bars is encoded on its own.
    """
    def __init__(self, tokenizer, tags="begin", teacher_system=TEACHER_SYSTEM, system_prompt=STUDENT_SYSTEM):
        self.tokenizer, self.tags, self.teacher_system, self.student_system = tokenizer, TAGS[tags], teacher_system, system_prompt
        self.reserved = [tag for pair in self.tags.values() for tag in pair] + tokenizer.all_special_tokens
        self.open_thought = self.encode(f"{self.tags['thought'][0]}\n\n")
        self.between = self.encode(f"\n\n{self.tags['thought'][1]}\n\n{self.tags['solution'][0]}\n\n")
        self.end = self.encode(f"\n\n{self.tags['solution'][1]}")
        self.close_explanation = self.encode(f"\n\n{self.tags['explanation'][1]}")
    @classmethod
    def of(cls, tokenizer, config):
        if tokenizer.eos_token_id is None:
            raise UserError(f"{config.model}: its tokenizer has no end-of-text token, which every response must end with")
        return cls(tokenizer, config.tags, config.teacher_system, config.system_prompt)
    def encode(self, text):
        return self.tokenizer(text, add_special_tokens=False).input_ids
    @functools.lru_cache(maxsize=1024)  # (each is asked for once an explanation)
    def teacher_prompt(self, question, solution):
        """Ids up to and including the opening explanation tag: the teacher writes on from there."""
        (open_s, close_s), (open_e, _) = self.tags["solution"], self.tags["explanation"]
        return (encode_prompt(self.tokenizer, question, self.teacher_system) + self.encode(f"{open_s}\n\n") + self.encode(solution) +
                self.encode(f"\n\n{close_s}\n\n{open_e}\n\n"))
    @functools.lru_cache(maxsize=1024)
    def student_prompt(self, question):
        """Ids up to and including the opening thought tag: the explanation follows."""
        return encode_prompt(self.tokenizer, question, self.student_system) + self.open_thought
    def response(self, explanation, solution):
        """Ids of what a distilled student is to write behind its chat prompt; without an explanation, the solution alone."""
        thought = self.open_thought + self.encode(explanation) + self.between if explanation else self.encode(f"{self.tags['solution'][0]}\n\n")
        return thought + self.encode(solution) + self.end + [self.tokenizer.eos_token_id]
    @functools.cached_property
    def enders(self):  # bool [V]: the ids whose text may end the closing tag
        return torch.tensor([self.tags["explanation"][1][-1] in text for text in tandem.token_texts(self.tokenizer, len(self.tokenizer))])
    def closes(self, ids, lengths):
        """Which rows [R] have just written the closing tag, from their ids [R, T] and lengths [R]. Few rows are decoded: those whose last token
        may end the tag, and of these the last tokens (the tag has at most one a character)."""
        closed, tag = self.enders.to(ids.device)[ids.gather(1, lengths[:, None] - 1)[:, 0]], self.tags["explanation"][1]
        for i in closed.nonzero()[:, 0].tolist():
            end = int(lengths[i])
            closed[i] = tag in self.tokenizer.decode(ids[i, max(0, end - len(tag)):end], clean_up_tokenization_spaces=False)
        return closed
    def tag_in(self, text):
        return next((tag for tag in self.reserved if tag in text), None)
    def refuse_tags(self, where, **parts):
        """Raises UserError if a text holds a tag or a special token: the models could not tell it from the real one."""
        for name, text in parts.items():
            if tag := self.tag_in(text):
                raise UserError(f"{where}: its {name} contains the tag {tag}: choose another --tags ({', '.join(TAGS)}), or mend the data")
    def split(self, ids):
        """(the explanation's ids, whether its closing tag was written) of what the teacher sampled, stop id and padding left out.

        Everything from the first closing tag on is cut, and so are tokens of white space before it: they belong to the tag's line.
        """
        close, decode, keep = self.tags["explanation"][1], functools.partial(self.tokenizer.decode, clean_up_tokenization_spaces=False), len(ids)
        text = decode(ids)
        if close not in text:
            return list(ids), False
        while len(before := decode(ids[:keep])) > text.index(close):  # from the end, where the tag is
            keep -= 1
        rest = text[len(before):text.index(close)].rstrip()  # of the token that the tag begins in
        while not rest and keep and not decode(ids[keep - 1:keep]).strip():
            keep -= 1
        return list(ids[:keep]) + (self.encode(rest) if rest else []), True

# ------------------------------------- 4. Reward: usefulness r_SS, naturalness r_KL -------------------------------------
@dataclass
class Reward:
    """What each explanation earned, [N]; and its per-token parts, for looking at: lists of N tensors."""
    reward: torch.Tensor
    r_ss: torch.Tensor
    r_kl: torch.Tensor
    solution_logp: list  # [S] each: log pi_s(solution token | explanation, question)
    token_kl: list  # [T] each: how far the teacher, who knows the solution, is from the student, who does not

@torch.no_grad()
def rlt_reward(teacher, student, fmt, questions, solutions, explanations, closed, *, alpha=0.01, lambda_kl=3.0, temperature=0.7, exact_kl=False,
               vocab_size=None, micro_tokens=16384):
    """r = r_SS - lambda r_KL, less 1 if the explanation was not closed. Returns a Reward.

    questions, solutions: N texts; explanations: N lists of ids, as sampled (see Format.split); closed: N bools. All log-probs are taken at the
    sampling temperature. r_SS = mean + alpha min of the student's log-probs of the solution's tokens, tags left out; r_KL = mean + alpha max,
    over the explanation's tokens, of the divergence of the teacher from the student. An explanation or a solution without a token earns
    EMPTY_REWARD. The result does not depend on how the batch is split.
    """
    n = len(questions)
    t_prompts = [fmt.teacher_prompt(q, s) for q, s in zip(questions, solutions)]
    s_prompts = [fmt.student_prompt(q) for q in questions]
    targets = [fmt.encode(s) for s in solutions]
    responses = [list(e) + fmt.between + s for e, s in zip(explanations, targets)]  # what the student reads behind its prompt
    out = Reward(*(torch.full((n,), x) for x in (EMPTY_REWARD, EMPTY_REWARD, -EMPTY_REWARD)), [torch.zeros(0)] * n, [torch.zeros(0)] * n)
    real = [i for i in range(n) if explanations[i] and targets[i]]
    totals = [max(len(p) + len(e), len(q) + len(r)) for p, e, q, r in zip(t_prompts, explanations, s_prompts, responses)]
    for rows in micro_batches(real, totals, micro_tokens):
        pick = lambda lists: [lists[i] for i in rows]  # noqa: E731
        ids, lengths = as_tensors(pick(explanations))
        read, read_lengths = as_tensors(pick(responses))
        states = completion_hidden(student, pick(s_prompts), read, read_lengths)  # one pass: the explanation and, behind it, the solution
        student_logp = completion_logprobs(student, pick(s_prompts), read, read_lengths, temperature, vocab_size=vocab_size, states=states)
        if exact_kl:
            hidden, row, col = states
            explained = hidden[col < lengths.to(col.device)[row]]  # [M, D], of the explanations' tokens
            kl = divergence(teacher, student, pick(t_prompts), None, ids, lengths, temperature, vocab_size, other_hidden=explained)
        else:
            kl = completion_logprobs(teacher, pick(t_prompts), ids, lengths, temperature, vocab_size=vocab_size) - student_logp[:, :ids.size(1)]
        for j, i in enumerate(rows):
            token_kl, logp = kl[j, :lengths[j]].cpu(), student_logp[j, read_lengths[j] - len(targets[i]):read_lengths[j]].cpu()
            out.token_kl[i], out.solution_logp[i] = token_kl, logp
            out.r_ss[i] = logp.mean() + alpha * logp.min()
            out.r_kl[i] = token_kl.mean() + alpha * token_kl.max()
            out.reward[i] = max(out.r_ss[i] - lambda_kl * out.r_kl[i] - float(not closed[i]), torch.tensor(EMPTY_REWARD))
    return out

def as_tensors(lists):
    """(ids [N, T], lengths [N]) of lists of ids."""
    lengths = torch.tensor([len(ids) for ids in lists])
    return padded(lists, int(lengths.max()), "cpu"), lengths

@torch.no_grad()
def divergence(model, other, prompts, other_prompts, ids, lengths, temperature=1.0, vocab_size=None, slice_tokens=1024, other_hidden=None):
    """KL(model || other) over the whole vocabulary at every position of the same completions under two prompts, in nats, [N, T], 0 on padding.

    Arguments as in tandem.completion_logprobs. In slices of positions: neither model's logits of a whole batch ever exist at once. other_hidden
    [M, D]: the other's hidden states at the M positions, if they are known.
    """
    hidden, row, col = completion_hidden(model, prompts, ids, lengths)
    hidden_other = completion_hidden(other, other_prompts, ids, lengths)[0] if other_hidden is None else other_hidden
    out = torch.zeros(ids.shape, device=model.device)
    for i in range(0, len(row), slice_tokens):
        some = slice(i, i + slice_tokens)
        logp, logq = (torch.log_softmax(m.get_output_embeddings()(h[some])[:, :vocab_size].float() / temperature, -1)
                      for m, h in ((model, hidden), (other, hidden_other)))  # [slice, V]
        out[row[some], col[some]] = (logp.exp() * (logp - logq)).sum(-1)
    return out

# ------------------------------------- 5. The teacher writes, and is scored -------------------------------------
def teach(teacher, student, fmt, lessons, config, samples, max_rows, seed):
    """`samples` explanations of each of P lessons, scored: (the Rollout, a dict an explanation, the Reward). A lesson's stand side by side.
    `config` is that of train or of explain."""
    size = len(fmt.tokenizer)
    stops = stop_ids(teacher, tokenizer=fmt.tokenizer)
    prompts = [fmt.teacher_prompt(lesson.question, lesson.solution) for lesson in lessons]
    rolled = rollout(teacher, None, prompts, group_size=samples, max_new_tokens=config.max_new_tokens, temperature=config.temperature, stops=stops,
                     also_stop=fmt.closes, vocab_size=size, max_rows=max_rows, seed=seed)
    rows = [ids[:n] for ids, n in zip(rolled.ids.tolist(), rolled.lengths.tolist())]
    written = [fmt.split(ids[:-1] if ids[-1] in stops else ids) for ids in rows]
    each = [lesson for lesson in lessons for _ in range(samples)]
    scored = rlt_reward(teacher, student, fmt, [x.question for x in each], [x.solution for x in each], [ids for ids, _ in written],
                        [closed for _, closed in written], alpha=config.alpha, lambda_kl=config.lambda_kl, temperature=config.temperature,
                        exact_kl=config.kl == "exact", vocab_size=size, micro_tokens=config.micro_tokens)
    texts = [fmt.tokenizer.decode(ids, clean_up_tokenization_spaces=False) for ids, _ in written]
    records = [{"question": lesson.question, "solution": lesson.solution, "explanation": text, "ids": ids, "length": len(ids), "closed": closed,
                "reward": reward, "r_ss": r_ss, "r_kl": r_kl} for lesson, text, (ids, closed), reward, r_ss, r_kl in zip(
                    each, texts, written, scored.reward.tolist(), scored.r_ss.tolist(), scored.r_kl.tolist())]
    return rolled, records, scored

def summary(records, patterns):
    """Means over explanations: the reward's parts (of those that are not empty), length in tokens, and the share of each style."""
    full, mean = [r for r in records if r["length"]], lambda values: sum(values) / len(records)
    return {"reward": mean(r["reward"] for r in records), **{part: sum(r[part] for r in full) / max(len(full), 1) for part in ("r_ss", "r_kl")},
            "length": mean(r["length"] for r in records), "closed": mean(r["closed"] for r in records),
            "floor": mean(r["reward"] <= EMPTY_REWARD for r in records),
            **{name: mean(bool(regex.search(r["explanation"])) for r in records) for name, regex in patterns.items()}}

def marked(tokenizer, ids, costs, worst=3):
    """The text of ids [T]; the `worst` costliest tokens above 0.05 nats are marked with their cost: red in a terminal, elsewhere «token 1.23»."""
    before, after = ("\033[91m", "\033[0m") if sys.stdout.isatty() else ("«", "»")
    costly = {i for i in sorted(range(len(ids)), key=lambda i: -costs[i])[:worst] if costs[i] > 0.05}
    text, run = "", []
    decode = lambda some: printable(tokenizer.decode(some, clean_up_tokenization_spaces=False))  # noqa: E731
    for i, token in enumerate(ids):
        run.append(token)
        if i in costly:
            text, run = f"{text}{decode(run[:-1])}{before}{decode(run[-1:])} {costs[i]:.2f}{after}", []
    return text + decode(run)

def show_marked(fmt, record, token_kl, solution_logp):
    """Prints an explanation with the tokens that cost most KL, and the solution with those the student finds hard."""
    explanation = marked(fmt.tokenizer, record["ids"], token_kl.tolist())
    solution = marked(fmt.tokenizer, fmt.encode(record["solution"]), (-solution_logp).tolist())
    tqdm.write(f"--- {printable(record['question'])}\n"
               f"explanation, marked where the solution shows through (nats): {explanation}\n"
               f"solution, marked where it is hard for the student (nats): {solution}\n"
               f"--- reward {record['reward']:.3f}: r_SS {record['r_ss']:.3f}, r_KL {record['r_kl']:.3f}, {'' if record['closed'] else 'not '}closed")

# ------------------------------------- 6. RL on the teacher -------------------------------------
class Teaching:
    """What makes GRPO the training of a teacher: how a batch is collected, what is measured, and the reference that moves."""
    def __init__(self, config, run, model, actor, student, reference, fmt, lessons, held_out):
        self.config, self.run, self.model, self.actor, self.student, self.reference = config, run, model, actor, student, reference
        self.fmt, self.lessons, self.held_out = fmt, lessons, held_out
    def collect(self, step):
        """Explanations of the step's questions and their rewards; the loss falls on every token that the teacher wrote."""
        c = self.config
        self.move_reference(step - 1)
        lessons = batch_of(self.lessons, step, c.prompts_per_step, c.seed)
        rolled, records, _ = teach(self.actor, self.student, self.fmt, lessons, c, c.group_size, c.max_rows, stream(c.seed, "rollout", step))
        prompts = [self.fmt.teacher_prompt(lesson.question, lesson.solution) for lesson in lessons for _ in range(c.group_size)]
        return Batch(prompts, rolled.ids, rolled.lengths, real_tokens(rolled.ids, rolled.lengths),
                     torch.tensor([record["reward"] for record in records]), summary(records, c.patterns()), records[::c.group_size])
    def evaluate(self, step):
        c = self.config
        rows = c.max_rows or c.prompts_per_step * c.group_size
        _, records, scored = teach(self.actor, self.student, self.fmt, self.held_out, c, c.eval_samples, rows, stream(c.seed, "eval", step))
        for i in range(0, min(c.show * c.eval_samples, len(records)), c.eval_samples):
            show_marked(self.fmt, records[i], scored.token_kl[i], scored.solution_logp[i])
        return {f"held_out/{name}": value for name, value in summary(records, c.patterns()).items()}
    def move_reference(self, done):
        """After every `sync_every` steps the reference is moved towards the policy. It is kept beside the checkpoints, for an exact resume."""
        c, every = self.config, self.config.sync_every
        if self.reference is None or done == 0 or done % every:
            return
        refresh(self.reference, self.model, c.sync_share)
        if not self.run.save(f"reference-{done}", self.reference, self.fmt.tokenizer):  # checkpoints after this could not be resumed
            raise OSError(f"{self.run.folder}/reference-{done} was not saved: make room, then go on with --resume")
        needed = min(((step - 1) // every * every for step in self.run.resumable()), default=0)
        for old in self.run.folder.glob("reference-*"):
            if old.name[10:].isdecimal() and int(old.name[10:]) < needed:
                shutil.rmtree(old)

def reference_of(run, config):
    """Where the reference of the newest checkpoint lies: the teacher's start, or where it was last moved to. Raises UserError."""
    moved = (run.step - 1) // config.sync_every * config.sync_every
    if run.step == 0 or moved == 0:
        return config.model
    if not (run.folder / f"reference-{moved}").is_dir():
        raise UserError(f"--resume: {run.folder}/reference-{moved} is missing, which {run.newest} was trained with")
    return str(run.folder / f"reference-{moved}")

def fitting(fmt, lessons, skipped, config, purpose):
    """The lessons whose teacher prompt, with the solution in it, is not too long; what is skipped is counted aloud. Raises UserError."""
    fit = [lesson for lesson in lessons if len(fmt.teacher_prompt(lesson.question, lesson.solution)) <= config.max_prompt_tokens]
    print(f"{len(fit)} questions {purpose}; skipped: {skipped} for want of a part, {len(lessons) - len(fit)} with more than "
          f"{config.max_prompt_tokens} tokens of question and solution")
    if not fit:
        raise UserError(f"no question is left: --max-prompt-tokens {config.max_prompt_tokens} is too low for all {len(lessons)}")
    return fit

def judged(config):
    """(the name of the student, the tokenizer, the format). Raises UserError for a student with another vocabulary."""
    name = config.model if config.student == "self" else config.student
    tokenizer, other = load_tokenizer(config.model), load_tokenizer(name)
    check_same_vocabulary(tokenizer, other, name)
    if tokenizer.chat_template != other.chat_template:
        print(f"note: {name} has another chat template than {config.model}, and is addressed with that of {config.model}")
    return name, tokenizer, Format.of(tokenizer, config)

def train(config):
    """RL on the teacher, from its start or the newest checkpoint to final/. Returns the rows of metrics.jsonl, or None after Ctrl-C."""
    run = Run(config)
    device, dtype = pick_device(config.device, config.dtype)
    student_name, tokenizer, fmt = judged(config)
    lessons = fitting(fmt, *load_lessons(config.data, fmt), config, "to train on")
    held_out = fitting(fmt, *load_lessons(config.eval_data, fmt), config, "held out") if config.eval_data else []
    if not config.eval_data:
        random.Random("held out").shuffle(lessons)
        take = min(config.eval_problems, len(lessons) // 5)
        held_out, lessons = lessons[:take], lessons[take:]
    if len(lessons) < config.prompts_per_step or not held_out:
        raise UserError(f"too few questions are left: {len(lessons)} to train on (--prompts-per-step {config.prompts_per_step}), "
                        f"{len(held_out)} held out")
    teacher, actor = load_trained(str(run.newest or config.model), device, dtype)
    student = load_model(student_name, device, dtype).requires_grad_(False)
    reference = load_model(reference_of(run, config), device, dtype).requires_grad_(False) if config.kl_coef else None
    print(f"{run.folder}: teacher {config.model}, {teacher.num_parameters() / 1e6:.1f} M parameters, student {student_name}; "
          f"{str(dtype)[6:]} on {device}")
    teaching = Teaching(config, run, teacher, actor, student, reference, fmt, lessons, held_out[:config.eval_problems])
    return train_loop(run, teacher, actor, tokenizer, config, teaching.collect, teaching.evaluate, reference, advantage_eps=1e-4)

# ------------------------------------- 7. Explaining -------------------------------------
def explain(config):
    """Writes traces.jsonl, a line an explanation: as a chat that SFT tools read, in parts, and with its reward. Returns the rows."""
    run = Run(config)
    path, (device, dtype) = run.folder / "traces.jsonl", pick_device(config.device, config.dtype)
    student_name, tokenizer, fmt = judged(config)
    lessons = fitting(fmt, *load_lessons(config.data, fmt), config, "that could be explained")[:config.problems or None]
    kept = config.samples if config.keep == "all" else 1
    batches = [lessons[i:i + config.batch_problems] for i in range(0, len(lessons), config.batch_problems)]
    wanted = [[(lesson.question, lesson.solution) for lesson in batch for _ in range(kept)] for batch in batches]
    stored = {}  # batch -> the questions and solutions of its lines; it counts when all are there
    with blame(f"{path}: a line is none of explain's"):
        for row in read_jsonl(path):
            stored.setdefault(int(row["step"]), []).append((row["question"], row["solution"]))
    for i, pairs in stored.items():
        if i >= len(batches) or pairs != wanted[i][:len(pairs)]:
            raise UserError(f"--resume: {path} was made from other data than {config.data} holds now, or by two processes at once")
    first = next((i for i, pairs in enumerate(wanted) if stored.get(i) != pairs), len(batches))
    run.logged = first - 1
    run.start()
    if first < len(batches):
        teacher, student = (load_model(name, device, dtype).requires_grad_(False) for name in (config.model, student_name))
    for i in tqdm(range(first, len(batches)), desc=f"explain {run.folder.name}", unit="batch", initial=first, total=len(batches), disable=None):
        _, records, scored = teach(teacher, student, fmt, batches[i], config, config.samples, config.max_rows, stream(config.seed, "explain", i))
        groups = [records[j:j + config.samples] for j in range(0, len(records), config.samples)]
        chosen = records if config.keep == "all" else [max(group, key=lambda record: record["reward"]) for group in groups]
        rows = [{"step": i, "messages": chat(fmt, record), **record} for record in chosen]
        run.log("traces.jsonl", [{key: value for key, value in row.items() if key != "ids"} for row in rows])
        for j in range(min(config.show, len(records)) if i == 0 else 0):
            show_marked(fmt, records[j], scored.token_kl[j], scored.solution_logp[j])
    rows = read_jsonl(path)
    print(f"{len(rows)} explanations: {tandem.readable(summary(rows, config.patterns()))}\nfile: {path}")
    return rows

def chat(fmt, record):
    """The conversation that a distilled student learns, in the form that SFT tools read."""
    (open_t, close_t), (open_s, close_s) = fmt.tags["thought"], fmt.tags["solution"]
    answer = f"{open_t}\n\n{record['explanation']}\n\n{close_t}\n\n{open_s}\n\n{record['solution']}\n\n{close_s}"
    turns = {"system": fmt.student_system, "user": record["question"], "assistant": answer}
    return [{"role": role, "content": content} for role, content in turns.items() if content]

# ------------------------------------- 8. Supervised fine-tuning: warm-up and distillation -------------------------------------
def finetune(run, config, tokenizer, examples, evaluate_with=None, best=0):
    """SFT on (prompt ids, response ids); the loss falls on the response. `best`: only the first so many that fit (0: all).
    Returns the rows of metrics.jsonl, or None after Ctrl-C."""
    fit = [pair for pair in examples if len(pair[0]) + len(pair[1]) <= config.max_tokens]
    print(f"{len(fit)} examples fit; skipped: {len(examples) - len(fit)} with more than {config.max_tokens} tokens")
    if not fit:
        raise UserError(f"no example is left: --max-tokens {config.max_tokens} is too low for all {len(examples)}")
    fit = fit[:best or None]
    if len(fit) < config.batch_size:
        raise UserError(f"{len(fit)} examples do not fill --batch-size {config.batch_size}")
    config.steps = math.ceil(len(fit) * config.epochs / config.batch_size)
    device, dtype = pick_device(config.device, config.dtype)
    model, actor = load_trained(str(run.newest or config.model), device, dtype if evaluate_with else torch.float32)
    def advance(step, optimizer):
        began, batch = time.perf_counter(), batch_of(fit, step, config.batch_size, config.seed)
        rising = max(1, round(config.warmup_share * config.steps))  # then a cosine to 0, which would be reached one step after the last
        lr = config.lr * (step / rising if step <= rising else 0.5 + 0.5 * math.cos(math.pi * (step - rising) / (config.steps + 1 - rising)))
        return {**sft_update(model, optimizer, batch, config, lr, len(tokenizer), dtype), "update_s": time.perf_counter() - began}, []
    def evaluate(step):
        if actor is not model:
            refresh(actor, model)
        return evaluate_with(actor, step)
    return training(run, model, tokenizer, config, advance, evaluate)

def sft_update(model, optimizer, batch, config, lr, vocab_size, dtype):
    """One optimiser step: the mean over all response tokens of the batch of their negative log-prob, however it is split."""
    totals, tokens, total = [len(p) + len(r) for p, r in batch], sum(len(r) for _, r in batch), 0.0
    model.train()
    for rows in micro_batches(range(len(batch)), totals, config.micro_tokens):
        ids, lengths = as_tensors([batch[i][1] for i in rows])
        with torch.autocast(model.device.type, dtype, enabled=dtype != torch.float32):
            loss = -completion_logprobs(model, [batch[i][0] for i in rows], ids, lengths, 1.0, vocab_size=vocab_size).sum() / tokens
        loss.backward()
        total += loss.item()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm).item()
    optimizer.param_groups[0]["lr"] = lr
    optimizer.step()
    optimizer.zero_grad()
    model.eval()
    return {"loss": total, "tokens": tokens, "grad_norm": norm, "lr": lr}

def warmup(config):
    """SFT in the teacher's format: the loss falls on the explanation and its closing tag."""
    run = Run(config)
    tokenizer = load_tokenizer(config.model)
    fmt = Format.of(tokenizer, config)
    lessons, skipped = load_lessons(config.data, fmt)
    if not lessons[0].explanation:
        raise UserError(f"{config.data}: the warm-up needs reasoning traces: a column {'/'.join(EXPLANATIONS)}, or chats")
    print(f"{config.data}: {len(lessons)} rows, {skipped} skipped for want of a part")
    return finetune(run, config, tokenizer, [(fmt.teacher_prompt(x.question, x.solution), fmt.encode(x.explanation) + fmt.close_explanation +
                                              [tokenizer.eos_token_id]) for x in lessons])

def distill(config):
    """SFT of a student on explanations, and its share of problems solved alone before and after."""
    run = Run(config)
    tokenizer = load_tokenizer(config.model)
    fmt = Format.of(tokenizer, config)
    lessons, skipped = load_lessons(config.data, fmt)
    if config.best:
        lessons.sort(key=lambda lesson: -lesson.reward)
        if lessons[0].reward == -math.inf:
            raise UserError(f"{config.data}: --best {config.best} needs rewards, and no row has one (a column `reward`)")
    what = "traces" if lessons[0].explanation else "solutions without explanations"
    unboxed = sum("\\boxed" not in lesson.solution for lesson in lessons)
    print(f"{config.data}: {len(lessons)} {what}, {skipped} skipped for want of a part; {unboxed} without \\boxed{{}}, which the verifier reads")
    problems, skipped = load_problems(config.eval_data) if config.eval_every else ([], 0)
    if skipped:
        print(f"note: {config.eval_data}: {skipped} of {skipped + len(problems)} rows are left out, for want of a question or an answer")
    def ask(question):
        return encode_prompt(tokenizer, question + ("" if "\\boxed" in question else config.prompt_suffix), config.system_prompt)
    problems = [(p, ask(p.question)) for p in problems[:config.eval_problems]]
    solo = tandem.Config(prob_senior=1.0, **{name: getattr(config, name) for name in (
        "max_new_tokens", "eval_samples", "eval_temperature", "eval_top_p", "eval_top_k", "max_rows", "seed", "show")})
    examples = [(ask(x.question), fmt.response(x.explanation, x.solution)) for x in lessons]
    evaluate = lambda student, step: Tandem(solo, student, None, tokenizer, [], problems).evaluate(step)  # noqa: E731
    return finetune(run, config, tokenizer, examples, evaluate, config.best)

# ------------------------------------- 9. Command line -------------------------------------
COMMANDS = {"warmup": (WarmupConfig, warmup), "train": (TrainConfig, train), "explain": (ExplainConfig, explain), "distill": (DistillConfig, distill)}

def command(name, argv):
    config_class, function = COMMANDS[name]
    about = f"{' '.join(config_class.__doc__.split())} The commands of rlt.py: {', '.join(COMMANDS)}; this is {name}. (arXiv 2506.08388)"
    return function(parse_config(config_class, PRESETS[name], argv, about))

def demo(out="runs/rlt-toy"):
    """The toy world: the teacher before and after RL, and a student distilled from each. What is there already is not done again."""
    def part(name, folder, *argv):
        resume = ["--resume"] * (Path(out) / folder / "config.json").is_file()
        return command(name, ["--preset", "toy", "--out", f"{out}/{folder}", *argv, *resume])
    patterns, lines = ExplainConfig(**PRESETS["explain"]["toy"]).patterns(), []
    for name, teacher in (("before", str(TOY / "teacher")), ("after", f"{out}/teacher/final")):
        if name == "after" and part("train", "teacher") is None:
            return 130
        traces = part("explain", f"traces-{name}", "--model", teacher)
        if (student := part("distill", f"student-{name}", "--data", f"{out}/traces-{name}/traces.jsonl")) is None:
            return 130
        means = summary(traces, patterns)
        lines.append({"teacher": f"{name} RL", **{key: f"{means[key]:.3f}" for key in ("reward", "r_ss", "r_kl", *patterns)},
                      "student": f"{student[0]['solo/pass@1']:.3f} -> {student[-1]['solo/pass@1']:.3f}"})
    print()
    for cells in [[name.removeprefix("style/") for name in lines[0]], *(list(line.values()) for line in lines)]:
        print(f"{cells[0]:<12}" + "".join(f"{cell:>9}" for cell in cells[1:-1]) + f"{cells[-1]:>18}")
    print("\nreward = r_SS - 3 r_KL; steps, leak, padded: shares of the explanations' styles; student: share of held-out problems that a student\n"
          "solves alone, before -> after it was distilled on this teacher's explanations\n"
          f"{out}/: teacher/, traces-*/traces.jsonl, student-*/; each final/ is a trained model")

def main(argv=None):
    argv = sys.argv[1:] if argv is None else list(argv)
    if not argv:
        return demo()
    name = argv.pop(0) if argv[0] in COMMANDS else "train"
    if argv and not argv[0].startswith("-"):
        raise UserError(f"the first word says what to do: {', '.join(COMMANDS)} (train, if there is none), not {argv[0]!r}; --help after it lists "
                        "the settings")
    return 130 if command(name, argv) is None else 0

if __name__ == "__main__":
    run_main(main)
