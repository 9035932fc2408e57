"""GRPO: advantages, log-probs, loss and update, against values worked by hand and slow plain versions."""
import math
from types import SimpleNamespace

import pytest
import torch

import tandem
from conftest import tiny_model
from tandem import completion_logprobs, group_advantages, grpo_loss, k3, rollout

PROMPTS = [[5, 6, 7, 8, 9], [10], [11, 12, 13], [5, 6, 7, 8, 9, 10, 11, 12]]


# --- advantages -----------------------------------------------------------------------------------------------------------------------

def test_advantages_by_hand():
    # 1 0 0 1: mean .5, unbiased std sqrt(1/3) = .57735; 0 0 0 4: mean 1, std 2
    got = group_advantages(torch.tensor([1.0, 0, 0, 1, 0, 0, 0, 4]), 4)
    assert torch.allclose(got, torch.tensor([0.8660, -0.8660, -0.8660, 0.8660, -0.5, -0.5, -0.5, 1.5]), atol=1e-4)


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1 / 3, 1e8])
def test_equal_rewards_give_exactly_zero(value):
    assert group_advantages(torch.full((14,), value), 7).tolist() == [0.0] * 14  # 0.1 * 7 leaves a rounding residue in mean and std


def test_each_group_has_mean_zero_and_permuting_prompts_permutes_advantages():
    rewards = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    got = group_advantages(rewards.flatten(), 5).view(6, 5)
    assert torch.allclose(got.mean(1), torch.zeros(6), atol=1e-6)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    assert torch.equal(group_advantages(rewards[order].flatten(), 5).view(6, 5), got[order])


@pytest.mark.parametrize("n, group", [(4, 1), (5, 2), (4, 3)])
def test_groups_that_cannot_be(n, group):
    with pytest.raises(ValueError, match="groups"):
        group_advantages(torch.zeros(n), group)


# --- log-probs ------------------------------------------------------------------------------------------------------------------------

def plain_logprobs(model, prompts, ids, lengths, temperature, vocab_size=None):
    """Row by row, all positions, the whole vocabulary."""
    rows = []
    for prompt, row, n in zip(prompts, ids.tolist(), lengths.tolist()):
        logits = model(torch.tensor([prompt + row[:n]])).logits[0, :, :vocab_size] / temperature
        logp = torch.log_softmax(logits, -1)
        rows.append(torch.stack([logp[len(prompt) - 1 + t, row[t]] for t in range(n)] + [logp.new_zeros(())] * (ids.size(1) - n)))
    return torch.stack(rows)


@pytest.fixture()
def batch():
    return SimpleNamespace(ids=torch.tensor([[3, 9, 1, 7], [8, 4, 4, 4], [1, 0, 0, 0], [20, 21, 22, 2]]), lengths=torch.tensor([3, 4, 1, 4]))


@pytest.mark.parametrize("slice_tokens", [1, 5, 1000])
@pytest.mark.parametrize("vocab_size", [None, 31])
def test_logprobs_and_their_gradient_equal_the_plain_version(batch, slice_tokens, vocab_size):
    model = tiny_model(0)
    weights = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    results = []
    for score in (lambda: completion_logprobs(model, PROMPTS, batch.ids, batch.lengths, 1.7, vocab_size=vocab_size, slice_tokens=slice_tokens),
                  lambda: plain_logprobs(model, PROMPTS, batch.ids, batch.lengths, 1.7, vocab_size)):
        model.zero_grad()
        logp = score()
        (logp * weights).sum().backward()
        results.append((logp.detach(), [p.grad.clone() for p in model.parameters()]))
    (got, got_grads), (want, want_grads) = results
    assert torch.allclose(got, want, atol=1e-5)
    assert got[0, 3] == 0 and got[2, 1:].abs().sum() == 0
    assert all(torch.allclose(a, b, atol=1e-5, rtol=1e-4) for a, b in zip(got_grads, want_grads))


