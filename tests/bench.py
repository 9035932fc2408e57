"""Speed, as ratios: both sides in one process, taking turns; the median of the runs, and their spread. No pass or fail.

    python tests/bench.py [--runs 5] [--size toy|mid]
    python tests/bench.py --recipes                               # estimated memory of the paper's batch on one GPU, for Qwen3's shapes
    python tests/bench.py --size 0.6b|1.7b|4b --device cuda       # random weights of these shapes, bf16: decoding; for a GPU
    python tests/bench.py --size 4b --lora-rank 32 --gb 24 --device cuda   # peak memory of the paper's batch within so many GB, beside the estimate

toy: the built-in model (0.3 M parameters). mid: a random Qwen3 of 8 layers, hidden size 256 and 32,000 words (20 M parameters).
"""
import argparse
import copy
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import eval as measures  # noqa: E402
import rlt  # noqa: E402
import tandem  # noqa: E402
from tandem import Schedule, rollout  # noqa: E402


SHAPES = {  # hidden size, feed-forward, layers, heads, key-value heads, head size, words
    "mid": (256, 768, 8, 8, 4, 32, 32000), "0.6b": (1024, 3072, 28, 16, 8, 128, 151936), "1.7b": (2048, 6144, 28, 16, 8, 128, 151936),
    "4b": (2560, 9728, 36, 32, 8, 128, 151936)}
BANDWIDTH = {"H200": 4.8e12, "H100": 3.35e12, "A100": 2.0e12, "4090": 1.0e12, "L40S": 0.86e12}  # bytes a second of the memory, by the card's name


def random_model(size, seed, device="cpu", dtype=torch.float32):
    hidden, feed_forward, layers, heads, kv_heads, head_dim, words = SHAPES[size]
    torch.manual_seed(seed)
    config = Qwen3Config(vocab_size=words, hidden_size=hidden, intermediate_size=feed_forward, num_hidden_layers=layers, num_attention_heads=heads,
                         num_key_value_heads=kv_heads, head_dim=head_dim, tie_word_embeddings=size != "mid", max_position_embeddings=40960)
    with torch.device(device):
        model = Qwen3ForCausalLM._from_config(config, dtype=dtype).eval()
    model.set_attn_implementation("grouped")  # as load_model has it
    model.generation_config = GenerationConfig(eos_token_id=[2, 0], pad_token_id=0)
    return model


def models(size):
    """(senior, junior, tokenizer, 16 ragged prompts)."""
    tokenizer = tandem.load_tokenizer(str(HERE / "toy/senior"))
    if size == "toy":
        pair = [tandem.load_model(str(HERE / "toy" / name), torch.device("cpu"), torch.float32) for name in ("senior", "junior")]
        return *pair, tokenizer, [tandem.encode_prompt(tokenizer, f"Add {i % 6 + 1} 2 {i % 5 + 1} 4" + " 5" * (i % 3)) for i in range(16)]
    pair = [random_model(size, seed) for seed in (0, 1)]
    return *pair, tokenizer, [list(range(5, 25 + 3 * (i % 8))) for i in range(16)]


def compare(name, ours, theirs, runs, per=None):
    """Prints ours / theirs in time as the median over runs, lowest and highest; with `per`, which counts a result's tokens, the time is that of a token."""
    ratios, rates = [], []
    ours(), theirs()  # warm up
    for _ in range(runs):
        seconds = []
        for side in (ours, theirs):
            began = time.perf_counter()
            result = side()
            seconds.append((time.perf_counter() - began) / (per(result) if per else 1))
        ratios.append(seconds[0] / seconds[1])
        rates.append(1 / seconds[0])
    rate = f"  {statistics.median(rates):.0f} tokens/s" if per else ""
    print(f"{name:<74} {statistics.median(ratios):6.2f} x  [{min(ratios):.2f}, {max(ratios):.2f}]{rate}", flush=True)


