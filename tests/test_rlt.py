"""The RLT reward against a slow plain double loop, token by token, and contexts whose spans cannot be corrupted."""
import pytest
import torch

import rlt
import tandem
from conftest import tiny_model
from rlt import EMPTY_REWARD, Format, rlt_reward

QUESTIONS = ["73+a3+b2=?", "10+a1=?", "99-c5=?", "12+a1+b2+c3=?"]
SOLUTIONS = ["\\boxed{78}", "11", "the answer is \\boxed{94}", "\\boxed{18}"]


@pytest.fixture(scope="module")
def world(toy):
    fmt = Format(toy.tokenizer)
    explanations = [toy.tokenizer.encode(t) for t in ("73+a3=76+b2=78", "it is 11 because the answer is 11", "no", "12+a1=13 <|end_of_thought|> 13+b2=15+c3")]
    return fmt, tiny_model(0, vocab_size=len(toy.tokenizer)), tiny_model(1, vocab_size=len(toy.tokenizer)), explanations


def plain_reward(teacher, student, fmt, question, solution, explanation, closed, alpha, lam, temperature, exact):
    """One explanation, one token at a time, from whole forward passes."""
    def distribution(model, ids):
        return torch.log_softmax(model(torch.tensor([ids])).logits[0, -1].detach().double() / temperature, -1)
    tok = fmt.tokenizer
    system = lambda text, q: f"<|im_start|>system\n{text}<|im_end|>\n<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n"  # noqa: E731
    enc = lambda text: tok(text, add_special_tokens=False).input_ids  # noqa: E731
    seen_t = (enc(system(rlt.TEACHER_SYSTEM, question)) + enc("<|begin_of_solution|>\n\n") + enc(solution) +
              enc("\n\n<|end_of_solution|>\n\n<|begin_of_explanation|>\n\n"))
    seen_s = enc(system(rlt.STUDENT_SYSTEM, question)) + enc("<|begin_of_thought|>\n\n")
    kl, logp = [], []
    for token in explanation:
        p, q = distribution(teacher, seen_t), distribution(student, seen_s)
        kl.append(float((p.exp() * (p - q)).sum() if exact else p[token] - q[token]))
        seen_t, seen_s = seen_t + [token], seen_s + [token]
    seen_s = seen_s + enc("\n\n<|end_of_thought|>\n\n<|begin_of_solution|>\n\n")
    for token in enc(solution):
        logp.append(float(distribution(student, seen_s)[token]))
        seen_s = seen_s + [token]
    r_ss, r_kl = sum(logp) / len(logp) + alpha * min(logp), sum(kl) / len(kl) + alpha * max(kl)
    return max(EMPTY_REWARD, r_ss - lam * r_kl - (0 if closed else 1)), r_ss, r_kl, logp, kl


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("alpha, lam, temperature", [(0.01, 3.0, 0.7), (0.5, 0.1, 1.3)])
def test_reward_equals_a_plain_double_loop(world, exact, alpha, lam, temperature):
    fmt, teacher, student, explanations = world
    closed = [True, True, False, False]
    got = rlt_reward(teacher, student, fmt, QUESTIONS, SOLUTIONS, explanations, closed, alpha=alpha, lambda_kl=lam, temperature=temperature, exact_kl=exact)
    for i in range(4):
        reward, r_ss, r_kl, logp, kl = plain_reward(teacher, student, fmt, QUESTIONS[i], SOLUTIONS[i], explanations[i], closed[i], alpha, lam, temperature, exact)
        assert got.reward[i].item() == pytest.approx(reward, abs=1e-3) and got.r_ss[i].item() == pytest.approx(r_ss, abs=1e-4)
        assert got.r_kl[i].item() == pytest.approx(r_kl, abs=1e-3)
        assert got.solution_logp[i].tolist() == pytest.approx(logp, abs=1e-4) and got.token_kl[i].tolist() == pytest.approx(kl, abs=1e-3)
    unpenalised = rlt_reward(teacher, student, fmt, QUESTIONS, SOLUTIONS, explanations, [True] * 4, alpha=alpha, lambda_kl=lam, temperature=temperature, exact_kl=exact)
    gain = unpenalised.reward - got.reward
    assert gain[:2].abs().max() == 0 and all(g == pytest.approx(1, abs=1e-4) or got.reward[i + 2] == EMPTY_REWARD for i, g in enumerate(gain[2:].tolist()))


