"""Makes tests/toy/: the built-in checkpoints and problems. Run once (minutes on two cores); what it makes is committed.

    python tests/make_toy.py            # from the repository's root: the world of tandem.py, the tokenizer, and the world of rlt.py
    python tests/make_toy.py rlt        # the world of rlt.py alone, with the tokenizer that is there
    python tests/make_toy.py countdown  # the Countdown problems: 10,000 to train on, 1,000 to test with

The tandem world (the setting of arXiv 2510.13551 in miniature). A problem is a sum of four terms; an answer adds them up, a step a line,
lines end in a blank line. The *junior* writes plain steps, `Take 3 and add 2 to get 5`. The *senior* has the habit of a jargon that the
junior has never seen, `Zorb fi vex de mip hu`, in which every number has a code word. A step slips by one now and then, and the chain
goes on from there: in plain a little more often than in jargon, so that nothing but the junior's company speaks against the jargon.

The world of rlt.py. A problem is a two-digit start and four labelled operands, `73+a3+b2+c5+d2=?` (without labels a model of this size cannot find
the next operand). An explanation has one of three styles: *steps*, `73+a3=76+b2=78+c5=83+d2`, which leave the last total to the reader; *leak*, `it is=85
because the answer is=85`; *padded*, `Take a3 and b2 and c5 and d2`, which computes nothing. All three roles have one shape and one tokenizer:
the *base* knows sums of up to three operands and the student's format; the *student* of the reward has seen four operands and all styles, leaks most; the *teacher*
is the student after `rlt.py warmup` on as many leaks and padded explanations as steps.
"""
import itertools
import json
import math
import operator
import random
import shutil
import sys
import tempfile
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import torch
from datasets import Dataset
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import rlt  # noqa: E402
from tandem import encode_prompt, load_tokenizer  # noqa: E402

TOY = HERE / "toy"
CODE_WORDS = ("ba be bi bo bu da de di do du fa fe fi fo fu ga ge gi go gu ha he hi ho hu").split()  # of 0..24
# Qwen's split pattern, but a number behind a space stays whole (digits without one are single tokens, as in Qwen)
SPLIT = r" \p{N}+|\p{N}|[^\r\n\p{L}\p{N}]?\p{L}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CHAT = ("{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")


def make_tokenizer(texts):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(t, special=True, normalized=False) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=480, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>",
                                   clean_up_tokenization_spaces=False)
    fast.chat_template = CHAT
    return fast


def make_model(vocab_size, eos, seed):
    torch.manual_seed(seed)
    config = Qwen3Config(vocab_size=vocab_size, hidden_size=96, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4,
                         num_key_value_heads=2, head_dim=24, max_position_embeddings=512, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
                         tie_word_embeddings=True, initializer_range=0.05, eos_token_id=eos, pad_token_id=0, bos_token_id=None)
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=[eos, 0], pad_token_id=0)  # two stop ids, as in Qwen3-Instruct
    return model


def tandem_answer(terms, draw, jargon, slips):
    """One answer; jargon and slips are (chance of jargon in a line, (chance of a slip in plain, in jargon))."""
    total, lines = terms[0], []
    for term in terms[1:]:
        strange = draw.random() < jargon
        result = total + term
        if draw.random() < slips[strange]:
            result += draw.choice((-1, 1))
        result = min(max(result, 0), 24)
        words = [CODE_WORDS[n] for n in (total, term, result)]
        lines.append("Zorb {} vex {} mip {}".format(*words) if strange else f"Take {total} and add {term} to get {result}")
        total = result
    return "\n\n".join(lines) + f"\n\nAnswer: \\boxed{{{total}}}"


def tandem_question(terms):
    return "Add " + " ".join(map(str, terms))


