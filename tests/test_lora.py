"""One set of weights for two models: the adapter against the plain formula, one forward pass against two, files, resume, and the memory estimate."""
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
import transformers

import tandem
from conftest import ROOT, TOY, tiny_model
from tandem import LoRA, Schedule, adapted, completion_logprobs, rollout
from test_run import SHORT, call, rows, same_run, weights

PROMPTS = [[5, 6, 7, 8, 9], [10], [11, 12, 13], [5, 6, 7, 8, 9, 10, 11, 12]]
IDS = torch.tensor([[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 15, 16]])


def trained(base, rank=4, seed=0, size=0.3):
    """An adapter that is no longer at its start."""
    model, generator = adapted(base, rank, seed), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".lora_B" in name:
                p.copy_(size * torch.randn(p.shape, generator=generator))
    return model


def merged_by_hand(model, rank=4):
    """The same model in plain Linear layers: W + 32 / rank B A."""
    plain = tiny_model(0)
    plain.load_state_dict(model.base[0].state_dict())
    with torch.no_grad():
        for name, layer in model.named_modules():
            if isinstance(layer, LoRA):
                plain.get_submodule(name).weight += 32 / rank * layer.lora_B @ layer.lora_A
    return plain


def test_at_its_start_the_model_is_its_base_and_off_is_the_base_bit_for_bit():
    base, untouched = tiny_model(0), tiny_model(0)
    model = adapted(base, 4, seed=0)
    want = untouched(IDS).logits
    assert torch.equal(model(IDS).logits, want)
    model = trained(base)
    assert not torch.allclose(model(IDS).logits, want, atol=0.1) and torch.equal(base(IDS).logits, want)
    LoRA.half = True
    try:
        both = model(torch.cat([IDS, IDS])).logits  # the first half with the adapter, the second without it
    finally:
        LoRA.half = False
    assert torch.allclose(both[:2], model(IDS).logits, atol=1e-5) and torch.allclose(both[2:], want, atol=1e-5)


def test_half_of_a_batch_is_half_of_its_rows_also_where_rows_and_tokens_are_one_dimension():
    """A shared expert sees [rows * tokens, D]."""
    layer = LoRA(torch.nn.Linear(6, 5), 2, torch.Generator().manual_seed(0))
    with torch.no_grad():
        layer.lora_B.normal_()
    x = torch.randn(4, 3, 6)
    LoRA.half = True
    try:
        rows, flat = layer(x), layer(x.flatten(0, 1))
    finally:
        LoRA.half = False
    assert torch.allclose(rows.flatten(0, 1), flat, atol=1e-6) and torch.allclose(rows[:2], layer(x)[:2], atol=1e-6) and not torch.allclose(rows[2:], layer(x)[2:], atol=1e-3)


def test_no_weight_is_copied_and_nothing_but_the_adapter_trains():
    base = tiny_model(0)
    model = adapted(base, 4, seed=0)
    shared = {p.data_ptr() for p in base.parameters()}
    own = {name for name, p in model.named_parameters() if p.data_ptr() not in shared}
    assert own == {name for name, p in model.named_parameters() if p.requires_grad} and own and all(".lora_" in name for name in own)
    layers = [name for name, layer in model.named_modules() if isinstance(layer, LoRA)]
    assert len(layers) == 2 * 7 and len(own) == 2 * len(layers) and not any(p.requires_grad for p in base.parameters())
    again, other = adapted(base, 4, seed=0), adapted(base, 4, seed=1)
    a, b, c = (dict(m.named_parameters())["model.layers.0.self_attn.q_proj.lora_A"] for m in (model, again, other))
    assert torch.equal(a, b) and not torch.equal(a, c) and a.abs().max() <= 32 ** -0.5


