"""The rollout: against a slow plain version, against transformers' generate, and the authorship rule."""
from types import SimpleNamespace

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM, PreTrainedTokenizerFast
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

import tandem
from conftest import Scripted, tiny_model
from tandem import Schedule, rollout

PROMPTS = [[5, 6, 7, 8, 9], [10], [11, 12, 13], [5, 6, 7, 8, 9, 10, 11, 12]]


def word_schedule(boundaries, vocab_size=40, **settings):
    always = torch.zeros(vocab_size, dtype=torch.bool)
    always[list(boundaries)] = True
    none = torch.zeros_like(always)
    return Schedule(always, none, none, **{"max_gap": 5, **settings})


def plain_rollout(senior, junior, prompts, group_size, max_new_tokens, schedule, temperature, stops, seed):
    """Row by row, without a cache, one full forward pass a token; the authorship rule as the paper words it."""
    generator = torch.Generator().manual_seed(seed)
    n = len(prompts) * group_size
    uniform = torch.rand(n, max_new_tokens, generator=generator)
    coins = torch.rand(n, max_new_tokens + 1, generator=generator)
    rows = []
    for i in range(n):
        ids, authors, logprobs = list(prompts[i // group_size]), [], []
        senior_writes, since = bool(coins[i, 0] < schedule.prob_senior), 0
        while True:
            t = len(authors)
            with torch.no_grad():
                logits = (senior if senior_writes else junior)(torch.tensor([ids])).logits[0, -1].double() / temperature
            probs = torch.softmax(logits, -1).tolist()
            token, total = 0, probs[0]
            while total <= uniform[i, t].item() and token < len(probs) - 1:
                token += 1
                total += probs[token]
            ids.append(token)
            authors.append(senior_writes)
            logprobs.append(torch.log_softmax(logits, -1)[token].item())
            if token in stops or len(authors) == max_new_tokens:
                rows.append((ids[len(prompts[i // group_size]):], authors, logprobs, token in stops))
                break
            since += 1
            if schedule.always[token] or since == schedule.max_gap:
                senior_writes, since = bool(coins[i, t + 1] < schedule.prob_senior), 0
    return rows


@pytest.mark.parametrize("prob_senior, kind", [(0.5, "alike"), (0.8, "alike"), (1.0, "alike"), (0.5, "unlike"), (0.8, "unlike")])
def test_cached_ragged_rollout_equals_the_plain_one_token_by_token(prob_senior, kind):
    senior, junior = tiny_model(0), tiny_model(1) if kind == "alike" else latent_attention(1).double()  # (another kind of model, in another precision)
    schedule = word_schedule(range(20, 30), prob_senior=prob_senior)
    rolled = rollout(senior, junior, PROMPTS, group_size=3, max_new_tokens=24, schedule=schedule, temperature=1.5, seed=7)
    plain = plain_rollout(senior, junior, PROMPTS, 3, 24, schedule, 1.5, (1, 2), seed=7)
    lengths = [len(ids) for ids, *_ in plain]
    assert rolled.lengths.tolist() == lengths and min(lengths) < max(lengths) == rolled.ids.size(1)  # ragged, and trimmed
    for i, (ids, authors, logprobs, finished) in enumerate(plain):
        assert rolled.ids[i, :len(ids)].tolist() == ids
        assert rolled.senior_mask[i, :len(ids)].tolist() == authors
        assert rolled.finished[i].item() == finished
        assert not rolled.ids[i, len(ids):].any() and not rolled.senior_mask[i, len(ids):].any()  # nothing behind the first stop
        assert rolled.turns[i] == 1 + sum(a != b for a, b in zip(authors, authors[1:]))
    assert any(f for *_, f in plain) and not all(f for *_, f in plain)  # some stopped, some were cut
    assert {1, 2} <= {row[0][-1] for row in plain if row[3]}  # on either stop id


def test_each_model_gets_the_mask_in_its_own_precision(monkeypatch):
    """A GPU's kernels take no other (the CPU's do, so that the rollouts above would not tell)."""
    attention, seen = torch.nn.functional.scaled_dot_product_attention, []
    def spy(query, key, value, attn_mask=None, *rest, **settings):
        seen.append((query.dtype, attn_mask.dtype))
        return attention(query, key, value, attn_mask, *rest, **settings)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    rollout(tiny_model(0).bfloat16(), tiny_model(1), PROMPTS, max_new_tokens=4, schedule=word_schedule(range(20, 30)))
    assert set(seen) == {(torch.bfloat16,) * 2, (torch.float32,) * 2}


@pytest.mark.parametrize("max_rows", [1, 3, 5, 100])
def test_rollout_does_not_depend_on_the_rows_at_a_time_nor_on_who_has_finished(max_rows):
    senior, junior = tiny_model(0), tiny_model(1)
    settings = dict(group_size=3, max_new_tokens=20, schedule=word_schedule(range(20, 30)), temperature=1.5, seed=3)
    whole, parts = (rollout(senior, junior, PROMPTS, max_rows=m, **settings) for m in (0, max_rows))
    for name in ("ids", "lengths", "senior_mask", "finished", "turns"):
        assert torch.equal(getattr(whole, name), getattr(parts, name)), name


def test_same_seed_same_rollout_and_another_seed_another():
    senior, junior = tiny_model(0), tiny_model(1)
    settings = dict(group_size=2, max_new_tokens=12, schedule=word_schedule(range(20, 30)), temperature=1.5)
    torch.manual_seed(0)
    a = rollout(senior, junior, PROMPTS, seed=1, **settings)
    torch.manual_seed(99)  # the global generator plays no part
    b, c = (rollout(senior, junior, PROMPTS, seed=seed, **settings) for seed in (1, 2))
    assert torch.equal(a.ids, b.ids) and torch.equal(a.senior_mask, b.senior_mask)
    assert a.ids.shape != c.ids.shape or not torch.equal(a.ids, c.ids)


def latent_attention(seed):
    """A DeepSeek-V3 with random weights, whose values are smaller than its keys."""
    torch.manual_seed(seed)
    config = DeepseekV3Config(vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
                              q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, first_k_dense_replace=2,
                              initializer_range=0.3, max_position_embeddings=64, eos_token_id=1, pad_token_id=1)
    return DeepseekV3ForCausalLM(config).eval()


@pytest.mark.parametrize("model", [tiny_model, latent_attention])
def test_greedy_solo_equals_generate(model):
    senior = model(3)
    rolled = rollout(senior, None, PROMPTS, max_new_tokens=20, temperature=0)
    for i, prompt in enumerate(PROMPTS):
        want = senior.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
                               max_new_tokens=20)[0, len(prompt):].tolist()
        assert rolled.ids[i, :rolled.lengths[i]].tolist() == want


@pytest.mark.parametrize("heads, shared", [(4, 2), (6, 1), (3, 3)])
@pytest.mark.parametrize("new", [1, 5])
def test_attention_by_groups_is_the_plain_one(heads, shared, new):
    query, key, value = (torch.randn(3, h, n, size, requires_grad=True) for h, n, size in ((heads, new, 8), (shared, 9, 8), (shared, 9, 6)))
    seen = torch.arange(9) <= torch.tensor([[8], [4], [6]])[:, :, None, None] - torch.arange(new).flip(0)[:, None]  # [3, 1, new, 9]
    module = SimpleNamespace(num_key_value_groups=heads // shared, is_causal=True, training=False)
    got, _ = tandem.grouped_attention(module, query, key, value, seen, scaling=0.3)
    keys, values = (x.repeat_interleave(heads // shared, 1) for x in (key, value))
    weights = torch.softmax((query @ keys.mT * 0.3).masked_fill(~seen, -torch.inf), -1)
    want = (weights @ values).transpose(1, 2)  # [3, new, heads, 6]
    assert got.shape == want.shape and torch.allclose(got, want, atol=1e-6)
    by_head, wide = seen.expand(-1, heads, -1, -1).clone(), torch.cat([seen, torch.zeros(3, 1, new, 1, dtype=torch.bool)], -1)
    by_head[:, 0, :, 1] = False  # a mask of its own for every head, by its name; and one that is wider than the keys
    for other, left in ((by_head, by_head), (wide, seen)):
        got_too, _ = tandem.grouped_attention(module, query, key, value, attention_mask=other, scaling=0.3)
        weights = torch.softmax((query @ keys.mT * 0.3).masked_fill(~left, -torch.inf), -1)
        assert torch.allclose(got_too, (weights @ values).transpose(1, 2), atol=1e-6)
    for ours, plain in zip(*(torch.autograd.grad(out.square().sum(), (query, key, value)) for out in (got, want))):
        assert torch.allclose(ours, plain, atol=1e-5)


def test_a_loaded_model_is_any_other_to_generate_and_on_disk(toy, tmp_path):
    prompts = [tandem.encode_prompt(toy.tokenizer, text) for text in ("Add 2 3 4", "Add 1 1 5 5 2 3", "Add 4 4")]
    width = max(map(len, prompts))
    ids, mask = (torch.tensor([[0] * (width - len(p)) + row for p, row in zip(prompts, rows)]) for rows in (prompts, [[1] * len(p) for p in prompts]))
    toy.junior.save_pretrained(tmp_path)
    assert "grouped" not in (tmp_path / "config.json").read_text()
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    ours, theirs = (model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=12) for model in (toy.junior, stock))
    assert toy.junior.config._attn_implementation == "grouped" and torch.equal(ours, theirs)  # (left-padded: without a mask it would be another text)


def test_vanilla_runs_no_junior():
    class Forbidden(torch.nn.Module):
        def forward(self, *_, **__):
            raise AssertionError("the junior was run")
    rolled = rollout(tiny_model(0), Forbidden(), PROMPTS, max_new_tokens=5, schedule=word_schedule([20], prob_senior=1.0))
    assert torch.equal(rolled.senior_mask, tandem.real_tokens(rolled.ids, rolled.lengths))  # every real token is the senior's
    assert rollout(tiny_model(0), None, PROMPTS, max_new_tokens=5).turns.tolist() == [1] * 4


def test_sampling_is_what_was_asked_for_whatever_the_generation_config_says():
    model, other = tiny_model(0), tiny_model(0)
    other.generation_config.top_k, other.generation_config.temperature, other.generation_config.do_sample = 1, 0.1, True
    a, b = (rollout(m, None, PROMPTS, group_size=4, max_new_tokens=10, temperature=1.3, seed=5) for m in (model, other))
    assert torch.equal(a.ids, b.ids)


def test_rollout_is_in_eval_mode_with_a_cache_and_gives_the_mode_back():
    model = tiny_model(0, attention_dropout=0.5)
    want = rollout(model, None, PROMPTS, group_size=2, max_new_tokens=10, temperature=1.3, seed=5)
    model.train()
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    model.config.use_cache = False
    got = rollout(model, None, PROMPTS, group_size=2, max_new_tokens=10, temperature=1.3, seed=5)
    assert torch.equal(want.ids, got.ids) and model.training
    rollout(model.eval(), None, PROMPTS, max_new_tokens=3)
    assert not model.training


def test_ids_outside_the_tokenizer_are_never_sampled():
    model = tiny_model(0)
    with torch.no_grad():
        model.get_input_embeddings().weight[30:] *= 20  # the padding ids are by far the most probable
    assert (rollout(model, None, PROMPTS, group_size=8, max_new_tokens=10).ids >= 30).any()
    rolled = rollout(model, None, PROMPTS, group_size=8, max_new_tokens=10, vocab_size=30)
    assert (rolled.ids < 30).all()
    each = torch.arange(30)[:, None]  # and scoring masks them alike: the first 30 have all the probability
    logp = tandem.completion_logprobs(model, [PROMPTS[0]] * 30, each, torch.ones(30, dtype=torch.long), 1.0, vocab_size=30)
    assert logp.exp().sum().item() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("schedule", [None, word_schedule(range(20, 30)), word_schedule(range(20, 30), alternate=True)])
def test_a_head_computes_the_logits_that_are_sampled_from_and_no_others(schedule):
    """None for prompts, for rows that the other model writes, that wait or have finished."""
    senior, junior, rows = tiny_model(0), tiny_model(1), [0, 0]
    for i, model in enumerate((senior, junior)):
        model.get_output_embeddings().register_forward_hook(lambda _, __, logits, i=i: rows.__setitem__(i, rows[i] + len(logits)))
    rolled = rollout(senior, junior, PROMPTS, group_size=4, max_new_tokens=24, schedule=schedule, stops=[1, 2, 3], seed=3)
    assert 0 < rolled.finished.sum() < 16
    assert rows == [rolled.senior_mask.sum(), (tandem.real_tokens(rolled.ids, rolled.lengths) & ~rolled.senior_mask).sum()]


def test_every_stop_id_stops_and_the_stop_is_part_of_the_answer():
    model = Scripted(lambda seen: {4: 2, 7: 1}.get(len(seen), 9))  # a row of 4 is answered with stop 2, a row of 7 with stop 1
    rolled = rollout(model, None, [[5, 5], [5] * 5, [5] * 8], max_new_tokens=6)
    assert rolled.ids.tolist() == [[9, 9, 2, 0, 0, 0], [9, 9, 1, 0, 0, 0], [9] * 6]
    assert rolled.lengths.tolist() == [3, 3, 6] and rolled.finished.tolist() == [True, True, False]
    other = Scripted(model.rule, stops=[9, 7])  # what ends an answer of a model that writes in turns ends the joint one, whoever wrote it
    assert rollout(model, other, [[5, 5]] * 4, max_new_tokens=6, schedule=word_schedule([9])).lengths.tolist() == [1] * 4
    assert rollout(model, other, [[5, 5]], max_new_tokens=6).lengths.tolist() == [3]  # alone it has its own
    only_one = rollout(model, None, [[5, 5]], max_new_tokens=6, stops=[1])
    assert only_one.ids.tolist() == [[9, 9, 2, 9, 9, 1]]


def test_both_models_read_all_that_either_wrote():
    """Each answers with the sum of what it has read, modulo 30, plus 3: one token unread or read twice and the sums go wrong."""
    def total(seen):
        return sum(seen) % 30 + 3
    rolled = rollout(Scripted(total), Scripted(total), [[3, 4], [9, 9, 9]], group_size=5, max_new_tokens=9,
                     schedule=word_schedule(range(10, 40), max_gap=3), seed=2)
    assert 0.2 < rolled.senior_mask.float().mean() < 0.8
    for i in range(10):
        seen = list(([3, 4], [9, 9, 9])[i // 5])
        for token in rolled.ids[i, :rolled.lengths[i]].tolist():
            assert token == total(seen)
            seen.append(token)


# --- the authorship rule --------------------------------------------------------------------------------------------------------------

def trace(schedule, tokens, coins, author=True):
    """Authors of tokens[1:], redraws, of one row."""
    author, drawn, before = torch.tensor([author]), torch.tensor([0]), torch.tensor([tokens[-1]])  # (what stands ahead of the first does not count)
    authors, redraws = "", ""
    for n, (token, coin) in enumerate(zip(tokens, coins), 1):
        token = torch.tensor([token])
        author, drawn = schedule.after(token, before, drawn, torch.tensor([n]), author, torch.tensor([coin == "s"]))
        authors, redraws, before = authors + ("s" if author else "j"), redraws + (".", "R")[int(drawn == n)], token
    return authors, redraws


def test_word_schedule_on_scripted_coins():
    # token 20 begins a word. A coin counts only at a redraw: after a word's first token, or when 3 tokens have passed without one
    tokens = [20, 5, 5, 5, 5, 20, 5, 20, 20, 5]
    coins = "jsssjjssjs"
    #        0: boundary, junior drawn; 1, 2: nothing; 3: third since the redraw, the cap draws the senior, and the count restarts;
    #        4: nothing; 5: boundary, junior; 6: nothing; 7: boundary, senior; 8: boundary, junior; 9: nothing
    assert trace(word_schedule([20], max_gap=3), tokens, coins) == ("jjjssjjsjj", "R..R.R.RR.")


def test_the_first_gap_counts_from_the_first_token():
    assert trace(word_schedule([20], max_gap=4), [5] * 9, "jjjjjjjjs", author=True) == ("sssjjjjjj", "...R...R.")


def test_alternating_hands_over_at_every_boundary_whatever_the_coins():
    schedule = word_schedule([20], max_gap=99, alternate=True)
    assert trace(schedule, [20, 5, 20, 20, 5], "sssss") == ("jjsjj", "R.RR.")


def test_every_change_of_author_follows_a_boundary_or_the_cap():
    senior, junior = tiny_model(0), tiny_model(1)
    schedule = word_schedule(range(20, 24), max_gap=4)
    rolled = rollout(senior, junior, PROMPTS, group_size=16, max_new_tokens=40, schedule=schedule, temperature=2.0, seed=11)
    changes = capped = 0
    for ids, mask, n in zip(rolled.ids.tolist(), rolled.senior_mask.tolist(), rolled.lengths.tolist()):
        since = 0
        for t in range(n - 1):
            since += 1
            redraw = ids[t] in range(20, 24) or since == 4
            if mask[t] != mask[t + 1]:
                assert redraw
                changes, capped = changes + 1, capped + (ids[t] not in range(20, 24))
            since = 0 if redraw else since
    assert changes > 50 and capped > 10
    assert abs(rolled.senior_mask.sum() / rolled.lengths.sum() - 0.5) < 0.1


def step_schedule(texts, **settings):
    tables = [torch.tensor([test(t) for t in texts]) for test in (lambda t: "\n\n" in t, lambda t: t[:1] == "\n", lambda t: t[-1:] == "\n")]
    return Schedule(*tables, max_gap=10**9, **settings)


@pytest.mark.parametrize("pieces, want", [
    (["a", "\n\n", "b", "\n\n", "c"], "ssjjs"),  # a blank line in one token
    (["a", "\n", "\n", "b", "c"], "sssjj"),  # split over two
    (["a", ".\n", "\nb", "c"], "sssj"),  # halves glued to text
    (["a", "\n\n", "\n", "b"], "ssjj"),  # the junior's own line break is half a blank line, not a step
    (["a", "\n\n", "\n", "\n", "b"], "ssjjs"),  # two of them are one
    (["a", "\n", "b", "\n", "c"], "sssss"),  # two single breaks are no blank line
    (["a", ".\n\n\n", "b"], "ssj"),
    (["\n", "a", "\n"], "sss"),  # what stands ahead of the answer is no half of its blank line
])
def test_steps_end_at_a_blank_line_however_it_is_tokenised(pieces, want):
    texts = sorted(set(pieces))
    authors, _ = trace(step_schedule(texts, alternate=True), [texts.index(p) for p in pieces], "j" * len(pieces))
    assert "s" + authors[:-1] == want


def test_step_schedule_of_a_real_tokenizer_hands_over_after_blank_lines(toy):
    schedule = Schedule.of(toy.tokenizer, len(toy.tokenizer), "step", alternate=True)
    prompts = [tandem.encode_prompt(toy.tokenizer, f"Add {a} 2 3 4") for a in (1, 2, 3)]
    rolled = rollout(toy.junior, toy.junior, prompts, group_size=4, max_new_tokens=44, schedule=schedule, seed=0,
                     vocab_size=len(toy.tokenizer))
    for i in range(12):
        pieces, ids = [], rolled.ids[i, :rolled.lengths[i]].tolist()
        for t, token in enumerate(ids):
            if t and rolled.senior_mask[i, t] != rolled.senior_mask[i, t - 1]:
                pieces.append("@")
            pieces.append(toy.tokenizer.decode([token]))
        steps = "".join(pieces).split("@")
        assert len(steps) == 4 == rolled.turns[i] and all(s.endswith("\n\n") and s.count("\n\n") == 1 for s in steps[:-1])
        assert rolled.senior_mask[i, 0]


# --- word boundaries ------------------------------------------------------------------------------------------------------------------

def test_word_boundaries_of_a_byte_level_tokenizer(toy):
    boundary = tandem.word_boundaries(toy.tokenizer, 576)  # the model's vocabulary is larger than the tokenizer's
    tokens = toy.tokenizer.convert_ids_to_tokens(list(range(len(toy.tokenizer))))
    assert boundary.tolist() == [t.startswith("Ġ") for t in tokens] + [False] * (576 - len(tokens))
    assert boundary[toy.tokenizer.encode(" get")[0]] and not boundary[toy.tokenizer.encode("\n\n")[0]] and not boundary[toy.tokenizer.encode("7")[0]]


def test_a_space_and_part_of_a_character_begins_a_word():
    """' é' whose second byte is a token of its own: Ġ Ã is a space plus half a character."""
    vocab = {"a": 0, "Ġ": 1, "Ã": 2, "©": 3, "ĠÃ": 4, "b": 5, "Ċ": 6}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [("Ġ", "Ã")]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), decoders.ByteLevel()
    boundary = tandem.word_boundaries(PreTrainedTokenizerFast(tokenizer_object=backend), 7)
    assert boundary.tolist() == [False, True, False, False, True, False, False]


def sentencepiece_like(vocab):
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def test_word_boundaries_of_a_sentencepiece_tokenizer():
    tokenizer = sentencepiece_like({"<unk>": 0, "a": 1, "▁": 2, "▁the": 3, "the": 4, "<0x20>": 5, "<0x0A>": 6})
    assert tandem.word_boundaries(tokenizer, 7).tolist() == [False, False, True, True, False, True, False]
    assert Schedule.of(tokenizer, 7, "step").starts.tolist() == [False] * 6 + [True]


def test_a_tokenizer_without_words_is_an_error():
    with pytest.raises(tandem.UserError, match="begins with a space"):
        tandem.word_boundaries(sentencepiece_like({"<unk>": 0, "a": 1, "字": 2}), 3)


# --- sampling -------------------------------------------------------------------------------------------------------------------------

def test_inverting_the_cdf_gives_the_distribution():
    probs = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    n = 4000
    uniform = (torch.arange(n) + 0.5) / n
    ids = tandem.sample(probs.log().expand(n, -1), uniform, 1.0)
    assert torch.bincount(ids, minlength=6).tolist() == [0, 1000, 0, 2000, 1000, 0]


def test_no_random_number_draws_an_id_of_probability_zero():
    torch.manual_seed(0)
    logits = torch.randn(200, 50)
    logits[:, 40:] = -torch.inf
    logits[:, 0] = -torch.inf
    for u in (0.0, 1 - 2**-24, 1.0):
        ids = tandem.sample(logits, torch.full((200,), u), 1.0)
        assert ((ids > 0) & (ids < 40)).all()


@pytest.mark.parametrize("temperature, top_k, top_p, want", [  # probabilities .5 .3 .15 .05 at temperature 1
    (1.0, 0, 1.0, [0.5, 0.3, 0.15, 0.05]), (1.0, 2, 1.0, [0.625, 0.375, 0, 0]), (1.0, 0, 0.7, [0.625, 0.375, 0, 0]), (1.0, 99, 0.01, [1, 0, 0, 0]),
    (0.5, 0, 1.0, [0.25 / 0.365, 0.09 / 0.365, 0.0225 / 0.365, 0.0025 / 0.365]),  # squared
    (0.5, 3, 0.9, [0.25 / 0.34, 0.09 / 0.34, 0, 0]),  # of the three that top-k leaves, two reach .9
])
def test_temperature_top_k_and_top_p(temperature, top_k, top_p, want):
    n = 20000
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(n, -1)
    ids = tandem.sample(logits, (torch.arange(n) + 0.5) / n, temperature, top_k, top_p)
    assert torch.allclose(torch.bincount(ids, minlength=4) / n, torch.tensor(want, dtype=torch.float), atol=1e-3)


@pytest.mark.parametrize("top_k, top_p", [(20, 0.8), (5, 1.0), (0, 0.8), (1, 0.5), (300, 0.3), (1000, 0.95)])
def test_top_k_and_top_p_draw_what_transformers_leaves(top_k, top_p):
    generator = torch.Generator().manual_seed(0)
    logits, uniform = 3 * torch.randn(2000, 300, generator=generator), torch.rand(2000, generator=generator)
    left = logits / 0.7
    left = TopKLogitsWarper(top_k)(None, left) if top_k else left
    left = TopPLogitsWarper(top_p)(None, left) if top_p < 1 else left
    assert torch.equal(tandem.sample(logits, uniform, 0.7, top_k, top_p), tandem.sample(left, uniform, 1.0))


def test_of_equal_logits_at_the_edge_top_k_keeps_k():
    logits, n = torch.tensor([1.0, 2.0, 2.0, 0.0, 2.0]).expand(9000, -1), 9000
    counts = torch.bincount(tandem.sample(logits, (torch.arange(n) + 0.5) / n, 1.0, 2), minlength=5)
    assert counts[0] == counts[3] == 0 and sorted(counts.tolist()) == [0, 0, 0, 4500, 4500]