@pytest.mark.parametrize("exact", [False, True])
def test_reward_does_not_depend_on_the_batch(world, exact):
    fmt, teacher, student, explanations = world
    args = [QUESTIONS, SOLUTIONS, explanations, [True] * 4]
    whole = rlt_reward(teacher, student, fmt, *args, exact_kl=exact)
    parts = rlt_reward(teacher, student, fmt, *args, exact_kl=exact, micro_tokens=1)
    order = [2, 0, 3, 1]
    shuffled = rlt_reward(teacher, student, fmt, *[[a[i] for i in order] for a in args], exact_kl=exact)
    assert torch.allclose(whole.reward, parts.reward, atol=1e-4) and torch.allclose(whole.reward[order], shuffled.reward, atol=1e-4)


@pytest.mark.parametrize("exact", [False, True])
def test_reward_does_not_depend_on_the_padding_id(world, exact, monkeypatch):
    """Also where it is a stop id, or an id of the explanations themselves."""
    fmt, teacher, student, explanations = world
    args = [QUESTIONS, SOLUTIONS, explanations, [True] * 4]
    zeros = rlt_reward(teacher, student, fmt, *args, exact_kl=exact).reward
    for pad in (2, explanations[0][0]):
        padded = lambda lists, width, device: torch.tensor([list(ids) + [pad] * (width - len(ids)) for ids in lists], device=device)  # noqa: E731, B023
        monkeypatch.setattr(rlt, "padded", padded)
        monkeypatch.setattr(tandem, "padded", padded)
        assert torch.equal(rlt_reward(teacher, student, fmt, *args, exact_kl=exact).reward, zeros)


def test_empty_explanations_have_a_fixed_score_that_is_never_better(world):
    fmt, teacher, student, explanations = world
    got = rlt_reward(teacher, student, fmt, QUESTIONS[:3], SOLUTIONS[:3], [[], explanations[1], []], [True, False, False], lambda_kl=100.0)
    assert got.reward[0] == got.reward[2] == EMPTY_REWARD <= got.reward[1] and got.reward.isfinite().all()
    assert rlt_reward(teacher, student, fmt, QUESTIONS[:1], [""], explanations[:1], [True]).reward.tolist() == [EMPTY_REWARD]


def test_exact_divergence_is_not_negative_and_zero_for_equal_contexts_and_models(world):
    fmt, teacher, student, explanations = world
    ids, lengths = rlt.as_tensors(explanations)
    prompts, others = [fmt.student_prompt(q) for q in QUESTIONS], [fmt.teacher_prompt(q, s) for q, s in zip(QUESTIONS, SOLUTIONS)]
    assert rlt.divergence(teacher, student, others, prompts, ids, lengths, 0.7).min() > -1e-5
    assert rlt.divergence(teacher, teacher, prompts, prompts, ids, lengths, 0.7).abs().max() < 1e-5
    assert rlt.divergence(teacher, teacher, others, prompts, ids, lengths, 0.7).max() > 0.01


def test_the_sampled_log_ratio_is_the_divergence_in_expectation(world):
    """Over all tokens that the teacher could write, weighted by its probabilities."""
    fmt, teacher, student, _ = world
    v = len(fmt.tokenizer)
    every = torch.arange(v)[:, None]
    ones = torch.ones(v, dtype=torch.long)
    t_prompt, s_prompt = fmt.teacher_prompt(QUESTIONS[0], SOLUTIONS[0]), fmt.student_prompt(QUESTIONS[0])
    p, q = (rlt.completion_logprobs(m, [prompt] * v, every, ones, 0.7)[:, 0] for m, prompt in ((teacher, t_prompt), (student, s_prompt)))
    exact = rlt.divergence(teacher, student, [t_prompt], [s_prompt], every[:1], ones[:1], 0.7)[0, 0]
    assert (p.exp() * (p - q)).sum().item() == pytest.approx(exact.item(), abs=1e-4)


def test_the_sampled_ids_are_scored_where_decoding_and_encoding_would_change_them(world):
    """A split that the tokenizer would never make: decode and encode again, and it is another list of ids with another reward."""
    fmt, teacher, student, _ = world
    tok = fmt.tokenizer
    odd = [i for c in "because the answer is 11" for i in tok.encode(c)]
    canonical = tok.encode(tok.decode(odd))
    assert canonical != odd
    a, b = (rlt_reward(teacher, student, fmt, QUESTIONS[:1], SOLUTIONS[:1], [ids], [True]) for ids in (odd, canonical))
    assert len(a.token_kl[0]) == len(odd) and len(b.token_kl[0]) == len(canonical) and a.reward != b.reward


