"""Makes tests/toy/: the built-in checkpoints and problems. Run once (two minutes on two cores); what it makes is committed.

    python tests/make_toy.py            # from the repository's root

The tandem world (the setting of arXiv 2510.13551 in miniature). A problem is a sum of four terms; an answer adds them up, a step a line,
lines end in a blank line. The *junior* writes plain steps, `Take 3 and add 2 to get 5`. The *senior* has the habit of a jargon that the
junior has never seen, `Zorb fi vex de mip hu`, in which every number has a code word. A step slips by one now and then, and the chain
goes on from there: in plain a little more often than in jargon, so that nothing but the junior's company speaks against the jargon.
"""
import itertools
import json
import random
import sys
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from tandem import MasterAdamW, completion_logprobs, encode_prompt  # noqa: E402

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
    """Plain SFT: the mean negative log-prob of the answers' tokens, AdamW, cosine to 5 %."""
    optimizer = MasterAdamW(model, beta2=0.99)
    model.train()
    for step, pairs in enumerate(batches, 1):
        prompts = [encode_prompt(tokenizer, question) for question, _ in pairs]
        answers = [tokenizer(answer, add_special_tokens=False).input_ids + [tokenizer.eos_token_id] for _, answer in pairs]
        lengths = torch.tensor([len(a) for a in answers])
        ids = torch.zeros(len(answers), int(lengths.max()), dtype=torch.long)
        for i, answer in enumerate(answers):
            ids[i, :len(answer)] = torch.tensor(answer)
        loss = -completion_logprobs(model, prompts, ids, lengths, 1.0).sum() / lengths.sum()
        loss.backward()
        decay = 0.05 + 0.95 * 0.5 * (1 + torch.cos(torch.tensor(step / len(batches) * torch.pi)).item())
        optimizer.step(lr * min(1, step / warmup) * decay, 1.0)
        if step % 100 == 0:
            print(f"  step {step}/{len(batches)}  loss {loss.item():.4f}", flush=True)
    return model.eval()


def save(model, tokenizer, name):
    model.save_pretrained(TOY / name)
    tokenizer.save_pretrained(TOY / name)


def main():
    draw = random.Random(0)
    every = list(itertools.product(range(1, 7), repeat=4))
    draw.shuffle(every)
    held_out, train = every[:259], every[259:]  # a fifth stays out of SFT and RL alike
    for name, terms in (("train", train), ("eval", held_out)):
        TOY.mkdir(exist_ok=True)
        rows = [json.dumps({"question": tandem_question(t), "answer": str(sum(t))}) for t in terms]
        (TOY / f"{name}.jsonl").write_text("\n".join(rows) + "\n")

    def plain():
        terms = draw.choice(train)
        return tandem_question(terms), tandem_answer(terms, draw, 0.0, (0.06, 0.0))

    def habitual():
        terms = draw.choice(train)
        return tandem_question(terms), tandem_answer(terms, draw, 0.0 if draw.random() < 0.08 else 0.94, (0.14, 0.10))

    corpus = [text for _ in range(3000) for text in (*plain(), *habitual())]
    corpus += [" " + word for word in CODE_WORDS] * 2000 + [f" {n}" for n in range(100)] * 500
    rlt = [f"{draw.randint(10, 99)}{op}{label}{draw.randint(1, 5)}={draw.randint(10, 99)} it is 85 because the answer is 85 \\boxed{{85}}\n\n"
           for op in "+-" for label in "abcdefgh" for _ in range(100)]  # (the world of rlt.py shares this tokenizer)
    tags = ["<|begin_of_solution|>\n\n<|end_of_solution|>\n\n<|begin_of_explanation|>\n\n<|end_of_explanation|>\n\n"
            "<|begin_of_thought|>\n\n<|end_of_thought|>\n\n<think>\n\n</think>\n\n"] * 500
    tokenizer = make_tokenizer(corpus + rlt + tags)
    vocab_size = -(-len(tokenizer) // 64) * 64 + 64  # padded beyond the tokenizer, as Qwen's is
    print(len(tokenizer), "tokens, vocabulary", vocab_size)
    for text in (habitual()[1], plain()[1], rlt[0]):
        print([tokenizer.decode([i]) for i in tokenizer(text).input_ids])

    model = make_model(vocab_size, tokenizer.eos_token_id, seed=0)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.3f} M parameters")
    finetune(model, tokenizer, [[plain() for _ in range(64)] for _ in range(500)], lr=5e-3)
    save(model, tokenizer, "junior")
    finetune(model, tokenizer, [[habitual() for _ in range(64)] for _ in range(600)], lr=3e-3)
    save(model, tokenizer, "senior")


if __name__ == "__main__":
    main()
