"""Reinforcement-Learned Teachers (arXiv 2506.08388): the formats and the reward. (The training commands are not written yet.)

The idea. A teacher is given the question *and* its solution, and writes the explanation that connects them. It solves nothing; it is rewarded,
densely, by how well a frozen *student* understands: the solution should become likely to the student who has read the explanation
(usefulness, r_SS), and each step of the explanation should be one that the student could have come to without the solution (naturalness, r_KL).
GRPO then trains the teacher: the same GRPO as in tandem.py, which this file imports.

Both contexts are built by concatenating token ids, so the ids that the teacher sampled are the ids that are scored, in either context, and
every span is known by construction: nothing is decoded, encoded again and searched for.

Departures from the paper and its released code
    1. The naturalness is by default the released code's log-ratio on the sampled token (an unbiased estimate that can be negative); with
       `exact_kl` it is the paper's divergence over the whole vocabulary.
    2. A closing tag may begin inside a token (`.<` is one in Qwen's vocabulary). What stands before the tag in that token is encoded on its own.
    3. Rewards are held at EMPTY_REWARD from below, which is also what an empty explanation earns: never more than a real one.
Letters: N explanations, T their positions (right-padded), S positions of the solution, V vocabulary.
"""
from dataclasses import dataclass

import torch

from tandem import completion_hidden, completion_logprobs, micro_batches, padded

EMPTY_REWARD = -10.0  # of an explanation without a token
STYLES = {  # (open, close) of the thought, the solution and the explanation: plain text, not special tokens
    "begin": {name: (f"<|begin_of_{name}|>", f"<|end_of_{name}|>") for name in ("thought", "solution", "explanation")},
    "think": {"thought": ("<think>", "</think>"), "solution": ("<solution>", "</solution>"), "explanation": ("<explanation>", "</explanation>")},
}
TEACHER_SYSTEM = ("You are given a problem and its solution. Explain, step by step, the reasoning that leads from the problem to the solution, so that a "
                  "student who has not seen the solution could follow it and come to it.")
STUDENT_SYSTEM = "Think about the problem step by step, and then give the solution."


# ------------------------------------- 1. Formats: contexts of ids (paper 3.1) -------------------------------------
class Format:
    """How teacher and student see a question, an explanation and a solution.

    teacher:  system, user = question, assistant = OPEN_s solution CLOSE_s, OPEN_e | explanation CLOSE_e
    student:  system, user = question, assistant = OPEN_t | explanation | CLOSE_t, OPEN_s | solution | CLOSE_s
    Each piece between bars is encoded on its own.
    """

    def __init__(self, tokenizer, style="begin", teacher_system=TEACHER_SYSTEM, student_system=STUDENT_SYSTEM):
        self.tokenizer, self.tags = tokenizer, STYLES[style]
        self.teacher_system, self.student_system = teacher_system, student_system
        self.between = self.encode(f"\n\n{self.tags['thought'][1]}\n\n{self.tags['solution'][0]}\n\n")
        self.end = self.encode(f"\n\n{self.tags['solution'][1]}")

    def encode(self, text):
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def chat(self, system, question):
        messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, enable_thinking=False)
        return self.encode(text)

    def teacher_prompt(self, question, solution):
        """Ids up to and including the opening explanation tag: the teacher writes on from there."""
        (open_s, close_s), (open_e, _) = self.tags["solution"], self.tags["explanation"]
        return self.chat(self.teacher_system, question) + self.encode(f"{open_s}\n\n") + self.encode(solution) + self.encode(f"\n\n{close_s}\n\n{open_e}\n\n")

    def student_prompt(self, question):
        """Ids up to and including the opening thought tag: the explanation follows."""
        return self.chat(self.student_system, question) + self.encode(f"{self.tags['thought'][0]}\n\n")

    def split(self, ids):
        """(the explanation's ids, whether its closing tag was written) of what the teacher sampled, stop id and padding left out.

        Everything from the first closing tag on is cut; white space before it belongs to the tag's line, and is cut as well.
        """
        close = self.tags["explanation"][1]
        text = self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        if close not in text:
            return list(ids), False
        at = len(text.partition(close)[0].rstrip())
        keep = 0  # the longest run of whole tokens that ends before the tag
        while keep < len(ids) and len(self.tokenizer.decode(ids[:keep + 1], clean_up_tokenization_spaces=False)) <= at:
            keep += 1
        rest = text[len(self.tokenizer.decode(ids[:keep], clean_up_tokenization_spaces=False)):at]
        return list(ids[:keep]) + (self.encode(rest) if rest else []), True