def test_logits_and_gradients_equal_the_merged_model():
    base = tiny_model(0)
    model = trained(base)
    plain = merged_by_hand(model)
    assert torch.allclose(model(IDS).logits, plain(IDS).logits, atol=1e-4)
    torch.manual_seed(0)
    aim = torch.randn(model(IDS).logits.shape)
    (model(IDS).logits * aim).sum().backward()
    (plain(IDS).logits * aim).sum().backward()
    for name, layer in model.named_modules():
        if isinstance(layer, LoRA):  # by the chain rule: dW = 8 dB A + 8 B dA
            grad = plain.get_submodule(name).weight.grad
            for got, want in ((layer.lora_A.grad, 8 * layer.lora_B.T @ grad), (layer.lora_B.grad, 8 * grad @ layer.lora_A.T)):
                assert torch.allclose(got, want, rtol=1e-4, atol=1e-4 * want.abs().max().item())
    assert all(p.grad is None for p in base.parameters())


def word_schedule(**settings):
    ids = torch.arange(40)
    never = torch.zeros(40, dtype=torch.bool)
    return Schedule((ids >= 20) & (ids < 30), never, never, **{"max_gap": 5, **settings})


@pytest.mark.parametrize("max_rows", [0, 5])
@pytest.mark.parametrize("prob_senior", [0.5, 0.9])
def test_one_pass_for_both_models_writes_what_two_passes_write(max_rows, prob_senior, monkeypatch):
    senior = trained(tiny_model(0))
    base, (plain_base,) = senior.base, senior.base
    settings = dict(group_size=3, max_new_tokens=24, schedule=word_schedule(prob_senior=prob_senior), temperature=1.5, seed=7)
    passes = []
    monkeypatch.setattr(tandem, "Reader", type("Counted", (tandem.Reader,), {"__init__": lambda self, *a: (passes.append((len(a[0]), a[4])), tandem.Reader.__mro__[1].__init__(self, *a))[1]}))
    one = rollout(senior, plain_base, PROMPTS, max_rows=max_rows, **settings)
    assert passes and set(passes) == {(1, True)}  # the rows of both, through one model
    passes.clear()
    senior.base = None
    two = rollout(senior, plain_base, PROMPTS, **settings)
    assert passes == [(2, False)]
    merged = rollout(merged_by_hand(SimpleNamespace(base=base, named_modules=senior.named_modules)), tiny_model(0), PROMPTS, **settings)
    for name in ("ids", "lengths", "senior_mask", "finished", "turns"):
        assert torch.equal(getattr(one, name), getattr(two, name)) and torch.equal(getattr(one, name), getattr(merged, name)), name
    assert 0.3 < two.senior_mask.sum() / two.lengths.sum() < 1 and not LoRA.half


def test_long_turns_and_solo_rollouts_use_the_adapter_as_well():
    senior = trained(tiny_model(0))
    plain, ids = merged_by_hand(senior), torch.arange(40)
    step = Schedule((ids >= 20) & (ids < 25), torch.zeros(40, dtype=torch.bool), torch.zeros(40, dtype=torch.bool), 10**9, alternate=True)
    for schedule in (None, step):
        a, b = (rollout(m, tiny_model(0), PROMPTS, group_size=3, max_new_tokens=20, schedule=schedule, temperature=1.5, seed=2) for m in (senior, plain))
        assert torch.equal(a.ids, b.ids) and torch.equal(a.senior_mask, b.senior_mask)


def test_a_rollout_that_breaks_off_does_not_turn_the_adapter_off():
    senior = trained(tiny_model(0))
    want = completion_logprobs(senior, PROMPTS[:2], IDS, torch.tensor([6, 6]), 1.0)
    LoRA.half = True
    assert torch.equal(completion_logprobs(senior, PROMPTS[:2], IDS, torch.tensor([6, 6]), 1.0), want)
    assert not LoRA.half


def test_gradient_checkpointing_does_not_change_the_gradient():
    grads = []
    for recompute in (False, True):
        senior = trained(tiny_model(0)).train()
        if recompute:
            getattr(senior, "activation_checkpointing_enable", senior.gradient_checkpointing_enable)()
        completion_logprobs(senior, PROMPTS[:2], IDS, torch.tensor([6, 4]), 0.7).sum().backward()
        grads.append({name: p.grad for name, p in senior.named_parameters() if p.requires_grad})
    assert all(g.abs().max() > 0 for g in grads[0].values()) and all(torch.allclose(grads[0][k], grads[1][k], rtol=1e-4, atol=1e-6) for k in grads[0])