def test_entropy_equals_the_plain_version(batch):
    model = tiny_model(0)
    logp, entropy = completion_logprobs(model, PROMPTS, batch.ids, batch.lengths, 0.7, entropy=True, slice_tokens=3)
    for i, (prompt, n) in enumerate(zip(PROMPTS, batch.lengths.tolist())):
        probs = torch.softmax(model(torch.tensor([prompt + batch.ids[i, :n].tolist()])).logits[0] / 0.7, -1)
        for t in range(n):
            want = -sum(p * math.log(p) for p in probs[len(prompt) - 1 + t].tolist() if p > 0)
            assert entropy[i, t].item() == pytest.approx(want, abs=1e-4)
    assert not entropy.requires_grad and logp.requires_grad and entropy[2, 1:].sum() == 0


def test_prompts_may_be_given_once_a_group(batch):
    model = tiny_model(0)
    once = completion_logprobs(model, PROMPTS[:2], batch.ids, batch.lengths, 1.0)
    each = completion_logprobs(model, [PROMPTS[0], PROMPTS[0], PROMPTS[1], PROMPTS[1]], batch.ids, batch.lengths, 1.0)
    assert torch.equal(once, each)


def test_padding_id_and_neighbours_play_no_part(batch):
    model = tiny_model(0)
    want = completion_logprobs(model, PROMPTS, batch.ids, batch.lengths, 1.0)
    other = torch.where(tandem.real_tokens(batch.ids, batch.lengths), batch.ids, 33)
    assert torch.equal(completion_logprobs(model, PROMPTS, other, batch.lengths, 1.0), want)
    for i in range(4):
        alone = completion_logprobs(model, [PROMPTS[i]], batch.ids[i:i + 1], batch.lengths[i:i + 1], 1.0)
        assert torch.allclose(alone[0], want[i], atol=1e-5)


def test_logprobs_equal_the_sampling_logprobs_at_another_temperature_than_1(monkeypatch):
    senior, junior, drawn, sample = tiny_model(0), tiny_model(1), {}, tandem.sample

    def noted(logits, uniform, temperature, *rest):  # every draw has a random number of its own, which tells where it belongs
        ids = sample(logits, uniform, temperature, *rest)
        drawn.update(zip(uniform.tolist(), torch.log_softmax(logits / 0.6, -1).gather(-1, ids[:, None])[:, 0].tolist()))
        return ids
    monkeypatch.setattr(tandem, "sample", noted)
    schedule = tandem.Schedule(torch.arange(40) % 3 == 0, *[torch.zeros(40, dtype=torch.bool)] * 2, max_gap=4)
    rolled = rollout(senior, junior, PROMPTS, group_size=3, max_new_tokens=15, temperature=0.6, schedule=schedule, vocab_size=38)
    scores = [completion_logprobs(m, PROMPTS, rolled.ids, rolled.lengths, 0.6, vocab_size=38) for m in (senior, junior)]
    uniform = torch.rand(12, 15, generator=torch.Generator().manual_seed(0))[:, :rolled.ids.size(1)]
    real = tandem.real_tokens(rolled.ids, rolled.lengths)
    sampled = torch.tensor([drawn[u] for u in uniform[real].tolist()])
    assert torch.allclose(torch.where(rolled.senior_mask, *scores)[real], sampled, atol=1e-4)
    assert not torch.allclose(scores[0][real], sampled, atol=1e-2)
    twice = completion_logprobs(senior, PROMPTS, rolled.ids, rolled.lengths, 0.6, vocab_size=38)
    assert torch.equal(twice, scores[0])