def test_stray_tags_and_stop_ids_cannot_corrupt_a_span(world):
    fmt, teacher, student, _ = world
    tok = fmt.tokenizer
    stray = tok.encode("a <|end_of_thought|>\n\n<|begin_of_solution|>\n\n99\n\n<|end_of_solution|> b") + [tok.eos_token_id] + tok.encode(" c")
    got = rlt_reward(teacher, student, fmt, QUESTIONS[:1], SOLUTIONS[:1], [stray], [True])
    assert len(got.token_kl[0]) == len(stray) and len(got.solution_logp[0]) == len(tok.encode(SOLUTIONS[0]))


@pytest.mark.parametrize("text, want, closed", [
    ("two and three\n\n<|end_of_explanation|>", "two and three", True), ("two<|end_of_explanation|> more", "two", True), ("two.<|end_of_explanation|>", "two.", True),
    ("never closed <|end_of_expl", "never closed <|end_of_expl", False), ("<|end_of_explanation|>", "", True), ("", "", False),
    ("a<|end_of_explanation|>b<|end_of_explanation|>", "a", True), ("\n\n \n<|end_of_explanation|>", "", True),
])
def test_split_cuts_at_the_first_closing_tag(world, text, want, closed):
    fmt = world[0]
    ids, was_closed = fmt.split(fmt.encode(text))
    assert fmt.tokenizer.decode(ids) == want and was_closed == closed


def test_released_coefficients(world):
    """[1, .01] of mean and min, [3, .03] of mean and max: the released run's form of alpha .01, lambda 3."""
    fmt, teacher, student, explanations = world
    got = rlt_reward(teacher, student, fmt, QUESTIONS, SOLUTIONS, explanations, [True] * 4, vocab_size=len(fmt.tokenizer))
    for reward, logp, kl in zip(got.reward.tolist(), got.solution_logp, got.token_kl):
        logp, kl = logp.tolist(), kl.tolist()
        by_hand = 1 * sum(logp) / len(logp) + 0.01 * min(logp) - (3 * sum(kl) / len(kl) + 0.03 * max(kl))
        assert reward == pytest.approx(max(by_hand, EMPTY_REWARD), abs=1e-4)


@pytest.mark.parametrize("exact", [False, True])
def test_one_pass_of_each_model_a_batch(world, exact):
    fmt, teacher, student, explanations = world
    calls = []
    hooks = [model.get_decoder().register_forward_hook(lambda *_, name=name: calls.append(name)) for name, model in (("t", teacher), ("s", student))]
    rlt_reward(teacher, student, fmt, QUESTIONS, SOLUTIONS, explanations, [True] * 4, exact_kl=exact)
    [hook.remove() for hook in hooks]
    assert sorted(calls) == ["s", "t"]


def test_split_keeps_sampled_ids_that_end_in_white_space(toy):
    """`>` and a blank line are one token here, as `.` and one are in Qwen's: it stays as it was sampled; tokens of white space alone go."""
    fmt = Format(toy.tokenizer)
    joined = toy.tokenizer.encode("a |>\n\n")
    assert toy.tokenizer.decode(joined[-1:]).strip() and toy.tokenizer.decode(joined[-1:]).endswith("\n\n")
    tag = toy.tokenizer.encode("<|end_of_explanation|>")
    assert fmt.split(joined + tag) == (joined, True) and fmt.split(joined + toy.tokenizer.encode("\n\n \n\n") + tag) == (joined, True)


def test_split_when_the_tag_begins_inside_a_token():
    """'.<' is one token, as in Qwen's vocabulary: the full stop belongs to the explanation."""
    class Pieces:
        vocab = ["a", ".<", "|end_of_explanation|>", ".", " b"]

        def decode(self, ids, **_):
            return "".join(self.vocab[i] for i in ids)
    fmt = object.__new__(Format)
    fmt.tokenizer, fmt.tags, fmt.encode = Pieces(), rlt.TAGS["begin"], lambda text: [Pieces.vocab.index(text)]
    assert fmt.split([0, 1, 2, 4]) == ([0, 3], True) and fmt.split([0, 4]) == ([0, 4], False)


def test_contexts_hold_the_solution_for_the_teacher_only(world):
    fmt = world[0]
    teacher, student = (fmt.tokenizer.decode(ids) for ids in (fmt.teacher_prompt("Q?", "SOL"), fmt.student_prompt("Q?")))
    assert teacher.endswith("<|begin_of_solution|>\n\nSOL\n\n<|end_of_solution|>\n\n<|begin_of_explanation|>\n\n") and "SOL" not in student
    assert student.endswith("<|im_start|>assistant\n<|begin_of_thought|>\n\n") and teacher.count("Q?") == student.count("Q?") == 1