def test_update_moves_the_adapter_alone_and_the_reference_is_the_base():
    base = tiny_model(0)
    senior = trained(base, size=0.05)
    before, plain = {k: v.clone() for k, v in senior.state_dict().items()}, merged_by_hand(senior)
    rolled = rollout(senior, base, PROMPTS, group_size=2, max_new_tokens=12, schedule=word_schedule(), temperature=1.0, seed=1)
    batch = tandem.Batch([p for p in PROMPTS for _ in range(2)], rolled.ids, rolled.lengths, rolled.senior_mask, torch.tensor([0., 1.] * 4), {}, [])
    config = tandem.Config(prompts_per_step=4, prompts_per_update=4, group_size=2, kl_coef=0.1, temperature=1.0)
    logs = []
    for model in (senior, plain):
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        logs.append(tandem.grpo_update(model, optimizer, batch, config, 0.1, 40, base))
    for name in ("loss", "kl", "entropy", "ratio"):
        assert logs[0][name] == pytest.approx(logs[1][name], rel=1e-4, abs=1e-6)
    assert logs[0]["kl"] > 1e-3
    for name, value in senior.state_dict().items():
        assert torch.equal(value, before[name]) != (".lora_" in name), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bf16_base_and_a_tiny_learning_rate_still_move_the_adapter(dtype):
    base = tiny_model(0).to(dtype)
    senior = trained(base, size=0.05)
    assert {p.dtype for n, p in senior.named_parameters() if ".lora_" in n} == {torch.float32} and senior.dtype == dtype
    rolled = rollout(senior, base, PROMPTS, group_size=2, max_new_tokens=12, schedule=word_schedule(), seed=1)
    batch = tandem.Batch([p for p in PROMPTS for _ in range(2)], rolled.ids, rolled.lengths, rolled.senior_mask, torch.tensor([0., 1.] * 4), {}, [])
    before = {n: p.detach().clone() for n, p in senior.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW([p for p in senior.parameters() if p.requires_grad], lr=1e-6, weight_decay=0.0)
    tandem.grpo_update(senior, optimizer, batch, tandem.Config(prompts_per_step=4, prompts_per_update=4, group_size=2), 1e-6, 40, dtype=dtype)
    for name, p in senior.named_parameters():
        if p.requires_grad:
            step = (p.detach() - before[name]).abs()
            assert 0 < step.max() < 2e-6 and (step > 0).float().mean() > 0.9, name


@pytest.mark.parametrize("tied", [True, False])
def test_the_merged_model_and_the_adapter_are_ordinary_files(tmp_path, tied):
    base = tiny_model(0, tie_word_embeddings=tied)
    model = trained(base)
    with torch.no_grad():
        want = model(IDS).logits
    tandem.save_model(model, tmp_path, "some/base")
    merged, information = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert torch.allclose(merged(IDS).logits, want, atol=1e-4) and not any(information[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["r"] == 4 and config["lora_alpha"] == 32 and config["base_model_name_or_path"] == "some/base" and config["peft_type"] == "LORA"
    assert config["target_modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    tensors = safetensors.torch.load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(tensors) == 28 and torch.equal(tensors["base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"], model.model.layers[1].mlp.down_proj.lora_B)
    assert torch.equal(base(IDS).logits, tiny_model(0, tie_word_embeddings=tied)(IDS).logits)  # merging leaves the base alone


@pytest.mark.parametrize("size", [1e-4, 3e-3])
def test_a_small_adapter_on_a_bf16_base_is_not_rounded_away_when_it_is_saved(tmp_path, size):
    tiny_model(0).to(torch.bfloat16).save_pretrained(tmp_path / "base")
    base = tandem.load_model(str(tmp_path / "base"), torch.device("cpu"), torch.bfloat16)
    transformers.AutoTokenizer.from_pretrained(TOY / "senior").save_pretrained(tmp_path / "base")
    model = trained(base, size=size)
    tandem.save_model(model, tmp_path / "out", str(tmp_path / "base"))
    transformers.AutoTokenizer.from_pretrained(TOY / "senior").save_pretrained(tmp_path / "out")  # as a run saves it
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert merged.dtype == torch.float32
    numbers = sum(t.numel() for t in safetensors.torch.load_file(tmp_path / "out" / "model.safetensors").values())
    assert numbers == sum(p.numel() for p in base.parameters())  # the tied head is the embedding, and is not stored twice
    for name, layer in model.named_modules():
        if isinstance(layer, LoRA):
            want = 8 * (layer.lora_B @ layer.lora_A).double()
            got = merged.get_submodule(name).weight.double() - base.get_submodule(name).weight.double()
            assert (got - want).norm() < 1e-2 * want.norm(), name
    import eval as measures
    assert measures.adapter_base(tmp_path / "out") == str(tmp_path / "base") and measures.adapter_base(tmp_path / "base") is None
    again = measures.load_adapted(tmp_path / "out", str(tmp_path / "base"), torch.device("cpu"), torch.bfloat16)
    assert torch.equal(again(IDS).logits, model(IDS).logits)  # the measurements see the model that was trained
    pair = measures.Pair(str(tmp_path / "out"), SimpleNamespace(junior="", device="cpu", dtype="bfloat16"))
    pair.names["junior"] = str(tmp_path / "base")
    assert pair.junior is pair.senior.base[0] and torch.equal(pair.senior(IDS).logits, model(IDS).logits)


def test_broken_adapters_are_one_line(tmp_path):
    import eval as measures
    tiny_model(0).save_pretrained(tmp_path / "base")
    tandem.save_model(trained(tiny_model(0)), tmp_path / "out", str(tmp_path / "base"))
    tensors = safetensors.torch.load_file(tmp_path / "out" / "adapter" / "adapter_model.safetensors")
    for content in ({"x": torch.zeros(2)}, {k: v for k, v in tensors.items() if "layers.0" in k}, {k: v[:, :3].contiguous() for k, v in tensors.items()}):
        safetensors.torch.save_file(content, tmp_path / "out" / "adapter" / "adapter_model.safetensors")
        with pytest.raises(tandem.UserError, match="adapter"):
            measures.load_adapted(tmp_path / "out", str(tmp_path / "base"), torch.device("cpu"), torch.float32)
    (tmp_path / "out" / "adapter" / "adapter_config.json").write_text("{}")
    with pytest.raises(tandem.UserError, match="adapter"):
        measures.adapter_base(tmp_path / "out")


def test_a_model_without_linear_layers_is_refused():
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=64))
    with pytest.raises(tandem.UserError, match="no linear layers"):
        adapted(gpt2, 4, 0)


def test_peft_reads_the_adapter(tmp_path):
    """PEFT itself, where it is installed; it is no requirement."""
    peft = pytest.importorskip("peft")
    model = trained(tiny_model(0))
    tandem.save_model(model, tmp_path, "some/base")
    theirs = peft.PeftModel.from_pretrained(tiny_model(0), tmp_path / "adapter")
    assert torch.allclose(theirs(IDS).logits, model(IDS).logits, atol=1e-5)


LORA = [*SHORT, "--lora-rank", "4", "--junior", "self", "--lr", "1e-3"]


def test_a_run_with_an_adapter_resumes_to_the_same_weights_and_can_be_evaluated(tmp_path, toy, capsys):
    assert call(*LORA, "--out", tmp_path / "whole") == 0
    assert "memory, estimated" in capsys.readouterr().out
    assert call(*LORA, "--steps", 2, "--out", tmp_path / "r") == 0 and call("--out", tmp_path / "r", "--resume", "--steps", 4) == 0
    same_run(tmp_path / "whole", tmp_path / "r")
    start, end = weights(TOY / "senior"), weights(tmp_path / "whole" / "final")
    moved = {name for name in start if not torch.equal(start[name], end[name])}
    assert moved and all("_proj.weight" in name for name in moved)  # embedding and norms are the base's
    adapter = [safetensors.torch.load_file(tmp_path / name / "adapter" / "adapter_model.safetensors") for name in ("whole/final", "r/final", "whole/checkpoint-2")]
    assert all(torch.equal(adapter[0][k], adapter[1][k]) for k in adapter[0]) and any(not torch.equal(adapter[0][k], adapter[2][k]) for k in adapter[0])
    import eval as measures
    assert measures.main(["solo", "--model", str(tmp_path / "whole"), "--preset", "toy", "--problems", "4", "--out", str(tmp_path / "e")]) in (None, 0)


def test_an_adapter_beside_another_junior(tmp_path):
    assert call(*SHORT, "--lora-rank", 2, "--kl-coef", 0.1, "--steps", 1, "--out", tmp_path / "r") == 0  # the toy's own junior: a model of its own
    assert rows(tmp_path / "r")[1]["kl"] > 1


def test_training_an_adapter_learns(toy):
    """On rewards for one answer, the plain weights' way: reward rises from the base's."""
    base = tiny_model(0)
    senior = adapted(base, 8, 0)
    optimizer = torch.optim.AdamW([p for p in senior.parameters() if p.requires_grad], lr=1e-2)
    config, shares = tandem.Config(prompts_per_step=4, prompts_per_update=4, group_size=16, temperature=1.0), []
    for step in range(12):
        rolled = rollout(senior, None, PROMPTS, group_size=16, max_new_tokens=4, stops=[], seed=step)
        rewards = (rolled.ids == 17).float().mean(1)
        shares.append(rewards.mean().item())
        batch = tandem.Batch([p for p in PROMPTS for _ in range(16)], rolled.ids, rolled.lengths, rolled.senior_mask, rewards, {}, [])
        tandem.grpo_update(senior, optimizer, batch, config, 1e-2, 40)
    assert sum(shares[-3:]) / 3 > sum(shares[:3]) / 3 + 0.3
    assert torch.equal(base(IDS).logits, tiny_model(0)(IDS).logits)


# --- memory ---------------------------------------------------------------------------------------------------------------------------

def test_rows_follow_the_free_memory_and_the_result_does_not(monkeypatch):
    senior, junior = tiny_model(0), tiny_model(1)
    settings = dict(group_size=3, max_new_tokens=20, schedule=word_schedule(), temperature=1.5, seed=3)
    want = rollout(senior, junior, PROMPTS, **settings)
    assert tandem.cache_bytes(senior) == 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, head size, bytes
    assert tandem.rows_that_fit((senior, junior), 28) >= 12  # no GPU: any number
    seen = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=60_000))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 10_000)
    on_gpu = [SimpleNamespace(device=torch.device("cuda"), config=m.config, dtype=m.dtype) for m in (senior, junior)]
    # 0.9 * 50,000 bytes, 28 tokens a row, 256 bytes a token and model: 3.1 rows; a cache too small for a single row still holds one
    assert tandem.rows_that_fit(on_gpu, 28, reserved=16_000) == 2 and tandem.rows_that_fit(on_gpu, 28) == 3 and tandem.rows_that_fit(on_gpu[:1], 28) == 6 and tandem.rows_that_fit(on_gpu, 10**6) == 1
    monkeypatch.setattr(tandem, "rows_that_fit", lambda models, width: seen.append(width) or 5)
    write, widths = tandem.write, []
    monkeypatch.setattr(tandem, "write", lambda out, row, *rest: (widths.append(len(row)), write(out, row, *rest)))
    got = rollout(senior, junior, PROMPTS, **settings)
    assert seen == [8 + 20] and widths == [5, 5, 2] and torch.equal(want.ids, got.ids) and torch.equal(want.senior_mask, got.senior_mask)
    widths.clear()
    rollout(senior, junior, PROMPTS, max_rows=8, **settings)  # evaluation, for one, names a number: it is a limit as well
    rollout(senior, junior, PROMPTS, max_rows=3, **settings)
    assert widths == [5, 5, 2] + [3] * 4