# --- loss -----------------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("ratio, advantage, want_loss, want_grad", [
    # loss -min(r A, clip(r) A) with clip to [.8, 1.2]; its derivative by log pi is -r A where r A is the smaller, else 0
    (1.0, 2.0, -2.0, -2.0),  # unclipped
    (1.5, 1.0, -1.2, 0.0),  # a good token grown too far: clipped
    (0.5, 1.0, -0.5, -0.5),  # a good token that shrank: the gradient brings it back
    (1.5, -1.0, 1.5, 1.5),  # a bad token that grew: the gradient takes it down, unclipped
    (0.5, -1.0, 0.8, 0.0),  # a bad token shrunk too far: clipped
    (1.1, -2.0, 2.2, 2.2),  # inside
])
def test_loss_and_gradient_by_hand(ratio, advantage, want_loss, want_grad):
    old = torch.tensor([[-1.0]])
    logp = (old + math.log(ratio)).requires_grad_()
    loss = grpo_loss(logp, old, torch.tensor([advantage]), torch.tensor([[True]]), 0.2)
    loss.backward()
    assert loss.item() == pytest.approx(want_loss, abs=1e-6) and logp.grad.item() == pytest.approx(want_grad, abs=1e-6)


def test_junior_tokens_get_exactly_no_gradient_and_do_not_count_in_the_denominator():
    logp = torch.tensor([[-1.0, -2.0, -3.0], [-1.0, -1.0, -1.0]], requires_grad=True)
    mask = torch.tensor([[True, False, True], [False, False, True]])
    loss = grpo_loss(logp, logp.detach(), torch.tensor([1.0, -2.0]), mask, 0.2)
    loss.backward()
    assert loss.item() == pytest.approx((-1 - 1 + 2) / 3)
    assert torch.allclose(logp.grad, torch.tensor([[-1 / 3, 0, -1 / 3], [0, 0, 2 / 3]]))
    assert (logp.grad[~mask] == 0).all()


def test_sequence_mean_is_a_denominator_a_row():
    logp = torch.zeros(2, 3, requires_grad=True)
    mask = torch.tensor([[True, True, True], [True, False, False]])
    grpo_loss(logp, logp.detach(), torch.tensor([1.0, 1.0]), mask, 0.2, denominator=torch.tensor([[3 * 2], [1 * 2]])).backward()
    assert torch.allclose(logp.grad, torch.tensor([[-1 / 6] * 3, [-1 / 2, 0, 0]]))


def test_an_empty_mask_gives_zero_and_masked_nans_do_no_harm():
    logp = torch.tensor([[0.0, math.nan], [-math.inf, -1.0]], requires_grad=True)
    old, ref = torch.tensor([[0.0, math.inf], [math.nan, -1.0]]), torch.tensor([[0.0, math.nan], [math.nan, -1.0]])
    mask = torch.tensor([[True, False], [False, True]])
    loss = grpo_loss(logp, old, torch.tensor([1.0, 3.0]), mask, 0.2, ref, 0.1)
    loss.backward()
    assert loss.item() == pytest.approx(-2.0) and torch.equal(logp.grad, torch.tensor([[-0.5, 0], [0, -1.5]]))
    empty = grpo_loss(logp, old, torch.tensor([1.0, 3.0]), torch.zeros(2, 2, dtype=torch.bool), 0.2, ref, 0.1)
    assert empty.item() == 0


def test_k3_by_hand():
    # p = 1/2, reference = 1/4: r = 1/2: 1/2 - 1 - log(1/2) = .19315; its gradient by log p is 1 - r
    logp = torch.tensor([math.log(0.5), math.log(0.25), 0.0], requires_grad=True)
    value = k3(logp, torch.tensor([math.log(0.25), math.log(0.25), 0.0]))
    assert torch.allclose(value, torch.tensor([0.193147, 0.0, 0.0]), atol=1e-6)
    value.sum().backward()
    assert torch.allclose(logp.grad, torch.tensor([0.5, 0.0, 0.0]))  # positive: descent lowers log p towards the reference


def test_k3_is_unbiased():
    p, q = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.2, 0.3, 0.5])
    assert (p * k3(p.log(), q.log())).sum().item() == pytest.approx((p * (p / q).log()).sum().item(), abs=1e-6)


