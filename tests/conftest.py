"""What the tests share: the repository's root on the path, tiny models with random weights, and a scripted one."""
import os
import sys
from pathlib import Path
from types import SimpleNamespace

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here may reach for a hub
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import pytest  # noqa: E402
import torch  # noqa: E402
import tandem  # noqa: E402 (which registers its attention)
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM  # noqa: E402

TOY = ROOT / "tests" / "toy"


def tiny_model(seed, vocab_size=40, stops=(1, 2), **settings):
    """A Qwen3 with random weights, two stop ids and grouped queries, read as load_model has it; weights large enough to make it opinionated."""
    torch.manual_seed(seed)
    config = Qwen3Config(**{**dict(vocab_size=vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                                   num_key_value_heads=2, head_dim=8, max_position_embeddings=256, tie_word_embeddings=True,
                                   initializer_range=0.3), **settings})
    model = Qwen3ForCausalLM(config).eval()
    model.set_attn_implementation("grouped")
    model.generation_config = GenerationConfig(eos_token_id=list(stops), pad_token_id=stops[0])
    return model


class Scripted(torch.nn.Module):
    """Stands in for a model: `rule(ids of the row so far)` names its next token, with certainty. Keeps the history it has read."""

    def __init__(self, rule, vocab_size=40, stops=(1, 2)):
        super().__init__()
        self.rule, self.config, self.device, self.dtype = rule, SimpleNamespace(vocab_size=vocab_size), torch.device("cpu"), torch.float32
        self.generation_config = SimpleNamespace(eos_token_id=list(stops))
        self.calls = 0

    def get_decoder(self):
        return self

    def get_output_embeddings(self):
        return lambda hidden: hidden

    def forward(self, input_ids, position_ids, attention_mask, use_cache, past_key_values):
        self.calls += 1
        key = input_ids[:, None, :, None].float()  # the "keys" are the ids themselves: the cache is the history
        history, _ = past_key_values.update(key, key, 0)
        out = torch.zeros(*input_ids.shape, self.config.vocab_size)
        for r in range(input_ids.size(0)):
            for q in range(input_ids.size(1)):
                seen = history[r, 0, :, 0][attention_mask[r, 0, q] == 0].long().tolist()
                out[r, q, self.rule(seen)] = 100.0
        return SimpleNamespace(last_hidden_state=out)


@pytest.fixture(scope="session")
def toy():
    device, dtype = torch.device("cpu"), torch.float32
    return SimpleNamespace(senior=tandem.load_model(str(TOY / "senior"), device, dtype), junior=tandem.load_model(str(TOY / "junior"), device, dtype),
                           tokenizer=tandem.load_tokenizer(str(TOY / "senior")))