def test_models_that_name_their_sizes_otherwise_have_an_estimate():
    neox = transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2))
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=64))
    for model in (neox, gpt2):
        assert tandem.cache_bytes(model) == 2 * 2 * 16 * 4 and min(tandem.memory_estimate(tandem.Config(), model, model, None, 10)) > 0


PEAK = """if True:
    import json, sys
    sys.path[:0] = [{tests!r}, {root!r}]
    import torch, tandem
    from conftest import tiny_model
    lora, what = {lora}, {what!r}
    def work(model, base, config, tokens, words, optimizer):
        n = config.prompts_per_step * config.group_size
        prompts = [[5] * config.max_prompt_tokens] * config.prompts_per_step
        ids, lengths = torch.randint(5, words, (n, tokens)), torch.full((n,), tokens)
        if what == "rollout":
            never = torch.zeros(words, dtype=torch.bool)
            schedule = tandem.Schedule(torch.arange(words) % 4 == 0, never, never, 32) if base is not None else None
            return tandem.rollout(model, base, prompts, group_size=config.group_size, max_new_tokens=tokens, schedule=schedule, stops=[])
        batch = tandem.Batch([p for p in prompts for _ in range(config.group_size)], ids, lengths, torch.ones(n, tokens, dtype=torch.bool), torch.arange(n).float(), {{}}, [])
        for _ in range(2):  # the optimiser's state is there from the second on
            tandem.grpo_update(model, optimizer, batch, config, 1e-6, words)
    def trainee(**shape):
        model = tiny_model(0, stops=(1,), **shape)
        base, model = (model, tandem.adapted(model, lora, 0)) if lora else (None, model)
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        return model, base, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-6)
    def config(tokens):
        return tandem.Config(prompts_per_step=2, prompts_per_update=2, group_size=16 if what == "rollout" else 4, max_prompt_tokens=16, max_new_tokens=tokens,
                             micro_tokens=8192 if tokens > 8 else 48, temperature=1.0)
    model, base, optimizer = trainee()
    work(model, base, config(8), 8, 40, optimizer)  # what libraries allocate at first use is not the run's
    held = int(open("/proc/self/statm").read().split()[1]) * 4096
    model, base, optimizer = trainee(vocab_size=32000, hidden_size=256, intermediate_size=768, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=4,
                                     head_dim=64, max_position_embeddings=1024, initializer_range=0.02)
    work(model, base, config(160), 160, 32000, optimizer)
    print(json.dumps([tandem.peak_memory_gb(model.device) - held / 1e9, *tandem.memory_estimate(config(160), model, model, base, 16)]))
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="a process's memory is read from /proc")
@pytest.mark.parametrize("lora, what", [(0, "update"), (16, "rollout"), (16, "update")])
def test_the_memory_estimate_is_within_a_fifth_of_the_peak(lora, what):
    """In a process of its own, whose allocator gives freed memory back at once. A model of 14 M parameters, 176 tokens a row."""
    code = PEAK.format(tests=str(ROOT / "tests"), root=str(ROOT), lora=lora, what=what)
    allocator = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **allocator})
    assert done.returncode == 0, done.stderr
    peak, rollout_gb, update_gb = json.loads(done.stdout.splitlines()[-1])
    assert {"rollout": rollout_gb, "update": update_gb}[what] == pytest.approx(peak, rel=0.2)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="elsewhere a process's memory is not known")
def test_the_peak_is_that_of_the_process_itself():
    """Not of the one that started it, such as a notebook (which getrusage's figure takes in), and not of what it holds now."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import torch, tandem; x = torch.ones(10**8); del x; print(tandem.peak_memory_gb(torch.device('cpu')))"
    ballast = torch.ones(5 * 10**8)  # 2 GB, held here
    peak = float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert ballast.nbytes == 2 * 10**9 and 0.4 < peak < 1.5


@pytest.mark.parametrize("status", ["VmRSS:\t1 kB\n", None])
def test_a_system_that_does_not_tell_the_peak(status, monkeypatch):
    """Some sandboxes leave the line out; elsewhere there is no such file. The log then says 0."""
    monkeypatch.setattr(Path, "exists", lambda self: status is not None)
    monkeypatch.setattr(Path, "read_text", lambda self: status)
    assert tandem.peak_memory_gb(torch.device("cpu")) == 0