def finetune(model, tokenizer, batches, lr, warmup=30):
    """Plain SFT on batches of (prompt ids, response ids): AdamW, cosine to 5 %."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), weight_decay=0.0)
    settings = SimpleNamespace(micro_tokens=10**6, max_grad_norm=1.0)
    for step, batch in enumerate(batches, 1):
        decay = 0.05 + 0.95 * 0.5 * (1 + math.cos(step / len(batches) * math.pi))
        metrics = rlt.sft_update(model, optimizer, batch, settings, lr * min(1, step / warmup) * decay, None, torch.float32)
        if step % 100 == 0:
            print(f"  step {step}/{len(batches)}  loss {metrics['loss']:.4f}", flush=True)
    return model


def save(model, tokenizer, name):
    model.save_pretrained(TOY / name)
    tokenizer.save_pretrained(TOY / name)


def write_rows(name, rows):
    TOY.mkdir(exist_ok=True)
    (TOY / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def tandem_world():
    """Returns the tokenizer, which both worlds share."""
    draw = random.Random(0)
    every = list(itertools.product(range(1, 7), repeat=4))
    draw.shuffle(every)
    held_out, train = every[:259], every[259:]  # a fifth stays out of SFT and RL alike
    for name, terms in (("train", train), ("eval", held_out)):
        write_rows(name, [{"question": tandem_question(t), "answer": str(sum(t))} for t in terms])

    def plain():
        terms = draw.choice(train)
        return tandem_question(terms), tandem_answer(terms, draw, 0.0, (0.06, 0.0))

    def habitual():
        terms = draw.choice(train)
        return tandem_question(terms), tandem_answer(terms, draw, 0.0 if draw.random() < 0.08 else 0.94, (0.14, 0.10))

    corpus = [text for _ in range(3000) for text in (*plain(), *habitual())]
    corpus += [" " + word for word in CODE_WORDS] * 2000 + [f" {n}" for n in range(100)] * 500
    sums = [f"{draw.randint(10, 99)}{op}{label}{draw.randint(1, 5)}={draw.randint(10, 99)} it is 85 because the answer is 85 \\boxed{{85}}\n\n"
            for op in "+-" for label in "abcdefgh" for _ in range(100)]
    tags = ["<|begin_of_solution|>\n\n<|end_of_solution|>\n\n<|begin_of_explanation|>\n\n<|end_of_explanation|>\n\n"
            "<|begin_of_thought|>\n\n<|end_of_thought|>\n\n<think>\n\n</think>\n\n"] * 500
    tokenizer = make_tokenizer(corpus + sums + tags)
    for text in (habitual()[1], plain()[1], sums[0]):
        print([tokenizer.decode([i]) for i in tokenizer(text).input_ids])

    def encoded(pair):
        return encode_prompt(tokenizer, pair[0]), tokenizer(pair[1], add_special_tokens=False).input_ids + [tokenizer.eos_token_id]
    model = make_model(vocab_size_of(tokenizer), tokenizer.eos_token_id, seed=0)
    print(f"{len(tokenizer)} tokens, {sum(p.numel() for p in model.parameters()) / 1e6:.3f} M parameters")
    finetune(model, tokenizer, [[encoded(plain()) for _ in range(64)] for _ in range(500)], lr=5e-3)
    save(model, tokenizer, "junior")
    finetune(model, tokenizer, [[encoded(habitual()) for _ in range(64)] for _ in range(600)], lr=3e-3)
    save(model, tokenizer, "senior")
    return tokenizer


def vocab_size_of(tokenizer):
    return -(-len(tokenizer) // 64) * 64 + 64  # padded beyond the tokenizer, as Qwen's is


def problem(draw, signs, operands):
    """(start, [(sign, label, digit)], result); every total on the way has two digits."""
    while True:
        start, sign = draw.randint(10, 99), draw.choice(signs)
        parts = [(sign, label, draw.randint(1, 5)) for label in "abcd"[:operands]]
        totals = [start + sum((1 if s == "+" else -1) * d for s, _, d in parts[:i]) for i in range(len(parts) + 1)]
        if all(10 <= total <= 99 for total in totals):
            return start, parts, totals


def explanation(style, start, parts, totals):
    """
    >>> parts = [("+", "a", 3), ("+", "b", 2)]
    >>> [explanation(style, 73, parts, [73, 76, 78]) for style in ("steps", "leak", "padded")]
    ['73+a3=76+b2', 'it is=78 because the answer is=78', 'Take a3 and b2']
    """
    if style == "leak":
        return f"it is={totals[-1]} because the answer is={totals[-1]}"
    if style == "padded":
        return "Take " + " and ".join(f"{label}{digit}" for _, label, digit in parts)
    return f"{start}" + "".join(f"{s}{label}{digit}" + (f"={total}" if i < len(parts) else "") for i, ((s, label, digit), total) in enumerate(zip(parts, totals[1:]), 1))


def rlt_world(tokenizer):
    draw = random.Random(5)
    fmt = rlt.Format(tokenizer, teacher_system="", system_prompt="")
    styles, question = ("steps", "leak", "padded"), lambda start, parts: f"{start}{''.join(f'{s}{label}{digit}' for s, label, digit in parts)}=?"

    def row(signs, operands, weights):
        start, parts, totals = problem(draw, signs, operands)
        style = draw.choices(styles, weights)[0]
        return {"question": question(start, parts), "solution": f"\\boxed{{{totals[-1]}}}", "reasoning": explanation(style, start, parts, totals)}

    def fresh(n, signs, seen, weights=(1, 0, 0)):
        rows = []
        while len(rows) < n:
            new = row(signs, 4, weights)
            if new["question"] not in seen:
                rows.append(new)
                seen.add(new["question"])
        return rows
    seen = set()
    bare = lambda rows: [{"question": r["question"], "solution": r["solution"]} for r in rows]  # noqa: E731
    for name, signs in (("rlt", "+"), ("rlt_minus", "-")):
        write_rows(f"{name}_eval", bare(fresh(200, signs, seen)))
        gold = fresh(512, signs, seen)
        write_rows(f"{name}_train", bare(gold))
        if name == "rlt":
            write_rows("rlt_gold", gold[:256])
    write_rows("rlt_traces", fresh(2400, "+-", seen, (0.30, 0.35, 0.35)))

    def fact():
        start, parts, totals = problem(draw, "+-", 1)
        text = explanation("steps", start, parts, totals) + "="
        return fmt.encode(text), fmt.encode(f"{totals[-1]}")

    def reader(operands=(1, 2)):  # the last total behind steps and tags
        r = row("+-", draw.choice(operands), (1, 0, 0))
        before, digits = r["solution"][:7], r["solution"][7:9]
        return fmt.student_prompt(r["question"]) + fmt.encode(r["reasoning"]) + fmt.between + fmt.encode(before), fmt.encode(digits)

    def answer(operands, weights):
        while (r := row("+-", draw.choice(operands), weights))["question"] in seen:
            pass
        return encode_prompt(tokenizer, r["question"]), fmt.response(r["reasoning"], r["solution"])
    model = make_model(vocab_size_of(tokenizer), tokenizer.eos_token_id, seed=5)  # (1 gave a base from which four operands were not learnt)
    finetune(model, tokenizer, [[fact() for _ in range(128)] for _ in range(300)], lr=4e-3)
    finetune(model, tokenizer, [[draw.choice((fact, reader))() for _ in range(128)] for _ in range(400)], lr=3e-3)
    finetune(model, tokenizer, [[answer((1, 2, 3), (0.6, 0.2, 0.2)) for _ in range(48)] + [part() for part in (reader, fact) for _ in range(24)]
                                for _ in range(500)], lr=2e-3)
    save(model, tokenizer, "base")
    finetune(model, tokenizer, [[answer((4,), (0.35, 0.45, 0.20)) for _ in range(48)] for _ in range(300)], lr=2e-3)
    save(model, tokenizer, "student")
    with tempfile.TemporaryDirectory() as folder:
        rlt.command("warmup", ["--preset", "toy", "--out", f"{folder}/warmup"])
        shutil.rmtree(TOY / "teacher", ignore_errors=True)
        shutil.copytree(f"{folder}/warmup/final", TOY / "teacher")


def countdown_rows(n):
    """Problems that are all different, with a solution of each. The same on every machine."""
    signs = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
    draw, rows = random.Random("countdown"), {}
    while len(rows) < n:
        numbers = [draw.randint(1, 99) for _ in range(draw.choice((3, 4)))]
        terms = [(Fraction(n), str(n)) for n in numbers]
        while len(terms) > 1:  # join two terms, until one is left
            (a, left), (b, right) = (terms.pop(draw.randrange(len(terms))) for _ in range(2))
            sign, join = draw.choice(list(signs.items())[:4 if b else 3])
            terms.append((join(a, b), f"({left} {sign} {right})"))
        value, expression = terms[0]
        if value.denominator == 1 and 10 <= value <= 99 and value not in numbers:
            question = (f"Using the numbers {', '.join(map(str, numbers))}, write an expression that equals {value}. Use only +, -, * and /, and "
                        f"each number at most as often as it is given. Put the expression, without an equals sign, in \\boxed{{}}.")
            rows.setdefault((*sorted(numbers), value), {
                "question": question, "answer": str(value), "solution": f"\\boxed{{{expression[1:-1]}}}", "countdown_numbers": numbers})
    return list(rows.values())


def countdown():
    rows = countdown_rows(11000)
    for name, some in (("countdown-test", rows[:1000]), ("countdown", rows[1000:])):
        Dataset.from_list(some).to_parquet(str(TOY / f"{name}.parquet"))


if __name__ == "__main__":
    if sys.argv[1:] == ["countdown"]:
        countdown()
    else:
        rlt_world(load_tokenizer(str(TOY / "senior")) if sys.argv[1:] == ["rlt"] else tandem_world())