# ------------------------------------- 2. Reward (paper 3.2) -------------------------------------
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
               unclosed_penalty=1.0, vocab_size=None, micro_tokens=16384):
    """r = r_SS - lambda r_KL, less 1 if the explanation was not closed. Paper 3.2; returns a Reward.

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
    out = Reward(*(torch.full((n,), EMPTY_REWARD) for _ in range(3)), [torch.zeros(0)] * n, [torch.zeros(0)] * n)
    real = [i for i in range(n) if explanations[i] and targets[i]]
    totals = [max(len(p) + len(e), len(q) + len(r)) for p, e, q, r in zip(t_prompts, explanations, s_prompts, responses)]
    for rows in micro_batches(real, totals, micro_tokens):
        pick = lambda lists: [lists[i] for i in rows]  # noqa: E731
        ids, lengths = as_tensors(pick(explanations))
        read, read_lengths = as_tensors(pick(responses))
        student_logp = completion_logprobs(student, pick(s_prompts), read, read_lengths, temperature, vocab_size=vocab_size)  # one pass for both parts
        if exact_kl:
            kl = divergence(teacher, student, pick(t_prompts), pick(s_prompts), ids, lengths, temperature, vocab_size)
        else:
            kl = completion_logprobs(teacher, pick(t_prompts), ids, lengths, temperature, vocab_size=vocab_size) - student_logp[:, :ids.size(1)]
        for j, i in enumerate(rows):
            token_kl, logp = kl[j, :lengths[j]].cpu(), student_logp[j, read_lengths[j] - len(targets[i]):read_lengths[j]].cpu()
            out.token_kl[i], out.solution_logp[i] = token_kl, logp
            out.r_ss[i] = logp.mean() + alpha * logp.min()
            out.r_kl[i] = token_kl.mean() + alpha * token_kl.max()
            out.reward[i] = max(out.r_ss[i] - lambda_kl * out.r_kl[i] - unclosed_penalty * (not closed[i]), torch.tensor(EMPTY_REWARD))
    return out


def as_tensors(lists):
    """(ids [N, T], lengths [N]) of lists of ids."""
    lengths = torch.tensor([len(ids) for ids in lists])
    return padded(lists, int(lengths.max()), "cpu"), lengths


@torch.no_grad()
def divergence(model, other, prompts, other_prompts, ids, lengths, temperature=1.0, vocab_size=None, slice_tokens=1024):
    """KL(model || other) over the whole vocabulary at every position of the same completions under two prompts, in nats, [N, T], 0 on padding.

    Arguments as in tandem.completion_logprobs. In slices of positions: neither model's logits of a whole batch ever exist at once.
    """
    (hidden, row, col), (hidden_other, _, _) = completion_hidden(model, prompts, ids, lengths), completion_hidden(other, other_prompts, ids, lengths)
    out = torch.zeros(ids.shape, device=model.device)
    for i in range(0, len(row), slice_tokens):
        some = slice(i, i + slice_tokens)
        logp, logq = (torch.log_softmax(m.get_output_embeddings()(h[some])[:, :vocab_size].float() / temperature, -1)
                      for m, h in ((model, hidden), (other, hidden_other)))  # [slice, V]
        out[row[some], col[some]] = (logp.exp() * (logp - logq)).sum(-1)
    return out