def test_what_the_reference_finds_impossible_is_pushed_down():
    """k3 = r - 1 - log r has the gradient 1 - r in log p, so 1 however small r is; in the auxiliary KL, -1 for the other's own tokens."""
    for gap in (30.0, 1e4):
        logp = torch.tensor([-1.0], requires_grad=True)
        value = k3(logp, torch.tensor([-1.0 - gap]))
        value.backward()
        assert value.item() == pytest.approx(gap - 1) and logp.grad.item() == pytest.approx(1)
        senior = torch.tensor([-1.0 - gap], requires_grad=True)
        k3(torch.tensor([-1.0]), senior).backward()
        assert senior.grad.item() == pytest.approx(-1)


@pytest.mark.parametrize("gap", [90.0, 1e4, -1e4])
def test_k3_and_ratio_stay_finite_with_finite_gradients(gap):
    logp = torch.tensor([[-gap if gap > 0 else 0.0]], requires_grad=True)
    other = torch.tensor([[0.0 if gap > 0 else gap]])
    for loss in (k3(logp, other).sum(), grpo_loss(logp, other, torch.tensor([-1.0]), torch.tensor([[True]]), 0.2)):
        logp.grad = None
        loss.backward()
        assert loss.isfinite() and logp.grad.isfinite().all()


# --- update ---------------------------------------------------------------------------------------------------------------------------

class Recorder:
    """Stands in for an optimiser: keeps each update's gradients, and takes a plain step."""

    def __init__(self, model, scale=0.0):
        self.model, self.scale, self.grads, self.param_groups = model, scale, [], [{}]

    @torch.no_grad()
    def step(self):
        self.grads.append([p.grad.clone() for p in self.model.parameters()])
        for p in self.model.parameters():
            p -= self.scale * p.grad

    def zero_grad(self):
        self.model.zero_grad()


def config(**settings):
    return tandem.Config(**{**dict(prompts_per_step=4, prompts_per_update=4, group_size=3, temperature=0.8, max_grad_norm=1e9, kl_coef=0.0), **settings})


@pytest.fixture(scope="module")
def rolled_batch():
    senior, junior = tiny_model(0), tiny_model(1)
    schedule = tandem.Schedule(torch.arange(40) % 3 == 0, *[torch.zeros(40, dtype=torch.bool)] * 2, max_gap=4)
    rolled = rollout(senior, junior, PROMPTS, group_size=3, max_new_tokens=12, temperature=0.8, schedule=schedule, seed=4)
    rewards = torch.tensor([1.0, 0, 0, 0, 1, 1, 0, 0, 1, 1, 1, 1])
    return tandem.Batch([p for p in PROMPTS for _ in range(3)], rolled.ids, rolled.lengths, rolled.senior_mask, rewards, {}, [])