def generate(model, prompts, group, new_tokens, stops):
    """transformers' generate, with its own attention, on the same work: every prompt left-padded and repeated for its group."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts for _ in range(group)])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts for _ in range(group)])
    model.set_attn_implementation("sdpa")
    out = model.generate(ids.to(model.device), attention_mask=mask.to(model.device), do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=new_tokens,
                         eos_token_id=stops or None, pad_token_id=0)
    model.set_attn_implementation("grouped")
    return out


def our_step(model, tokenizer, prompts, group, new_tokens, stops):
    """(collect(), update(batch)): the two halves of a GRPO step on `prompts`: rollout and reward; one update."""
    config = tandem.GRPOConfig(prompts_per_update=len(prompts), group_size=group, temperature=1.0, micro_tokens=10**6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    seeds = iter(range(10**6))

    def collect():
        rolled = rollout(model, None, prompts, group_size=group, max_new_tokens=new_tokens, stops=stops, vocab_size=len(tokenizer), seed=next(seeds))
        texts = tandem.completion_texts(tokenizer, rolled)
        rewards = torch.tensor([float(len(text) % 2) for text in texts])
        return tandem.Batch([p for p in prompts for _ in range(group)], rolled.ids, rolled.lengths, rolled.senior_mask, rewards, {}, [])
    return collect, lambda batch: tandem.grpo_update(model, optimizer, batch, config, 1e-6, len(tokenizer))


def plain_update(model, optimizer, batch, group, words):
    """An update as one would write it first: all rows, and the logits of every position at once."""
    starts = torch.tensor([len(p) for p in batch.prompts])
    whole = [p + ids[:n].tolist() for p, ids, n in zip(batch.prompts, batch.ids, batch.lengths)]
    ids = tandem.padded(whole, max(map(len, whole)), model.device)
    logits = model(ids).logits[:, :-1, :words].float()
    logp = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])[..., 0]
    at = torch.arange(1, ids.size(1))
    mask = (at >= starts[:, None]) & (at < (starts + batch.lengths)[:, None])
    tandem.grpo_loss(logp, logp.detach(), tandem.group_advantages(batch.rewards, group), mask, 0.2).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def trl_seconds(model, tokenizer, prompts, group, new_tokens, stops, steps):
    """Seconds of each of `steps` steps of TRL's GRPOTrainer on the same prompts, one update a step, after one to warm up."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    ends = []
    model.set_attn_implementation("sdpa")  # transformers' own

    class Clock(TrainerCallback):
        def on_step_end(self, *_, **__):
            ends.append(time.perf_counter())
    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(output_dir=folder, per_device_train_batch_size=len(prompts) * group, num_generations=group, max_completion_length=new_tokens,
                              temperature=1.0, max_steps=steps + 1, learning_rate=1e-6, beta=0.0, report_to=[], save_strategy="no", use_cpu=True, bf16=False,
                              gradient_checkpointing=False, disable_tqdm=True, logging_strategy="no", generation_kwargs={"eos_token_id": stops})
        rows = Dataset.from_list([{"prompt": tokenizer.decode(p)} for p in prompts])
        reward = lambda completions, **_: [float(len(text) % 2) for text in completions]  # noqa: E731
        GRPOTrainer(model, reward, args=settings, train_dataset=rows, processing_class=tokenizer, callbacks=[Clock()]).train()
    return [b - a for a, b in zip(ends, ends[1:])]


def against_trl(model, tokenizer, prompts, new_tokens, runs):
    """Whole steps, ours / TRL's, with ragged and with equal lengths. TRL is no requirement: without it this is left out."""
    try:
        import trl  # noqa: F401
    except ImportError:
        return print("whole GRPO step / TRL's: trl is not installed (pip install trl)")
    for name, some, new_tokens in (("ragged lengths", prompts, 2 * new_tokens), ("equal lengths", [prompts[0]] * len(prompts), 20)):
        stops = [2, 0]  # (no answer of the built-in model ends within 20 tokens)
        ours, theirs = [], []
        for _ in range(3):  # taking turns
            collect, update = our_step(copy.deepcopy(model), tokenizer, some, 8, new_tokens, stops)
            update(collect())
            for _ in range(runs):
                began = time.perf_counter()
                update(collect())
                ours.append(time.perf_counter() - began)
            theirs += trl_seconds(copy.deepcopy(model), tokenizer, some, 8, new_tokens, stops, runs)
        ratios = sorted(a / b for a in ours for b in theirs)
        print(f"{f'whole GRPO step / TRL {trl.__version__}, 16 prompts x 8, {name}':<74} {statistics.median(ours) / statistics.median(theirs):6.2f} x  "
              f"[{ratios[len(ratios) // 10]:.2f}, {ratios[-1 - len(ratios) // 10]:.2f}]", flush=True)