def plain_gradient(model, reference, junior, batch, kl_coef, lambda_jun, loss_mean):
    """The gradient of the first update, from the definition, row by row."""
    model.zero_grad()
    advantages = group_advantages(batch.rewards, 3)
    rows = [i for i in range(12)]
    logp = plain_logprobs(model, batch.prompts, batch.ids, batch.lengths, 0.8)
    ref = plain_logprobs(reference, batch.prompts, batch.ids, batch.lengths, 0.8).detach()
    tokens, loss = int(batch.mask.sum()), 0.0
    juniors = sum(int(n) for n in batch.lengths) - tokens
    for i in rows:
        n = int(batch.lengths[i])
        own = [t for t in range(n) if batch.mask[i, t]]
        for t in range(n):
            r = torch.exp(ref[i, t] - logp[i, t])
            if t in own:
                term = -torch.exp(logp[i, t] - logp[i, t].detach()) * advantages[i] + kl_coef * (r - 1 - torch.log(r))
                loss = loss + (term / tokens if loss_mean == "token" else term / len(own) / sum(bool(batch.mask[j].any()) for j in rows))
            else:
                loss = loss + lambda_jun * (1 / r - 1 + torch.log(r)) / juniors
    loss.backward()
    return loss.item(), [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("loss_mean", ["token", "sequence"])
@pytest.mark.parametrize("kl_coef, lambda_jun", [(0.0, 0.0), (0.3, 0.0), (0.3, 0.7)])
@pytest.mark.parametrize("micro_tokens", [1, 40, 10**6])
def test_the_update_is_the_definition_however_it_is_split(rolled_batch, loss_mean, kl_coef, lambda_jun, micro_tokens):
    model, reference = tiny_model(0), tiny_model(1)
    recorder = Recorder(model)
    settings = config(loss_mean=loss_mean, kl_coef=kl_coef, lambda_jun=lambda_jun, micro_tokens=micro_tokens)
    metrics = tandem.grpo_update(model, recorder, rolled_batch, settings, 0.0, None, reference)
    want_loss, want = plain_gradient(model, reference, None, rolled_batch, kl_coef, lambda_jun, loss_mean)
    assert len(recorder.grads) == 1 and metrics["loss"] == pytest.approx(want_loss, abs=1e-5)
    assert all(torch.allclose(a, b, atol=1e-6, rtol=1e-4) for a, b in zip(recorder.grads[0], want))
    assert max(g.abs().max() for g in want) > 1e-3
    assert metrics["ratio"] == 1 and metrics["clipped"] == 0 and metrics["no_signal"] == 0.25 and metrics["reward"] == pytest.approx(7 / 12)


def test_the_mask_reaches_the_loss(rolled_batch):
    """Another mask gives another gradient; none at all gives none."""
    grads = []
    for mask in (rolled_batch.mask, tandem.real_tokens(rolled_batch.ids, rolled_batch.lengths), torch.zeros_like(rolled_batch.mask)):
        model = tiny_model(0)
        recorder = Recorder(model)
        batch = tandem.Batch(rolled_batch.prompts, rolled_batch.ids, rolled_batch.lengths, mask, rolled_batch.rewards, {}, [])
        tandem.grpo_update(model, recorder, batch, config(), 0.0, None)
        grads.append(torch.cat([g.flatten() for g in recorder.grads[0]]))
    assert not torch.allclose(grads[0], grads[1], atol=1e-4) and grads[2].abs().max() == 0


def test_rows_without_signal_are_measured_but_get_no_backward_pass(rolled_batch, monkeypatch):
    """Their gradient is 0 (the definition above has them in it). With a KL every row has a gradient."""
    real, passes, entropies = tandem.completion_logprobs, [], []
    def spy(model, prompts, ids, *rest, **settings):
        passes.append((torch.is_grad_enabled(), len(ids)))
        return real(model, prompts, ids, *rest, **settings)
    monkeypatch.setattr(tandem, "completion_logprobs", spy)
    for kl_coef, want in ((0.0, [(True, 9), (False, 3)]), (0.3, [(False, 12), (True, 12)])):  # (with a KL first the reference's)
        passes.clear()
        model = tiny_model(0)
        entropies.append(tandem.grpo_update(model, Recorder(model), rolled_batch, config(kl_coef=kl_coef), 0.0, None, tiny_model(1))["entropy"])
        assert passes == want
    prompts, ids, lengths, mask = rolled_batch[:4]
    logits = [tiny_model(0)(torch.tensor([p + row[:n].tolist()])).logits[0, len(p) - 1:-1] / 0.8 for p, row, n in zip(prompts, ids, lengths)]
    plain = torch.cat([torch.distributions.Categorical(logits=x).entropy()[mask[i, :len(x)]] for i, x in enumerate(logits)]).mean().item()
    assert entropies == pytest.approx([plain] * 2, rel=1e-5)


def test_a_batch_without_any_signal_is_a_step_with_gradient_zero(rolled_batch):
    """Adam's momentum and the decay go on, as they do where the zeros are computed."""
    models = tiny_model(0), tiny_model(0)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1) for model in models]
    for model, optimizer in zip(models, optimizers):
        tandem.grpo_update(model, optimizer, rolled_batch, config(), 1e-3, None)
    before = [p.detach().clone() for p in models[0].parameters()]
    metrics = tandem.grpo_update(models[0], optimizers[0], rolled_batch._replace(rewards=torch.ones(12)), config(), 1e-3, None)
    for p in models[1].parameters():
        p.grad = torch.zeros_like(p)
    optimizers[1].step()
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters()))
    assert any((a != b).any() for a, b in zip(models[0].parameters(), before)) and metrics["no_signal"] == 1 and metrics["grad_norm"] == 0


def test_later_updates_use_the_old_logprobs_from_before_the_first(rolled_batch):
    one = Recorder(tiny_model(0), scale=0.05)
    assert tandem.grpo_update(one.model, one, rolled_batch, config(), 0.0, None)["ratio"] == 1
    model = tiny_model(0)
    two = Recorder(model, scale=0.05)
    metrics = tandem.grpo_update(model, two, rolled_batch, config(prompts_per_update=2), 0.0, None)
    assert len(two.grads) == 2 and abs(metrics["ratio"] - 1) > 1e-4
    # the second gradient, by hand: the ratio to the *starting* weights, at the weights after the first update
    start, now = tiny_model(0), tiny_model(0)
    with torch.no_grad():
        for p, g in zip(now.parameters(), two.grads[0]):
            p -= 0.05 * g
    old = plain_logprobs(start, rolled_batch.prompts[6:], rolled_batch.ids[6:], rolled_batch.lengths[6:], 0.8).detach()
    logp = plain_logprobs(now, rolled_batch.prompts[6:], rolled_batch.ids[6:], rolled_batch.lengths[6:], 0.8)
    advantages, mask = group_advantages(rolled_batch.rewards, 3)[6:], rolled_batch.mask[6:]
    ratio = torch.exp(logp - old)
    terms = torch.minimum(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
    (-terms[mask].sum() / mask.sum()).backward()
    assert all(torch.allclose(a, b.grad, atol=1e-5, rtol=1e-3) for a, b in zip(two.grads[1], now.parameters()))


def test_bf16_arithmetic_on_fp32_weights_moves_them_at_lr_1e_6(rolled_batch):
    model = tiny_model(0)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0, weight_decay=0)
    tandem.grpo_update(model, optimizer, rolled_batch, config(), 1e-6, None, dtype=torch.bfloat16)
    moved = [(p.detach() - b).abs() for p, b in zip(model.parameters(), before)]
    assert all(m.max() > 5e-7 for m in moved) and all(m.max() < 2e-6 for m in moved)
    stuck = [(p.detach().bfloat16() != b.bfloat16()).float().mean() for p, b in zip(model.parameters(), before)]
    assert sum(stuck) / len(stuck) < 0.02  # in bf16 weights nearly all of it would round away


def test_gradients_are_clipped_to_the_norm(rolled_batch):
    model = tiny_model(0)
    recorder = Recorder(model)
    norm = tandem.grpo_update(model, recorder, rolled_batch, config(max_grad_norm=0.01), 0.0, None)["grad_norm"]
    assert norm > 0.01 and math.sqrt(sum(float(g.square().sum()) for g in recorder.grads[0])) == pytest.approx(0.01, rel=1e-3)


def test_gradient_checkpointing_changes_nothing(rolled_batch):
    grads = []
    for checkpointed in (False, True):
        model = tiny_model(0)
        if checkpointed:
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        recorder = Recorder(model)
        tandem.grpo_update(model, recorder, rolled_batch, config(), 0.0, None)
        grads.append(recorder.grads[0])
        assert not model.training
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*grads))


def test_micro_batches_hold_every_row_once_within_the_budget():
    draw = torch.Generator().manual_seed(0)
    totals = torch.randint(1, 60, (100,), generator=draw).tolist()
    batches = tandem.micro_batches(range(100), totals, budget=128)
    assert sorted(i for b in batches for i in b) == list(range(100))
    assert all(max(totals[i] for i in b) * len(b) <= 128 for b in batches)
    padding = sum(max(totals[i] for i in b) * len(b) for b in batches) / sum(totals)
    assert padding < 1.1  # sorted by length, so little is padding