def head_memory():
    """Peak memory of log-probs and their gradient at Qwen's 151,936 words, ours / plain, in processes of their own (a peak is a process's)."""
    code = """if True:
        import sys, torch; sys.path.insert(0, {root!r})
        import tandem
        from transformers import Qwen3Config, Qwen3ForCausalLM
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(Qwen3Config(vocab_size=151936, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
                                             num_key_value_heads=1, head_dim=32))
        prompts, ids, lengths = [[1, 2, 3]] * 4, torch.randint(0, 151936, (4, 1000)), torch.tensor([1000] * 4)
        start = tandem.peak_memory_gb(torch.device("cpu"))
        if {plain}:
            logits = model(torch.cat([torch.tensor(prompts), ids], 1)).logits[:, 2:-1].float() / 0.7
            logp = torch.log_softmax(logits, -1).gather(-1, ids[..., None])[..., 0]
        else:
            logp = tandem.completion_logprobs(model, prompts, ids, lengths, 0.7)
        logp.sum().backward()
        print(tandem.peak_memory_gb(torch.device("cpu")) - start)"""
    peaks = [float(subprocess.run([sys.executable, "-c", code.format(root=str(HERE.parent), plain=plain)], capture_output=True, text=True, check=True).stdout)
             for plain in (False, True)]
    if not peaks[1]:
        return print("peak memory of log-probs: this system does not tell a process's peak")
    print(f"{'log-probs of 4 x 1,000 tokens at 151,936 words, peak memory / plain':<74} {peaks[0] / peaks[1]:6.2f} x  ({peaks[0]:.1f} GB against {peaks[1]:.1f} GB)", flush=True)


def trainee(size, rank, device, seed=0):
    """(senior, actor, junior) as tandem.train has them on a GPU that computes in bf16: an adapter on one set of weights, or fp32 masters and two copies."""
    if rank:
        senior = tandem.adapted(random_model(size, seed, device, torch.bfloat16), rank, seed)
        return senior, senior, senior.base[0]
    return tuple(random_model(size, seed, device, dtype) for dtype in (torch.float32, torch.bfloat16, torch.bfloat16))


def rows_within(gb, config, models):
    """The most rows at a time whose caches the estimate fits into nine tenths of `gb`; 0: not one."""
    fits = [rows for rows in range(1, 129) if tandem.memory_estimate(replace(config, max_rows=rows), *models, config.max_prompt_tokens)[0] <= 0.9 * gb]
    return max(fits, default=0)


def recipes():
    """Estimates for the paper's batch: 16 prompts x 8 answers, 1,024 + 3,000 tokens, 16,384 tokens at a time in the update. Nothing is allocated."""
    print("| model | trained | card | rows at a time | GB, rollout | GB, update | tokens/s that the bandwidth allows |\n|" + " --- |" * 7)
    for size, rank, gb, bandwidth in (("0.6b", 0, 24, 1.0e12), ("1.7b", 32, 24, 1.0e12), ("1.7b", 0, 80, 2.0e12), ("4b", 32, 24, 1.0e12), ("4b", 32, 80, 2.0e12)):
        models, config = trainee(size, rank, "meta"), tandem.Config(lora_rank=rank)
        rows = rows_within(gb, config, models)
        rollout_gb, update_gb = tandem.memory_estimate(replace(config, max_rows=rows), *models, config.max_prompt_tokens)
        read = sum(p.nbytes for m in {id(m): m for m in models[1:]}.values() for p in m.parameters()) / (2 if rank else 1)  # of weights, at a step
        read += rows * (300 + 1500) * sum(map(tandem.cache_bytes, models[1:]))  # and of caches: a prompt of 300 tokens and half an answer
        print(f"| Qwen3-{size.upper()} | {f'adapter of rank {rank}' if rank else 'all weights'} | {gb} GB, {bandwidth / 1e12:.1f} TB/s | {rows} | {rollout_gb:.1f} | {update_gb:.1f} | "
              f"{rows * bandwidth / read:.0f} |")


def peak(size, rank, gb, device):
    """Peak memory of rolling out and of updating on the paper's batch, with `gb` GB of the GPU at hand; beside the estimate."""
    models, config = trainee(size, rank, device), tandem.Config(lora_rank=rank)
    senior, actor, junior = models
    config = replace(config, max_rows=rows_within(gb, config, models))
    if not config.max_rows:
        return print(f"{size}, rank {rank}: not one row fits into {gb:.0f} GB beside the weights")
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, gb * 1e9 / total), senior.device)
    senior.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW([p for p in senior.parameters() if p.requires_grad], lr=1e-6, fused=True)
    n, words = config.max_new_tokens, senior.config.vocab_size
    prompts = [[10 + i] * config.max_prompt_tokens for i in range(config.prompts_per_step)]
    ids, mask = torch.randint(10, words, (128, n), device=device), torch.ones(128, n, dtype=torch.bool, device=device)
    batch = tandem.Batch([p for p in prompts for _ in range(8)], ids, torch.full((128,), n, device=device), mask, torch.arange(128).float(), {}, [])
    word = Schedule(torch.arange(words) % 4 == 0, None, None, 32)
    for name, work in (("update", lambda: tandem.grpo_update(senior, optimizer, batch, replace(config, prompts_per_update=16), 1e-6, words, dtype=torch.bfloat16)),
                       ("rollout of one batch of rows", lambda: rollout(actor, junior, prompts[:-(-config.max_rows // 8)], group_size=8, schedule=word, stops=[],
                                                                        max_new_tokens=n, max_rows=config.max_rows))):
        torch.cuda.reset_peak_memory_stats(device)
        began = time.perf_counter()
        work()
        torch.cuda.synchronize(device)
        print(f"{size}, rank {rank}, {config.max_rows} rows at a time, {name}: peak {tandem.peak_memory_gb(device):.2f} GB, {time.perf_counter() - began:.0f} s; "
              f"estimated {tandem.memory_estimate(config, *models, config.max_prompt_tokens)[name == 'update']:.2f} GB", flush=True)


def decoding(size, device, dtype, runs, rows=128, prompt=128, new_tokens=256):
    """Tokens a second of decoding `rows` sequences, against generate and against what the memory's bandwidth allows; tandem against vanilla; peak memory."""
    senior, junior = (random_model(size, seed, device, dtype) for seed in (0, 1))
    pair = tandem.adapted(junior, 32, 0)
    prompts = [[(7 * i + j) % 30000 + 10 for j in range(prompt)] for i in range(rows // 8)]
    word = Schedule(torch.arange(senior.config.vocab_size) % 4 == 0, None, None, 32)
    common = dict(group_size=8, max_new_tokens=new_tokens, stops=[])

    def clock(work):
        device.type == "cuda" and torch.cuda.synchronize(device)
        began = time.perf_counter()
        work()
        device.type == "cuda" and torch.cuda.synchronize(device)
        return time.perf_counter() - began

    def plain(work):  # the loop without graph replay
        kind, tandem.Reader.graphs = tandem.Reader.graphs, None
        work()
        tandem.Reader.graphs = kind
    sides = {"vanilla": lambda: rollout(senior, None, prompts, **common), "plain": lambda: plain(sides["vanilla"]), "tandem": lambda: rollout(senior, junior, prompts, schedule=word, **common),
             "adapter": lambda: rollout(pair, junior, prompts, schedule=word, **common), "adapter alone": lambda: rollout(pair, None, prompts, **common),
             "generate": lambda: generate(senior, prompts, 8, new_tokens, [])}
    seconds = {name: [clock(work) for _ in range(runs + 1)][1:] for name, work in sides.items()}
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    c, each = senior.config, torch.finfo(dtype).bits // 8
    weights = sum(p.numel() for p in senior.parameters()) * each
    cache = rows * (prompt + new_tokens / 2) * c.num_hidden_layers * 2 * c.num_key_value_heads * c.head_dim * each  # read at a step, on average
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    bandwidth = next((value for name, value in BANDWIDTH.items() if name in card), None)
    limit = f"{(weights + cache) * new_tokens / bandwidth / middle['vanilla']:.0%} of the bandwidth limit" if bandwidth else "bandwidth not known"
    print(f"{size}, {rows} rows x ({prompt} + {new_tokens}) tokens, {str(dtype)[6:]}, {card}: {rows * new_tokens / middle['vanilla']:.0f} tokens/s, {limit}; "
          f"{middle['generate'] / middle['vanilla']:.2f} x generate's tokens/s, {middle['plain'] / middle['vanilla']:.2f} x the plain loop's"
          f"{'' if tandem.Reader.graphs else ' (NO GRAPHS)'}; tandem / vanilla {middle['tandem'] / middle['vanilla']:.2f} x, with "
          f"an adapter {middle['adapter'] / middle['adapter alone']:.2f} x; "
          f"peak memory {tandem.peak_memory_gb(device):.1f} GB", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--size", choices=("toy", *SHAPES), default="toy")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--recipes", action="store_true")
    parser.add_argument("--lora-rank", type=int, default=0)
    parser.add_argument("--gb", type=float, default=0)
    options = parser.parse_args()
    if options.recipes:
        return recipes()
    if options.gb:
        return peak(options.size, options.lora_rank, options.gb, torch.device(options.device))
    if options.device != "cpu" or options.size not in ("toy", "mid"):
        return decoding(options.size if options.size in SHAPES else "mid", torch.device(options.device), torch.bfloat16, options.runs)
    senior, junior, tokenizer, prompts = models(options.size)
    new_tokens = 44 if options.size == "toy" else 64
    tokens = lambda rolled: int(rolled.lengths.sum())  # noqa: E731
    seeds = iter(range(10**6))
    common = dict(max_new_tokens=new_tokens, vocab_size=len(tokenizer))
    word, step = (Schedule.of(tokenizer, len(tokenizer), name, alternate=name == "step") for name in ("word", "step"))
    print(f"{options.size}, {torch.get_num_threads()} threads, torch {torch.__version__}; time ratio: median of {options.runs} runs [lowest, highest]")

    same = [prompts[0]] * 16
    compare("solo rollout / generate, 16 equal prompts, no stops", lambda: rollout(senior, None, same, stops=[], seed=next(seeds), max_new_tokens=new_tokens),
            lambda: generate(senior, same, 1, new_tokens, []), options.runs)
    long = [p * 4 for p in prompts]
    compare("solo rollout / generate, 16 ragged long prompts x 8, stops", lambda: rollout(senior, None, long, group_size=8, seed=next(seeds), max_new_tokens=new_tokens),
            lambda: generate(senior, long, 8, new_tokens, [2, 0]), options.runs)
    vanilla = lambda: rollout(senior, None, prompts, group_size=8, seed=next(seeds), **common)  # noqa: E731
    for name, stops in (("equal lengths", []), ("ragged lengths", [2, 0])):
        every = dict(group_size=8, stops=stops, **common)
        compare(f"tandem / vanilla rollout, per token, {name}", lambda: rollout(senior, junior, prompts, schedule=word, seed=next(seeds), **every),
                lambda: rollout(senior, None, prompts, seed=next(seeds), **every), options.runs, tokens)
        pair = tandem.adapted(junior, 16, 0)
        compare(f"likewise with an adapter (--lora-rank 16), one pass for both, {name}", lambda: rollout(pair, junior, prompts, schedule=word, seed=next(seeds), **every),
                lambda: rollout(pair, None, prompts, seed=next(seeds), **every), options.runs, tokens)
    for group in (1, 2, 4, 8):  # a pair that speaks one language, at 16 to 128 answers a time; then a senior whose jargon the junior cannot continue
        compare(f"step hand-off / solo answers, per token, junior with itself, {16 * group} rows",
                lambda: rollout(junior, junior, prompts, group_size=group, schedule=step, seed=next(seeds), **common),
                lambda: rollout(junior, None, prompts, group_size=group, seed=next(seeds), **common), options.runs, tokens)
    compare("step hand-off / solo answers, per token, untrained senior, 128 rows",
            lambda: rollout(senior, junior, prompts, group_size=8, schedule=step, seed=next(seeds), **common), vanilla, options.runs, tokens)

    problems = measures.load_benchmarks(str(tandem.TOY / "eval.jsonl"), 32)["eval.jsonl"]
    evaluated = SimpleNamespace(senior=junior, junior=junior, tokenizer=tokenizer, schedule=lambda _: step,  # with the paper's sampling; graded, too
                                config=measures.Config(prompt_suffix="", max_new_tokens=new_tokens))
    compare("step hand-off / solo evaluation (eval.py), per token, 32 problems x 8", lambda: measures.answer(evaluated, "handoff-step", problems, next(seeds)),
            lambda: measures.answer(evaluated, "solo", problems, next(seeds)), options.runs, lambda out: sum(len(s["ids"]) for p in out for s in p["samples"]))

    rolled = vanilla()
    pair = SimpleNamespace(senior=senior, junior=junior, tokenizer=tokenizer, config=SimpleNamespace(micro_tokens=16384))
    chains = [{"question": "", "prompt_ids": p, "samples": [{"ids": rolled.ids[i, :rolled.lengths[i]].tolist()} for i in range(8 * j, 8 * j + 8)]} for j, p in enumerate(prompts)]
    single = [{**p, "samples": [s]} for p in chains for s in p["samples"]]
    for name in ("legibility", "drift"):
        compare(f"{name}: batched / one answer at a time", lambda: measures.score(pair, name, chains), lambda: [measures.score(pair, name, [p]) for p in single], options.runs)

    logits, uniform = 3 * torch.randn(16, 151936), torch.rand(16)
    warpers = TopKLogitsWarper(20), TopPLogitsWarper(0.8)
    compare("a draw of top-k 20, top-p .8 of 151,936 words / transformers' two warpers", lambda: tandem.sample(logits, uniform, 0.7, 20, 0.8),
            lambda: tandem.sample(warpers[1](None, warpers[0](None, logits / 0.7)), uniform, 1.0), options.runs)

    fmt = rlt.Format(tokenizer, teacher_system="", system_prompt="")
    sums = [(f"{20 + i}+a{i % 5 + 1}+b2+c{i % 3 + 1}+d4=?", f"\\boxed{{{26 + i + i % 5 + 2 + i % 3}}}") for i in range(64)]
    written = [fmt.encode(f"{q[:5]}={i + 30}" * (1 + i % 3)) for i, (q, _) in enumerate(sums)]
    collect, update = our_step(trained := copy.deepcopy(senior), tokenizer, prompts, 8, 2 * new_tokens, [2, 0])
    batches, optimizer = [collect() for _ in range(4)], torch.optim.AdamW(trained.parameters(), lr=1e-6)
    every = lambda step: [step(batch) for batch in batches]  # noqa: E731
    compare("update step, 16 ragged prompts x 8 / plain: all rows, all logits", lambda: every(update),
            lambda: every(lambda batch: plain_update(trained, optimizer, batch, 8, len(tokenizer))), options.runs)
    against_trl(senior, tokenizer, prompts, new_tokens, options.runs)
    head_memory()
    for kl in ("sampled", "exact"):
        reward = lambda rows: rlt.rlt_reward(senior, junior, fmt, [sums[i][0] for i in rows], [sums[i][1] for i in rows], [written[i] for i in rows],  # noqa: E731
                                             [True] * len(rows), exact_kl=kl == "exact")
        compare(f"reward of 64 explanations, {kl} KL: batched / one at a time", lambda: reward(range(64)), lambda: [reward([i]) for i in range(64)], options.runs)


if __name__ == "__main__":
    main()
